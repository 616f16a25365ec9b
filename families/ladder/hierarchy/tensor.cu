// Products on tensor cores in float16, sums in float32, with nothing but products in the loop.
//
// wgmma_rate: THREADS / 128 warpgroups multiply 64 x N x 16, both operands in shared memory with the 128-byte swizzle. Each names
// its sums: NAMES and SUMS are the N / 2 registers as text. mma_rate: each warp multiplies 16 x 8 x 16 from registers.
#include "timed.cuh"

#define TEXT(x) #x
#define VALUE(x) TEXT(x)
constexpr int ROUND = 16;  // products of a group

#if N
extern "C" __global__ void __launch_bounds__(THREADS) wgmma_rate(u64* times, const u32* data, int repeats) {
  extern __shared__ __align__(1024) u32 operands[];
  for (int i = threadIdx.x; i < (64 + N) * 32; i += blockDim.x) operands[i] = data[0] + 0x3C003C00;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  const u32 a = (u32)__cvta_generic_to_shared(operands) >> 4 | 1 << 16, w = a + (64 * 128 >> 4);
  float c[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; i++) c[i] = i;
  begin(times);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; repeat++) {
#pragma unroll
    for (int i = 0; i < ROUND; i++)
      asm volatile("{\n.reg .pred add;\n.reg .b64 left, right;\nsetp.eq.b32 add, 0, 0;\n"
                   "mov.b64 left, {" A_NAME ", 0x40000040};\nmov.b64 right, {" W_NAME ", 0x40000040};\n"
                   "wgmma.mma_async.sync.aligned.m64n" VALUE(N) "k16.f32.f16.f16 "
                   "{" NAMES "}, left, right, add, 1, 1, 0, 0;\n}"
                   : SUMS
                   : "r"(a + i % 4 * 2), "r"(w + i % 4 * 2));
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS::"memory");
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N / 2; i++) sum += c[i];
  keep(times, __float_as_int(sum));
  end(times);
}
#else
extern "C" __global__ void __launch_bounds__(512) mma_rate(u64* times, const u32* data, int repeats) {
  float c[ROUND][4] = {};
  const u32 a = data[0] + 0x3C003C00;
  begin(times);
#pragma unroll 1
  for (int repeat = 0; repeat < repeats; repeat++)
#pragma unroll
    for (int i = 0; i < ROUND; i++)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%4, %4}, "
                   "{%0, %1, %2, %3};"
                   : "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
                   : "r"(a));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < ROUND; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  keep(times, __float_as_int(sum));
  end(times);
}
#endif
