// Warp tiles: a warp computes 64 x 32 outputs, a block's warps 2 x 4 of them; a lane's 8 x 8 lie inside.
//
// A warp of the vectorised rung reads 8 rows and 128 columns for 2 x 16 lanes. Here it reads 64 and 32, and no 16 bytes
// for more than 8 lanes: 8 passes of shared memory in place of 12 for 64 multiply-adds.
#include "fp32_tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_warp_tiles(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ __align__(16) float x[BK][BM + PAD], w[BK][BN + PAD];
  const Tile tile = find_tile(m, n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 4 * 64 + lane_across(lane) * 4, column = warp % 4 * 32 + lane_down(lane) * 4;
  float sum[8][8] = {};
  for (int start = 0; start < k; start += BK) {
    stage_transposed(x, a, tile.row, m, start, k);
    stage_transposed(w, b, tile.column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BK; step++) {
      float left[8], right[8];
      read<32>(left, &x[step][row]);
      read<16>(right, &w[step][column]);
      multiply_add(sum, left, right);
    }
    __syncthreads();
  }
  store<32, 16>(c, sum, tile.row + row, tile.column + column, m, n);
}
