// Held: two passes over a row in registers, the mean first, then the squared distances from it. Memory is read once.
#include "rows.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    layernorm_held(const float* x, float* out, int rows, int columns) {
  Row row = load_row(x, rows, columns, 0.0f);
  float sum = 0.0f, squares = 0.0f;
  each(row, [&sum](float& value, int) { sum += value; });
  const float mean = across_row(row, sum, Sum()) / columns;
  // What stands behind the row's end has no distance from the mean.
  each(row, [&squares, mean, columns](float& value, int at) {
    value = at < columns ? value - mean : 0.0f;
    squares += value * value;
  });
  const float scale = rsqrtf(across_row(row, squares, Sum()) / columns + EPSILON);
  each(row, [scale](float& value, int) { value *= scale; });
  store_row(out, row);
}
