"""CUDA source of the warpgroup kernel: its sizes, and the steps of a layer."""

from __future__ import annotations

WARPGROUP_SIZES = r"""
// The whole forward of short sequences in one launch for compute capability 9.0: warpgroup products, residual in
// registers, everything they multiply in shared memory, weights streamed through rings of tiles by bulk copies.
//
// A program holds two bands of 64 rows: a sequence of up to 128, or two blocks of shorter ones. Two warpgroups (twins)
// share a band: each owns half of the columns of every product and half of the heads. Four warps a scheduler then fill
// each other's waits, which two did not: a warp issued an instruction every four cycles.
//
// Operands lie in shared memory as core matrices of 8 x 16 bytes (K-major, no swizzle): core (n8, k8) of an operand of
// N rows at byte (k8 * N / 8 + n8) * 128. A thread's pair of accumulators is 4 bytes at lane * 4 of a core matrix, so
// stores meet no bank twice.
//
// Compile-time: D width, HEADS, HD columns of a head (multiple of 8), FFN (multiple of D), SPANS whether a sequence
// takes both bands, GROUP sequences a band otherwise, CAUSAL, MASKED, STAGES tiles of a ring, BF16 operands, IO (0
// float32, 1 float16, 2 bfloat16).

constexpr int THREADS = 512;
constexpr int BAND = 64;  // rows, and keys taken together
constexpr int HALF = D / 2;
constexpr int TILE_BYTES = HALF * D * 2;
constexpr int LAYER_TILES = 4 + 2 * (FFN / D);
constexpr int LAYER_BIASES = 3 * D + FFN;
constexpr int OPERAND_BYTES = BAND * D * 2;
constexpr int AHEAD = STAGES - 1;  // tiles asked for before their use; one slot is what a band may lead by
constexpr int SEQUENCE_ROWS = BAND / GROUP;
constexpr bool SHARED_HEADS = HEADS % 2 != 0;  // the twins take every head together, each half of its values
constexpr int CONTEXT = SHARED_HEADS ? HD / 2 : HD;  // columns of a head's context a warpgroup computes
static_assert(HALF % 8 == 0 && HD % 8 == 0 && CONTEXT % 8 == 0, "a product takes eight columns at a time");
"""

WARPGROUP_OPERAND = r"""
// Low word of the descriptor of an operand: `along_k` bytes from one core matrix to the next along K. Adding BYTES / 16
// moves it on. Opaque, or the compiler works every step's word out once and holds them in registers there are not.
__device__ __forceinline__ u32 operand(u32 address, u32 along_k) { return opaque(address >> 4 | along_k >> 4 << 16); }
"""

WARPGROUP_STEPS = r"""
// ---- pieces -------------------------------------------------------------------------------------------------------

// What a warpgroup knows of its place.
struct Place {
  int band, side, warp, lane;
  u32 rows, queries, keys, values, zeros, moments;  // shared memory; keys and values of the first band
};

__device__ __forceinline__ void sync_band(const Place& place) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + place.band) : "memory");
}

// Accumulators [64, HALF] += rows of the left operand [64, D] at `left` times a weight tile.
__device__ __forceinline__ void multiply(float (&c)[HALF / 2], u32 left, u32 tile) {
  u32 a = operand(left, 1024), b = operand(tile, HALF * 16);
  fence_products();
#pragma unroll
  for (int k = 0; k < D / 16; k++) product_shared<HALF>(c, a + k * 128, b + k * (HALF * 2), 1);
  finish_products<HALF>(c);
}

// c = or (ADD) += a row vector of HALF floats.
template <bool ADD>
__device__ __forceinline__ void add_row(float (&c)[HALF / 2], const float* bias, const Place& place) {
  bias += place.side * HALF + place.lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < HALF / 8; j++) {
    float2 b = __ldg((const float2*)(bias + j * 8));
    c[4 * j + 0] = (ADD ? c[4 * j + 0] : 0.0f) + b.x;
    c[4 * j + 1] = (ADD ? c[4 * j + 1] : 0.0f) + b.y;
    c[4 * j + 2] = (ADD ? c[4 * j + 2] : 0.0f) + b.x;
    c[4 * j + 3] = (ADD ? c[4 * j + 3] : 0.0f) + b.y;
  }
}

// Write N columns of accumulators, rounded, from column core `core` on: rows of a left operand, or keys.
template <int N>
__device__ __forceinline__ void write_rows(const float (&c)[N / 2], u32 operand, int core, const Place& place) {
  u32 to = operand + (core * 8 + place.warp * 2) * 128 + place.lane * 4;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    store_shared(to + j * 1024, pack(c[4 * j], c[4 * j + 1]));
    store_shared(to + j * 1024 + 128, pack(c[4 * j + 2], c[4 * j + 3]));
  }
}

// Write this warpgroup's columns of the values, their rows along K.
__device__ __forceinline__ void write_values(const float (&c)[HALF / 2], u32 operand, const Place& place) {
  u32 to = operand + (place.warp * 2 * (D / 8) + place.side * (HALF / 8)) * 128 + place.lane * 4;
#pragma unroll
  for (int j = 0; j < HALF / 8; j++) {
    store_shared(to + j * 128, transpose(pack(c[4 * j], c[4 * j + 1])));
    store_shared(to + (D / 8 + j) * 128, transpose(pack(c[4 * j + 2], c[4 * j + 3])));
  }
}

// Normalise a thread's part of its two rows. The twins exchange sums and squared distances from their own means, which
// combine without the cancellation that sums of squares suffer.
__device__ __forceinline__ void normalise(
    float (&y)[HALF / 2], const float (&x)[HALF / 2], float eps, const Place& place) {
  u32 row = place.band * BAND + place.warp * 16 + place.lane / 4;
  float part[2][4] = {};
#pragma unroll
  for (int i = 0; i < HALF / 2; i++) part[i / 2 % 2][i / 4 % 2 * 2 + i % 2] += x[i];
  float sum[2], mean[2], square[2], scale[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    sum[half] = quad_sum((part[half][0] + part[half][1]) + (part[half][2] + part[half][3]));
    mean[half] = sum[half] * (1.0f / HALF);
#pragma unroll
    for (int j = 0; j < 4; j++) part[half][j] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < HALF / 2; i++) {
    float apart = x[i] - mean[i / 2 % 2];
    part[i / 2 % 2][i / 4 % 2 * 2 + i % 2] += apart * apart;
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    square[half] = quad_sum((part[half][0] + part[half][1]) + (part[half][2] + part[half][3]));
    u32 to = place.moments + ((row + 8 * half) * 2 + place.side) * 8;
    if (place.lane % 4 == 0) store_pair(to, sum[half], square[half]);
  }
  sync_band(place);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float2 other = load_shared(place.moments + ((row + 8 * half) * 2 + (place.side ^ 1)) * 8);
    float between = (sum[half] - other.x) * (1.0f / D);  // half the distance between the twins' means
    mean[half] = (sum[half] + other.x) * (1.0f / D);
    scale[half] = rsqrt_fast((square[half] + other.y) * (1.0f / D) + between * between + eps);
  }
#pragma unroll
  for (int i = 0; i < HALF / 2; i++) y[i] = (x[i] - mean[i / 2 % 2]) * scale[i / 2 % 2];
}

// Context of one head over `blocks` bands of keys: its queries, keys and values in shared memory from `q` and so on.
// `visible` holds a bit a key for the thread's two rows, `whole` a bit a band that the warp's rows all see in full.
// Bands are taken with a running top, so that both of a causal sequence run the same instructions.
__device__ __forceinline__ void attend(
    float (&c)[CONTEXT / 2], u32 q, u32 keys, u32 values, const u32 (&visible)[2], u32 whole, int blocks,
    const Place& place) {
  float top[2] = {NEGATIVE, NEGATIVE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < CONTEXT / 2; i++) c[i] = 0.0f;
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    float s[BAND / 2];
    u32 from = keys + block * OPERAND_BYTES, a = operand(q, 1024), b = operand(from, 1024);
    fence_products();
#pragma unroll
    for (int k = 0; k < HD / 16; k++) product_shared<BAND>(s, a + k * 128, b + k * 128, k > 0);
    if (HD % 16 != 0) {
      // The last eight columns stand beside zeros: the second core matrices lie where the stride along K leads.
      u32 last = HD / 16 * 2048;
      product_shared<BAND>(s, operand(q + last, place.zeros - (q + last)), operand(from + last, 0), HD / 16 > 0);
    }
    finish_products<BAND>(s);
    if (!(whole >> block & 1)) {
      u32 seen[2] = {opaque(visible[0] >> block * 16), opaque(visible[1] >> block * 16)};
#pragma unroll
      for (int i = 0; i < BAND / 2; i++)
        if (!(seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1)) s[i] = NEGATIVE;
    }
    float part[2][4];
#pragma unroll
    for (int i = 0; i < BAND / 2; i++) {
      float& most = part[i / 2 % 2][i / 4 % 4];
      most = i % 2 == 0 && i < 16 ? s[i] : fmaxf(most, s[i]);
    }
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float (&m)[4] = part[half];
      float most = fmaxf(top[half], quad_max(fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]))));
      rescale[half] = exp2_fast(top[half] - most);
      top[half] = most;
    }
#pragma unroll
    for (int i = 0; i < BAND / 2; i++) {
      float& total = part[i / 2 % 2][i / 4 % 4];
      s[i] = exp2_fast(s[i] - top[i / 2 % 2]);
      total = i % 2 == 0 && i < 16 ? s[i] : total + s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float (&m)[4] = part[half];
      sum[half] = sum[half] * rescale[half] + ((m[0] + m[1]) + (m[2] + m[3]));
    }
    u32 p[BAND / 4];
#pragma unroll
    for (int i = 0; i < BAND / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
#pragma unroll
    for (int i = 0; i < CONTEXT / 2; i++) c[i] *= rescale[i / 2 % 2];
    b = operand(values + block * OPERAND_BYTES, D * 16);
    fence_products();
#pragma unroll
    for (int k = 0; k < BAND / 16; k++) product<CONTEXT>(c, p + 4 * k, b + k * (D * 2), 1);
    finish_products<CONTEXT>(c);
  }
  // A row without a visible key sees every key alike, and is written as zero at the end, or never.
  float scale[2] = {1.0f / quad_sum(sum[0]), 1.0f / quad_sum(sum[1])};
#pragma unroll
  for (int i = 0; i < CONTEXT / 2; i++) c[i] *= scale[i / 2 % 2];
}
"""
