// Three passes over a row: its maximum, the sum of exponentials, the quotients. Each reads the row again.
//
// The row stays in the L1 and L2, so memory is read once; the waits of three passes remain.
#include "blocks.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_passes(const float* x, float* out, int rows, int columns) {
  x += (size_t)blockIdx.x * columns, out += (size_t)blockIdx.x * columns;
  float top = -INFINITY, sum = 0.0f;
  for (int i = threadIdx.x; i < columns; i += THREADS) top = fmaxf(top, x[i]);
  top = across_block(top, Max());
  for (int i = threadIdx.x; i < columns; i += THREADS) sum += __expf(x[i] - top);
  sum = across_block(sum, Sum());
  for (int i = threadIdx.x; i < columns; i += THREADS) out[i] = __expf(x[i] - top) / sum;
}
