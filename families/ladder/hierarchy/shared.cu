// Shared memory: a dependent chase by one warp, and reads or writes by 32 warps. In a CLUSTER of two blocks each one
// works on the other's.
//
// Lanes are `stride` words of WIDTH x 4 bytes apart: of stride 2 two lanes meet in a bank, of stride 32 all.
#include "timed.cuh"

constexpr int UNROLL = 8;
constexpr int PLACE = 32 * 4 * WIDTH;  // bytes that a warp reads without conflicts

__device__ __forceinline__ void sync_cluster() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// The address of a word in the memory of this block, or with `other` in that of the other block.
__device__ __forceinline__ u32 address_of(const u32* word, bool other) {
  u32 address = (u32)__cvta_generic_to_shared(word);
#if CLUSTER > 1
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(other ? rank ^ 1 : rank));
#endif
  return address;
}

#if CLUSTER > 1
#define SPACE "shared::cluster"
#else
#define SPACE "shared::cta"
#endif

__device__ __forceinline__ u32 load_word(u32 from) {
  u32 value;
  asm volatile("ld." SPACE ".u32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ u32 load(u32 from) {
#if WIDTH == 4
  u32 a, b, c, d;
  asm volatile("ld." SPACE ".v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(from));
  return a ^ b ^ c ^ d;
#else
  return load_word(from);
#endif
}

__device__ __forceinline__ void store(u32 to, u32 value) {
  asm volatile("st." SPACE ".u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

extern __shared__ __align__(16) u32 words[];

// Each lane's word holds its own address, so that a load gives the address of the next load.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(32)
    shared_chase(u64* times, const u32*, int repeats, int stride) {
  u32* own = words + threadIdx.x * stride;
  *own = address_of(own, false);
  sync_cluster();
  u32 at = address_of(own, true);
  begin(times);
#pragma unroll 16
  for (int i = 0; i < repeats; i++) at = load_word(at);
  keep(times, at);
  end(times);
  sync_cluster();
}

// 32 warps, UNROLL accesses a round. Writes of a cluster are timed until they have arrived.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(1024)
    shared_rate(u64* times, const u32*, int repeats, int stride) {
  for (int i = threadIdx.x; i < 2048; i += blockDim.x) words[i] = i;
  sync_cluster();
  const u32 from = address_of(words + threadIdx.x % 32 * stride * WIDTH, true);
  u32 all = 0;
  begin(times);
#pragma unroll 1
  for (int i = 0; i < repeats; i++) {
    // The place moves, or the compiler would read once and for all.
    const u32 at = from + i % UNROLL * PLACE;
#pragma unroll
    for (int j = 0; j < UNROLL; j++)
#if STORE
      store(at + j * PLACE, i);
  }
  sync_cluster();
#else
      all ^= load(at + j * PLACE);
  }
#endif
  keep(times, all);
  end(times);
  sync_cluster();
}
