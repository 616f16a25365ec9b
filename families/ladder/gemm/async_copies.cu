// Asynchronous copies: a ring of STAGES tiles, filled by cp.async while others are read; 16 x 8 outputs a thread.
//
// A copy of four bytes takes no register and may transpose, so staging costs one instruction a word. A step's operands
// are read while the step before is computed, so neither copies nor reads are waited for. Six reads serve 128
// multiply-adds: 2,048 of the loop's 2,240 instructions. Two blocks share an SM and hide each other's barriers.
#include "fp32_tiles.cuh"

#define LINE (BM + PAD)
#define STAGE (2 * BK * LINE)
// A warp's copy takes 8 depths of 4 lines: whole sectors of 32 bytes, and no bank twice.
#define DEPTHS 8
#define LINES (THREADS / DEPTHS)
#define COPIES (BM / LINES)
static_assert(BM == BN && THREADS == 128, "four warps, 2 x 2, of 64 x 64 outputs");

// Copy a word, or write a zero where `live` is false.
__device__ __forceinline__ void copy_word(unsigned to, const char* from, bool live) {
  asm volatile(
      "{.reg .pred dead; setp.eq.s32 dead, %2, 0;\ncp.async.ca.shared.global.L2::128B [%0], [%1], 4, dead;}" ::"r"(to),
      "l"(from), "r"((int)live));
}

// Find where this thread's words of an operand's tile come from, in bytes behind the tile's first.
__device__ __forceinline__ void find_offsets(unsigned (&offset)[COPIES], int lines, int k) {
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int line = threadIdx.x / DEPTHS + i * LINES;
    offset[i] = (min(line, lines - 1) * (unsigned)k + threadIdx.x % DEPTHS) * 4;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    gemm_async_copies(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, int m, int n,
                      int k) {
  extern __shared__ __align__(16) float shared[];
  const Tile tile = find_tile(m, n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / 2 * 64 + lane_down(lane) * 4, column = warp % 2 * 64 + lane_across(lane) * 4;

  // What is copied next: its place in both operands, the depth that is left, its place in the ring.
  const char *from_a = (const char*)(a + (size_t)tile.row * k), *from_b = (const char*)(b + (size_t)tile.column * k);
  unsigned offset_a[COPIES], offset_b[COPIES];
  find_offsets(offset_a, m - tile.row, k);
  find_offsets(offset_b, n - tile.column, k);
  int left = k - threadIdx.x % DEPTHS;
  const unsigned ring =
      (unsigned)__cvta_generic_to_shared(shared) + (threadIdx.x % DEPTHS * LINE + threadIdx.x / DEPTHS) * 4;
  unsigned to = ring;
  // Copy one of PARTS parts of a tile. Parts stand apart in the loop, so that copies do not block the reads' queue.
  auto copy_part = [&](int part) {
#pragma unroll
    for (int depth = 0; depth < BK; depth += DEPTHS)
#pragma unroll
      for (int i = part * COPIES / PARTS; i < (part + 1) * COPIES / PARTS; i++) {
        const unsigned at = to + (depth * LINE + i * LINES) * 4;
        copy_word(at, from_a + offset_a[i] + depth * 4, left > depth);
        copy_word(at + BK * LINE * 4, from_b + offset_b[i] + depth * 4, left > depth);
      }
  };
  auto end_copy = [&] {
    asm volatile("cp.async.commit_group;" ::: "memory");
    from_a += BK * 4, from_b += BK * 4, left -= BK;
    to = to == ring + (STAGES - 1) * STAGE * 4 ? ring : to + STAGE * 4;
  };
  // Wait for the oldest tile that was not waited for yet. The barrier also frees the tile that all have read.
  auto await_tile = [] {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncthreads();
  };

  float sum[16][8] = {}, left_part[2][16], right_part[2][8];
  const float *rows = shared + row, *columns = shared + BK * LINE + column;
  int stage = 0;
  auto read_step = [&](int slot, int step) {
    read<16>(left_part[slot], rows + step * LINE);
    read<32>(right_part[slot], columns + step * LINE);
  };
  for (int i = 0; i < STAGES - 1; i++) {
#pragma unroll
    for (int part = 0; part < PARTS; part++) copy_part(part);
    end_copy();
  }
  await_tile();
  read_step(0, 0);
  for (int start = 0; start < k; start += BK) {
#pragma unroll
    for (int step = 0; step < BK; step++) {
      if (step % (BK / PARTS) == 0) copy_part(step / (BK / PARTS));
      if (step == BK - 1) {
        end_copy();
        await_tile();
        const bool last = stage == STAGES - 1;
        const int move = last ? (1 - STAGES) * STAGE : STAGE;
        stage = last ? 0 : stage + 1;
        rows += move, columns += move;
      }
      read_step((step + 1) % 2, (step + 1) % BK);
      multiply_add(sum, left_part[step % 2], right_part[step % 2]);
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  store<16, 32>(c, sum, tile.row + row, tile.column + column, m, n);
}
