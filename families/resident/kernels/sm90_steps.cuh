// Instructions, row reductions, GELU and the stream of weight tiles that the sm90 kernels share.
//
// The including file defines D, STAGES, BF16, IO and TILE_BYTES first.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned char u8;

constexpr float NEGATIVE = -1e30f;  // below any score, and finite: a row without a visible key divides no infinities

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
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const u8* from, u32 barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "n"(TILE_BYTES) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "n"(TILE_BYTES), "r"(barrier)
      : "memory");
}

template <int ID, int COUNT>
__device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}
template <int ID, int COUNT>
__device__ __forceinline__ void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// Make ordinary stores to shared memory visible to the products that read it.
__device__ __forceinline__ void publish_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float rsqrt_fast(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

__device__ __forceinline__ void store_pair(u32 address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ float2 load_shared(u32 address) {
  float2 y;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(y.x), "=f"(y.y) : "r"(address));
  return y;
}

// Keep the compiler from working out what follows from x outside a loop, and holding it in registers there are not.
__device__ __forceinline__ u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// x Phi(x), Phi by a polynomial in x^2 cut to [0, 1]: that of the Triton kernels (families/resident/triton_steps.py).
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

// The stream of weight tiles through a ring of STAGES slots as one warp sees it.
struct Stream {
  u32 tiles, full, empty, slot, phase, left, within, length;
  const u8* source;

  // Copy the next tile into slot `to`, once its use a round ago is over; a barrier nobody arrived at yet lets the
  // odd parity through.
  __device__ __forceinline__ void request(u32 to, u32 parity) {
    barrier_wait(empty + to * 8, parity);
    copy_tile(tiles + to * TILE_BYTES, source + within * TILE_BYTES, full + to * 8);
    left--;
    within = within + 1 == length ? 0 : within + 1;
  }

  // Wait for the tile in use and return its address.
  __device__ __forceinline__ u32 current() {
    barrier_wait(full + slot * 8, phase);
    return tiles + slot * TILE_BYTES;
  }

  // Signal that this warp has used the tile.
  __device__ __forceinline__ void used() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + slot * 8);
    bool wraps = slot + 1 == STAGES;
    slot = wraps ? 0 : slot + 1;
    if (wraps) phase ^= 1;
  }
};

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

// A product of 16 rows and eight columns over 16, of one warp.
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
