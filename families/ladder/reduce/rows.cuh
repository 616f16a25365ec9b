// A row that its block holds in registers: HELD groups of four values a thread, one load of memory for all passes.
#include "blocks.cuh"

struct Row {
  float value[HELD][4];
  int columns;
};

__device__ __forceinline__ int first_column(int i) { return (i * THREADS + threadIdx.x) * 4; }

// Load the block's row; `fill` stands behind its end.
__device__ __forceinline__ Row load_row(const float* x, int columns, float fill) {
  x += (size_t)blockIdx.x * columns;
  Row row;
  row.columns = columns;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int at = first_column(i);
    if (columns % 4 == 0 && at < columns) {
      const float4 four = *(const float4*)(x + at);
      row.value[i][0] = four.x, row.value[i][1] = four.y, row.value[i][2] = four.z, row.value[i][3] = four.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++) row.value[i][e] = at + e < columns ? x[at + e] : fill;
    }
  }
  return row;
}

__device__ __forceinline__ void store_row(float* out, const Row& row) {
  const int columns = row.columns;
  out += (size_t)blockIdx.x * columns;
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    const int at = first_column(i);
    if (columns % 4 == 0) {
      if (at < columns)
        *(float4*)(out + at) = float4{row.value[i][0], row.value[i][1], row.value[i][2], row.value[i][3]};
    } else {
#pragma unroll
      for (int e = 0; e < 4; e++)
        if (at + e < columns) out[at + e] = row.value[i][e];
    }
  }
}

// Call a function with each value and its column, some of them behind the row's end.
template <class Function>
__device__ __forceinline__ void each(Row& row, Function function) {
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    if (i * THREADS * 4 >= row.columns) break;
#pragma unroll
    for (int e = 0; e < 4; e++) function(row.value[i][e], first_column(i) + e);
  }
}
