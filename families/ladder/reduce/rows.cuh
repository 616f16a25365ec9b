// Rows that are held in registers: HELD groups of four values a thread, one load of memory for all passes.
//
// A row takes as few warps as hold it, 1, 2 or 4 of the block's four. So a warp has a row of 1,024 columns in flight, and
// such rows need no barrier.
#include "blocks.cuh"

static_assert(THREADS == 128, "a row has 1, 2 or 4 warps");

struct Row {
  float value[HELD][4];
  int number, columns, log_span;  // of the row's threads
  size_t start;
  bool live;  // whether the row is there: the last block may have threads to spare

  __device__ int span() const { return 1 << log_span; }
  __device__ int lane() const { return threadIdx.x & (span() - 1); }
  __device__ int column(int i) const { return (i * span() + lane()) * 4; }
};

// Load this thread's part of its row; `fill` stands behind the row's end.
__device__ __forceinline__ Row load_row(const float* x, int rows, int columns, float fill) {
  Row row;
  row.columns = columns;
  row.log_span = columns <= HELD * 4 * 32 ? 5 : columns <= HELD * 4 * 64 ? 6 : 7;
  row.number = blockIdx.x * (THREADS >> row.log_span) + (threadIdx.x >> row.log_span);
  row.live = row.number < rows;
  row.start = (size_t)min(row.number, rows - 1) * columns;
  x += row.start;
  if (columns % 4 == 0) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
      float4 four = {fill, fill, fill, fill};
      if (row.column(i) < columns) four = *(const float4*)(x + row.column(i));
      row.value[i][0] = four.x, row.value[i][1] = four.y, row.value[i][2] = four.z, row.value[i][3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < HELD; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) row.value[i][e] = row.column(i) + e < columns ? x[row.column(i) + e] : fill;
  }
  return row;
}

__device__ __forceinline__ void store_row(float* out, const Row& row) {
  if (!row.live) return;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int at = row.column(i);
    float* to = out + row.start + at;
    if (row.columns % 4 == 0) {
      if (at < row.columns) *(float4*)to = float4{row.value[i][0], row.value[i][1], row.value[i][2], row.value[i][3]};
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (at + e < row.columns) to[e] = row.value[i][e];
    }
  }
}

// Call a function with each value and its column, some of them behind the row's end.
template <class Function>
__device__ __forceinline__ void each(Row& row, Function function) {
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i * row.span() * 4 >= row.columns) break;
#pragma unroll
    for (int e = 0; e < 4; e++) function(row.value[i][e], row.column(i) + e);
  }
}

// Return the fold over the row to each of its threads. All rows of a launch span the same, so all meet the barriers.
template <class Value, class Fold>
__device__ __forceinline__ Value across_row(const Row& row, Value value, Fold fold) {
  value = across_warp(value, fold);
  if (row.span() == 32) return value;
  __shared__ Value of_warps[THREADS / 32];
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  const int warps = row.span() / 32, first = (threadIdx.x >> row.log_span) * warps;
  value = of_warps[first];
  for (int i = 1; i < warps; i++) value = fold(value, of_warps[first + i]);
  return value;
}
