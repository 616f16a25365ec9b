"""CUDA source of the row-block kernel: a layer, the courier, the forward."""

from __future__ import annotations

ROWBLOCKS = r"""
__device__ __forceinline__ void layer(
    Stream& stream, float (&x)[2][4], u32* scratch, int* flags, int block, int index, const u32 (&visible)[2],
    float eps, const Place& place) {
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

// Ask for weight tiles as slots come free, announce each layer's keys once they are written, and leave the flags as the
// next call must find them. A layer's tiles are asked for behind the announcement of the layer before, so no warp can
// arrive at a barrier twice before the courier is through it.
__device__ __forceinline__ void courier(Stream& stream, int* flags, int block, int blocks, int layers) {
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

extern "C" __global__ void __launch_bounds__(THREADS, 1) resident_rowblocks(
    const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* final_norm, u32* scratch,
    int* flags, int blocks, int length, int layers, float eps) {
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
    courier(stream, flags, block, blocks, layers);
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
"""
