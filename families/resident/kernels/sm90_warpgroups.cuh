// The whole forward of short sequences in one launch for compute capability 9.0: warpgroup products, residual in
// registers, everything they multiply in shared memory, weights streamed through rings of tiles by bulk copies.
//
// A program holds two bands of 64 rows: a sequence of up to 128, or two blocks of shorter ones. Two warpgroups (a pair)
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
constexpr bool SHARED_HEADS = HEADS % 2 != 0;        // the pair takes every head together, each half of its values
constexpr int CONTEXT = SHARED_HEADS ? HD / 2 : HD;  // columns of a head's context a warpgroup computes
static_assert(HALF % 8 == 0 && HD % 8 == 0 && CONTEXT % 8 == 0, "a product takes eight columns at a time");

#include "sm90_steps.cuh"

// Low word of the descriptor of an operand: `along_k` bytes from one core matrix to the next along K. Adding BYTES / 16
// moves it on. Opaque, or the compiler works every step's word out once and holds them in registers there are not.
__device__ __forceinline__ u32 operand(u32 address, u32 along_k) { return opaque(address >> 4 | along_k >> 4 << 16); }

#include "sm90_wgmma.cuh"

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

// Normalise a thread's part of its two rows. The pair exchanges sums and squared distances from their own means, which
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
    float between = (sum[half] - other.x) * (1.0f / D);  // half the distance between the pair's means
    mean[half] = (sum[half] + other.x) * (1.0f / D);
    scale[half] = rsqrt_fast((square[half] + other.y) * (1.0f / D) + between * between + eps);
  }
#pragma unroll
  for (int i = 0; i < HALF / 2; i++) y[i] = (x[i] - mean[i / 2 % 2]) * scale[i / 2 % 2];
}

// Context of one head over `blocks` bands of keys: its queries, keys and values in shared memory from `q` and so on.
// `visible` holds a bit a key for the thread's two rows, `whole` a bit a band that the warp's rows all see in full.
// Bands are taken with a running top, so that both of a causal sequence run the same instructions.
__device__ __forceinline__ void attend(float (&c)[CONTEXT / 2], u32 q, u32 keys, u32 values, const u32 (&visible)[2],
    u32 whole, int blocks, const Place& place) {
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

// Signal that this warp has used a tile; the first band's first thread of each side copies another.
__device__ __forceinline__ void done(Stream& stream) {
  if (threadIdx.x % 128 == 0 && threadIdx.x < 256 && stream.left > 0) {
    bool wraps = stream.slot + AHEAD >= STAGES;
    stream.request(wraps ? stream.slot + AHEAD - STAGES : stream.slot + AHEAD, wraps ? stream.phase : stream.phase ^ 1);
  }
  stream.used();
}

// Before the keys of the layer before are overwritten, and before those of this one are read. Only bands that share a
// sequence wait for each other; causally, the first never for the second's keys.
__device__ __forceinline__ void await_free_keys(const Place& place) {
  constexpr int COUNT = SHARED_HEADS ? 512 : 256;
  int id = 5 + (SHARED_HEADS ? 0 : place.side);
  if (SPANS && (!CAUSAL || place.band == 0)) asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

__device__ __forceinline__ void free_keys(const Place& place) {
  constexpr int COUNT = SHARED_HEADS ? 512 : 256;
  int id = 5 + (SHARED_HEADS ? 0 : place.side);
  if (SPANS && CAUSAL && place.band == 1) asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

__device__ __forceinline__ void await_keys(const Place& place) {
  constexpr int COUNT = SHARED_HEADS ? 512 : 256;
  int id = 3 + (SHARED_HEADS ? 0 : place.side);
  if (SPANS && CAUSAL && place.band == 0) asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
  if (SPANS && (!CAUSAL || place.band == 1))
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
  else if (SHARED_HEADS)
    sync_band(place);
  else
    asm volatile("bar.sync %0, 128;" ::"r"(7 + place.band * 2 + place.side) : "memory");
}

__device__ __forceinline__ void layer(Stream& stream, float (&x)[HALF / 2], const float* biases,
    const u32 (&visible)[2], u32 whole, float eps, const Place& place) {
  u32 own = place.band * OPERAND_BYTES;
  int core = place.side * (HALF / 8);
  float c[HALF / 2];
  normalise(c, x, eps, place);
  write_rows<HALF>(c, place.rows, core, place);
  publish_shared();
  sync_band(place);
  await_free_keys(place);
  zero(c);
  multiply(c, place.rows, stream.current());
  done(stream);
  write_rows<HALF>(c, place.keys + own, core, place);
  zero(c);
  multiply(c, place.rows, stream.current());
  done(stream);
  write_values(c, place.values + own, place);
  add_row<false>(c, biases, place);
  multiply(c, place.rows, stream.current());
  done(stream);
  write_rows<HALF>(c, place.queries, core, place);
  publish_shared();
  await_keys(place);
  int first = SPANS ? 0 : own, blocks = SPANS ? (CAUSAL ? place.band + 1 : 2) : 1;
  u32 context = SHARED_HEADS ? place.rows : place.queries;
  constexpr int OWN_HEADS = SHARED_HEADS ? HEADS : HEADS / 2;
#pragma unroll 1
  for (int index = 0; index < OWN_HEADS; index++) {
    float part[CONTEXT / 2];
    int at = (index + (SHARED_HEADS ? 0 : place.side * OWN_HEADS)) * (HD / 8);
    int mine = at + (SHARED_HEADS ? place.side * (CONTEXT / 8) : 0);
    u32 keys = place.keys + first + at * 1024, values = place.values + first + mine * 128;
    attend(part, place.queries + at * 1024, keys, values, visible, whole, blocks, place);
    write_rows<CONTEXT>(part, context, mine, place);
  }
  free_keys(place);
  publish_shared();
  sync_band(place);
  add_row<true>(x, biases + D, place);
  multiply(x, context, stream.current());
  done(stream);
  normalise(c, x, eps, place);
  write_rows<HALF>(c, place.rows, core, place);
  publish_shared();
  sync_band(place);
  add_row<true>(x, biases + 2 * D, place);
#pragma unroll 1
  for (int tile = 0; tile < FFN / D; tile++) {
    add_row<false>(c, biases + (3 + tile) * D, place);
    multiply(c, place.rows, stream.current());
    done(stream);
#pragma unroll
    for (int i = 0; i < HALF / 2; i++) c[i] = gelu(c[i]);
    if (tile > 0) sync_band(place);  // the other of the pair may still multiply the hidden columns before
    write_rows<HALF>(c, place.queries, core, place);
    publish_shared();
    sync_band(place);
    multiply(x, place.queries, stream.current());
    done(stream);
  }
}

// ---- the forward --------------------------------------------------------------------------------------------------

// Where one of a thread's two rows lies: token index, whether it exists, whether the mask keeps it.
struct Row {
  long long token;
  bool inside, valid;
};

// `row` counts from the band's first; a band holds part of sequence `block`, or the GROUP sequences of block `block`.
__device__ __forceinline__ Row locate(int block, int row, int batch, int length, const u8* mask) {
  int sequence = SPANS ? block : block * GROUP + row / SEQUENCE_ROWS, position = SPANS ? row : row % SEQUENCE_ROWS;
  Row y;
  y.inside = sequence < batch && position < length;
  y.token = (long long)sequence * length + position;
  y.valid = y.inside && (!MASKED || mask[y.token]);
  return y;
}

// The bits of `keys` (one a key of 32) a thread's place in its quad stands for: bit 2j + b for key 8j + 2t + b.
__device__ __forceinline__ u32 own_bits(u32 keys) {
  keys >>= threadIdx.x % 4 * 2;
  return (keys & 3) | (keys >> 6 & 12) | (keys >> 12 & 48) | (keys >> 18 & 192);
}

// The keys `row` may see, of those present.
__device__ __forceinline__ u32 visible_keys(int row, u32 present) {
  if (GROUP > 1) present &= ((1ull << SEQUENCE_ROWS / 4) - 1) << row / SEQUENCE_ROWS * (SEQUENCE_ROWS / 4);
  if (CAUSAL) {
    int last = row % 8 - int(threadIdx.x % 4 * 2) + 1;  // how many of its own two keys among the row's eight are past
    u32 near = last >= 2 ? 3 : last == 1 ? 1 : 0;
    present &= ((1u << row / 8 * 2) - 1) | near << row / 8 * 2;
  }
  return present;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) resident_warpgroups(const io_t* input, const u8* mask,
    io_t* output, const u8* weights, const float* biases, int blocks, int batch, int length, int layers, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[4 * STAGES];
  __shared__ __align__(16) float2 moments[2 * BAND * 2];
  Place place;
  // Broadcast, so that the compiler knows them to be the same in all of a warp.
  int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  place.band = group / 2;
  place.side = group % 2;
  place.warp = threadIdx.x / 32 % 4;
  place.lane = threadIdx.x % 32;
  u32 base = shared_address(memory);
  place.keys = base;
  place.values = base + 2 * OPERAND_BYTES;
  place.rows = base + (4 + place.band) * OPERAND_BYTES;
  place.queries = base + (6 + place.band) * OPERAND_BYTES;
  place.zeros = base + 8 * OPERAND_BYTES + 2 * STAGES * TILE_BYTES;
  place.moments = shared_address(moments);
  Stream stream;
  stream.tiles = base + 8 * OPERAND_BYTES + place.side * (STAGES * TILE_BYTES);
  stream.full = shared_address(barriers) + place.side * (2 * STAGES * 8);
  stream.empty = stream.full + STAGES * 8;
  stream.slot = stream.phase = stream.within = 0;
  stream.length = layers * LAYER_TILES;
  stream.left = (blocks - blockIdx.x + gridDim.x - 1) / gridDim.x * stream.length;
  stream.source = weights + (u64)place.side * stream.length * TILE_BYTES;
  if (HD % 16)
    for (int i = threadIdx.x; i < 256; i += THREADS) store_shared(place.zeros + i * 4, 0);
  if (threadIdx.x % 128 == 0 && threadIdx.x < 256) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(stream.full + slot * 8, 1);
      barrier_init(stream.empty + slot * 8, THREADS / 64);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (u32 slot = 0; slot < AHEAD && stream.left > 0; slot++) stream.request(slot, 1);
  }
  publish_shared();
  __syncthreads();
  free_keys(place);
  int row = (SPANS ? place.band * BAND : 0) + place.warp * 16 + place.lane / 4;
  int column = place.side * HALF + place.lane % 4 * 2;
#pragma unroll 1
  for (int step = blockIdx.x; step < blocks; step += gridDim.x) {
    int block = SPANS ? step : step * 2 + place.band;
    Row rows[2] = {locate(block, row, batch, length, mask), locate(block, row + 8, batch, length, mask)};
    float x[HALF / 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const io2_t* from = (const io2_t*)(input + rows[half].token * D + column);
#pragma unroll
      for (int j = 0; j < HALF / 8; j++) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (rows[half].inside) pair = widen(from[j * 4]);
        x[4 * j + 2 * half] = pair.x;
        x[4 * j + 2 * half + 1] = pair.y;
      }
    }
    u32 present = 0;
#pragma unroll
    for (int part = 0; part < (SPANS ? 4 : 2); part++) {
      bool valid = locate(block, part * 32 + place.lane, batch, length, mask).valid;
      present |= own_bits(__ballot_sync(~0u, valid)) << part * 8;
    }
    u32 visible[2] = {visible_keys(row, present), visible_keys(row + 8, present)}, whole = 0;
    if (__all_sync(~0u, (visible[0] & visible[1] & 0xFFFF) == 0xFFFF)) whole |= 1;
    if (__all_sync(~0u, (visible[0] & visible[1]) >> 16 == 0xFFFF)) whole |= 2;
    const float* from = biases;
#pragma unroll 1
    for (int index = 0; index < layers; index++) {
      layer(stream, x, from, visible, whole, eps, place);
      from += LAYER_BIASES;
    }
    float y[HALF / 2];
    normalise(y, x, eps, place);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      io2_t* to = (io2_t*)(output + rows[half].token * D + column);
#pragma unroll
      for (int j = 0; j < HALF / 8; j++) {
        float2 gamma = __ldg((const float2*)(from + column + j * 8));
        float2 beta = __ldg((const float2*)(from + D + column + j * 8));
        float left = y[4 * j + 2 * half] * gamma.x + beta.x, right = y[4 * j + 2 * half + 1] * gamma.y + beta.y;
        if (rows[half].inside) to[j * 4] = rows[half].valid ? narrow(left, right) : narrow(0.0f, 0.0f);
      }
    }
    sync_band(place);  // the other of the pair has read these moments before the next step's are written
  }
  if (SPANS && CAUSAL && place.band == 0) await_free_keys(place);
}
