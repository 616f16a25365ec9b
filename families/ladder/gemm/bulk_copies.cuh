// Barriers in shared memory and the copies of the copy engine (TMA) that complete on them.
//
// A barrier counts arrivals and bytes; its phase ends when both are there. A wait names the parity of a phase and
// passes once that phase is over: phase 0 is the first. A wait for parity 1 on a new barrier passes at once.

// The description of a matrix in device memory that the copy engine reads (CUtensorMap).
struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and expect the bytes of copies in this phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Make new barriers visible to the copy engine and to other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Copy the box of a matrix that starts at `depth` and `row`; what lies outside the matrix is zero and counts as bytes.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int depth, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(depth), "r"(row), "r"(barrier)
      : "memory");
}

// A place in the ring of STAGES tiles, and the parity of its phase.
struct Place {
  u32 slot, parity;

  __device__ __forceinline__ void advance() {
    slot++;
    if (slot == STAGES) slot = 0, parity ^= 1;
  }
};
