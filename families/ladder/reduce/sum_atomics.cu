// Atomics: each thread adds its element to one word of memory.
//
// The L2 adds to one word about once a cycle, so the adds of all threads stand in line. The sum is also the least
// exact: a small element meets a large total.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    sum_atomics(const float* x, float* out, float* scratch, int rows, int columns) {
  const int at = blockIdx.x * THREADS + threadIdx.x;
  if (at < columns) atomicAdd(scratch, x[at]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) add_to_total(0.0f, scratch, out);
}
