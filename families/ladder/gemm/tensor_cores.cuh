// What the tensor-core rungs share: D [M, N] = A [M, K] W [N, K]^T, sums in float32. OPERAND is the type of A and W:
// 0 float16, 1 bfloat16, 2 float32 read as TF32, 3 float8 (e4m3).
//
// A tile of an operand in shared memory is BK elements deep: 128 bytes a row, eight chunks of 16 bytes. Chunk c of row
// r lies in place c ^ r % 8 of its row. This is the 128-byte swizzle of the copy engine and of wgmma. Eight rows at one
// depth then meet eight different groups of four banks. A tile starts at a multiple of 1,024 bytes.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short half_t;  // 16 bits of an operand or of the output

constexpr int LINE = 128;  // bytes of a row of a tile
constexpr int SLICES = 4;  // products of a row of a tile: an instruction of tensor cores takes 32 bytes of it
static_assert(BK * (OPERAND == 2 ? 4 : OPERAND == 3 ? 1 : 2) == LINE, "a row of a tile is one line of the swizzle");

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ u32 swizzled(int row, int chunk) { return row * LINE + ((chunk ^ row % 8) << 4); }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 y;
#if OPERAND == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}

struct Tile {
  int row, column;
};

// Number the tiles of the output by bands of GROUP rows, column by column in a band. Blocks that run together then
// share rows and columns of the operands, which stay in the L2.
__device__ __forceinline__ Tile find_tile(int index, int row_tiles, int column_tiles) {
  const int first = index / (GROUP * column_tiles) * GROUP, within = index - first * column_tiles;
  const int rows = min(GROUP, row_tiles - first);
  return {first + within % rows, within / rows};
}

// ---- tiles copied by the threads ----------------------------------------------------------------------------------

// Copy 16 bytes, or write zeros where `live` is false.
__device__ __forceinline__ void copy_chunk(u32 to, const half_t* from, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(live ? 16 : 0) : "memory");
}

// Copy ROWS rows of an operand from `first` on; zeros where it has no row or no depth.
template <int ROWS>
__device__ __forceinline__ void copy_rows(u32 to, const half_t* from, int first, int rows, int start, int k) {
  const int chunk = threadIdx.x % 8, depth = start + chunk * 8;
#pragma unroll
  for (int row = threadIdx.x / 8; row < ROWS; row += THREADS / 8) {
    const bool live = first + row < rows && depth < k;
    copy_chunk(to + swizzled(row, chunk), live ? from + (size_t)(first + row) * k + depth : from, live);
  }
}

__device__ __forceinline__ void end_copy() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all but the last LEFT copies of this thread.
template <int LEFT>
__device__ __forceinline__ void await_copy() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Store two neighbouring outputs. N is a multiple of eight, so both are inside or neither.
__device__ __forceinline__ void store_pair(half_t* d, int row, int column, float x, float y, int m, int n) {
  if (row < m && column < n) *(u32*)(d + (size_t)row * n + column) = pack(x, y);
}
