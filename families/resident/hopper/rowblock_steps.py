"""CUDA source of the row-block kernel: its sizes, and the steps that are no attention."""

from __future__ import annotations

ROWBLOCK_SIZES = r"""
// Blocks of 16 query rows through every layer in one launch, many programs a causal sequence: for batches of at most a
// block a multiprocessor, whose time is the length of one chain of dependent steps.
//
// Each of D / 16 warps owns 16 columns of every product: its 16 x 16 part of the residual lies in registers in the
// layout of a product's accumulators; what all warps need of the rows passes through shared memory. One more warp, the
// courier, asks for weight tiles and announces written keys, off the chain.
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
constexpr int BLOCKS = 8;       // of a sequence, at most
constexpr int WEIGHT_BYTES = D * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + D * 4;
constexpr int LAYER_TILES = 4 + 2 * (FFN / D);
constexpr int KEY_TILES = 2;          // of a layer: used before the keys are written
constexpr int SHARE = HD / 16;        // warps of a head: they take its key blocks in turn
constexpr int ITEMS = (BLOCKS + SHARE - 1) / SHARE;  // key blocks of a warp, at most
constexpr int LANE_WORDS = HD / 8;    // of a lane in the packed keys of eight rows
constexpr int ROW_BYTES = (D + 8) * 2;  // of a row in shared memory: an odd number of 16-byte units meets no bank twice
constexpr int PART_FLOATS = HD + 8;
constexpr int OPERAND_BYTES = ROWS * ROW_BYTES;
constexpr int SCRATCH_WORDS = ROWS * D;  // of a program and layer: keys, then values
"""

ROWBLOCK_STEPS = r"""
__device__ __forceinline__ void sync_rows() { named_sync<2, WARPS * 32>(); }

__device__ __forceinline__ void load_left(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

__device__ __forceinline__ uint4 load_words(u32 address) {
  uint4 y;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w) : "r"(address) : "memory");
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
                 : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3]) : "l"(from + i) : "memory");
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
    a -= mean; b -= mean; c -= mean; d -= mean;
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
  *(uint4*)to = make_uint4(
      transpose(pack(c[0][0], c[0][1])), transpose(pack(c[0][2], c[0][3])), transpose(pack(c[1][0], c[1][1])),
      transpose(pack(c[1][2], c[1][3])));
}
"""
