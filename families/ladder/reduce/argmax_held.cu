// Held: each thread finds the largest of its values, then the block the largest of those; of equal ones the first wins.
#include "rows.cuh"

struct Place {
  float value;
  int at;
};

__device__ __forceinline__ Place larger(Place a, Place b) {
  return b.value > a.value || (b.value == a.value && b.at < a.at) ? b : a;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    argmax_held(const float* x, int* out, int rows, int columns) {
  Row row = load_row(x, columns, -INFINITY);
  Place best = {-INFINITY, columns - 1};
  each(row, [&best, columns](float& value, int at) {
    if (at < columns) best = larger(best, {value, at});
  });
  for (int step = 16; step; step /= 2)
    best = larger(best, {__shfl_xor_sync(~0u, best.value, step), __shfl_xor_sync(~0u, best.at, step)});
  __shared__ Place of_warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < THREADS / 32; i++) best = larger(best, of_warps[i]);
  out[blockIdx.x] = best.at;
}
