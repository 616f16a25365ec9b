// Several results: a thread computes eight outputs of one column, and keeps its word of B for all of them.
//
// Nine reads of shared memory serve eight multiply-adds, where shared tiles needed sixteen.
#include "fp32_tiles.cuh"

#define STEP (THREADS / BN)
#define RESULTS (BM / STEP)

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_several_results(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float x[BM][BK + PAD], w[BN][BK + PAD];
  const Tile tile = find_tile(m, n);
  const int column = threadIdx.x % BN, row = threadIdx.x / BN;
  float sum[RESULTS] = {};
  for (int start = 0; start < k; start += BK) {
    stage_lines(x, a, tile.row, m, start, k);
    stage_lines(w, b, tile.column, n, start, k);
    __syncthreads();
#pragma unroll
    for (int step = 0; step < BK; step++) {
      const float right = w[column][step];
#pragma unroll
      for (int i = 0; i < RESULTS; i++) sum[i] += x[row + i * STEP][step] * right;
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < RESULTS; i++)
    if (tile.row + row + i * STEP < m && tile.column + column < n)
      c[(size_t)(tile.row + row + i * STEP) * n + tile.column + column] = sum[i];
}
