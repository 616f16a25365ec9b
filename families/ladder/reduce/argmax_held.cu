// Held: each thread finds its largest value, then its row folds value and column as one number of 64 bits. Of equal values
// the first column wins. A row must have no NaN.
#include "rows.cuh"

typedef unsigned long long u64;

// The value's bits, larger for larger values, above the column's, larger for earlier ones.
__device__ __forceinline__ u64 key_of(float value, int column) {
  const unsigned bits = __float_as_uint(value + 0.0f);  // -0 becomes 0
  return (u64)(bits >> 31 ? ~bits : bits | 1u << 31) << 32 | ~(unsigned)column;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    argmax_held(const float* x, int* out, int rows, int columns) {
  Row row = load_row(x, rows, columns, -INFINITY);
  float top = row.value[0][0];
  int place = row.column(0);
  // A thread's columns ascend: a later one must be larger.
  each(row, [&top, &place](float& value, int column) {
    if (value > top) top = value, place = column;
  });
  const u64 best = across_row(row, place < columns ? key_of(top, place) : 0, [](u64 a, u64 b) { return max(a, b); });
  if (row.live && row.lane() == 0) out[row.number] = ~(unsigned)best;
}
