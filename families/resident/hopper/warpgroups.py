"""CUDA source of the warpgroup kernel: waits between bands, a layer, the forward."""

from __future__ import annotations

WARPGROUPS = r"""
// Say that this warp has used a tile; the first band's first thread of each side asks for another.
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
  if (SPANS && (!CAUSAL || place.band == 1)) asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
  else if (SHARED_HEADS) sync_band(place);
  else asm volatile("bar.sync %0, 128;" ::"r"(7 + place.band * 2 + place.side) : "memory");
}

__device__ __forceinline__ void layer(
    Stream& stream, float (&x)[HALF / 2], const float* biases, const u32 (&visible)[2], u32 whole, float eps,
    const Place& place) {
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
    if (tile > 0) sync_band(place);  // the twin may still multiply the hidden columns before
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) resident_warpgroups(
    const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* biases, int blocks, int batch,
    int length, int layers, float eps) {
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
    sync_band(place);  // the twin has read these moments before the next step's are written
  }
  if (SPANS && CAUSAL && place.band == 0) await_free_keys(place);
}
"""
