// What blocks of a cluster share, and how a block's warpgroups share its registers and take turns.

// The rank of this block in its cluster.
__device__ __forceinline__ u32 block_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Wait for all threads of the cluster.
__device__ __forceinline__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrive once, for this warp, at the barrier of this place in every block of the cluster.
__device__ __forceinline__ void arrive_at_all(u32 barrier) {
  const u32 rank = threadIdx.x % 32;
  if (rank < CLUSTER)
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

// Copy a box into every block of the cluster, at the same place, with its bytes counted at each block's own barrier.
__device__ __forceinline__ void copy_box_to_all(u32 to, const TensorMap& map, int depth, int row, u32 barrier) {
#if CLUSTER == 1
  copy_box(to, map, depth, row, barrier);
#else
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
               "l"(&map), "r"(depth), "r"(row), "r"(barrier), "h"((half_t)((1 << CLUSTER) - 1))
               : "memory");
#endif
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// A warpgroup waits at its own named barrier for the other one to give it the turn: 256 threads in all.
__device__ __forceinline__ void await_turn(int group) {
  asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {
  asm volatile("bar.arrive %0, 256;" ::"r"(1 + group) : "memory");
}
