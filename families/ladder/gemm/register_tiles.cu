// Register tiles: a thread computes 8 x 8 outputs, 16 rows and 16 columns apart.
//
// Sixteen reads of shared memory serve 64 multiply-adds: shared memory and the FMA units now keep the same pace, and
// four instructions of five are multiply-adds.
#include "fp32_tiles.cuh"

#define SIDE 16

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_register_tiles(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float x[BM][BK + PAD], w[BN][BK + PAD];
  const Tile tile = find_tile(m, n);
  const int row = threadIdx.x / SIDE, column = threadIdx.x % SIDE;
  float sum[BM / SIDE][BN / SIDE] = {};
  for (int start = 0; start < k; start += BK) {
    stage_lines(x, a, tile.row, m, start, k);
    stage_lines(w, b, tile.column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BK; step++) {
      float left[BM / SIDE], right[BN / SIDE];
#pragma unroll
      for (int i = 0; i < BM / SIDE; i++) left[i] = x[row + i * SIDE][step];
#pragma unroll
      for (int j = 0; j < BN / SIDE; j++) right[j] = w[column + j * SIDE][step];
      multiply_add(sum, left, right);
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < BM / SIDE; i++)
#pragma unroll
    for (int j = 0; j < BN / SIDE; j++) {
      const int at = tile.row + row + i * SIDE, to = tile.column + column + j * SIDE;
      if (at < m && to < n) c[(size_t)at * n + to] = sum[i][j];
    }
}
