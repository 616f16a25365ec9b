// Naive: one pass sums x and x^2, and the variance is their difference. Where the mean is large against the deviation,
// the difference has few digits left.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_naive(const float* x, float* out, int rows, int columns) {
  x += (size_t)blockIdx.x * columns, out += (size_t)blockIdx.x * columns;
  float sum = 0.0f, squares = 0.0f;
  for (int i = threadIdx.x; i < columns; i += THREADS) sum += x[i], squares += x[i] * x[i];
  const float mean = across_block(sum, Sum()) / columns;
  const float variance = across_block(squares, Sum()) / columns - mean * mean;
  const float scale = rsqrtf(fmaxf(variance, 0.0f) + EPSILON);
  for (int i = threadIdx.x; i < columns; i += THREADS) out[i] = (x[i] - mean) * scale;
}
