// Shared tiles: a block stages 32 x 32 of each operand in shared memory, and a thread computes one output from them.
//
// An element comes from the L2 once for 32 multiply-adds. Each multiply-add still reads two words of shared memory: a
// warp's 32 take two passes of 128 bytes, so an SM does 16 a cycle, an eighth of its FMA rate. Lines are one word
// longer than a tile: the 32 columns that a warp reads lie in 32 banks.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_shared_tiles(const float* a, const float* b, float* c, int m, int n, int k) {
  __shared__ float x[BM][BK + PAD], w[BN][BK + PAD];
  const int column_tiles = (n + BN - 1) / BN;
  const int row0 = blockIdx.x / column_tiles * BM, column0 = blockIdx.x % column_tiles * BN;
  const int across = threadIdx.x % BN, down = threadIdx.x / BN;
  // Rows and columns behind the end repeat the last one; their sums are not stored.
  const float* from_a = a + (size_t)min(row0 + down, m - 1) * k;
  const float* from_b = b + (size_t)min(column0 + down, n - 1) * k;
  float sum = 0.0f;
  for (int start = 0; start < k; start += BK) {
    const bool inside = start + across < k;
    x[down][across] = inside ? from_a[start + across] : 0.0f;
    w[down][across] = inside ? from_b[start + across] : 0.0f;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < BK; i++) sum += x[down][i] * w[across][i];
    __syncthreads();
  }
  if (row0 + down < m && column0 + across < n) c[(size_t)(row0 + down) * n + column0 + across] = sum;
}
