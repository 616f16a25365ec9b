"""CUDA source of the row-warp kernel: a layer, the courier, the forward."""

from __future__ import annotations

ROWWARPS = r"""
__device__ __forceinline__ void layer(Tiles& tiles, float (&x)[TILES][4], u32 round, float eps, const Place& place) {
  u32 a[STEPS][4], own_columns = place.twin * (OWN_STEPS * STEPS * 512) + place.lane * 16;
  if (int(place.lane) < SPLIT - 1) {
    barrier_wait(place.ready + place.awaited * 8, round & 1 ^ 1);
    expect(place.ready + place.awaited * 8, 2 * BLOCK_BYTES / TWINS);
  }
  normalise(a, x, eps);
  {
    u32 words[2][TILES / TWINS], slot = tiles.slot;
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
    float (&rows)[TILES][4] = TWINS > 1 ? share : x;
#pragma unroll 1
    for (int own = 0; own < OWN_HEADS / TOGETHER; own++) {
      int step = place.twin * (OWN_HEADS / TOGETHER) + own;
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
    if (TWINS > 1) add_shares(x, share, 0, place);
    tiles.used(slot);
    tiles.used(other);
    if (place.lane < SPLIT) arrive_in(place.free, place.lane);
  }
  normalise(a, x, eps);
  float share[TILES][4] = {};
  float (&rows)[TILES][4] = TWINS > 1 ? share : x;
#pragma unroll 1
  for (int tile = 0; tile < FFN / D; tile++) {
    u32 slot = tiles.slot;
    const u8* into = tiles.next();
    u32 other = tiles.slot;
    const u8* back = tiles.next();
    start(x, (const float*)(back + WEIGHT_BYTES), place.lane, true);
#pragma unroll 1
    for (int own = 0; own < OWN_STEPS; own += SLICES) {
      int first = place.twin * OWN_STEPS + own;
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
  if (TWINS > 1) add_shares(x, share, 1, place);
}

// Ask for this program's slices of all tiles, each as its slot comes free in every program of the cluster; a barrier
// nobody arrived at yet lets the odd parity through.
__device__ __forceinline__ void courier(u32 tiles, u32 full, u32 empty, const u8* weights, int rounds, int length) {
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
__device__ __forceinline__ void forward(
    Tiles& tiles, Place& place, u32& round, int sequence, const io_t* input, const u8* mask, io_t* output,
    const float* final_norm, int batch, int length, int layers, float eps) {
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
      if (inside[half] && i / (TILES / TWINS) == int(place.twin))
        *to = valid[half] ? narrow(left, right) : narrow(0.0f, 0.0f);
    }
  }
}

#if SPLIT > 1
#define IN_CLUSTERS __cluster_dims__(SPLIT, 1, 1)
#else
#define IN_CLUSTERS
#endif
extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, 1) resident_rowwarps(
    const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* final_norm, int units, int batch,
    int length, int layers, float eps) {
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
    for (int b = 0; b < HELD; b++) barrier_init(place.ready + b * 8, TWINS);
    barrier_init(place.free, WARPS * SPLIT);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  int clusters = gridDim.x / SPLIT, unit = blockIdx.x / SPLIT;
  if (warp >= WARPS) {
    if (WARPS == 8) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    int rounds = (units - unit + clusters - 1) / clusters * layers;
    if (warp == WARPS && place.lane == 0)
      courier(shared_address(memory), tiles.full, tiles.empty, weights, rounds / layers, layers * LAYER_TILES);
  } else {
    if (WARPS == 8) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    // Blocks of a sequence over warps: of two warps on a scheduler one attends to few keys, one to many.
    place.pair = warp / TWINS;
    place.twin = warp % TWINS;
    u32 first = SPLIT > 1 ? 0 : place.pair / BLOCKS * BLOCKS;
    u32 within = SPLIT > 1 ? place.pair * SPLIT + rank : place.pair % BLOCKS;
    constexpr u32 TURN = BLOCKS < 4 ? BLOCKS : 4;
    if (SPLIT == 1 && place.pair / 4 % 2) within = within / TURN * TURN + TURN - 1 - within % TURN;
    place.block = within;
    place.keys = held + first * BLOCK_BYTES;
    place.values = place.keys + HELD * BLOCK_BYTES;
    place.exchange = held + 2 * HELD * BLOCK_BYTES + place.pair * (2 * TWINS * EXCHANGE_BYTES);
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
"""
