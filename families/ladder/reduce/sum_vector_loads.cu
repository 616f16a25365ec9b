// Vector loads: a thread has four loads of 16 bytes in flight before it adds, and a block takes 16 elements a thread.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_vector_loads(const float* x, float* out, float* scratch, int rows, int columns) {
  const int whole = columns / 4, first = blockIdx.x * 4 * THREADS + threadIdx.x;
  float4 four[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int at = first + i * THREADS;
    four[i] = at < whole ? ((const float4*)x)[at] : float4{};
  }
  // The last elements, fewer than four, fall to the first block.
  const int rest = whole * 4 + threadIdx.x;
  float sum = blockIdx.x == 0 && rest < columns ? x[rest] : 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) sum += (four[i].x + four[i].y) + (four[i].z + four[i].w);
  sum = across_block(sum, Sum());
  if (threadIdx.x == 0) add_to_total(sum, scratch, out);
}
