// Coalesced: a warp computes one output, and its lanes take neighbouring depths.
//
// Both operands lie along K, so a warp's load is one cache line: two lines for 32 multiply-adds. A block of 8 x 4
// warps shares 12 lines a step through the L1; the L2 delivers 1.5 bytes a multiply-add.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_coalesced(const float* a, const float* b, float* c, int m, int n, int k) {
  const int column_tiles = (n + BN - 1) / BN, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x / column_tiles * BM + warp / BN, column = blockIdx.x % column_tiles * BN + warp % BN;
  if (row >= m || column >= n) return;
  const float *x = a + (size_t)row * k, *w = b + (size_t)column * k;
  float sum = 0.0f;
#pragma unroll 4
  for (int i = lane; i < k; i += 32) sum += x[i] * w[i];
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) c[(size_t)row * n + column] = sum;
}
