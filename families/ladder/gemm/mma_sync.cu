// Tensor cores by mma.sync: a warp holds 64 x 64 sums in registers and reads its operands by ldmatrix.
//
// A ring of STAGES tiles is filled by cp.async. ldmatrix reads eight rows at one depth at a time; the swizzle spreads
// them over all banks. A step of 16 depths takes 8 reads for 32 products. The reads of a step are issued before the
// products of the step before. Two blocks share an SM and hide each other's barriers.
#include "tensor_cores.cuh"

static_assert(BM == 128 && BN == 128 && THREADS == 128, "four warps, 2 x 2, of 64 x 64 outputs");
constexpr int STAGE = (BM + BN) * LINE;

__device__ __forceinline__ void read_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

#if OPERAND == 1
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_mma_sync(const half_t* __restrict__ a, const half_t* __restrict__ w, half_t* __restrict__ d, int m, int n,
                  int k) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const u32 ring = shared_address(shared);
  const Tile tile = find_tile(blockIdx.x, (m + BM - 1) / BM, (n + BN - 1) / BN);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = (k + BK - 1) / BK;
  const int row = warp / 2 * 64, column = warp % 2 * 64;

  auto copy = [&](int step) {
    if (step < steps) {
      const u32 to = ring + step % STAGES * STAGE;
      copy_rows<BM>(to, a, tile.row * BM, m, step * BK, k);
      copy_rows<BN>(to + BM * LINE, w, tile.column * BN, n, step * BK, k);
    }
    end_copy();
  };
  // The matrices of 16 rows and 16 depths of A in the order of mma's registers; of W, 16 columns for two products.
  u32 left[2][4][4], right[2][4][4];
  auto read = [&](int slot, u32 from, int part) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      read_matrices(left[slot][i], from + swizzled(row + i * 16 + lane % 16, part * 2 + lane / 16));
      read_matrices(right[slot][i], from + BM * LINE +
                                        swizzled(column + i * 16 + lane / 16 * 8 + lane % 8, part * 2 + lane / 8 % 2));
    }
  };

  float sum[4][8][4] = {};
  for (int step = 0; step < STAGES - 1; step++) copy(step);
  for (int step = 0; step < steps; step++) {
    await_copy<STAGES - 2>();
    __syncthreads();  // the tile is there for all, and all have read the one before, whose place is filled next
    copy(step + STAGES - 1);
    const u32 from = ring + step % STAGES * STAGE;
    read(0, from, 0);
#pragma unroll
    for (int part = 0; part < SLICES; part++) {
      if (part + 1 < SLICES) read((part + 1) % 2, from, part + 1);
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const u32* columns = right[part % 2][j / 2] + j % 2 * 2;
          multiply(sum[i][j], left[part % 2][i], columns[0], columns[1]);
        }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const int at = tile.row * BM + row + i * 16 + lane / 4, to = tile.column * BN + column + j * 8 + lane % 4 * 2;
      store_pair(d, at, to, sum[i][j][0], sum[i][j][1], m, n);
      store_pair(d, at + 8, to, sum[i][j][2], sum[i][j][3], m, n);
    }
}
