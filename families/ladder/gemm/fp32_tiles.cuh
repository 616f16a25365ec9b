// What the fp32 rungs share: the place of a block's tile, staging, reads of 16 bytes, the multiply-adds, the stores.

struct Tile {
  int row, column;
};

// Blocks take the tiles of the output row by row.
__device__ __forceinline__ Tile find_tile(int m, int n) {
  const int column_tiles = (n + BN - 1) / BN;
  return {(int)(blockIdx.x / column_tiles) * BM, (int)(blockIdx.x % column_tiles) * BN};
}

// Stage COUNT lines from `first` on, BK deep from `start`. Lines behind the end repeat the last one, whose results are
// not stored; what lies behind K is zero.
template <int COUNT>
__device__ __forceinline__ void stage_lines(float (&to)[COUNT][BK + PAD], const float* from, int first, int lines,
                                            int start, int k) {
  const int depth = threadIdx.x % BK;
  for (int line = threadIdx.x / BK; line < COUNT; line += THREADS / BK)
    to[line][depth] = start + depth < k ? from[(size_t)min(first + line, lines - 1) * k + start + depth] : 0.0f;
}

// The same, 16 bytes a load where K is a multiple of four, a depth a line of the tile.
template <int LENGTH>
__device__ __forceinline__ void stage_transposed(float (&to)[BK][LENGTH], const float* from, int first, int lines,
                                                 int start, int k) {
  const int depth = threadIdx.x % (BK / 4) * 4, left = k - start - depth;
#pragma unroll
  for (int line = threadIdx.x / (BK / 4); line < LENGTH - PAD; line += THREADS / (BK / 4)) {
    const float* p = from + (size_t)min(first + line, lines - 1) * k + start + depth;
    float4 value = {};
    if (k % 4 == 0) {
      if (left > 0) value = *(const float4*)p;
    } else {
      if (left > 0) value.x = p[0];
      if (left > 1) value.y = p[1];
      if (left > 2) value.z = p[2];
      if (left > 3) value.w = p[3];
    }
    to[depth][line] = value.x, to[depth + 1][line] = value.y;
    to[depth + 2][line] = value.z, to[depth + 3][line] = value.w;
  }
}

// A lane's place in its warp of 8 by 4. Lanes side by side have one place down, lanes two apart one place across: so
// shared memory can answer the 16-byte reads of half a warp at once.
__device__ __forceinline__ int lane_across(int lane) { return lane & 1 | lane >> 1 & 2 | lane >> 2 & 4; }
__device__ __forceinline__ int lane_down(int lane) { return lane >> 1 & 1 | lane >> 2 & 2; }

// Read groups of four words, GAP words from one to the next.
template <int GAP, int N>
__device__ __forceinline__ void read(float (&to)[N], const float* from) {
#pragma unroll
  for (int i = 0; i < N; i += 4) {
    const float4 value = *(const float4*)(from + i / 4 * GAP);
    to[i] = value.x, to[i + 1] = value.y, to[i + 2] = value.z, to[i + 3] = value.w;
  }
}

// Columns outside: of async_copies.cu one multiply-add in a hundred then reads three registers of one bank, which costs
// a cycle. With rows outside one in fourteen does.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ void multiply_add(float (&sum)[ROWS][COLUMNS], const float (&left)[ROWS],
                                             const float (&right)[COLUMNS]) {
#pragma unroll
  for (int j = 0; j < COLUMNS; j++)
#pragma unroll
    for (int i = 0; i < ROWS; i++) sum[i][j] += left[i] * right[j];
}

// Store groups of 4 x 4 outputs, DOWN rows and ACROSS columns from one to the next.
template <int DOWN, int ACROSS, int ROWS, int COLUMNS>
__device__ __forceinline__ void store(float* c, const float (&sum)[ROWS][COLUMNS], int row, int column, int m, int n) {
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int at = row + i / 4 * DOWN + i % 4;
    if (at >= m) continue;
#pragma unroll
    for (int j = 0; j < COLUMNS; j += 4) {
      const int to = column + j / 4 * ACROSS;
      float* p = c + (size_t)at * n + to;
      if (n % 4 == 0) {
        if (to < n) *(float4*)p = float4{sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]};
      } else {
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (to + e < n) p[e] = sum[i][j + e];
      }
    }
  }
}
