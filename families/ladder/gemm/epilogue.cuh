// What is done to a product before it is stored, chosen at compile time:
//   SCALES      times a scale of the row of A and one of the row of W, for operands of eight bits
//   NORM        LayerNorm of A's rows, folded: rstd (sum - mean column_sum); W holds its scale, the bias its shift
//   BIAS        + bias
//   ACTIVATION  1 ReLU, 2 GELU, 3 GELU by tanh
//   RESIDUAL    + a float32 residual
//   ROW_SUMS    the sum and the sum of squares of each row of what is stored, for each tile of columns
// A warp stages 16 rows x 64 columns of 16-bit output in shared memory, and the copy engine stores them, clipped at
// the ends of D. A quad of lanes reads and writes whole sectors of float32, so a residual and an output of float32
// (FLOAT_OUT) pass shared memory by.

struct Epilogue {
  const float* bias;         // [N]
  const float* column_sums;  // [N] of W
  const float2* moments;     // [moment_tiles, M]: sum and sum of squares of a part of each row of A
  const float* residual;     // [M, N]
  float* d;                  // [M, N], float32
  float2* sums;              // [tiles of columns, M]
  const float *row_scales, *column_scales;  // [M], [N]
  int moment_tiles;
  float epsilon;
};

constexpr int BOX_ROWS = 16, BOX_COLUMNS = LINE / 2, BOX_BYTES = BOX_ROWS * LINE;
constexpr int STAGING_BYTES = FLOAT_OUT ? 0 : 8 * BOXES * BOX_BYTES;

// Store four matrices of 8 x 8 of 16 bits; each lane gives the address of one row.
__device__ __forceinline__ void store_matrices(u32 to, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Store a box of shared memory; what lies outside of the matrix is left out.
__device__ __forceinline__ void store_box(const TensorMap& map, int column, int row, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(from)
               : "memory");
}

__device__ __forceinline__ void end_store() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until the copy engine has read all but the last LEFT boxes of this thread: their places are free.
template <int LEFT>
__device__ __forceinline__ void await_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float activate(float x) {
#if ACTIVATION == 1
  return fmaxf(x, 0.0f);
#elif ACTIVATION == 2
  // x Phi(x), Phi by a polynomial in x^2 cut to [0, 1] (families/resident/triton_steps.py).
  const float square = x * x;
  float slope = 4.312710527333037e-08f;
  slope = slope * square - 2.5485443956321907e-06f;
  slope = slope * square + 6.521377349530807e-05f;
  slope = slope * square - 9.6730077911058e-04f;
  slope = slope * square + 9.455236241824544e-03f;
  slope = slope * square - 6.595716082397797e-02f;
  slope = slope * square + 3.988047686733097e-01f;
  return x * __saturatef(0.5f + x * slope);
#elif ACTIVATION == 3
  // x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3); the exponent has base 2.
  const float power = x * (-2.302208198f - 0.1029432397f * x * x);
  return __fdividef(x, 1.0f + exp2_fast(power));
#else
  return x;
#endif
}

// What a lane needs of a box of a row: eight pairs of neighbours, eight columns apart.
struct Pairs {
  float2 at[8];
};

// Read the pairs of which `left` columns are there; zeros behind them.
__device__ __forceinline__ Pairs read_pairs(const float* from, int left) {
  Pairs pairs;
#pragma unroll
  for (int pair = 0; pair < 8; pair++)
    pairs.at[pair] = pair * 8 < left ? *(const float2*)(from + pair * 8) : float2{};
  return pairs;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Finish a warpgroup's sums [64, BN] of a part of its tile, whose first output is at `row` and `column`; store them.
__device__ __forceinline__ void finish(const Epilogue& epilogue, const TensorMap& map_d, float (&c)[BN / 2],
                                       u32 staging, int part, int row, int column, int column_tile, int m, int n,
                                       int k) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  row += warp % 4 * 16;
  [[maybe_unused]] const int own[2] = {row + lane / 4, row + lane / 4 + 8};
#if ROW_SUMS
  float total[2] = {}, squares[2] = {};
#endif
#if SCALES
  const float row_scale[2] = {epilogue.row_scales[min(own[0], m - 1)], epilogue.row_scales[min(own[1], m - 1)]};
#endif
#if NORM
  float mean[2], scale[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float2 moment = {};
    for (int tile = 0; tile < epilogue.moment_tiles && own[i] < m; tile++) {
      const float2 part = epilogue.moments[(size_t)tile * m + own[i]];
      moment.x += part.x, moment.y += part.y;
    }
    mean[i] = moment.x / k;
    scale[i] = rsqrtf(fmaxf(moment.y / k - mean[i] * mean[i], 0.0f) + epilogue.epsilon);
  }
#endif
#pragma unroll
  for (int box = 0; box < BN / BOX_COLUMNS; box++) {
    // What a box needs is read before any of it is used: the latency of memory is paid once a box.
    const int first = column + box * BOX_COLUMNS + lane % 4 * 2;
    [[maybe_unused]] const int left[2] = {own[0] < m ? n - first : 0, own[1] < m ? n - first : 0};
#if BIAS
    const Pairs bias = read_pairs(epilogue.bias + first, n - first);
#endif
#if SCALES
    const Pairs column_scales = read_pairs(epilogue.column_scales + first, n - first);
#endif
#if NORM
    const Pairs column_sums = read_pairs(epilogue.column_sums + first, n - first);
#endif
#if RESIDUAL || FLOAT_OUT
    const size_t to[2] = {(size_t)own[0] * n + first, (size_t)own[1] * n + first};
#endif
#if RESIDUAL
    const Pairs residual[2] = {read_pairs(epilogue.residual + to[0], left[0]),
                               read_pairs(epilogue.residual + to[1], left[1])};
#endif
#if !FLOAT_OUT
    const u32 stage = staging + (warp * BOXES + (part * (BN / BOX_COLUMNS) + box) % BOXES) * BOX_BYTES;
    if (lane == 0) await_stores<BOXES - 1>();
    __syncwarp();
#endif
#pragma unroll
    for (int pair = 0; pair < 8; pair++) {
      const int j = box * 8 + pair;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float &x = c[4 * j + 2 * i], &y = c[4 * j + 2 * i + 1];
#if SCALES
        x *= row_scale[i] * column_scales.at[pair].x, y *= row_scale[i] * column_scales.at[pair].y;
#endif
#if NORM
        x = scale[i] * (x - mean[i] * column_sums.at[pair].x), y = scale[i] * (y - mean[i] * column_sums.at[pair].y);
#endif
#if BIAS
        x += bias.at[pair].x, y += bias.at[pair].y;
#endif
        x = activate(x), y = activate(y);
#if RESIDUAL
        x += residual[i].at[pair].x, y += residual[i].at[pair].y;
#endif
#if FLOAT_OUT
        if (pair * 8 < left[i]) *(float2*)(epilogue.d + to[i] + pair * 8) = float2{x, y};
#endif
#if ROW_SUMS
        total[i] += x + y, squares[i] += x * x + y * y;
#endif
      }
#if !FLOAT_OUT
      if (pair % 2 == 1)
        store_matrices(stage + swizzled(lane % 16, pair - 1 + lane / 16), pack(c[4 * j - 4], c[4 * j - 3]),
                       pack(c[4 * j - 2], c[4 * j - 1]), pack(c[4 * j], c[4 * j + 1]),
                       pack(c[4 * j + 2], c[4 * j + 3]));
#endif
    }
#if !FLOAT_OUT
    publish_shared();
    __syncwarp();
    if (lane == 0) {
      if (row < m && column + box * BOX_COLUMNS < n) store_box(map_d, column + box * BOX_COLUMNS, row, stage);
      end_store();
    }
#endif
  }
#if ROW_SUMS
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float2 sums = {quad_sum(total[i]), quad_sum(squares[i])};
    if (lane % 4 == 0 && own[i] < m) epilogue.sums[(size_t)column_tile * m + own[i]] = sums;
  }
#endif
}
