// Shared tree: a block adds its elements in shared memory, half as many threads in each step, and adds once to memory.
//
// A block reads one element a thread, meets nine barriers, and sends two atomics to one line of memory. The atomics of
// all blocks stand in line.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_shared_tree(const float* x, float* out, float* scratch, int rows, int columns) {
  __shared__ float part[THREADS];
  const int at = blockIdx.x * THREADS + threadIdx.x;
  part[threadIdx.x] = at < columns ? x[at] : 0.0f;
  __syncthreads();
  for (int step = THREADS / 2; step; step /= 2) {
    if (threadIdx.x < step) part[threadIdx.x] += part[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) add_to_total(part[0], scratch, out);
}
