// What the reductions share: sums and other folds over a warp and a block, and a total over all blocks.

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif

struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <class Value, class Fold>
__device__ __forceinline__ Value across_warp(Value value, Fold fold) {
#pragma unroll
  for (int step = 16; step; step /= 2) value = fold(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// Return the fold over the block to every thread.
template <class Value, class Fold>
__device__ __forceinline__ Value across_block(Value value, Fold fold) {
  __shared__ Value of_warps[THREADS / 32];
  value = across_warp(value, fold);
  __syncthreads();  // all have read the fold before
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = of_warps[0];
#pragma unroll
  for (int i = 1; i < THREADS / 32; i++) value = fold(value, of_warps[i]);
  return value;
}

// Add a block's sum to the total; one thread calls. The last block stores the total and leaves zeros in the scratch.
__device__ __forceinline__ void add_to_total(float sum, float* scratch, float* out) {
  atomicAdd(scratch, sum);
  __threadfence();
  if (atomicInc((unsigned*)scratch + 1, gridDim.x - 1) == gridDim.x - 1) out[0] = atomicExch(scratch, 0.0f);
}
