"""CUDA source of the row-warp kernel: its sizes, what passes between programs, the steps of one warp."""

from __future__ import annotations

ROWWARP_SIZES = r"""
// Every warp takes 16 rows of a sequence through the whole forward in its registers: the accumulators of one product
// are the left operand of the next. Warps meet for keys and values, which pass through shared memory, of every program
// of a cluster where a sequence is split over several; a warp waits for the blocks of rows it attends to alone. Twins
// share their rows: each takes half of the heads and of the hidden columns, and both add up what they make of them.
//
// The programs of a cluster share the stream of weight tiles: each asks for its slice of a tile, which goes to all of
// them. One more warp, the courier, does the asking.
//
// Compile-time: D width = HEADS * HD, FFN (multiple of D), MASKED, CAUSAL, BF16 operands, IO, STAGES tiles of the ring,
// WARPS of a program, TWINS of a block of rows, BLOCKS of a sequence (a power of two), SPLIT programs it is split over,
// which form a cluster, SPAN blocks of keys taken together, TOGETHER heads taken in one step.

constexpr int THREADS = WARPS * 32 + (WARPS == 8 ? 128 : 32);
constexpr int OWN_BLOCKS = WARPS / TWINS;  // of rows, of a program
constexpr int ROWS = 16;
constexpr int STEPS = D / 16;  // of 16 along the width
constexpr int TILES = D / 8;   // of eight columns
constexpr int HEAD_TILES = HD / 8;
constexpr int WEIGHT_BYTES = D * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + D * 4;
constexpr int SLICE_BYTES = TILE_BYTES / SPLIT;
constexpr int LAYER_TILES = 4 + 2 * (FFN / D);
constexpr int HELD = BLOCKS > OWN_BLOCKS ? BLOCKS : OWN_BLOCKS;       // blocks whose keys a program holds
constexpr int BLOCK_BYTES = ROWS * D * 2;                   // of a block's keys, or values
constexpr int LANE_WORDS = 2 * HEAD_TILES;                  // of a lane in a head's keys, or values, of a block
constexpr int VECTOR = HEAD_TILES % 2 ? 2 : 4;              // words a lane reads at a time
constexpr int OWN_STEPS = STEPS / TWINS;  // of 16 columns, of a warp
constexpr int OWN_HEADS = HEADS / TWINS;
// Of 16 columns, at a time: chains of products enough to hide each other's latency, and few enough for the registers.
constexpr int SLICES = OWN_STEPS % 4 == 0 ? 4 : OWN_STEPS % 3 == 0 ? 3 : OWN_STEPS % 2 == 0 ? 2 : OWN_STEPS;
constexpr int EXCHANGE_BYTES = ROWS * D * 4;
constexpr unsigned ONES = BF16 ? 0x3F803F80 : 0x3C003C00;
static_assert(SLICE_BYTES % 16 == 0 && TOGETHER * HEAD_TILES % 2 == 0 && OWN_HEADS % TOGETHER == 0, "");
"""

ROWWARP_STEPS = r"""
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
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[N - 1]), "r"(barrier) : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(to),
                 "r"(words[0]), "r"(words[1]), "r"(barrier) : "memory");
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
        "[%0], [%1], %2, [%3], all;\n}" ::"r"(to), "l"(from), "n"(SLICE_BYTES), "r"(barrier), "n"((1 << SPLIT) - 1)
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
        "n"(SLICE_BYTES), "r"(barrier)
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

  // Say that this warp has used the tile in a slot.
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
  u32 twin, pair, lane, ready, free, block, last, open, awaited;
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

// The rows += both twins' shares; the sum of two is the same in either order.
__device__ __forceinline__ void add_shares(
    float (&x)[TILES][4], const float (&share)[TILES][4], int which, const Place& place) {
  u8* own = place.exchange + (which * TWINS + place.twin) * EXCHANGE_BYTES + place.lane * 16;
  const u8* other = place.exchange + (which * TWINS + (place.twin ^ 1)) * EXCHANGE_BYTES + place.lane * 16;
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
"""
