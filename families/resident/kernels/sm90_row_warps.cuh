// Every warp takes 16 rows of a sequence through the whole forward in its registers: the accumulators of one product
// are the left operand of the next. Warps meet for keys and values, which pass through shared memory, of every program
// of a cluster where a sequence is split over several; a warp waits for the blocks of rows it attends to alone. Paired
// warps share their rows: each takes half of the heads and of the hidden columns, and both add up the results.
//
// The programs of a cluster share the stream of weight tiles: each copies its slice of a tile, which goes to all of
// them. One more warp, the producer, issues the copies.
//
// Compile-time: D width = HEADS * HD, FFN (multiple of D), MASKED, CAUSAL, BF16 operands, IO, STAGES tiles of the ring,
// WARPS of a program, PAIR of a block of rows, BLOCKS of a sequence (a power of two), SPLIT programs it is split over,
// which form a cluster, SPAN blocks of keys taken together, TOGETHER heads taken in one step.

constexpr int THREADS = WARPS * 32 + (WARPS == 8 ? 128 : 32);
constexpr int OWN_BLOCKS = WARPS / PAIR;  // of rows, of a program
constexpr int ROWS = 16;
constexpr int STEPS = D / 16;  // of 16 along the width
constexpr int TILES = D / 8;   // of eight columns
constexpr int HEAD_TILES = HD / 8;
constexpr int WEIGHT_BYTES = D * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + D * 4;
constexpr int SLICE_BYTES = TILE_BYTES / SPLIT;
constexpr int LAYER_TILES = 4 + 2 * (FFN / D);
constexpr int HELD = BLOCKS > OWN_BLOCKS ? BLOCKS : OWN_BLOCKS;  // blocks whose keys a program holds
constexpr int BLOCK_BYTES = ROWS * D * 2;                        // of a block's keys, or values
constexpr int LANE_WORDS = 2 * HEAD_TILES;                       // of a lane in a head's keys, or values, of a block
constexpr int VECTOR = HEAD_TILES % 2 ? 2 : 4;                   // words a lane reads at a time
constexpr int OWN_STEPS = STEPS / PAIR;                          // of 16 columns, of a warp
constexpr int OWN_HEADS = HEADS / PAIR;
// Of 16 columns, at a time: chains of products enough to hide each other's latency, and few enough for the registers.
constexpr int SLICES = OWN_STEPS % 4 == 0 ? 4 : OWN_STEPS % 3 == 0 ? 3 : OWN_STEPS % 2 == 0 ? 2 : OWN_STEPS;
constexpr int EXCHANGE_BYTES = ROWS * D * 4;
constexpr unsigned ONES = BF16 ? 0x3F803F80 : 0x3C003C00;
static_assert(SLICE_BYTES % 16 == 0 && TOGETHER * HEAD_TILES % 2 == 0 && OWN_HEADS % TOGETHER == 0, "");

#include "sm90_steps.cuh"

// ---- what passes between programs ---------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
  u32 y = 0;
  if (SPLIT > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(y));
  return y;
}

__device__ __forceinline__ void cluster_sync() {
  if (SPLIT > 1)
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  else
    __syncthreads();
}

// Where an address of shared memory lies in another program of the cluster.
__device__ __forceinline__ u32 address_in(u32 address, u32 rank) {
  u32 y;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(y) : "r"(address), "r"(rank));
  return y;
}

// Arrive at a barrier of another program. No release to the cluster, which costs a fence of device memory: what passes
// between programs is copied by instructions that arrive themselves, and otherwise only reads are over.
__device__ __forceinline__ void arrive_in(u32 barrier, u32 rank) {
  if (SPLIT > 1)
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in(barrier, rank)) : "memory");
  else
    barrier_arrive(barrier);
}

// Write to another program of the cluster, whose barrier counts the bytes.
template <int N>
__device__ __forceinline__ void send(u32 to, const u32 (&words)[N], u32 barrier) {
  if (N == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
        "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[N - 1]), "r"(barrier)
        : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
        "r"(words[0]), "r"(words[1]), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// This program's slice of a tile, to the same place in every program of the cluster; each counts whole tiles.
__device__ __forceinline__ void copy_slice(u32 to, const u8* from, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(TILE_BYTES) : "memory");
  if (SPLIT > 1)
    asm volatile(
        "{\n.reg .b16 all;\nmov.b16 all, %4;\n"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1], %2, [%3], all;\n}" ::"r"(to),
        "l"(from), "n"(SLICE_BYTES), "r"(barrier), "n"((1 << SPLIT) - 1)
        : "memory");
  else
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "n"(SLICE_BYTES), "r"(barrier)
        : "memory");
}

// The ring of weight tiles as one warp sees it.
struct Tiles {
  const u8* memory;
  u32 full, empty, slot, phase;

  // Wait for the next tile.
  __device__ __forceinline__ const u8* next() {
    barrier_wait(full + slot * 8, phase);
    const u8* tile = memory + slot * TILE_BYTES;
    slot = slot + 1 == STAGES ? 0 : slot + 1;
    if (slot == 0) phase ^= 1;
    return tile;
  }

  // Signal that this warp has used the tile in a slot.
  __device__ __forceinline__ void used(u32 which) const {
    __syncwarp();
    u32 lane = threadIdx.x % 32;
    if (lane < SPLIT) arrive_in(empty + which * 8, lane);
  }
};

// What a warp knows of its place. `keys` and `values` are its sequence's first block, `other` where they begin in the
// other programs of the sequence. `visible` holds four bits a key block for the thread's two rows: two keys of the
// block's first eight, two of its last; `open` a bit a block that all rows see whole.
struct Place {
  u32 member, pair, lane, ready, free, block, last, open, awaited;
  u8* keys;
  u8* values;
  u8* exchange;
  u32 other[SPLIT > 1 ? SPLIT - 1 : 1], other_ready[SPLIT > 1 ? SPLIT - 1 : 1];
  u32 visible[2];
};

// ---- pieces -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void mma_narrow(float (&c)[4], u32 a0, u32 a1, u32 b) {
#if BF16
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

__device__ __forceinline__ uint4 words_of(const u8* weights, int slice, int step) {
  return *(const uint4*)(weights + (slice * STEPS + step) * 512);
}

// N slices of 16 columns of the rows in `a`, from `weights` on (a lane's words of its first slice).
template <int N>
__device__ __forceinline__ void project(float (&c)[2 * N][4], const u32 (&a)[STEPS][4], const u8* weights) {
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int slice = 0; slice < N; slice++) {
      uint4 b = words_of(weights, slice, k);
      mma(c[2 * slice], a[k], b.x, b.y);
      mma(c[2 * slice + 1], a[k], b.z, b.w);
    }
}

// The rows += the N steps of 16 in `a` of a product, `weights` at the first of them.
template <int N>
__device__ __forceinline__ void accumulate(float (&x)[TILES][4], const u32 (&a)[N][4], const u8* weights) {
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int slice = 0; slice < STEPS; slice++) {
      uint4 b = words_of(weights, slice, k);
      mma(x[2 * slice], a[k], b.x, b.y);
      mma(x[2 * slice + 1], a[k], b.z, b.w);
    }
}

// Start columns at their bias, or add it.
template <int N>
__device__ __forceinline__ void start(float (&c)[N][4], const float* bias, u32 lane, bool add) {
#pragma unroll
  for (int i = 0; i < N; i++) {
    float2 b = *(const float2*)(bias + i * 8 + lane % 4 * 2);
    c[i][0] = add ? c[i][0] + b.x : b.x;
    c[i][1] = add ? c[i][1] + b.y : b.y;
    c[i][2] = add ? c[i][2] + b.x : b.x;
    c[i][3] = add ? c[i][3] + b.y : b.y;
  }
}

// Accumulators rounded, as the left operand of the next product.
template <int N>
__device__ __forceinline__ void round_left(u32 (&a)[N][4], const float (&c)[2 * N][4]) {
#pragma unroll
  for (int k = 0; k < N; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) a[k][i] = pack(c[2 * k + i / 2][i % 2 * 2], c[2 * k + i / 2][i % 2 * 2 + 1]);
}

// Mean and reciprocal deviation of the thread's two rows.
__device__ __forceinline__ void moments(float (&mean)[2], float (&scale)[2], const float (&x)[TILES][4], float eps) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum[2] = {}, square[4] = {};
#pragma unroll
    for (int i = 0; i < TILES; i++) sum[i % 2] += x[i][2 * half] + x[i][2 * half + 1];
    mean[half] = quad_sum(sum[0] + sum[1]) * (1.0f / D);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      float left = x[i][2 * half] - mean[half], right = x[i][2 * half + 1] - mean[half];
      square[i % 2] += left * left;
      square[2 + i % 2] += right * right;
    }
    scale[half] = rsqrt_fast(quad_sum((square[0] + square[1]) + (square[2] + square[3])) * (1.0f / D) + eps);
  }
}

// The rows normalised and rounded, as a left operand.
__device__ __forceinline__ void normalise(u32 (&a)[STEPS][4], const float (&x)[TILES][4], float eps) {
  float mean[2], scale[2];
  moments(mean, scale, x, eps);
#pragma unroll
  for (int k = 0; k < STEPS; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* pair = &x[2 * k + i / 2][i % 2 * 2];
      float shift = -mean[i % 2] * scale[i % 2];
      a[k][i] = pack(pair[0] * scale[i % 2] + shift, pair[1] * scale[i % 2] + shift);
    }
}

// The rows += both paired warps' shares; the sum of two is the same in either order.
__device__ __forceinline__ void add_shares(
    float (&x)[TILES][4], const float (&share)[TILES][4], int which, const Place& place) {
  u8* own = place.exchange + (which * PAIR + place.member) * EXCHANGE_BYTES + place.lane * 16;
  const u8* other = place.exchange + (which * PAIR + (place.member ^ 1)) * EXCHANGE_BYTES + place.lane * 16;
#pragma unroll
  for (int i = 0; i < TILES; i++)
    *(float4*)(own + i * 512) = make_float4(share[i][0], share[i][1], share[i][2], share[i][3]);
  asm volatile("bar.sync %0, 64;" ::"r"(place.pair + 1) : "memory");
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    float4 y = *(const float4*)(other + i * 512);
    x[i][0] += share[i][0] + y.x;
    x[i][1] += share[i][1] + y.y;
    x[i][2] += share[i][2] + y.z;
    x[i][3] += share[i][3] + y.w;
  }
}

// Keys (or values) of this warp's rows, as the right operands of the products that read them: a key's part of an
// accumulator tile is one already, a value's after a transposition of 8 x 8.
template <bool VALUES>
__device__ __forceinline__ void right_operand(u32 (&words)[2][TILES / PAIR], const u32 (&a)[STEPS][4], const u8* tile) {
#pragma unroll
  for (int first = 0; first < OWN_STEPS; first += SLICES) {
    float c[2 * SLICES][4] = {};
    project<SLICES>(c, a, tile + first * (STEPS * 512));
#pragma unroll
    for (int i = 0; i < 2 * SLICES; i++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 pair = pack(c[i][2 * half], c[i][2 * half + 1]);
        words[half][2 * first + i] = VALUES ? transpose(pair) : pair;
      }
  }
}

// Where a lane's words of a head begin in a block: VECTOR of every lane side by side, so reads meet no bank twice.
__device__ __forceinline__ u32 lane_offset(u32 head, u32 lane) { return (head * LANE_WORDS * 32 + lane * VECTOR) * 4; }

// Write them to every program of the sequence: half-blocks of keys one behind the other, those of values in turn.
template <bool VALUES>
__device__ __forceinline__ void publish(const u32 (&words)[2][TILES / PAIR], const Place& place) {
  u32 offset = place.block * BLOCK_BYTES + (VALUES ? HELD * BLOCK_BYTES : 0);
  u8* own = place.keys + offset;
#pragma unroll
  for (int head = 0; head < OWN_HEADS; head++)
#pragma unroll
    for (int first = 0; first < LANE_WORDS; first += VECTOR) {
      u32 part[VECTOR];
#pragma unroll
      for (int i = 0; i < VECTOR; i++) {
        int word = first + i;
        part[i] = VALUES ? words[word % 2][head * HEAD_TILES + word / 2]
                         : words[word / HEAD_TILES][head * HEAD_TILES + word % HEAD_TILES];
      }
      u32 at = lane_offset(place.member * OWN_HEADS + head, place.lane) + first * 128;
      if (VECTOR == 4)
        *(uint4*)(own + at) = make_uint4(part[0], part[1], part[2], part[VECTOR - 1]);
      else
        *(uint2*)(own + at) = make_uint2(part[0], part[1]);
#pragma unroll
      for (int i = 0; i < SPLIT - 1; i++) send(place.other[i] + offset + at, part, place.other_ready[i]);
    }
}

__device__ __forceinline__ void read_block(u32 (&words)[LANE_WORDS], const u8* from) {
#pragma unroll
  for (int first = 0; first < LANE_WORDS; first += VECTOR) {
    if (VECTOR == 4) {
      uint4 y = *(const uint4*)(from + first * 128);
      words[first] = y.x, words[first + 1] = y.y, words[first + 2] = y.z, words[first + VECTOR - 1] = y.w;
    } else {
      uint2 y = *(const uint2*)(from + first * 128);
      words[first] = y.x, words[first + 1] = y.y;
    }
  }
}

// The context of one head, rounded: a pair of columns of the upper row, one of the lower, a tile.
__device__ __forceinline__ void attend(u32 (*context)[2], const u32 (*q)[2], u32 head, const Place& place) {
  float s[BLOCKS][2][4], top[2] = {NEGATIVE, NEGATIVE};
  const u8* keys = place.keys + lane_offset(head, place.lane);
#pragma unroll
  for (int first = 0; first < BLOCKS; first += SPAN) {
    if (first <= int(place.last)) {
#pragma unroll
      for (int b = first; b < first + SPAN; b++) {
        u32 words[LANE_WORDS];
        read_block(words, keys + b * BLOCK_BYTES);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
          for (int j = 0; j < 4; j++) s[b][half][j] = 0.0f;
#pragma unroll
          for (int i = 0; i + 1 < HEAD_TILES; i += 2) {
            u32 left[4] = {q[i][0], q[i][1], q[i + 1][0], q[i + 1][1]};
            mma(s[b][half], left, words[half * HEAD_TILES + i], words[half * HEAD_TILES + i + 1]);
          }
          constexpr int LAST = HEAD_TILES - 1;
          if (HEAD_TILES % 2) mma_narrow(s[b][half], q[LAST][0], q[LAST][1], words[half * HEAD_TILES + LAST]);
        }
      }
#pragma unroll
      for (int b = first; b < first + SPAN; b++)
        if (!(place.open >> b & 1)) {
#pragma unroll
          for (int i = 0; i < 8; i++)
            if (!(place.visible[i % 4 / 2] >> (b * 4 + i / 4 * 2 + i % 2) & 1)) s[b][i / 4][i % 4] = NEGATIVE;
        }
#pragma unroll
      for (int b = first; b < first + SPAN; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float left = fmaxf(s[b][0][2 * half], s[b][0][2 * half + 1]);
          float right = fmaxf(s[b][1][2 * half], s[b][1][2 * half + 1]);
          top[half] = fmaxf(top[half], fmaxf(left, right));
        }
    }
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  const u8* values = place.values + lane_offset(head, place.lane);
  float c[HEAD_TILES][4] = {}, sum[4] = {};
#pragma unroll
  for (int first = 0; first < BLOCKS; first += SPAN) {
    if (first <= int(place.last)) {
#pragma unroll
      for (int b = first; b < first + SPAN; b++) {
        u32 words[LANE_WORDS], p[4];
        read_block(words, values + b * BLOCK_BYTES);
#pragma unroll
        for (int i = 0; i < 8; i++) s[b][i / 4][i % 4] = exp2_fast(s[b][i / 4][i % 4] - top[i % 4 / 2]);
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = pack(s[b][i / 2][i % 2 * 2], s[b][i / 2][i % 2 * 2 + 1]);
        mma(sum, p, ONES, ONES);  // a product's columns of ones sum the rows of what the context sums
#pragma unroll
        for (int i = 0; i < HEAD_TILES; i++) mma(c[i], p, words[2 * i], words[2 * i + 1]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float scale = 1.0f / sum[2 * half];
#pragma unroll
    for (int i = 0; i < HEAD_TILES; i++) context[i][half] = pack(c[i][2 * half] * scale, c[i][2 * half + 1] * scale);
  }
}

__device__ __forceinline__ void layer(Tiles& tiles, float (&x)[TILES][4], u32 round, float eps, const Place& place) {
  u32 a[STEPS][4], own_columns = place.member * (OWN_STEPS * STEPS * 512) + place.lane * 16;
  if (int(place.lane) < SPLIT - 1) {
    barrier_wait(place.ready + place.awaited * 8, round & 1 ^ 1);
    expect(place.ready + place.awaited * 8, 2 * BLOCK_BYTES / PAIR);
  }
  normalise(a, x, eps);
  {
    u32 words[2][TILES / PAIR], slot = tiles.slot;
    right_operand<false>(words, a, tiles.next() + own_columns);
    tiles.used(slot);
    barrier_wait(place.free, round & 1 ^ 1);  // every warp has read the layer before's
    publish<false>(words, place);
    slot = tiles.slot;
    right_operand<true>(words, a, tiles.next() + own_columns);
    tiles.used(slot);
    publish<true>(words, place);
    __syncwarp();
    if (place.lane == 0) barrier_arrive(place.ready + place.block * 8);
  }
  {
    constexpr int COLUMN_TILES = TOGETHER * HEAD_TILES, COLUMN_STEPS = COLUMN_TILES / 2;
    u32 slot = tiles.slot;
    const u8* queries = tiles.next();
    u32 other = tiles.slot;
    const u8* output = tiles.next();
    start(x, (const float*)(output + WEIGHT_BYTES), place.lane, true);
    float share[TILES][4] = {};
    float (&rows)[TILES][4] = PAIR > 1 ? share : x;
#pragma unroll 1
    for (int own = 0; own < OWN_HEADS / TOGETHER; own++) {
      int step = place.member * (OWN_HEADS / TOGETHER) + own;
      u32 q[COLUMN_TILES][2], context[COLUMN_TILES][2];
      {
        float c[COLUMN_TILES][4];
        start(c, (const float*)(queries + WEIGHT_BYTES) + step * (COLUMN_TILES * 8), place.lane, false);
        project<COLUMN_STEPS>(c, a, queries + place.lane * 16 + step * (COLUMN_STEPS * STEPS * 512));
#pragma unroll
        for (int i = 0; i < COLUMN_TILES; i++)
#pragma unroll
          for (int half = 0; half < 2; half++) q[i][half] = pack(c[i][2 * half], c[i][2 * half + 1]);
      }
      if (own == 0) {
        int awaited = int(place.last) / SPAN * SPAN + SPAN;
        if (int(place.lane) < awaited) barrier_wait(place.ready + place.lane * 8, round & 1);
        __syncwarp();
      }
#pragma unroll
      for (int head = 0; head < TOGETHER; head++)
        attend(context + head * HEAD_TILES, q + head * HEAD_TILES, step * TOGETHER + head, place);
      u32 left[COLUMN_STEPS][4];
#pragma unroll
      for (int k = 0; k < COLUMN_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) left[k][i] = context[2 * k + i / 2][i % 2];
      accumulate<COLUMN_STEPS>(rows, left, output + place.lane * 16 + step * (COLUMN_STEPS * 512));
    }
    if (PAIR > 1) add_shares(x, share, 0, place);
    tiles.used(slot);
    tiles.used(other);
    if (place.lane < SPLIT) arrive_in(place.free, place.lane);
  }
  normalise(a, x, eps);
  float share[TILES][4] = {};
  float (&rows)[TILES][4] = PAIR > 1 ? share : x;
#pragma unroll 1
  for (int tile = 0; tile < FFN / D; tile++) {
    u32 slot = tiles.slot;
    const u8* into = tiles.next();
    u32 other = tiles.slot;
    const u8* back = tiles.next();
    start(x, (const float*)(back + WEIGHT_BYTES), place.lane, true);
#pragma unroll 1
    for (int own = 0; own < OWN_STEPS; own += SLICES) {
      int first = place.member * OWN_STEPS + own;
      float c[2 * SLICES][4];
      start(c, (const float*)(into + WEIGHT_BYTES) + first * 16, place.lane, false);
      project<SLICES>(c, a, into + place.lane * 16 + first * (STEPS * 512));
#pragma unroll
      for (int i = 0; i < 8 * SLICES; i++) c[i / 4][i % 4] = gelu(c[i / 4][i % 4]);
      u32 hidden[SLICES][4];
      round_left(hidden, c);
      accumulate<SLICES>(rows, hidden, back + place.lane * 16 + first * 512);
    }
    tiles.used(slot);
    tiles.used(other);
  }
  if (PAIR > 1) add_shares(x, share, 1, place);
}

// Copy this program's slices of all tiles, each as its slot comes free in every program of the cluster; a barrier
// nobody arrived at yet lets the odd parity through.
__device__ __forceinline__ void producer(u32 tiles, u32 full, u32 empty, const u8* weights, int rounds, int length) {
  u32 slice = cluster_rank() * SLICE_BYTES, slot = 0, parity = 1;
  for (int round = 0; round < rounds; round++)
    for (int tile = 0; tile < length; tile++) {
      barrier_wait(empty + slot * 8, parity);
      copy_slice(tiles + slot * TILE_BYTES + slice, weights + tile * TILE_BYTES + slice, full + slot * 8);
      slot = slot + 1 == STAGES ? 0 : slot + 1;
      if (slot == 0) parity ^= 1;
    }
}

// A warp's rows of one sequence through every layer.
__device__ __forceinline__ void forward(Tiles& tiles, Place& place, u32& round, int sequence, const io_t* input,
    const u8* mask, io_t* output, const float* final_norm, int batch, int length, int layers, float eps) {
  int row = place.block * ROWS + place.lane / 4;
  long long first = (long long)sequence * length;
  u32 column = place.lane % 4 * 2;
  float x[TILES][4];
  bool inside[2], valid[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    inside[half] = sequence < batch && row + 8 * half < length;
    valid[half] = inside[half] && (!MASKED || mask[first + row + 8 * half]);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      float2 pair = make_float2(0.0f, 0.0f);
      if (inside[half]) pair = widen(*(const io2_t*)(input + (first + row + 8 * half) * D + column + i * 8));
      x[i][2 * half] = pair.x;
      x[i][2 * half + 1] = pair.y;
    }
  }
  place.visible[0] = place.visible[1] = place.open = 0;
#pragma unroll
  for (int b = 0; b < BLOCKS; b++) {
    int key = b * ROWS + place.lane % 16;
    bool there = sequence < batch && key < length;
    u32 present = __ballot_sync(~0u, there && (!MASKED || mask[first + key])) >> column;
    u32 bits = (present & 3) | (present >> 6 & 12), all = 15;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 seen = bits;
#pragma unroll
      for (int bit = 0; bit < 4; bit++)
        if (CAUSAL && b * ROWS + bit / 2 * 8 + int(column) + bit % 2 > row + 8 * half) seen &= ~(1u << bit);
      place.visible[half] |= seen << b * 4;
      all &= seen;
    }
    if (__all_sync(~0u, all == 15)) place.open |= 1u << b;
  }
#pragma unroll 1
  for (int index = 0; index < layers; index++) layer(tiles, x, round++, eps, place);
  float mean[2], scale[2];
  moments(mean, scale, x, eps);
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    float2 gamma = __ldg((const float2*)(final_norm + column + i * 8));
    float2 beta = __ldg((const float2*)(final_norm + D + column + i * 8));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float left = (x[i][2 * half] - mean[half]) * scale[half] * gamma.x + beta.x;
      float right = (x[i][2 * half + 1] - mean[half]) * scale[half] * gamma.y + beta.y;
      io2_t* to = (io2_t*)(output + (first + row + 8 * half) * D + column + i * 8);
      if (inside[half] && i / (TILES / PAIR) == int(place.member))
        *to = valid[half] ? narrow(left, right) : narrow(0.0f, 0.0f);
    }
  }
}

#if SPLIT > 1
#define IN_CLUSTERS __cluster_dims__(SPLIT, 1, 1)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1)
    resident_rowwarps(const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* final_norm,
        int units, int batch, int length, int layers, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES + HELD + 1];
  u32 warp = threadIdx.x / 32, rank = cluster_rank();
  u8* held = memory + STAGES * TILE_BYTES;
  Tiles tiles;
  tiles.memory = memory;
  tiles.full = shared_address(barriers);
  tiles.empty = tiles.full + STAGES * 8;
  tiles.slot = tiles.phase = 0;
  Place place;
  place.lane = threadIdx.x % 32;
  place.ready = tiles.empty + STAGES * 8;
  place.free = place.ready + HELD * 8;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(tiles.full + slot * 8, 1);
      barrier_init(tiles.empty + slot * 8, WARPS * SPLIT);
    }
    for (int b = 0; b < HELD; b++) barrier_init(place.ready + b * 8, PAIR);
    barrier_init(place.free, WARPS * SPLIT);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  int clusters = gridDim.x / SPLIT, unit = blockIdx.x / SPLIT;
  if (warp >= WARPS) {
    if (WARPS == 8) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    int rounds = (units - unit + clusters - 1) / clusters * layers;
    if (warp == WARPS && place.lane == 0)
      producer(shared_address(memory), tiles.full, tiles.empty, weights, rounds / layers, layers * LAYER_TILES);
  } else {
    if (WARPS == 8) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    // Blocks of a sequence over warps: of two warps on a scheduler one attends to few keys, one to many.
    place.pair = warp / PAIR;
    place.member = warp % PAIR;
    u32 first = SPLIT > 1 ? 0 : place.pair / BLOCKS * BLOCKS;
    u32 within = SPLIT > 1 ? place.pair * SPLIT + rank : place.pair % BLOCKS;
    constexpr u32 TURN = BLOCKS < 4 ? BLOCKS : 4;
    if (SPLIT == 1 && place.pair / 4 % 2) within = within / TURN * TURN + TURN - 1 - within % TURN;
    place.block = within;
    place.keys = held + first * BLOCK_BYTES;
    place.values = place.keys + HELD * BLOCK_BYTES;
    place.exchange = held + 2 * HELD * BLOCK_BYTES + place.pair * (2 * PAIR * EXCHANGE_BYTES);
    place.ready += first * 8;
#pragma unroll
    for (int i = 0; i < SPLIT - 1; i++) {
      place.other[i] = address_in(shared_address(held), rank ^ (i + 1));
      place.other_ready[i] = address_in(place.ready + within * 8, rank ^ (i + 1));
    }
    // Of the blocks other programs write, each warp makes ready for as many as it writes itself to one of them.
    if (SPLIT > 1) place.awaited = place.pair * SPLIT + (rank ^ (place.lane + 1)) % SPLIT;
    int furthest = (length - 1) / ROWS;
    place.last = CAUSAL && int(within) < furthest ? within : furthest;
    u32 round = 0;
    for (; unit < units; unit += clusters) {
      int sequence = SPLIT > 1 ? unit : unit * (OWN_BLOCKS / BLOCKS) + place.pair / BLOCKS;
      forward(tiles, place, round, sequence, input, mask, output, final_norm, batch, length, layers, eps);
    }
  }
  __syncwarp();
  cluster_sync();
}
