// Online: one pass keeps the maximum and the sum of exponentials below it, rescaled when the maximum moves.
#include "blocks.cuh"

struct State {
  float top, sum;
};

__device__ __forceinline__ State merge(State a, State b) {
  const float top = fmaxf(a.top, b.top);
  // A lane without elements has no maximum: its sum of zero must not meet infinity less infinity.
  return {top, a.sum * (a.top == top ? 1.0f : __expf(a.top - top)) + b.sum * (b.top == top ? 1.0f : __expf(b.top - top))};
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_online(const float* x, float* out, int rows, int columns) {
  x += (size_t)blockIdx.x * columns, out += (size_t)blockIdx.x * columns;
  State state = {-INFINITY, 0.0f};
  for (int i = threadIdx.x; i < columns; i += THREADS) state = merge(state, {x[i], 1.0f});
  for (int step = 16; step; step /= 2)
    state = merge(state, {__shfl_xor_sync(~0u, state.top, step), __shfl_xor_sync(~0u, state.sum, step)});
  __shared__ State of_warps[THREADS / 32];
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = state;
  __syncthreads();
  state = of_warps[0];
  for (int i = 1; i < THREADS / 32; i++) state = merge(state, of_warps[i]);
  for (int i = threadIdx.x; i < columns; i += THREADS) out[i] = __expf(x[i] - state.top) / state.sum;
}
