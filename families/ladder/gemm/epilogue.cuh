// What is done to a product before it is stored, chosen at compile time:
//   SCALES      times a scale of the row of A and one of the row of W, for operands of eight bits
//   NORM        LayerNorm of A's rows, folded: rstd (sum - mean column_sum); W holds its scale, the bias its shift
//   BIAS        + bias
//   ACTIVATION  1 ReLU, 2 GELU, 3 GELU by tanh, 4 GELU in pairs of float16
//   RESIDUAL    + a residual stream of two float16: the high one is the next product's operand, the low one holds the
//               bits that it lacks, 22 in all. A row of the stream may be stored times a power of two, its `inverse`.
//   ROW_SUMS    the sum and the sum of squares of each row of what is stored, for each tile of columns
// A warp stages boxes of 16 rows x 64 columns of 16-bit output in shared memory, and the copy engine stores them,
// clipped at the ends of D. The residual's boxes are copied to the same places before the products end. A quad of lanes
// writes whole sectors of float32, so an output of float32 (FLOAT_OUT) passes shared memory by.

struct Epilogue {
  const float* bias;         // [N]
  const float* column_sums;  // [N] of W
  const float2* moments;     // [moment_tiles, M]: sum and sum of squares of a part of each row of A
  const float* inverses;     // [M], with NORM or RESIDUAL
  float* d;                  // [M, N], float32
  float2* sums;              // [tiles of columns, M]
  const float *row_scales, *column_scales;  // [M], [N]
  int moment_tiles;
  float epsilon;
};

constexpr int BOX_ROWS = 16, BOX_COLUMNS = LINE / 2, BOX_BYTES = BOX_ROWS * LINE;
constexpr int PLACE_BYTES = (RESIDUAL ? 2 : 1) * BOX_BYTES;  // what a warp stages of 64 columns
constexpr int STAGING_BYTES = FLOAT_OUT ? 0 : 8 * BOXES * PLACE_BYTES;
constexpr int PARTS = PINGPONG ? BM / 64 : 1;  // times 64 rows that a warpgroup takes
constexpr int PART_BOXES = BN / BOX_COLUMNS;  // of a warpgroup's 64 rows

// Store four matrices of 8 x 8 of 16 bits; each lane gives the address of one row.
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

__device__ __forceinline__ void load_matrices(u32 from, u32 (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(from)
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

// GELU of a pair of float16 as x (1 + tanh u) / 2, u = x (a + b x^2 + c x^4). The coefficients follow erf within 2.5e-5
// of x; half precision leaves 4e-4. x^2 stops where tanh has long been 1, as c x^4 would turn u round.
__device__ __forceinline__ u32 activate_pair(u32 x) {
#if ACTIVATION == 4
  asm("{\n.reg .b32 t, u, h;\nmul.rn.f16x2 t, %0, %0;\nmin.f16x2 t, t, %1;\n"
      "fma.rn.f16x2 u, t, %2, %3;\nfma.rn.f16x2 u, u, t, %4;\nmul.rn.f16x2 u, u, %0;\n"
      "tanh.approx.f16x2 u, u;\nmul.rn.f16x2 h, %0, %5;\nfma.rn.f16x2 %0, h, u, h;\n}"
      : "+r"(x)
      : "r"(0x50005000), "r"(0x8DC28DC2), "r"(0x28BD28BD), "r"(0x3A613A61), "r"(0x38003800));  // 32, c, b, a, 1/2
#endif
  return x;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

#if RESIDUAL
// The residual's boxes, in the order of a warp's boxes in its tile.
struct Residual {
  const TensorMap &high, &low;
  u32 staging, barriers;  // of this warp
  int row, column;        // of its first box
  u32 phases;             // a bit for each place

  // Ask for a box. Its place must have been read.
  __device__ __forceinline__ void copy(int box) const {
    const u32 to = staging + box % BOXES * PLACE_BYTES, barrier = barriers + box % BOXES * 8;
    const int at = column + box % PART_BOXES * BOX_COLUMNS, from = row + box / PART_BOXES * 64;
    barrier_expect(barrier, PLACE_BYTES);
    copy_box(to, high, at, from, barrier);
    copy_box(to + BOX_BYTES, low, at, from, barrier);
  }
  __device__ __forceinline__ void await(int box) {
    barrier_wait(barriers + box % BOXES * 8, phases >> box % BOXES & 1);
    phases ^= 1 << box % BOXES;
  }
};

__device__ __forceinline__ float2 unpack(u32 pair) {
  float2 y;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(y.x), "=f"(y.y)
      : "r"(pair));
  return y;
}
#else
struct Residual {};
#endif

// What a lane needs of its rows, two of each part of its tile, read before the products begin.
struct Rows {
  float mean[PARTS][2], scale[PARTS][2], inverse[PARTS][2];
};

// Read them from the lane's first row on. All rows' reads are under way together.
__device__ __forceinline__ Rows read_rows(const Epilogue& epilogue, int row, int m, int k) {
  Rows rows = {};
  int own[PARTS][2];
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      own[part][i] = min(row + part * 64 + i * 8, m - 1);
#if NORM || RESIDUAL
      rows.inverse[part][i] = __ldg(epilogue.inverses + own[part][i]);
#endif
#if SCALES
      rows.scale[part][i] = __ldg(epilogue.row_scales + own[part][i]);
#endif
    }
#if NORM
  float2 moments[PARTS][2] = {};
#pragma unroll 4
  for (int tile = 0; tile < epilogue.moment_tiles; tile++)
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float2 more = __ldg(epilogue.moments + (size_t)tile * m + own[part][i]);
        moments[part][i].x += more.x, moments[part][i].y += more.y;
      }
  const float share = __frcp_rn(k);
#pragma unroll
  for (int part = 0; part < PARTS; part++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float mean = moments[part][i].x * share, inverse = rows.inverse[part][i];
      const float variance = fmaxf(moments[part][i].y * share - mean * mean, 0.0f);
      rows.mean[part][i] = mean;
      rows.scale[part][i] = rsqrtf(variance + epilogue.epsilon * inverse * inverse);
    }
#endif
  return rows;
}

// Finish a warp's sums of 16 rows of a part of its tile and store them; its first output is at `row` and `column`.
__device__ __forceinline__ void finish(const Epilogue& epilogue, const TensorMap& map_d, const TensorMap& map_low,
                                       float (&c)[BN / 2], const Rows& rows, [[maybe_unused]] Residual& residual,
                                       u32 staging, int part, int row, int column, int column_tile, int m, int n) {
  const int lane = threadIdx.x % 32;
  [[maybe_unused]] const int own[2] = {row + lane / 4, row + lane / 4 + 8};
#if ROW_SUMS
  float total[2] = {}, squares[2] = {};
#endif
#pragma unroll
  for (int box = 0; box < PART_BOXES; box++) {
    // What a box needs is read before any of it is used: the latency of memory is paid once a box.
    [[maybe_unused]] const int first = column + box * BOX_COLUMNS + lane % 4 * 2;
#if BIAS
    const Pairs bias = read_pairs(epilogue.bias + first, n - first);
#endif
#if SCALES
    const Pairs column_scales = read_pairs(epilogue.column_scales + first, n - first);
#endif
#if NORM
    const Pairs column_sums = read_pairs(epilogue.column_sums + first, n - first);
#endif
#if !FLOAT_OUT
    const int number = part * PART_BOXES + box;
    const u32 stage = staging + number % BOXES * PLACE_BYTES;
#if RESIDUAL
    residual.await(number);
#else
    if (lane == 0) await_stores<BOXES - 1>();
    __syncwarp();
#endif
#endif
#pragma unroll
    for (int chunk = 0; chunk < 8; chunk += 2) {  // 16 columns: four matrices of 8 x 8
#if !FLOAT_OUT
      const u32 at = stage + swizzled(lane % 16, chunk + lane / 16);
      u32 high[4];
#endif
#if RESIDUAL
      u32 low[4];
      load_matrices(at, high);
      load_matrices(at + BOX_BYTES, low);
#endif
#pragma unroll
      for (int matrix = 0; matrix < 4; matrix++) {
        const int i = matrix % 2, pair = chunk + matrix / 2;
        float x = c[(box * 8 + pair) * 4 + 2 * i], y = c[(box * 8 + pair) * 4 + 2 * i + 1];
#if SCALES
        x *= rows.scale[part][i] * column_scales.at[pair].x, y *= rows.scale[part][i] * column_scales.at[pair].y;
#endif
#if NORM
        x = rows.scale[part][i] * (x - rows.mean[part][i] * column_sums.at[pair].x);
        y = rows.scale[part][i] * (y - rows.mean[part][i] * column_sums.at[pair].y);
#endif
#if BIAS
        x += bias.at[pair].x, y += bias.at[pair].y;
#endif
        x = activate(x), y = activate(y);
#if RESIDUAL
        const float2 before = unpack(high[matrix]), rest = unpack(low[matrix]);
        x = x * rows.inverse[part][i] + before.x + rest.x, y = y * rows.inverse[part][i] + before.y + rest.y;
#endif
#if ROW_SUMS
        total[i] += x + y, squares[i] += x * x + y * y;
#endif
#if FLOAT_OUT
        if (own[i] < m && pair * 8 < n - first)
          *(float2*)(epilogue.d + (size_t)own[i] * n + first + pair * 8) = float2{x, y};
#else
        high[matrix] = activate_pair(pack(x, y));
#endif
#if RESIDUAL
        const float2 kept = unpack(high[matrix]);
        low[matrix] = pack(x - kept.x, y - kept.y);
#endif
      }
#if !FLOAT_OUT
      store_matrices(at, high);
#endif
#if RESIDUAL
      store_matrices(at + BOX_BYTES, low);
#endif
    }
#if !FLOAT_OUT
    publish_shared();
    __syncwarp();
    if (lane == 0) {
      if (row < m && column + box * BOX_COLUMNS < n) {
        store_box(map_d, column + box * BOX_COLUMNS, row, stage);
#if RESIDUAL
        store_box(map_low, column + box * BOX_COLUMNS, row, stage + BOX_BYTES);
#endif
      }
      end_store();
#if RESIDUAL
      // The place of the box before this one takes a later box, if this tile has one.
      if (number > 0 && number - 1 + BOXES < PARTS * PART_BOXES) {
        await_stores<1>();
        residual.copy(number - 1 + BOXES);
      }
#endif
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
