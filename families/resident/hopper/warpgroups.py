"""CUDA source of the warpgroup kernel, kept as text so that an exported file can hold it."""

from __future__ import annotations

WARPGROUPS = r"""
// The whole forward of short sequences in one launch for compute capability 9.0: warpgroup products, residual in
// registers, keys and values in shared memory, weights streamed through a ring of tiles by bulk copies.
//
// A warpgroup (128 threads) owns 64 rows. Its residual lies in registers in the layout of a product's accumulators,
// which is also, rounded to half precision, the layout of the next product's left operand: no exchange between threads
// except for keys and values. All right operands lie in shared memory as core matrices of 8 x 16 bytes (K-major, no
// swizzle): core (n8, k8) of a tile of N columns at byte (k8 * N / 8 + n8) * 128. A thread's pair of accumulators is 4
// bytes at lane * 4 of a core matrix, so stores of keys and values meet no bank twice.
//
// Compile-time: D width, HEADS, HD columns of a head (multiple of 16), FFN (multiple of 64), WGS warpgroups, GROUP
// sequences a program, CAUSAL, MASKED, STAGES tiles of the ring, BF16 operands, IO (0 float32, 1 float16, 2 bfloat16).

constexpr int THREADS = WGS * 128;
constexpr int ROWS = WGS * 64;
constexpr int HW = HEADS * HD;
constexpr int STEP = 64;   // columns of a weight tile
constexpr int BLOCK = 64;  // keys taken together
constexpr int BIAS = D > STEP ? D : STEP;
constexpr int WEIGHT_BYTES = STEP * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + BIAS * 4;
constexpr int SIDE_TILES = HW / STEP;  // tiles of each of keys, values, queries, output projection
constexpr int FFN_TILES = FFN / STEP;
constexpr int LAYER_TILES = 4 * SIDE_TILES + 2 * FFN_TILES;
constexpr int KEY_BYTES = ROWS * HW * 2;
constexpr int AHEAD = STAGES - STAGES / 3;  // tiles asked for before their use; the rest is how far a group may lead
constexpr int SEQUENCE_ROWS = ROWS / GROUP;

// ---- shared parts

// Descriptor of a right operand: `along_k` bytes from one core matrix to the next along K; along N they are adjacent.
__device__ __forceinline__ u64 describe(u32 address, u32 along_k) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(along_k >> 4) << 16) | ((u64)(128 >> 4) << 32);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// ---- pieces -------------------------------------------------------------------------------------------------------

// Accumulators [64, N] = or (ADD) += a [64, 16 * STEPS] times the operand at `address`.
template <int N, int STEPS, bool ADD>
__device__ __forceinline__ void multiply(float (&c)[N / 2], const u32* a, u32 address, u32 along_k) {
  products_begin();
#pragma unroll
  for (int k = 0; k < STEPS; k++) product<N>(c, a + 4 * k, describe(address + k * 2 * along_k, along_k), ADD || k > 0);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  wait_products<N>(c);
}

// c += (or =) a row vector of N floats in shared memory.
template <int N, bool ADD>
__device__ __forceinline__ void add_row(float (&c)[N / 2], u32 address) {
  address += (threadIdx.x % 4) * 8;
#pragma unroll
  for (int j = 0; j < N / 8; j++) {
    float2 b = load_shared(address + j * 32);
    c[4 * j + 0] = (ADD ? c[4 * j + 0] : 0.0f) + b.x;
    c[4 * j + 1] = (ADD ? c[4 * j + 1] : 0.0f) + b.y;
    c[4 * j + 2] = (ADD ? c[4 * j + 2] : 0.0f) + b.x;
    c[4 * j + 3] = (ADD ? c[4 * j + 3] : 0.0f) + b.y;
  }
}

// Round accumulators to the left operand of the next product.
template <int N>
__device__ __forceinline__ void to_operand(u32* a, const float (&c)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 4; i++) a[i] = pack(c[2 * i], c[2 * i + 1]);
}

// Sum over a thread's two rows of f(element): four partial sums a row, or each addition would await the one before.
template <typename F>
__device__ __forceinline__ void row_sums(float (&sum)[2], F element) {
  float part[2][4] = {};
#pragma unroll
  for (int i = 0; i < D / 2; i++) part[i / 2 % 2][i / 4 % 4 ^ i % 2 * 2] += element(i);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float (&p)[4] = part[half];
    sum[half] = quad_sum((p[0] + p[1]) + (p[2] + p[3]));
  }
}

// Mean and reciprocal deviation of the two rows a thread shares with its quad.
__device__ __forceinline__ void moments(const float (&x)[D / 2], float eps, float (&mean)[2], float (&scale)[2]) {
  float sum[2];
  row_sums(sum, [&](int i) { return x[i]; });
  mean[0] = sum[0] * (1.0f / D);
  mean[1] = sum[1] * (1.0f / D);
  row_sums(sum, [&](int i) { return (x[i] - mean[i / 2 % 2]) * (x[i] - mean[i / 2 % 2]); });
  scale[0] = rsqrt_fast(sum[0] * (1.0f / D) + eps);
  scale[1] = rsqrt_fast(sum[1] * (1.0f / D) + eps);
}

__device__ __forceinline__ void normalise(u32 (&a)[D / 4], const float (&x)[D / 2], float eps) {
  float mean[2], scale[2];
  moments(x, eps, mean, scale);
#pragma unroll
  for (int i = 0; i < D / 4; i++) {
    float shift = -mean[i % 2] * scale[i % 2];
    a[i] = pack(x[2 * i] * scale[i % 2] + shift, x[2 * i + 1] * scale[i % 2] + shift);
  }
}

// Say that this warp has used a tile; the first thread asks for another.
__device__ __forceinline__ void done(Stream& stream) {
  if (threadIdx.x == 0 && stream.left > 0) {
    bool wraps = stream.slot + AHEAD >= STAGES;
    stream.request(wraps ? stream.slot + AHEAD - STAGES : stream.slot + AHEAD, wraps ? stream.phase : stream.phase ^ 1);
  }
  stream.used();
}

// Keys and values of this warpgroup's rows, normalised rows `a`, into shared memory.
__device__ __forceinline__ void write_keys(Stream& stream, const u32 (&a)[D / 4], u32 keys, u32 values) {
  u32 lane = threadIdx.x % 32 * 4;
  u32 row8 = threadIdx.x / 32 * 2;
#pragma unroll 1
  for (int tile = 0; tile < SIDE_TILES; tile++) {
    float c[STEP / 2];
    multiply<STEP, D / 16, false>(c, a, stream.current(), STEP * 16);
    done(stream);
    u32 to = keys + (tile * (STEP / 8) * (ROWS / 8) + row8) * 128 + lane;
#pragma unroll
    for (int j = 0; j < STEP / 8; j++) {
      store_shared(to + j * (ROWS / 8) * 128, pack(c[4 * j], c[4 * j + 1]));
      store_shared(to + (j * (ROWS / 8) + 1) * 128, pack(c[4 * j + 2], c[4 * j + 3]));
    }
  }
#pragma unroll 1
  for (int tile = 0; tile < SIDE_TILES; tile++) {
    float c[STEP / 2];
    multiply<STEP, D / 16, false>(c, a, stream.current(), STEP * 16);
    done(stream);
    u32 to = values + (row8 * (HW / 8) + tile * (STEP / 8)) * 128 + lane;
#pragma unroll
    for (int j = 0; j < STEP / 8; j++) {
      store_shared(to + j * 128, transpose(pack(c[4 * j], c[4 * j + 1])));
      store_shared(to + (HW / 8 + j) * 128, transpose(pack(c[4 * j + 2], c[4 * j + 3])));
    }
  }
  publish_shared();
}

// Context [64, HD] of one head over `blocks` times 64 keys, as a left operand; `visible` holds a bit a key for the
// thread's two rows. Blocks are taken one after the other with a running maximum, so that both warpgroups of a causal
// sequence run the same instructions: two copies of them do not fit the instruction cache.
__device__ __forceinline__ void attend(
    u32 (&context)[HD / 4], const u32 (&q)[HD / 4], u32 keys, u32 values, const u32 (&visible)[2], int blocks) {
  float c[HD / 2], top[2] = {NEGATIVE, NEGATIVE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < HD / 2; i++) c[i] = 0.0f;
#pragma unroll 1
  for (int block = 0; block < blocks; block++) {
    float s[BLOCK / 2];
    multiply<BLOCK, HD / 16, false>(s, q, keys + block * (BLOCK / 8) * 128, ROWS / 8 * 128);
    u32 seen[2] = {opaque(visible[0] >> block * (BLOCK / 4)), opaque(visible[1] >> block * (BLOCK / 4))};
    float part[2][4];
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++) {
      float& most = part[i / 2 % 2][i / 4 % 4];
      s[i] = seen[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1 ? s[i] : NEGATIVE;
      most = i % 2 == 0 && i < 16 ? s[i] : fmaxf(most, s[i]);
    }
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float (&p)[4] = part[half];
      float most = fmaxf(top[half], quad_max(fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3]))));
      rescale[half] = exp2_fast(top[half] - most);
      top[half] = most;
    }
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++) {
      float& total = part[i / 2 % 2][i / 4 % 4];
      s[i] = exp2_fast(s[i] - top[i / 2 % 2]);
      total = i % 2 == 0 && i < 16 ? s[i] : total + s[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float (&p)[4] = part[half];
      sum[half] = sum[half] * rescale[half] + ((p[0] + p[1]) + (p[2] + p[3]));
    }
    u32 p[BLOCK / 4];
    to_operand<BLOCK>(p, s);
#pragma unroll
    for (int i = 0; i < HD / 2; i++) c[i] *= rescale[i / 2 % 2];
    multiply<HD, BLOCK / 16, true>(c, p, values + block * (BLOCK / 8) * (HW / 8) * 128, HW / 8 * 128);
  }
  // A row without a visible key sees every key alike, and is written as zero at the end, or never.
  float scale[2] = {1.0f / quad_sum(sum[0]), 1.0f / quad_sum(sum[1])};
#pragma unroll
  for (int i = 0; i < HD / 2; i++) c[i] *= scale[i / 2 % 2];
  to_operand<HD>(context, c);
}

// x += attention(a) Wo + bo, head by head.
__device__ __forceinline__ void attention(
    Stream& stream, float (&x)[D / 2], const u32 (&a)[D / 4], u32 keys, u32 values, const u32 (&visible)[2],
    int blocks) {
  constexpr int PARTS = HD > STEP ? HD / STEP : 1;  // tiles of a head
  constexpr int PART = HD > STEP ? STEP : HD;       // columns of a head in a tile
#pragma unroll 1
  for (int column = 0; column < HW; column += PART * PARTS) {
    u32 within = column % STEP;  // where a narrow head stands in its tile
    u32 q[HD / 4], context[HD / 4];
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      u32 tile = stream.current();
      float c[PART / 2];
      add_row<PART, false>(c, tile + WEIGHT_BYTES + within * 4);
      multiply<PART, D / 16, true>(c, a, tile + within / 8 * 128, STEP * 16);
      to_operand<PART>(q + part * (PART / 4), c);
      if (PARTS > 1) done(stream);
    }
    attend(context, q, keys + column / 8 * (ROWS / 8) * 128, values + column / 8 * 128, visible, blocks);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      u32 tile = PARTS > 1 ? stream.current() : stream.following();
      if (part == 0 && column == 0) add_row<D, true>(x, tile + WEIGHT_BYTES);
      multiply<D, PART / 16, true>(x, context + part * (PART / 4), tile + within / 8 * (D / 8) * 128, D * 16);
      if (PARTS > 1) done(stream);
    }
    if (PARTS == 1 && within + PART == STEP) {
      done(stream);
      done(stream);
    }
  }
}

// x += gelu(a W1 + b1) W2 + b2.
__device__ __forceinline__ void feed_forward(Stream& stream, float (&x)[D / 2], const u32 (&a)[D / 4]) {
#pragma unroll 1
  for (int tile = 0; tile < FFN_TILES; tile++) {
    u32 in = stream.current();
    float c[STEP / 2];
    add_row<STEP, false>(c, in + WEIGHT_BYTES);
    multiply<STEP, D / 16, true>(c, a, in, STEP * 16);
    done(stream);
    u32 hidden[STEP / 4];
#pragma unroll
    for (int i = 0; i < STEP / 4; i++) hidden[i] = pack(gelu(c[2 * i]), gelu(c[2 * i + 1]));
    u32 out = stream.current();
    if (tile == 0) add_row<D, true>(x, out + WEIGHT_BYTES);
    multiply<D, STEP / 16, true>(x, hidden, out, D * 16);
    done(stream);
  }
}

// ---- the forward --------------------------------------------------------------------------------------------------

// Where one of a thread's two rows lies: token index, whether it exists, whether the mask keeps it.
struct Row {
  long long token;
  bool inside, valid;
};

__device__ __forceinline__ Row locate(int block, int row, int batch, int length, const u8* mask) {
  int sequence = block * GROUP + row / SEQUENCE_ROWS, position = row % SEQUENCE_ROWS;
  Row y;
  y.inside = sequence < batch && position < length;
  y.token = (long long)sequence * length + position;
  y.valid = y.inside && (!MASKED || mask[y.token]);
  return y;
}

// The bits of `keys` (one a key of 32) a thread's place in its quad stands for: bit 2j + b for key 8j + 2t + b.
__device__ __forceinline__ u32 own_bits(u32 keys) {
  keys >>= threadIdx.x % 4 * 2;
  return (keys & 3) | (keys >> 6 & 12) | (keys >> 12 & 48) | (keys >> 18 & 192);
}

// The keys `row` may see, of those present.
__device__ __forceinline__ u32 visible_keys(int row, u32 present) {
  if (GROUP > 1) present &= ((1ull << SEQUENCE_ROWS / 4) - 1) << row / SEQUENCE_ROWS * (SEQUENCE_ROWS / 4);
  if (CAUSAL) {
    int last = row % 8 - int(threadIdx.x % 4 * 2) + 1;  // how many of its own two keys among the row's eight are past
    u32 near = last >= 2 ? 3 : last == 1 ? 1 : 0;
    present &= ((1u << row / 8 * 2) - 1) | near << row / 8 * 2;
  }
  return present;
}

__device__ __forceinline__ void layer(
    Stream& stream, float (&x)[D / 2], u32 keys, u32 values, const u32 (&visible)[2], int blocks, float eps) {
  u32 a[D / 4];
  constexpr bool APART = WGS == 2 && CAUSAL;  // the first warpgroup never reads the second's keys
  bool first = threadIdx.x < 128;
  normalise(a, x, eps);
  // The keys of the layer before are free once every reader is through.
  if (APART) {
    if (first) named_sync<1, 256>();
    else named_sync<4, 128>();
  } else {
    named_sync<1, THREADS>();
  }
  write_keys(stream, a, keys, values);
  if (APART) {
    if (first) { named_arrive<2, 256>(); named_sync<3, 128>(); }
    else named_sync<2, 256>();
  } else {
    named_sync<2, THREADS>();
  }
  attention(stream, x, a, keys, values, visible, blocks);
  if (APART && !first) named_arrive<1, 256>();
  normalise(a, x, eps);
  feed_forward(stream, x, a);
}

__device__ __forceinline__ void forward(
    Stream& stream, u32 keys, u32 values, const io_t* input, const u8* mask, io_t* output, const float* final_norm,
    int blocks, int batch, int length, int layers, float eps) {
  int quad = threadIdx.x % 4;
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  int key_blocks = CAUSAL ? threadIdx.x / 128 + 1 : WGS;
#pragma unroll 1
  for (int block = blockIdx.x; block < blocks; block += gridDim.x) {
    Row rows[2] = {locate(block, row, batch, length, mask), locate(block, row + 8, batch, length, mask)};
    float x[D / 2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const io2_t* from = (const io2_t*)(input + rows[half].token * D) + quad;
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        float2 pair = make_float2(0.0f, 0.0f);
        if (rows[half].inside) pair = widen(from[j * 4]);
        x[4 * j + 2 * half] = pair.x;
        x[4 * j + 2 * half + 1] = pair.y;
      }
    }
    u32 present = 0;
#pragma unroll
    for (int part = 0; part < ROWS / 32; part++) {
      bool valid = locate(block, part * 32 + threadIdx.x % 32, batch, length, mask).valid;
      present |= own_bits(__ballot_sync(~0u, valid)) << part * 8;
    }
    u32 visible[2] = {visible_keys(row, present), visible_keys(row + 8, present)};
#pragma unroll 1
    for (int index = 0; index < layers; index++) layer(stream, x, keys, values, visible, key_blocks, eps);
    float mean[2], scale[2];
    moments(x, eps, mean, scale);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      io2_t* to = (io2_t*)(output + rows[half].token * D) + quad;
#pragma unroll
      for (int j = 0; j < D / 8; j++) {
        float2 gamma = __ldg((const float2*)final_norm + j * 4 + quad);
        float2 beta = __ldg((const float2*)(final_norm + D) + j * 4 + quad);
        float left = (x[4 * j + 2 * half] - mean[half]) * scale[half] * gamma.x + beta.x;
        float right = (x[4 * j + 2 * half + 1] - mean[half]) * scale[half] * gamma.y + beta.y;
        if (rows[half].inside) to[j * 4] = rows[half].valid ? narrow(left, right) : narrow(0.0f, 0.0f);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, WGS == 1 ? 2 : 1) resident_warpgroups(
    const io_t* input, const u8* mask, io_t* output, const u8* weights, const float* final_norm, int blocks, int batch,
    int length, int layers, float eps) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  u32 keys = shared_address(memory), values = keys + KEY_BYTES;
  Stream stream;
  stream.tiles = values + KEY_BYTES;
  stream.full = shared_address(barriers);
  stream.empty = stream.full + STAGES * 8;
  stream.slot = stream.phase = stream.within = 0;
  stream.length = layers * LAYER_TILES;
  stream.left = (blocks - blockIdx.x + gridDim.x - 1) / gridDim.x * stream.length;
  stream.source = weights;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(stream.full + slot * 8, 1);
      barrier_init(stream.empty + slot * 8, THREADS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (u32 slot = 0; slot < AHEAD && stream.left > 0; slot++) stream.request(slot, 1);
  }
  __syncthreads();
  if (WGS == 2 && CAUSAL && threadIdx.x >= 128) named_arrive<1, 256>();
  forward(stream, keys, values, input, mask, output, final_norm, blocks, batch, length, layers, eps);
  if (WGS == 2 && CAUSAL && threadIdx.x < 128) named_sync<1, 256>();
}
"""
