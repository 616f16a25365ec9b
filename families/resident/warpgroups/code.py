"""CUDA source of the warpgroup kernel, kept as text so that an exported file can hold it."""

from __future__ import annotations

CODE = r"""
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

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

constexpr int THREADS = WGS * 128;
constexpr int ROWS = WGS * 64;
constexpr int HW = HEADS * HD;
constexpr int STEP = 64;  // columns of a weight tile
constexpr int BIAS = D > STEP ? D : STEP;
constexpr int WEIGHT_BYTES = STEP * D * 2;
constexpr int TILE_BYTES = WEIGHT_BYTES + BIAS * 4;
constexpr int SIDE_TILES = HW / STEP;  // tiles of each of keys, values, queries, output projection
constexpr int FFN_TILES = FFN / STEP;
constexpr int LAYER_TILES = 4 * SIDE_TILES + 2 * FFN_TILES;
constexpr int KEY_BYTES = ROWS * HW * 2;
constexpr int AHEAD = STAGES - STAGES / 3;  // tiles requested before they are used; the rest is one group's lead
constexpr int SEQUENCE_ROWS = ROWS / GROUP;
constexpr float NEGATIVE = -1e30f;  // below any score, and finite: a row without a visible key divides no infinities

// ---- instructions -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(barrier), "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const u8* from, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(TILE_BYTES) : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
      "n"(TILE_BYTES), "r"(barrier)
      : "memory");
}

template <int ID, int COUNT>
__device__ __forceinline__ void named_sync() { asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory"); }
template <int ID, int COUNT>
__device__ __forceinline__ void named_arrive() { asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(COUNT) : "memory"); }

// Make ordinary stores to shared memory visible to the products that read it.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ float rsqrt_fast(float x) { float y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 y;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
#endif
  return y;
}

__device__ __forceinline__ u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ float2 load_shared(u32 address) {
  float2 y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(address));
  return y;
}

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

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// Mean and reciprocal deviation of the two rows a thread shares with its quad.
__device__ __forceinline__ void moments(const float (&x)[D / 2], float eps, float (&mean)[2], float (&scale)[2]) {
  float sum[2] = {0.0f, 0.0f}, square[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < D / 2; i++) sum[i / 2 % 2] += x[i];
  mean[0] = quad_sum(sum[0]) * (1.0f / D);
  mean[1] = quad_sum(sum[1]) * (1.0f / D);
#pragma unroll
  for (int i = 0; i < D / 2; i++) {
    float centred = x[i] - mean[i / 2 % 2];
    square[i / 2 % 2] += centred * centred;
  }
  scale[0] = rsqrt_fast(quad_sum(square[0]) * (1.0f / D) + eps);
  scale[1] = rsqrt_fast(quad_sum(square[1]) * (1.0f / D) + eps);
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

// x Phi(x), Phi by a polynomial in x^2 cut to [0, 1]: the one of parts.py, with its error.
__device__ __forceinline__ float gelu(float x) {
  float square = x * x;
  float slope = 4.312710527333037e-08f;
  slope = slope * square - 2.5485443956321907e-06f;
  slope = slope * square + 6.521377349530807e-05f;
  slope = slope * square - 9.6730077911058e-04f;
  slope = slope * square + 9.455236241824544e-03f;
  slope = slope * square - 6.595716082397797e-02f;
  slope = slope * square + 3.988047686733097e-01f;
  return x * __saturatef(0.5f + x * slope);
}

// The stream of weight tiles as one warp sees it: `index` counts the tiles used so far.
struct Stream {
  u32 tiles, full, empty, index, total, forward_tiles;
  const u8* source;

  __device__ __forceinline__ void request(u32 tile) {
    u32 slot = tile % STAGES, use = tile / STAGES;
    if (use > 0) barrier_wait(empty + slot * 8, (use - 1) & 1);
    copy_tile(tiles + slot * TILE_BYTES, source + (u64)(tile % forward_tiles) * TILE_BYTES, full + slot * 8);
  }

  // Wait for the next tile and return its address; the first thread keeps requests ahead.
  __device__ __forceinline__ u32 next() {
    if (threadIdx.x == 0 && index + AHEAD < total) request(index + AHEAD);
    __syncwarp();
    u32 slot = index % STAGES;
    barrier_wait(full + slot * 8, (index / STAGES) & 1);
    return tiles + slot * TILE_BYTES;
  }

  // Say that this warp has used the tile.
  __device__ __forceinline__ void done() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + index % STAGES * 8);
    index++;
  }
};

// Keys and values of this warpgroup's rows, normalised rows `a`, into shared memory.
__device__ __forceinline__ void write_keys(Stream& stream, const u32 (&a)[D / 4], u32 keys, u32 values) {
  u32 lane = threadIdx.x % 32 * 4;
  u32 row8 = threadIdx.x / 32 * 2;
#pragma unroll 1
  for (int tile = 0; tile < SIDE_TILES; tile++) {
    float c[STEP / 2];
    multiply<STEP, D / 16, false>(c, a, stream.next(), STEP * 16);
    stream.done();
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
    multiply<STEP, D / 16, false>(c, a, stream.next(), STEP * 16);
    stream.done();
    u32 to = values + (row8 * (HW / 8) + tile * (STEP / 8)) * 128 + lane;
#pragma unroll
    for (int j = 0; j < STEP / 8; j++) {
      store_shared(to + j * 128, transpose(pack(c[4 * j], c[4 * j + 1])));
      store_shared(to + (HW / 8 + j) * 128, transpose(pack(c[4 * j + 2], c[4 * j + 3])));
    }
  }
  publish_shared();
}

// Context [64, HD] of one head over KEYS keys, as a left operand; `visible` holds a bit a key for the thread's rows.
template <int KEYS>
__device__ __forceinline__ void attend(u32* context, const u32* q, u32 keys, u32 values, const u32 (&visible)[2]) {
  float s[KEYS / 2];
  multiply<KEYS, HD / 16, false>(s, q, keys, ROWS / 8 * 128);
  float top[2] = {NEGATIVE, NEGATIVE}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    s[i] = visible[i / 2 % 2] >> (i / 4 * 2 + i % 2) & 1 ? s[i] : NEGATIVE;
    top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
#pragma unroll
  for (int i = 0; i < KEYS / 2; i++) {
    s[i] = exp2_fast(s[i] - top[i / 2 % 2]);
    sum[i / 2 % 2] += s[i];
  }
  u32 p[KEYS / 4];
  to_operand<KEYS>(p, s);
  float c[HD / 2];
  multiply<HD, KEYS / 16, false>(c, p, values, HW / 8 * 128);
  // A row without a visible key sees every key alike, and is written as zero at the end, or never.
  float scale[2] = {1.0f / quad_sum(sum[0]), 1.0f / quad_sum(sum[1])};
#pragma unroll
  for (int i = 0; i < HD / 2; i++) c[i] *= scale[i / 2 % 2];
  to_operand<HD>(context, c);
}

// x += attention(a) Wo + bo, STEP columns of heads at a time (or a wider head alone).
template <int KEYS>
__device__ __forceinline__ void attention(
    Stream& stream, float (&x)[D / 2], const u32 (&a)[D / 4], u32 keys, u32 values, const u32 (&visible)[2]) {
  constexpr int WIDE = HD > STEP ? HD : STEP;  // columns taken together
#pragma unroll 1
  for (int column = 0; column < HW; column += WIDE) {
    u32 q[WIDE / 4], context[WIDE / 4];
#pragma unroll
    for (int part = 0; part < WIDE / STEP; part++) {
      u32 tile = stream.next();
      float c[STEP / 2];
      add_row<STEP, false>(c, tile + WEIGHT_BYTES);
      multiply<STEP, D / 16, true>(c, a, tile, STEP * 16);
      stream.done();
      to_operand<STEP>(q + part * (STEP / 4), c);
    }
#pragma unroll
    for (int head = 0; head < WIDE / HD; head++)
      attend<KEYS>(
          context + head * (HD / 4), q + head * (HD / 4), keys + (column + head * HD) / 8 * (ROWS / 8) * 128,
          values + (column + head * HD) / 8 * 128, visible);
#pragma unroll
    for (int part = 0; part < WIDE / STEP; part++) {
      u32 tile = stream.next();
      if (part == 0 && column == 0) add_row<D, true>(x, tile + WEIGHT_BYTES);
      multiply<D, STEP / 16, true>(x, context + part * (STEP / 4), tile, D * 16);
      stream.done();
    }
  }
}

// x += gelu(a W1 + b1) W2 + b2.
__device__ __forceinline__ void feed_forward(Stream& stream, float (&x)[D / 2], const u32 (&a)[D / 4]) {
#pragma unroll 1
  for (int tile = 0; tile < FFN_TILES; tile++) {
    u32 in = stream.next();
    float c[STEP / 2];
    add_row<STEP, false>(c, in + WEIGHT_BYTES);
    multiply<STEP, D / 16, true>(c, a, in, STEP * 16);
    stream.done();
    u32 hidden[STEP / 4];
#pragma unroll
    for (int i = 0; i < STEP / 4; i++) hidden[i] = pack(gelu(c[2 * i]), gelu(c[2 * i + 1]));
    u32 out = stream.next();
    if (tile == 0) add_row<D, true>(x, out + WEIGHT_BYTES);
    multiply<D, STEP / 16, true>(x, hidden, out, D * 16);
    stream.done();
  }
}

#if IO == 0
typedef float io_t;
typedef float2 io2_t;
__device__ __forceinline__ float2 widen(float2 x) { return x; }
__device__ __forceinline__ float2 narrow(float x, float y) { return make_float2(x, y); }
#else
typedef unsigned short io_t;
typedef u32 io2_t;
__device__ __forceinline__ float2 widen(u32 x) {
  float2 y;
#if IO == 1
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}" : "=f"(y.x), "=f"(y.y) : "r"(x));
#else
  y.x = __uint_as_float(x << 16);
  y.y = __uint_as_float(x & 0xFFFF0000u);
#endif
  return y;
}
__device__ __forceinline__ u32 narrow(float x, float y) {
  u32 z;
#if IO == 1
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
#else
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(z) : "f"(y), "f"(x));
#endif
  return z;
}
#endif

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

// Bit 2j + b of the result: whether `row` may see key 8j + 2t + b, t the thread's place in its quad.
__device__ __forceinline__ u32 visible_keys(int row, u32 present) {
  u32 seen = present;
#pragma unroll
  for (int bit = 0; bit < ROWS / 4; bit++) {
    int key = bit / 2 * 8 + threadIdx.x % 4 * 2 + bit % 2;
    bool apart = GROUP > 1 && key / SEQUENCE_ROWS != row / SEQUENCE_ROWS;
    if (apart || (CAUSAL && key > row)) seen &= ~(1u << bit);
  }
  return seen;
}

template <int KEYS>
__device__ __forceinline__ void layer(
    Stream& stream, float (&x)[D / 2], u32 keys, u32 values, const u32 (&visible)[2], float eps) {
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
  attention<KEYS>(stream, x, a, keys, values, visible);
  if (APART && !first) named_arrive<1, 256>();
  normalise(a, x, eps);
  feed_forward(stream, x, a);
}

template <int KEYS>
__device__ __forceinline__ void forward(
    Stream& stream, u32 keys, u32 values, const io_t* input, const u8* mask, io_t* output, const float* final_norm,
    int blocks, int batch, int length, int layers, float eps) {
  int quad = threadIdx.x % 4;
  int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
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
    for (int bit = 0; bit < ROWS / 4; bit++) {
      int key = bit / 2 * 8 + quad * 2 + bit % 2;
      if (locate(block, key, batch, length, mask).valid) present |= 1u << bit;
    }
    u32 visible[2] = {visible_keys(row, present), visible_keys(row + 8, present)};
#pragma unroll 1
    for (int index = 0; index < layers; index++) layer<KEYS>(stream, x, keys, values, visible, eps);
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
  stream.index = 0;
  stream.forward_tiles = layers * LAYER_TILES;
  stream.total = (blocks - blockIdx.x + gridDim.x - 1) / gridDim.x * stream.forward_tiles;
  stream.source = weights;
  if (threadIdx.x == 0) {
    for (int slot = 0; slot < STAGES; slot++) {
      barrier_init(stream.full + slot * 8, 1);
      barrier_init(stream.empty + slot * 8, THREADS / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    for (u32 tile = 0; tile < AHEAD && tile < stream.total; tile++) stream.request(tile);
  }
  __syncthreads();
  if (WGS == 2 && CAUSAL) {
    // One branch a warpgroup: they differ in the keys they see, hence in their products.
    if (threadIdx.x < 128) {
      forward<64>(stream, keys, values, input, mask, output, final_norm, blocks, batch, length, layers, eps);
      named_sync<1, 256>();
    } else {
      named_arrive<1, 256>();
      forward<ROWS>(stream, keys, values, input, mask, output, final_norm, blocks, batch, length, layers, eps);
    }
  } else {
    forward<ROWS>(stream, keys, values, input, mask, output, final_norm, blocks, batch, length, layers, eps);
  }
}
"""
