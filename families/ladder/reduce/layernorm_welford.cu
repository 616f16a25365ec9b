// Welford: one pass keeps the mean and the squared distances from it, and corrects both with each element. Exact like
// two passes, for a division an element.
#include "blocks.cuh"

struct Moments {
  float count, mean, squares;
};

__device__ __forceinline__ Moments merge(Moments a, Moments b) {
  const float count = a.count + b.count, apart = b.mean - a.mean, share = count > 0.0f ? b.count / count : 0.0f;
  return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_welford(const float* x, float* out, int rows, int columns) {
  x += (size_t)blockIdx.x * columns, out += (size_t)blockIdx.x * columns;
  Moments own = {};
  for (int i = threadIdx.x; i < columns; i += THREADS) {
    const float apart = x[i] - own.mean;
    own.count += 1.0f;
    own.mean += apart / own.count;
    own.squares += apart * (x[i] - own.mean);
  }
  for (int step = 16; step; step /= 2)
    own = merge(own, {__shfl_xor_sync(~0u, own.count, step), __shfl_xor_sync(~0u, own.mean, step),
                      __shfl_xor_sync(~0u, own.squares, step)});
  __shared__ Moments of_warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = own;
  __syncthreads();
  own = of_warps[0];
  for (int i = 1; i < THREADS / 32; i++) own = merge(own, of_warps[i]);
  const float scale = rsqrtf(own.squares / columns + EPSILON);
  for (int i = threadIdx.x; i < columns; i += THREADS) out[i] = (x[i] - own.mean) * scale;
}
