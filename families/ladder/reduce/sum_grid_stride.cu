// Grid stride: as many blocks as the device holds, each a share of all elements; the last one adds the blocks' sums.
//
// Nothing is started or folded but once a block, so the loads alone remain. The sums are added in one order: each run
// gives the same bits.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_grid_stride(const float* x, float* out, float* scratch, int rows, int columns) {
  const int whole = columns / 4, stride = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
  const float4* fours = (const float4*)x;
  float sum[4] = {whole * 4 + first < columns ? x[whole * 4 + first] : 0.0f};
  for (int at = first; at < whole; at += 4 * stride) {
    float4 four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) four[i] = i * stride < whole - at ? __ldcs(fours + at + i * stride) : float4{};
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += (four[i].x + four[i].y) + (four[i].z + four[i].w);
  }
  const float of_block = across_block((sum[0] + sum[1]) + (sum[2] + sum[3]), Sum());

  unsigned* done = (unsigned*)scratch;
  float* of_blocks = scratch + 1;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    of_blocks[blockIdx.x] = of_block;
    __threadfence();
    last = atomicInc(done, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  float total = 0.0f;
  for (int i = threadIdx.x; i < gridDim.x; i += THREADS) total += __ldcg(of_blocks + i);
  total = across_block(total, Sum());
  if (threadIdx.x == 0) out[0] = total;
}
