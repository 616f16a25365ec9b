// Attention over packed q, k and v: context = softmax(q k^T scale) v for 64 rows of a head a warpgroup.
//
// A producer copies q once and tiles of KEYS keys and values into a ring of STAGES places, by the copy engine.
// Scores and probabilities stay in registers: the layout of a product's sums is that of the next one's left operand.
// The values' tile is read along its rows, [keys, D], which wgmma takes for operands of 16 bits. The product with the
// values of a tile runs under the scores of the next one.
//
// Phases: place p of the ring is filled in phase i of its full barrier for the i-th time and freed in phase i of its
// empty barrier. A warpgroup that a causal mask spares a tile waits for it and frees it unread.
#include "ladder/gemm/tensor_cores.cuh"
#include "ladder/gemm/bulk_copies.cuh"
#include "ladder/gemm/cluster.cuh"

constexpr int CHUNK = D < 64 ? D : 64;  // columns of a box: at most a line of the widest swizzle
constexpr int CHUNKS = D / CHUNK;
constexpr int ROW = CHUNK * 2;  // bytes of a row of a box
constexpr int ROWS = 64;        // of a warpgroup
constexpr int Q_BOX = ROWS * ROW, KEY_BOX = KEYS * ROW, TILE = CHUNKS * KEY_BOX;
constexpr int CONSUMER_WARPS = GROUPS * 4;
static_assert(THREADS == (GROUPS + 1) * 128, "the warpgroups that multiply, and the producer's");
// The high word of a descriptor: the distance of eight rows, and the swizzle of boxes with rows of 128, 64 or 32 bytes.
constexpr u32 HIGH = (8 * ROW >> 4) | (ROW == 128 ? 1u : ROW == 64 ? 2u : 3u) << 30;

__device__ __forceinline__ void copy_rows_of(u32 to, const TensorMap& map, int column, int row, int sequence,
                                             u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
               " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
               "l"(&map), "r"(column), "r"(row), "r"(sequence), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store_rows_of(const TensorMap& map, int column, int row, int sequence, u32 from) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
               "r"(column), "r"(row), "r"(sequence), "r"(from)
               : "memory");
}

// Where a chunk of 16 bytes of a row of a box lies: the swizzle flips the bits of the chunk by those of the line.
__device__ __forceinline__ u32 placed(int row, int chunk) {
  const u32 place = row * ROW + chunk * 16;
  return place ^ (place >> 7 & (ROW / 16 - 1)) << 4;
}

// The low word of a descriptor: the address, and the distance to the next columns of an operand that is read along its
// rows.
__device__ __forceinline__ u32 describe(u32 address, u32 next) { return (address & 0x3FFFF) >> 4 | next >> 4 << 16; }

// scores [64, KEYS] = or (add) += a slice of 16 columns of q and k.
__device__ __forceinline__ void multiply_scores(float (&c)[KEYS / 2], u32 q, u32 k, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 left, right;\nsetp.ne.b32 p, " SCORE_ADD ", 0;\n"
               "mov.b64 left, {" SCORE_LEFT ", " SCORE_HIGH "};\nmov.b64 right, {" SCORE_RIGHT ", " SCORE_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n" SCORE_N "k16.f32.f16.f16 {" SCORE_NAMES "}, left, right, p,"
               " 1, 1, 0, 0;\n}"
               : SCORE_SUMS
               : "r"(q), "r"(k), "r"(HIGH), "r"(add));
}

// context [64, D] += probabilities of 16 keys, in registers, times their values.
__device__ __forceinline__ void multiply_context(float (&c)[D / 2], const u32* p, u32 v) {
  asm volatile("{\n.reg .b64 right;\nmov.b64 right, {" CONTEXT_RIGHT ", " CONTEXT_HIGH "};\n"
               "wgmma.mma_async.sync.aligned.m64n" CONTEXT_N "k16.f32.f16.f16 {" CONTEXT_NAMES "}, {" CONTEXT_LEFT "},"
               " right, 1, 1, 1, 1;\n}"
               : CONTEXT_SUMS
               : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "r"(v), "r"(HIGH));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void hold_scores(float (&c)[KEYS / 2]) { asm volatile("" : SCORE_SUMS::"memory"); }
__device__ __forceinline__ void hold_context(float (&c)[D / 2]) { asm volatile("" : CONTEXT_SUMS::"memory"); }
__device__ __forceinline__ void sync_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    fused_attention(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_kv,
                    const __grid_constant__ TensorMap map_out, const bool* __restrict__ mask,
                    const int* __restrict__ extents, int length, float scale) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 q = shared_address(shared), ring = q + GROUPS * CHUNKS * Q_BOX;
  const u32 barriers = ring + STAGES * 2 * TILE;
  // A place's barriers: keys full, values full, keys empty, values empty; behind all places, that of q.
  const u32 q_full = barriers + STAGES * 32;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  // Late rows see the most keys under a causal mask: they start first, so that the last wave is short.
  const int row_tiles = (length + GROUPS * ROWS - 1) / (GROUPS * ROWS);
  const int head = blockIdx.x / row_tiles % HEADS, sequence = blockIdx.x / row_tiles / HEADS;
  const int first = (row_tiles - 1 - blockIdx.x % row_tiles) * GROUPS * ROWS;
  const int signed_extent = extents ? extents[sequence] : length;
  const int limit = signed_extent < 0 ? -signed_extent : signed_extent;  // keys behind it are hidden
  const int end = first >= limit ? 0 : CAUSAL ? min(limit, first + GROUPS * ROWS) : limit;
  const int tiles = (end + KEYS - 1) / KEYS;
  if (threadIdx.x == 0) {
    for (int place = 0; place < STAGES; place++)
      for (int kind = 0; kind < 4; kind++) barrier_init(barriers + place * 32 + kind * 8, kind < 2 ? 1 : CONSUMER_WARPS);
    barrier_init(q_full, 1);
    publish_barriers();
  }
  __syncthreads();
  if (warp >= CONSUMER_WARPS) {
    give_registers<24>();
    if (warp == CONSUMER_WARPS && lane == 0 && tiles > 0) {
      barrier_expect(q_full, GROUPS * CHUNKS * Q_BOX);
      for (int group = 0; group < GROUPS; group++)
        for (int chunk = 0; chunk < CHUNKS; chunk++)
          copy_rows_of(q + (group * CHUNKS + chunk) * Q_BOX, map_q, head * D + chunk * CHUNK, first + group * ROWS,
                       sequence, q_full);
      Place place = {0, 1};
      for (int tile = 0; tile < tiles; tile++, place.advance())
        for (int kind = 0; kind < 2; kind++) {
          const u32 full = barriers + place.slot * 32 + kind * 8, to = ring + (place.slot * 2 + kind) * TILE;
          barrier_wait(full + 16, place.parity);
          barrier_expect(full, TILE);
          for (int chunk = 0; chunk < CHUNKS; chunk++)
            copy_rows_of(to + chunk * KEY_BOX, map_kv, ((1 + kind) * HEADS + head) * D + chunk * CHUNK, tile * KEYS,
                         sequence, full);
        }
    }
    return;
  }

  take_registers<OWN_REGISTERS>();
  const int group = warp / 4, top_row = first + group * ROWS, row = top_row + warp % 4 * 16 + lane / 4;
  const int own_end = top_row >= limit ? 0 : CAUSAL ? min(end, top_row + ROWS) : end;
  const int own_tiles = (own_end + KEYS - 1) / KEYS;
  const u32 own_q = q + group * CHUNKS * Q_BOX;
  const float nothing = __int_as_float(0xff800000);  // -inf
  float context[D / 2] = {}, top[2] = {nothing, nothing}, total[2] = {};
  auto free_place = [&](u32 slot, int kind) {
    if (lane == 0) barrier_arrive(barriers + slot * 32 + 16 + kind * 8);
  };
  if (own_tiles > 0) barrier_wait(q_full, 0);
  Place place = {0, 0};
  u32 before = 0;
  for (int tile = 0; tile < own_tiles; tile++, place.advance()) {
    const u32 full = barriers + place.slot * 32, keys = ring + place.slot * 2 * TILE, values = keys + TILE;
    float score[KEYS / 2];
    barrier_wait(full, place.parity);
    begin_products();
#pragma unroll
    for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
      for (int slice = 0; slice < CHUNK / 16; slice++)
        multiply_scores(score, describe(own_q + chunk * Q_BOX + slice * 32, 16),
                        describe(keys + chunk * KEY_BOX + slice * 32, 16), chunk > 0 || slice > 0);
    end_products();
    await_products();  // also the values of the tile before
    hold_scores(score);
    hold_context(context);
    free_place(place.slot, 0);
    if (tile > 0) free_place(before, 1);
    before = place.slot;

    const int start = tile * KEYS;
    if (start + KEYS > limit || signed_extent < 0 || (CAUSAL && start + KEYS - 1 > top_row)) {
#pragma unroll
      for (int j = 0; j < KEYS / 2; j++) {
        const int key = start + j / 4 * 8 + lane % 4 * 2 + j % 2, own = row + j / 2 % 2 * 8;
        bool seen = key < limit && (!CAUSAL || key <= own);
        if (signed_extent < 0) seen = seen && mask[(size_t)sequence * length + min(key, length - 1)];
        score[j] = seen ? score[j] : nothing;
      }
    }
    float decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float most = top[i];
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++) most = fmaxf(most, fmaxf(score[4 * j + 2 * i], score[4 * j + 2 * i + 1]));
      most = quad_max(most);
      // A row that has seen no key yet keeps -inf; 0 in its place keeps inf - inf out of the exponent.
      const float anchor = most == nothing ? 0.0f : most * scale;
      decay[i] = exp2_fast(top[i] * scale - anchor);
      top[i] = most;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float& x = score[4 * j + 2 * i + e];
          x = exp2_fast(x * scale - anchor);
          sum += x;
        }
      total[i] = total[i] * decay[i] + sum;
    }
    u32 probability[KEYS / 4];
#pragma unroll
    for (int j = 0; j < KEYS / 4; j++) probability[j] = pack(score[2 * j], score[2 * j + 1]);
#pragma unroll
    for (int j = 0; j < D / 2; j++) context[j] *= decay[j / 2 % 2];

    barrier_wait(full + 8, place.parity);
    if (start + KEYS > limit) {
      // Values behind the limit may be NaN, and 0 times NaN is NaN.
      for (int at = threadIdx.x % 128; at < (start + KEYS - limit) * CHUNKS * (ROW / 16); at += 128) {
        const int hidden = limit - start + at / (ROW / 16) / CHUNKS, chunk = at / (ROW / 16) % CHUNKS;
        const u32 to = values + chunk * KEY_BOX + placed(hidden, at % (ROW / 16));
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
      }
      publish_shared();
      sync_group(group);
    }
    begin_products();
#pragma unroll
    for (int slice = 0; slice < KEYS / 16; slice++)
      multiply_context(context, probability + 4 * slice, describe(values + slice * 16 * ROW, KEY_BOX));
    end_products();
  }
  await_products();
  hold_context(context);
  if (own_tiles > 0) free_place(before, 1);
  for (int tile = own_tiles; tile < tiles; tile++, place.advance())
    for (int kind = 0; kind < 2; kind++) {
      barrier_wait(barriers + place.slot * 32 + kind * 8, place.parity);
      free_place(place.slot, kind);
    }

  float share[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float sum = quad_sum(total[i]);
    share[i] = sum != 0.0f && row + i * 8 < limit ? __fdividef(1.0f, sum) : 0.0f;  // a NaN is kept
  }
  // The output takes q's place, once the whole warpgroup has multiplied with it.
  sync_group(group);
  const u32 own = own_q + warp % 4 * 16 * ROW;
#pragma unroll
  for (int j = 0; j < D / 8; j += 2) {
    u32 words[4];
#pragma unroll
    for (int matrix = 0; matrix < 4; matrix++) {
      const int at = (j + matrix / 2) * 4 + matrix % 2 * 2;
      words[matrix] = share[matrix % 2] != 0.0f
                          ? pack(context[at] * share[matrix % 2], context[at + 1] * share[matrix % 2])
                          : 0;
    }
    const u32 to = own + j * 8 / CHUNK * Q_BOX + placed(lane % 16, j % (CHUNK / 8) + lane / 16);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
  publish_shared();
  __syncwarp();
  if (lane == 0) {
    for (int chunk = 0; chunk < CHUNKS; chunk++)
      store_rows_of(map_out, head * D + chunk * CHUNK, top_row + warp % 4 * 16, sequence, own + chunk * Q_BOX);
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 0;" ::: "memory");
  }
}
