// Reads of device memory by all multiprocessors, 16 bytes a thread, in bursts that follow each other or are scattered.
//
// 2^burst chunks of 16 bytes lie together, and bursts 2^stride chunks apart. Burst i of 2^bursts is read from place
// i * multiplier: an odd multiplier other than 1 scatters them, each place taken once. All are read `repeats` times.
// With OWN each block reads bursts of its own, in order, through the L1; else all blocks share them.
#include "timed.cuh"

constexpr int AHEAD = 8;  // reads in flight, of a thread

#if OWN
#define LOAD "ld.global.ca.v4.u32"
#else
#define LOAD "ld.global.cg.v4.u32"
#endif

__device__ __forceinline__ uint4 load(const uint4* from, bool live) {
  uint4 value = {};
  asm volatile("{\n.reg .pred live;\nsetp.ne.b32 live, %5, 0;\n@live " LOAD " {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w)
               : "l"(from), "r"((int)live));
  return value;
}

extern "C" __global__ void __launch_bounds__(1024, 1)
    stream(u64* times, const uint4* data, int repeats, int bursts, int burst, int stride, u32 multiplier) {
  const u32 chunks = (u32)repeats << bursts << burst, mask = (1u << bursts) - 1;
  const u32 first = OWN ? threadIdx.x : blockIdx.x * blockDim.x + threadIdx.x;
  const u32 threads = OWN ? blockDim.x : gridDim.x * blockDim.x;
  if (OWN) data += (size_t)blockIdx.x << bursts << stride;
  u32 all = 0;
  begin(times);
#pragma unroll 1
  for (u32 start = first; start < chunks; start += AHEAD * threads) {
    uint4 value[AHEAD];
#pragma unroll
    for (int j = 0; j < AHEAD; j++) {
      const u32 i = start + j * threads, place = (i >> burst) * multiplier & mask;
      // A block's own bursts lie side by side: with more arithmetic the L1 would wait for the issue of instructions.
      const u32 at = OWN ? i & ((1u << bursts << burst) - 1) : (place << stride) + (i & (1u << burst) - 1);
      value[j] = load(data + at, i < chunks);
    }
#pragma unroll
    for (int j = 0; j < AHEAD; j++) all ^= value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  keep(times, all);
  end(times);
}
