// Persistent: a block an SM takes tile after tile, its ring filled by a producer while two warpgroups multiply.
//
// The copies of the next tile run through the epilogue of this one. setmaxnreg moves registers from the producer to the
// consumers. With CLUSTER 2, two blocks take tiles one above the other: each copies half of the rows of W into both, so
// that an SM reads 32 KB of the L2 for a step of 128 x 256 in place of 48. Two orders:
//   cooperative  both warpgroups share a tile, 64 rows each
//   PINGPONG     they take tiles in turn, and the epilogue of one runs under the products of the other
//
// Phases: step i of a block, counted over its tiles, uses place i % STAGES in phase i / STAGES of full[] and empty[].
// A phase of full[] ends with the bytes of all copies, also those of the other block. A phase of empty[] ends with an
// arrival of each warp that multiplies, of both blocks. A producer asks after phase i / STAGES - 1 of its own empty[],
// so neither block's place is overwritten early. Both blocks of a cluster run the same steps; tiles behind the last row
// are zeros and are not stored. With PINGPONG a warpgroup begins a tile when the other has waited for all steps of the
// tile before (named barriers). It must not wait for a phase while the one before that is still open: parities tell
// two phases apart and no more. No block leaves before its cluster's last arrival.
#include "tensor_cores.cuh"
#include "warpgroup.cuh"
#include "bulk_copies.cuh"
#include "cluster.cuh"
#include "epilogue.cuh"

static_assert(BM == 128 && THREADS == 384, "two warpgroups that multiply, and the producer's");
constexpr int STAGE = (BM + BN) * LINE;
constexpr int SHARE = BN / CLUSTER;            // rows of W that a block copies
constexpr int CONSUMERS = PINGPONG ? 4 : 8;    // warps that use a step

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, BLOCKS)
    gemm_persistent(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_w,
                    const __grid_constant__ TensorMap map_d, const __grid_constant__ TensorMap map_low,
                    const __grid_constant__ TensorMap map_residual, const __grid_constant__ TensorMap map_rest,
                    const Epilogue epilogue, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 ring = shared_address(shared), staging = ring + STAGES * STAGE;
  const u32 full = staging + STAGING_BYTES, empty = full + STAGES * 8;
  const u32 rank = block_rank();
  const int steps = (k + BK - 1) / BK;
  const int row_tiles = (m + BM * CLUSTER - 1) / (BM * CLUSTER), column_tiles = (n + BN - 1) / BN;
  const int tiles = row_tiles * column_tiles, first = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(full + slot * 8, 1);
      barrier_init(empty + slot * 8, CONSUMERS * CLUSTER);
    }
    for (int place = 0; place < RESIDUAL * 8 * BOXES; place++) barrier_init(empty + (STAGES + place) * 8, 1);
    publish_barriers();
  }
  sync_cluster();
  if (group == 2) {
    give_registers<24>();
    if (threadIdx.x == 256) {
      Place place = {0, 1};
      for (int index = first; index < tiles; index += clusters) {
        const Tile tile = find_tile(index, row_tiles, column_tiles);
        const int row = (tile.row * CLUSTER + rank) * BM, column = tile.column * BN + rank * SHARE;
#pragma unroll 1
        for (int step = 0; step < steps; step++, place.advance()) {
          const u32 to = ring + place.slot * STAGE, barrier = full + place.slot * 8;
          barrier_wait(empty + place.slot * 8, place.parity);
          barrier_expect(barrier, STAGE);
          copy_box(to, map_a, step * BK, row, barrier);
          copy_box_to_all(to + (BM + rank * SHARE) * LINE, map_w, step * BK, column, barrier);
        }
      }
    }
  } else {
    take_registers<240>();
    float sum[PARTS][BN / 2];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 own_staging = staging + warp * BOXES * PLACE_BYTES;
#if RESIDUAL
    Residual residual = {map_residual, map_rest, own_staging, empty + (STAGES + warp * BOXES) * 8};
#else
    Residual residual;
#endif
    for (int turn = PINGPONG ? group : 0; first + turn * clusters < tiles; turn += PINGPONG ? 2 : 1) {
      const int index = first + turn * clusters, start = turn * steps;
      Place place = {(u32)start % STAGES, (u32)start / STAGES & 1};
      u32 before = 0;  // the place of the step before
      const Tile tile = find_tile(index, row_tiles, column_tiles);
      const int row = (tile.row * CLUSTER + rank) * BM + (PINGPONG ? 0 : group * 64) + warp % 4 * 16;
      const int column = tile.column * BN;
#if RESIDUAL
      residual.row = row, residual.column = column;
      if (lane == 0) {
        await_stores<0>();
        for (int box = 0; box < min(BOXES, PARTS * PART_BOXES); box++) residual.copy(box);
      }
#endif
      const Rows rows = read_rows(epilogue, row + lane / 4, m, k);
      if (PINGPONG && turn > 0) await_turn(group);
#pragma unroll 1
      for (int step = 0; step < steps; step++) {
        const u32 from = ring + place.slot * STAGE;
        const u32 left = describe(from + (PINGPONG ? 0 : group * 64 * LINE)), right = describe(from + BM * LINE);
        barrier_wait(full + place.slot * 8, place.parity);
        begin_products();
#pragma unroll
        for (int part = 0; part < SLICES; part++)
#pragma unroll
          for (int i = 0; i < PARTS; i++)
            multiply(sum[i], left + i * NEXT_ROWS + part * NEXT_SLICE, right + part * NEXT_SLICE,
                     step > 0 || part > 0);
        end_products();
        await_products<1>();  // those of the step before
        if (step > 0) arrive_at_all(empty + before * 8);
        before = place.slot;
        place.advance();
      }
      if (PINGPONG && index + clusters < tiles) give_turn(group ^ 1);
      await_products<0>();
#pragma unroll
      for (int i = 0; i < PARTS; i++) hold(sum[i]);
      arrive_at_all(empty + before * 8);
#pragma unroll
      for (int i = 0; i < PARTS; i++)
        finish(epilogue, map_d, map_low, sum[i], rows, residual, own_staging, i, row + i * 64, column, tile.column,
               m, n);
    }
    await_stores<0>();  // shared memory must live until it has been read
  }
  sync_cluster();
}
