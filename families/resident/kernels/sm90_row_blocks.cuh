// Blocks of 16 query rows through every layer in one launch, many programs a causal sequence: for batches of at most a
// block a multiprocessor, whose time is the length of one chain of dependent steps.
//
// Each of D / 16 warps owns 16 columns of every product: its 16 x 16 part of the residual lies in registers in the
// layout of a product's accumulators; what all warps need of the rows passes through shared memory. One more warp, the
// producer, copies weight tiles and announces written keys, off the chain.
//
// Keys and values pass between programs through a scratch of each layer in device memory, packed as the right operands
// of the products that read them, and announced by a flag a block. A program awaits programs before it alone, so the
// launch order ends every wait however few of them run at a time.
//
// Compile-time: D width = HEADS * HD, FFN (multiple of D), MASKED, STAGES tiles of the ring, BF16 operands, IO.

constexpr int WARPS = D / 16;
constexpr int THREADS = WARPS * 32 + 32;
constexpr int STEPS = D / 16;  // of 16 along the width
constexpr int ROWS = 16;
constexpr int BLOCKS = 8;  // of a sequence, at most
constexpr int WEIGHT_BYTES = D * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + D * 4;
constexpr int LAYER_TILES = 4 + 2 * (FFN / D);
constexpr int KEY_TILES = 2;                         // of a layer: used before the keys are written
constexpr int SHARE = HD / 16;                       // warps of a head: they take its key blocks in turn
constexpr int ITEMS = (BLOCKS + SHARE - 1) / SHARE;  // key blocks of a warp, at most
constexpr int LANE_WORDS = HD / 8;                   // of a lane in the packed keys of eight rows
constexpr int ROW_BYTES = (D + 8) * 2;  // of a row in shared memory: an odd number of 16-byte units meets no bank twice
constexpr int PART_FLOATS = HD + 8;
constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
constexpr int SCRATCH_WORDS = ROWS * D;  // of a program and layer: keys, then values

#include "sm90_steps.cuh"

__device__ __forceinline__ void sync_rows() { named_sync<2, WARPS * 32>(); }

__device__ __forceinline__ void load_left(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
      : "r"(address)
      : "memory");
}

__device__ __forceinline__ uint4 load_words(u32 address) {
  uint4 y;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
      : "r"(address)
      : "memory");
  return y;
}

// Read words another program wrote: past the first-level cache.
template <int N>
__device__ __forceinline__ void read_words(u32* to, const u32* from) {
  if (N == 2)
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from) : "memory");
#pragma unroll
  for (int i = 0; i + 4 <= N; i += 4)
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
        : "l"(from + i)
        : "memory");
}

__device__ __forceinline__ int load_flag(const int* flag) {
  int y;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(y) : "l"(flag) : "memory");
  return y;
}

__device__ __forceinline__ void store_flag(int* flag, int value) {
  asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// ---- pieces -------------------------------------------------------------------------------------------------------

// What every warp knows of its place, and the shared memory it passes rows through.
struct Place {
  u32 warp, lane, moments, parts, tops, operands;
};

// This warp's 16 columns of a [16, D] times the tile at `tile`, two columns' bias first; four chains of products.
__device__ __forceinline__ void project(
    float (&c)[2][4], const u32 (&a)[STEPS][4], u32 tile, const Place& place, bool add) {
  u32 weights = tile + place.warp * (STEPS * 512) + place.lane * 16;
  u32 bias = tile + WEIGHT_BYTES + (place.warp * 16 + place.lane % 4 * 2) * 4;
  float other[2][4];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float2 b = load_shared(bias + i * 32);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float start = j % 2 ? b.y : b.x;
      c[i][j] = add ? c[i][j] + start : start;
      other[i][j] = 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < STEPS; k++) {
    uint4 b = load_words(weights + k * 512);
    mma(k % 2 ? other[0] : c[0], a[k], b.x, b.y);
    mma(k % 2 ? other[1] : c[1], a[k], b.z, b.w);
  }
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) c[i][j] += other[i][j];
}

// Write this warp's columns of a left operand, rounded.
__device__ __forceinline__ void write_left(const float (&c)[2][4], u32 operand, const Place& place) {
  u32 to = operand + place.lane / 4 * ROW_BYTES + (place.warp * 16 + place.lane % 4 * 2) * 2;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    store_shared(to + i * 16, pack(c[i][0], c[i][1]));
    store_shared(to + i * 16 + 8 * ROW_BYTES, pack(c[i][2], c[i][3]));
  }
}

template <int N>
__device__ __forceinline__ void read_left(u32 (&a)[N][4], u32 operand, const Place& place) {
  u32 from = operand + place.lane % 16 * ROW_BYTES + place.lane / 16 * 16;
#pragma unroll
  for (int k = 0; k < N; k++) load_left(a[k], from + k * 32);
}

// Normalise the rows: every warp gives the sum and the squared distances from its own mean of its 16 columns, which
// combine without the cancellation that sums of squares suffer.
__device__ __forceinline__ void normalise(float (&y)[2][4], const float (&x)[2][4], float eps, const Place& place) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float a = x[0][2 * half], b = x[0][2 * half + 1], c = x[1][2 * half], d = x[1][2 * half + 1];
    float sum = quad_sum((a + b) + (c + d));
    float mean = sum * (1.0f / 16);
    a -= mean;
    b -= mean;
    c -= mean;
    d -= mean;
    float square = quad_sum((a * a + b * b) + (c * c + d * d));
    u32 row = place.lane / 4 + 8 * half;
    if (place.lane % 4 == 0) store_pair(place.moments + (row * WARPS + place.warp) * 8, sum, square);
  }
  sync_rows();
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float2 part[WARPS];
    float sum = 0.0f, square = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      part[i] = load_shared(place.moments + ((place.lane / 4 + 8 * half) * WARPS + i) * 8);
      sum += part[i].x;
    }
    float mean = sum * (1.0f / D);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      float apart = part[i].x * (1.0f / 16) - mean;
      square += part[i].y + 16.0f * apart * apart;
    }
    float scale = rsqrt_fast(square * (1.0f / D) + eps);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      y[i][2 * half] = (x[i][2 * half] - mean) * scale;
      y[i][2 * half + 1] = (x[i][2 * half + 1] - mean) * scale;
    }
  }
}

// Keys and values of these rows into the scratch, as right operands: a key's part of an accumulator tile is one
// already, a value's after a transposition of 8 x 8.
__device__ __forceinline__ void write_keys(const float (&c)[2][4], u32* scratch, const Place& place) {
  u32 head = place.warp / SHARE, first = place.warp % SHARE * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32* to = scratch + ((half * HEADS + head) * 32 + place.lane) * LANE_WORDS + first;
    *(uint2*)to = make_uint2(pack(c[0][2 * half], c[0][2 * half + 1]), pack(c[1][2 * half], c[1][2 * half + 1]));
  }
}

__device__ __forceinline__ void write_values(const float (&c)[2][4], u32* scratch, const Place& place) {
  u32 head = place.warp / SHARE, first = place.warp % SHARE * 4;
  u32* to = scratch + SCRATCH_WORDS / 2 + (head * 32 + place.lane) * (2 * LANE_WORDS) + first;
  *(uint4*)to = make_uint4(transpose(pack(c[0][0], c[0][1])), transpose(pack(c[0][2], c[0][3])),
      transpose(pack(c[1][0], c[1][1])), transpose(pack(c[1][2], c[1][3])));
}

// This warp's share of its head: key blocks share, share + SHARE, ... up to `block`; the partial context, its sums and
// tops go to shared memory. `visible` holds four bits a key block for each of the thread's two rows.
__device__ __forceinline__ void attend(const u32* scratch, const int* flags, int block, int layer,
    const u32 (&visible)[2], u32 q_operand, const Place& place) {
  u32 head = place.warp / SHARE, share = place.warp % SHARE;
  u32 q[SHARE][4];
  read_left<SHARE>(q, q_operand + head * (HD * 2), place);
  int awaited = share + place.lane * SHARE;
  bool ready = place.lane >= ITEMS || awaited >= block;
  while (!__all_sync(~0u, ready)) {
    if (!ready) ready = load_flag(flags + awaited) > layer;
  }
  __syncwarp();
  const u32* from = scratch + (int(share) - block) * SCRATCH_WORDS + (head * 32 + place.lane) * LANE_WORDS;
  u32 keys[ITEMS][2][LANE_WORDS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
#pragma unroll
      for (int half = 0; half < 2; half++)
        read_words<LANE_WORDS>(keys[item][half], from + item * SHARE * SCRATCH_WORDS + half * (SCRATCH_WORDS / 4));
    }
  }
  u32 seen[2] = {opaque(visible[0]), opaque(visible[1])};
  float s[ITEMS][2][4], top[2] = {NEGATIVE, NEGATIVE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++) s[item][half][j] = 0.0f;
#pragma unroll
        for (int k = 0; k < SHARE; k++) mma(s[item][half], q[k], keys[item][half][2 * k], keys[item][half][2 * k + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++)
          if (!(seen[j / 2] >> (item * 4 + half * 2 + j % 2) & 1)) s[item][half][j] = NEGATIVE;
#pragma unroll
        for (int j = 0; j < 4; j++) top[j / 2] = fmaxf(top[j / 2], s[item][half][j]);
      }
    }
  }
  // Asked for here and not with the keys: both at once do not fit the registers.
  from += SCRATCH_WORDS / 2 + (head * 32 + place.lane) * LANE_WORDS;
  u32 values[ITEMS][2 * LANE_WORDS];
#pragma unroll
  for (int item = 0; item < ITEMS; item++)
    if (share + item * SHARE <= block) read_words<2 * LANE_WORDS>(values[item], from + item * SHARE * SCRATCH_WORDS);
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  float c[LANE_WORDS][4] = {};
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    if (share + item * SHARE <= block) {
      u32 p[4];
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          s[item][half][j] = exp2_fast(s[item][half][j] - top[j / 2]);
          sum[j / 2] += s[item][half][j];
        }
        p[2 * half] = pack(s[item][half][0], s[item][half][1]);
        p[2 * half + 1] = pack(s[item][half][2], s[item][half][3]);
      }
#pragma unroll
      for (int n = 0; n < LANE_WORDS; n++) mma(c[n], p, values[item][2 * n], values[item][2 * n + 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float total = quad_sum(sum[half]);
    u32 row = place.lane / 4 + 8 * half;
    if (place.lane % 4 == 0) store_pair(place.tops + (place.warp * ROWS + row) * 8, top[half], total);
    u32 to = place.parts + ((place.warp * ROWS + row) * PART_FLOATS + place.lane % 4 * 2) * 4;
#pragma unroll
    for (int n = 0; n < LANE_WORDS; n++) store_pair(to + n * 32, c[n][2 * half], c[n][2 * half + 1]);
  }
}

// This warp's 16 columns of the context, from the parts of its head's warps.
__device__ __forceinline__ void combine(float (&y)[2][4], const Place& place) {
  u32 first = place.warp / SHARE * SHARE, column = place.warp % SHARE * 16 + place.lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    u32 row = place.lane / 4 + 8 * half;
    float2 part[SHARE];
    float top = NEGATIVE, total = 0.0f;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      part[i] = load_shared(place.tops + ((first + i) * ROWS + row) * 8);
      top = fmaxf(top, part[i].x);
    }
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
      part[i].x = exp2_fast(part[i].x - top);
      total += part[i].x * part[i].y;
    }
    // A row without a visible key, which no mask keeps, may find no key block at all.
    float scale = 1.0f / (total == 0.0f ? 1.0f : total);
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float2 c = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < SHARE; i++) {
        float2 p = load_shared(place.parts + (((first + i) * ROWS + row) * PART_FLOATS + column + n * 8) * 4);
        c.x += part[i].x * p.x;
        c.y += part[i].x * p.y;
      }
      y[n][2 * half] = c.x * scale;
      y[n][2 * half + 1] = c.y * scale;
    }
  }
}

__device__ __forceinline__ void layer(Stream& stream, float (&x)[2][4], u32* scratch, int* flags, int block, int index,
    const u32 (&visible)[2], float eps, const Place& place) {
  u32 a[STEPS][4];
  float c[2][4];
  u32 rows = place.operands, queries = rows + OPERAND_BYTES, context = queries + OPERAND_BYTES;
  normalise(c, x, eps, place);
  write_left(c, rows, place);
  sync_rows();
  read_left<STEPS>(a, rows, place);
  project(c, a, stream.current(), place, false);
  stream.used();
  write_keys(c, scratch, place);
  project(c, a, stream.current(), place, false);
  stream.used();
  write_values(c, scratch, place);
  named_arrive<1, THREADS>();
  project(c, a, stream.current(), place, false);
  stream.used();
  write_left(c, queries, place);
  sync_rows();
  attend(scratch, flags, block, index, visible, queries, place);
  sync_rows();
  combine(c, place);
  write_left(c, context, place);
  sync_rows();
  read_left<STEPS>(a, context, place);
  project(x, a, stream.current(), place, true);
  stream.used();
  normalise(c, x, eps, place);
  write_left(c, rows, place);
  sync_rows();
  read_left<STEPS>(a, rows, place);
#pragma unroll 1
  for (int tile = 0; tile < FFN / D; tile++) {
    u32 hidden[STEPS][4];
    u32 to = tile % 2 ? context : queries;
    project(c, a, stream.current(), place, false);
    stream.used();
#pragma unroll
    for (int i = 0; i < 8; i++) c[i / 4][i % 4] = gelu(c[i / 4][i % 4]);
    write_left(c, to, place);
    sync_rows();
    read_left<STEPS>(hidden, to, place);
    project(x, hidden, stream.current(), place, true);
    stream.used();
  }
}

// Copy weight tiles as slots come free, announce each layer's keys once they are written, and leave the flags as the
// next call must find them. A layer's tiles are asked for behind the announcement of the layer before, so no warp can
// arrive at a barrier twice before the producer has passed it.
__device__ __forceinline__ void producer(Stream& stream, int* flags, int block, int blocks, int layers) {
  bool first = threadIdx.x % 32 == 0;
  int asked = 0;
  for (int index = 0; index < layers; index++) {
    // No tile asked for before the announcement waits for a slot that comes free only behind it.
    int most = min(index * LAYER_TILES + KEY_TILES + STAGES, (index + 1) * LAYER_TILES);
    for (; first && asked < most; asked++) stream.request(asked % STAGES, asked / STAGES % 2 ^ 1);
    __syncwarp();
    named_sync<1, THREADS>();
    if (first) store_flag(flags + block, index + 1);
  }
  int total = layers * LAYER_TILES;
  for (; first && asked < total; asked++) stream.request(asked % STAGES, asked / STAGES % 2 ^ 1);
  __syncwarp();
  named_sync<3, THREADS>();
  if (first) {
    // Every warp of this program has read what it awaited: the last program of the sequence clears the flags.
    int done;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(done) : "l"(flags + BLOCKS) : "memory");
    if (done == blocks - 1)
      for (int i = 0; i <= BLOCKS; i++) flags[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    resident_rowblocks(const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* final_norm,
        u32* scratch, int* flags, int blocks, int length, int layers, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ __align__(16) float moments[ROWS * WARPS * 2], tops[WARPS * ROWS * 2];
  Place place;
  place.warp = threadIdx.x / 32;
  place.lane = threadIdx.x % 32;
  place.moments = shared_address(moments);
  place.tops = shared_address(tops);
  Stream stream;
  stream.tiles = shared_address(memory);
  place.operands = stream.tiles + STAGES * TILE_BYTES;
  place.parts = place.operands + 3 * OPERAND_BYTES;
  stream.full = shared_address(barriers);
  stream.empty = stream.full + STAGES * 8;
  stream.slot = stream.phase = stream.within = 0;
  stream.length = stream.left = layers * LAYER_TILES;
  stream.source = weights;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(stream.full + slot * 8, 1);
      barrier_init(stream.empty + slot * 8, WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  int sequence = blockIdx.x / blocks, block = blockIdx.x % blocks;
  flags += sequence * (2 * BLOCKS);
  if (place.warp == WARPS) {
    producer(stream, flags, block, blocks, layers);
    return;
  }
  int row = block * ROWS + place.lane / 4;
  long long first = (long long)sequence * length;
  u32 column = place.warp * 16 + place.lane % 4 * 2;
  float x[2][4];
  bool inside[2], valid[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    inside[half] = row + 8 * half < length;
    valid[half] = inside[half] && (!MASKED || mask[first + row + 8 * half]);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 pair = make_float2(0.0f, 0.0f);
      if (inside[half]) pair = widen(*(const io2_t*)(input + (first + row + 8 * half) * D + column + i * 8));
      x[i][2 * half] = pair.x;
      x[i][2 * half + 1] = pair.y;
    }
  }
  // Four bits a key block of this warp: the thread's two keys among the block's first eight, and among its last.
  u32 visible[2] = {0, 0};
#pragma unroll
  for (int item = 0; item < ITEMS; item++) {
    int other = place.warp % SHARE + item * SHARE, key = other * ROWS + place.lane % 16;
    u32 present = __ballot_sync(~0u, key < length && (!MASKED || mask[first + key])) >> place.lane % 4 * 2;
    u32 bits = (present & 3) | (present >> 6 & 12);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      u32 seen = bits;
#pragma unroll
      for (int bit = 0; bit < 4; bit++)
        if (other * ROWS + bit / 2 * 8 + int(place.lane % 4) * 2 + bit % 2 > row + 8 * half) seen &= ~(1u << bit);
      visible[half] |= seen << item * 4;
    }
  }
  scratch += (long long)blockIdx.x * SCRATCH_WORDS;
#pragma unroll 1
  for (int index = 0; index < layers; index++) {
    layer(stream, x, scratch, flags, block, index, visible, eps, place);
    scratch += (long long)gridDim.x * SCRATCH_WORDS;
  }
  float y[2][4];
  normalise(y, x, eps, place);
  named_arrive<3, THREADS>();
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float2 gamma = __ldg((const float2*)(final_norm + column + i * 8));
    float2 beta = __ldg((const float2*)(final_norm + D + column + i * 8));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      io2_t* to = (io2_t*)(output + (first + row + 8 * half) * D + column + i * 8);
      if (inside[half]) {
        float left = y[i][2 * half] * gamma.x + beta.x, right = y[i][2 * half + 1] * gamma.y + beta.y;
        *to = valid[half] ? narrow(left, right) : narrow(0.0f, 0.0f);
      }
    }
  }
}
