// Barriers, `repeats` of each in turn: of a block, of a cluster, of the whole grid, and a signal between two blocks.
//
// A cluster's barrier as the language has it orders all memory. The relaxed one only makes the threads meet.
//
// The grid's barrier is a counter in device memory, as the resident kernels wait for each other; all blocks must be
// resident at once. The signal goes to and fro between two blocks of a cluster, one arrival at the other's barrier each
// way.
#include "timed.cuh"

__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(1024) block_barrier(u64* times, u32*, int repeats) {
  begin(times);
#pragma unroll 16
  for (int i = 0; i < repeats; i++) __syncthreads();
  end(times);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(1024)
    cluster_barrier(u64* times, u32*, int repeats) {
  sync_cluster();
  begin(times);
  for (int i = 0; i < repeats; i++) sync_cluster();
  end(times);
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(1024)
    relaxed_cluster_barrier(u64* times, u32*, int repeats) {
  sync_cluster();
  begin(times);
  for (int i = 0; i < repeats; i++)
    asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
  end(times);
}

extern "C" __global__ void __launch_bounds__(1024) grid_barrier(u64* times, u32* counter, int repeats) {
  begin(times);
  for (int i = 1; i <= repeats; i++) {
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 arrived;
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      do {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
      } while (arrived < i * gridDim.x);
    }
    __syncthreads();
  }
  end(times);
}

#if CLUSTER == 2
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(32) signal(u64* times, u32*, int repeats) {
  __shared__ u64 barrier;
  const u32 own = (u32)__cvta_generic_to_shared(&barrier);
  u32 rank, other;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank ^ 1));
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(own) : "memory");
  sync_cluster();
  begin(times);
  for (int i = 0; i < repeats; i++) {
    if (rank == 0 || i > 0)
      asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(other) : "memory");
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(own),
        "r"(i & 1)
        : "memory");
  }
  if (rank == 1) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(other) : "memory");
  end(times);
  sync_cluster();
}
#endif
