// Warpgroup products from shared memory: two warpgroups of 64 x 256 sums each; the threads still fill the ring.
//
// An instruction multiplies 64 x 256 x 16 and reads both operands from shared memory, so no registers hold operands and
// the tensor cores run while the threads copy. Place `step - 2` of the ring is filled during `step`: at the barrier
// every warpgroup has waited for the products of `step - 2`.
#include "tensor_cores.cuh"
#include "warpgroup.cuh"

static_assert(BM == 128 && THREADS == 256, "a warpgroup takes 64 rows");
constexpr int STAGE = (BM + BN) * LINE;
constexpr int AHEAD = STAGES - 2;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_wgmma_shared(const half_t* __restrict__ a, const half_t* __restrict__ w, half_t* __restrict__ d, int m, int n,
                      int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 ring = shared_address(shared);
  const Tile tile = find_tile(blockIdx.x, (m + BM - 1) / BM, (n + BN - 1) / BN);
  const int steps = (k + BK - 1) / BK, group = __shfl_sync(~0u, threadIdx.x / 128, 0);

  auto copy = [&](int step) {
    if (step < steps) {
      const u32 to = ring + step % STAGES * STAGE;
      copy_rows<BM>(to, a, tile.row * BM, m, step * BK, k);
      copy_rows<BN>(to + BM * LINE, w, tile.column * BN, n, step * BK, k);
    }
    end_copy();
  };

  float sum[BN / 2];
  for (int step = 0; step < AHEAD; step++) copy(step);
  for (int step = 0; step < steps; step++) {
    await_copy<AHEAD - 1>();
    publish_shared();
    __syncthreads();
    const u32 from = ring + step % STAGES * STAGE;
    const u32 left = describe(from + group * 64 * LINE), right = describe(from + BM * LINE);
    begin_products();
#pragma unroll
    for (int part = 0; part < SLICES; part++)
      multiply(sum, left + part * NEXT_SLICE, right + part * NEXT_SLICE, step > 0 || part > 0);
    end_products();
    copy(step + AHEAD);
    await_products<1>();
  }
  await_products<0>();
  hold(sum);
  store_sums(d, sum, tile.row * BM + group * 64, tile.column * BN, m, n);
}
