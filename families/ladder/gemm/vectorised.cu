// Vectorised: loads of 16 bytes along K, staged transposed, so that a thread reads its rows and columns 16 bytes a time.
//
// Four reads serve 64 multiply-adds, where register tiles needed sixteen: 64 instructions of 68. A line of the staged
// tile is four words longer than the tile: the four stores that transpose a load meet no bank twice.
#include "fp32_tiles.cuh"

#define SIDE 16

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_vectorised(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ __align__(16) float x[BK][BM + PAD], w[BK][BN + PAD];
  const Tile tile = find_tile(m, n);
  const int row = threadIdx.x / SIDE * 4, column = threadIdx.x % SIDE * 4;
  float sum[8][8] = {};
  for (int start = 0; start < k; start += BK) {
    stage_transposed(x, a, tile.row, m, start, k);
    stage_transposed(w, b, tile.column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BK; step++) {
      float left[8], right[8];
      read<SIDE * 4>(left, &x[step][row]);
      read<SIDE * 4>(right, &w[step][column]);
      multiply_add(sum, left, right);
    }
    __syncthreads();
  }
  store<SIDE * 4, SIDE * 4>(c, sum, tile.row + row, tile.column + column, m, n);
}
