// Held: the row is loaded once, 16 bytes a load, and stays in registers for maximum, sum and quotients.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    softmax_held(const float* x, float* out, int rows, int columns) {
  Row row = load_row(x, rows, columns, -INFINITY);
  float top = -INFINITY;
  each(row, [&top](float& value, int) { top = fmaxf(top, value); });
  top = across_row(row, top, Max());
  float sum = 0.0f;
  each(row, [&sum, top](float& value, int) { sum += value = __expf(value - top); });
  const float share = 1.0f / across_row(row, sum, Sum());
  each(row, [share](float& value, int) { value *= share; });
  store_row(out, row);
}
