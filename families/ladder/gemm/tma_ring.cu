// A ring filled by the copy engine: one thread asks for tiles of 128 x 64 and 256 x 64, and two warpgroups multiply.
//
// A copy of the engine takes one instruction and no registers. It writes the swizzle itself, and zeros behind the ends
// of the operands. Phases: place s of the ring is filled in phase i of full[s] for the i-th time, and freed in phase i of
// empty[s]. The producer fills it for the i-th time after phase i - 1 of empty[s]: it waits for the parity of i + 1,
// which a new barrier lets through. Nothing waits for ever: the producer asks for each step's tile once, and each
// consumer warp frees it once.
#include "tensor_cores.cuh"
#include "warpgroup.cuh"
#include "bulk_copies.cuh"

static_assert(BM == 128 && THREADS == 288, "two warpgroups of 64 rows and the producer's warp");
constexpr int STAGE = (BM + BN) * LINE;
constexpr int CONSUMER_WARPS = 8;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_tma_ring(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_w,
                  half_t* __restrict__ d, int m, int n, int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 ring = shared_address(shared), full = ring + STAGES * STAGE, empty = full + STAGES * 8;
  const Tile tile = find_tile(blockIdx.x, (m + BM - 1) / BM, (n + BN - 1) / BN);
  const int steps = (k + BK - 1) / BK, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(full + slot * 8, 1);
      barrier_init(empty + slot * 8, CONSUMER_WARPS);
    }
    publish_barriers();
  }
  __syncthreads();
  if (warp == CONSUMER_WARPS) {
    if (threadIdx.x % 32 == 0) {
      Place place = {0, 1};
      for (int step = 0; step < steps; step++, place.advance()) {
        const u32 to = ring + place.slot * STAGE, barrier = full + place.slot * 8;
        barrier_wait(empty + place.slot * 8, place.parity);
        barrier_expect(barrier, STAGE);
        copy_box(to, map_a, step * BK, tile.row * BM, barrier);
        copy_box(to + BM * LINE, map_w, step * BK, tile.column * BN, barrier);
      }
    }
  } else {
    const int group = warp / 4;
    float sum[BN / 2];
    Place place = {0, 0};
    u32 before = 0;  // the place of the step before
    for (int step = 0; step < steps; step++) {
      const u32 from = ring + place.slot * STAGE;
      const u32 left = describe(from + group * 64 * LINE), right = describe(from + BM * LINE);
      barrier_wait(full + place.slot * 8, place.parity);
      begin_products();
#pragma unroll
      for (int part = 0; part < SLICES; part++)
        multiply(sum, left + part * NEXT_SLICE, right + part * NEXT_SLICE, step > 0 || part > 0);
      end_products();
      await_products<1>();  // those of the step before
      if (step > 0 && threadIdx.x % 32 == 0) barrier_arrive(empty + before * 8);
      before = place.slot;
      place.advance();
    }
    await_products<0>();
    hold(sum);
    store_sums(d, sum, tile.row * BM + group * 64, tile.column * BN, m, n);
  }
}
