// Products of a warpgroup (PTX ISA, wgmma.mma_async): 64 rows, BN columns, 32 bytes of depth. Both operands lie in
// shared memory.
//
// A descriptor names an operand: the address of its first row and depth by 16 bytes, and in the high word the distance
// of eight rows, 1,024 bytes, and the 128-byte swizzle. The next slice of depths is 32 bytes further: the swizzle is a
// function of the address, so it stays right as long as a tile starts at a multiple of 1,024 bytes.
//
// The instruction names each sum, so that each BN has an instruction of its own.

// The top byte of an address names the block of the cluster; a descriptor's address is in the block's own memory.
__device__ __forceinline__ u32 describe(u32 address) { return (address & 0x3FFFF) >> 4 | 1 << 16; }
constexpr u32 NEXT_SLICE = 32 >> 4;         // a descriptor 32 bytes of depth further
constexpr u32 NEXT_ROWS = 64 * LINE >> 4;  // and 64 rows further

// Operands of 16 bits may lie along either side, and END says that these lie along K; others must.
#if OPERAND == 0
#define TYPES "k16.f32.f16.f16 "
#define END ", 1, 1, 0, 0;\n}"
#elif OPERAND == 1
#define TYPES "k16.f32.bf16.bf16 "
#define END ", 1, 1, 0, 0;\n}"
#elif OPERAND == 2
#define TYPES "k8.f32.tf32.tf32 "
#define END ", 1, 1;\n}"
#elif OPERAND == 3
#define TYPES "k32.f32.e4m3.e4m3 "
#define END ", 1, 1;\n}"
#endif
#define HIGH_WORD "0x40000040"
#define TEN(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9, "
#define SIXTY TEN() TEN(1) TEN(2) TEN(3) TEN(4) TEN(5)
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SIXTEEN(i) FOUR(i), FOUR(i + 4), FOUR(i + 8), FOUR(i + 12)
#define SUMS_64 SIXTEEN(0), SIXTEEN(16), SIXTEEN(32), SIXTEEN(48)
#define SUMS_96 SUMS_64, SIXTEEN(64), SIXTEEN(80)
#define SUMS_128 SUMS_96, SIXTEEN(96), SIXTEEN(112)

#if BN == 128
#define SHAPE "m64n128"
#define ALL_SUMS SUMS_64
#define ALL_NAMES SIXTY "%60, %61, %62, %63"
#define A_NAME "%64"
#define W_NAME "%65"
#define ADD_NAME "%66"
#elif BN == 192
#define SHAPE "m64n192"
#define ALL_SUMS SUMS_96
#define ALL_NAMES SIXTY TEN(6) TEN(7) TEN(8) "%90, %91, %92, %93, %94, %95"
#define A_NAME "%96"
#define W_NAME "%97"
#define ADD_NAME "%98"
#elif BN == 256
#define SHAPE "m64n256"
#define ALL_SUMS SUMS_128
#define ALL_NAMES \
  SIXTY TEN(6) TEN(7) TEN(8) TEN(9) TEN(10) TEN(11) "%120, %121, %122, %123, %124, %125, %126, %127"
#define A_NAME "%128"
#define W_NAME "%129"
#define ADD_NAME "%130"
#endif

// c [64, BN] = or (add) += a slice of the rows of both operands.
__device__ __forceinline__ void multiply(float (&c)[BN / 2], u32 a, u32 w, int add) {
  asm volatile("{\n.reg .pred p;\n.reg .b64 left, right;\nsetp.ne.b32 p, " ADD_NAME ", 0;\n"
               "mov.b64 left, {" A_NAME ", " HIGH_WORD "};\nmov.b64 right, {" W_NAME ", " HIGH_WORD "};\n"
               "wgmma.mma_async.sync.aligned." SHAPE TYPES "{" ALL_NAMES "}, left, right, p" END
               : ALL_SUMS
               : "r"(a), "r"(w), "r"(add));
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait for all but the last LEFT groups of products.
template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keep the compiler from reading the sums before the wait above it.
__device__ __forceinline__ void hold(float (&c)[BN / 2]) { asm volatile("" : ALL_SUMS::"memory"); }

// Make ordinary stores and cp.async's copies to shared memory visible to wgmma and to the copy engine.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Store a warpgroup's sums from row `row` and column `column` on.
__device__ __forceinline__ void store_sums(half_t* d, const float (&c)[BN / 2], int row, int column, int m, int n) {
  row += threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
  column += threadIdx.x % 4 * 2;
#pragma unroll
  for (int j = 0; j < BN / 8; j++) {
    store_pair(d, row, column + j * 8, c[4 * j], c[4 * j + 1], m, n);
    store_pair(d, row + 8, column + j * 8, c[4 * j + 2], c[4 * j + 3], m, n);
  }
}
