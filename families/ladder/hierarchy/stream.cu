// Reads of device memory by all multiprocessors, 16 bytes a thread, in bursts that follow each other or are scattered.
//
// 2^burst chunks of 16 bytes lie together, and bursts 2^stride chunks apart. Burst i of 2^bursts is read from place
// i * multiplier: an odd multiplier other than 1 scatters them, each place taken once. With OWN each block reads bursts
// of its own through the L1; else all blocks share them. All bursts are
// read `repeats` times.
#include "timed.cuh"

__device__ __forceinline__ u32 load(const uint4* from) {
  uint4 value;
#if OWN
#define LOAD "ld.global.ca.v4.u32"
#else
#define LOAD "ld.global.cg.v4.u32"
#endif
  asm volatile(LOAD " {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value.x ^ value.y ^ value.z ^ value.w;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    stream(u64* times, const uint4* data, int repeats, int bursts, int burst, int stride, u32 multiplier) {
  const u32 chunks = (u32)repeats << bursts << burst, mask = (1u << bursts) - 1;
  const u32 first = OWN ? threadIdx.x : blockIdx.x * blockDim.x + threadIdx.x;
  const u32 threads = OWN ? blockDim.x : gridDim.x * blockDim.x;
  if (OWN) data += (size_t)blockIdx.x << bursts << stride;
  u32 all = 0;
  begin(times);
#pragma unroll 8
  for (u32 i = first; i < chunks; i += threads) {
    const u32 place = (i >> burst) * multiplier & mask;
    all ^= load(data + ((place << stride) + (i & (1u << burst) - 1)));
  }
  keep(times, all);
  end(times);
}
