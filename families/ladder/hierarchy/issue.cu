// Arithmetic in registers: CHAINS chains of OPERATION a thread, each step dependent on the one before. A round of the
// loop takes STEPS of each chain.
//
// One chain in one warp shows the latency. Many chains in 32 warps show the rate of a multiprocessor.
#include "timed.cuh"

__device__ __forceinline__ float multiply_add(float x, float half, int) { return fmaf(x, half, half); }

// 2^-x by the special-function unit; a chain stays between 0 and 1.
__device__ __forceinline__ float exp2_unit(float x, float, int) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(-x));
  return y;
}

// 2^-x by multiply-adds: the nearest whole number goes into the exponent, a polynomial takes what is left.
__device__ __forceinline__ float exp2_polynomial(float x, float, int) {
  const float shifted = 12582912.f - x;  // 1.5 2^23: the sum's last bits are the whole number
  const float left = 12582912.f - shifted - x;
  const float part = fmaf(fmaf(fmaf(C3, left, C2), left, C1), left, C0);
  return __int_as_float(__float_as_int(part) + (__float_as_int(shifted) << 23));
}

// Half of the chains by each.
__device__ __forceinline__ float exp2_half(float x, float half, int chain) {
  return chain % 2 ? exp2_polynomial(x, half, chain) : exp2_unit(x, half, chain);
}

extern "C" __global__ void __launch_bounds__(1024) issue(u64* times, const float* data, int repeats) {
  const float half = data[0] + 0.5f;
  float x[CHAINS];
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++) x[chain] = data[0] + chain;
  begin(times);
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; repeat++) {
#pragma unroll
    for (int step = 0; step < STEPS; step++)
#pragma unroll
      for (int chain = 0; chain < CHAINS; chain++) x[chain] = OPERATION(x[chain], half, chain);
  }
  float sum = 0;
#pragma unroll
  for (int chain = 0; chain < CHAINS; chain++) sum += x[chain];
  keep(times, __float_as_int(sum));
  end(times);
}
