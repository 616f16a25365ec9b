// Warpgroup products (PTX ISA, wgmma.mma_async): 64 rows, N columns, 16 of the inner dimension, sums in float32.
//
// An operand in shared memory is named by the low word of its descriptor (`operand`, sm90_warpgroups.cuh). The high
// word is the same for all: 128 bytes from one core matrix to the next along the rows.

// c[64, N] = or (add) += left operand times right operand b; the left operand lies in registers or in shared memory.
template <int N>
__device__ void product(float (&c)[N / 2], const u32* a, u32 b, int add);
template <int N>
__device__ void product_shared(float (&c)[N / 2], u32 a, u32 b, int add);
// Wait for the products. The wait names what they accumulate into, or the compiler might read it too early.
template <int N>
__device__ void finish_products(float (&c)[N / 2]);
__device__ __forceinline__ void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void zero(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) c[i] = 0.0f;
}

#if BF16
#define WGMMA_TYPES ".f32.bf16.bf16 "
#else
#define WGMMA_TYPES ".f32.f16.f16 "
#endif
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])

// The instruction names each accumulator, so that every N has wrappers of its own. OUTPUTS are the accumulators,
// REGISTERS their numbers, P0 to P5 the numbers of the operands behind them.
#define WGMMA(N, OUTPUTS, REGISTERS, P0, P1, P2, P3, P4, P5)                                                 \
  template <>                                                                                                \
  __device__ __forceinline__ void product<N>(float (&c)[N / 2], const u32* a, u32 b, int add) {              \
    asm volatile("{\n.reg .pred p;\n.reg .b64 right;\nsetp.ne.b32 p, " P5 ", 0;\nmov.b64 right, {" P4        \
                 ", 8};\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" REGISTERS                      \
                 "}, "                                                                                       \
                 "{" P0 ", " P1 ", " P2 ", " P3 "}, right, p, 1, 1, 0;\n}"                                   \
        : OUTPUTS                                                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(add));                                     \
  }                                                                                                          \
  template <>                                                                                                \
  __device__ __forceinline__ void product_shared<N>(float (&c)[N / 2], u32 a, u32 b, int add) {              \
    asm volatile("{\n.reg .pred p;\n.reg .b64 left, right;\nsetp.ne.b32 p, " P2                              \
                 ", 0;\n"                                                                                    \
                 "mov.b64 left, {" P0 ", 8};\nmov.b64 right, {" P1                                           \
                 ", 8};\n"                                                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES "{" REGISTERS                      \
                 "}, "                                                                                       \
                 "left, right, p, 1, 1, 0, 0;\n}"                                                            \
        : OUTPUTS                                                                                            \
        : "r"(a), "r"(b), "r"(add));                                                                         \
  }                                                                                                          \
  template <>                                                                                                \
  __device__ __forceinline__ void finish_products<N>(float (&c)[N / 2]) {                                    \
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : OUTPUTS ::"memory"); \
  }

#define OUTPUTS_8 FOUR(0)
#define OUTPUTS_16 OUTPUTS_8, FOUR(4)
#define OUTPUTS_24 OUTPUTS_16, FOUR(8)
#define OUTPUTS_32 OUTPUTS_24, FOUR(12)
#define OUTPUTS_40 OUTPUTS_32, FOUR(16)
#define OUTPUTS_48 OUTPUTS_40, FOUR(20)
#define OUTPUTS_56 OUTPUTS_48, FOUR(24)
#define OUTPUTS_64 OUTPUTS_56, FOUR(28)
#define REGISTERS_8 "%0, %1, %2, %3"
#define REGISTERS_16 REGISTERS_8 ", %4, %5, %6, %7"
#define REGISTERS_24 REGISTERS_16 ", %8, %9, %10, %11"
#define REGISTERS_32 REGISTERS_24 ", %12, %13, %14, %15"
#define REGISTERS_40 REGISTERS_32 ", %16, %17, %18, %19"
#define REGISTERS_48 REGISTERS_40 ", %20, %21, %22, %23"
#define REGISTERS_56 REGISTERS_48 ", %24, %25, %26, %27"
#define REGISTERS_64 REGISTERS_56 ", %28, %29, %30, %31"

WGMMA(8, OUTPUTS_8, REGISTERS_8, "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA(16, OUTPUTS_16, REGISTERS_16, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA(24, OUTPUTS_24, REGISTERS_24, "%12", "%13", "%14", "%15", "%16", "%17")
WGMMA(32, OUTPUTS_32, REGISTERS_32, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA(40, OUTPUTS_40, REGISTERS_40, "%20", "%21", "%22", "%23", "%24", "%25")
WGMMA(48, OUTPUTS_48, REGISTERS_48, "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA(56, OUTPUTS_56, REGISTERS_56, "%28", "%29", "%30", "%31", "%32", "%33")
WGMMA(64, OUTPUTS_64, REGISTERS_64, "%32", "%33", "%34", "%35", "%36", "%37")
