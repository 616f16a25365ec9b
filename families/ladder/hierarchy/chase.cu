// A pointer chase through device memory: each load gives the address of the next one.
//
// One thread on multiprocessor 0 walks from the address in `data` on: its distance to each half of the L2 is then the
// same in every launch. After `warm` loads, `repeats` are timed together. `samples` more are timed one by one: a branch
// on the loaded value keeps the second clock behind the load. CACHED loads may hit the L1.
#include "timed.cuh"

__device__ __forceinline__ u64 load(u64 from) {
  u64 value;
#if CACHED
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
#else
  asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
#endif
  return value;
}

extern "C" __global__ void __launch_bounds__(32) chase(u64* times, u64 data, int repeats, int warm, int samples) {
  extern __shared__ u32 taken[];
  u32 unit;
  asm("mov.u32 %0, %%smid;" : "=r"(unit));
  if (unit != 0) return;
  u64 at = data;
#pragma unroll 1
  for (int i = 0; i < warm; i++) at = load(at);
  begin(times);
#pragma unroll 16
  for (int i = 0; i < repeats; i++) at = load(at);
  keep(times, (u32)at);
  end(times);
#pragma unroll 1
  for (int i = 0; i < samples; i++) {
    const u64 start = read_cycles();
    at = load(at);
    if (at == 0) break;
    taken[i] = read_cycles() - start;
  }
#pragma unroll 1
  for (int i = 0; i < samples; i++) times[4 * gridDim.x + i] = taken[i];
}
