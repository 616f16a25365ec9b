// Runs a tensor-core rung on the CPU: every thread of a cluster as a fiber, in random order.
//
// Bodies of the functions that are one instruction are replaced by calls of what stands here. What the hardware does
// later is done as late as it may: products and stores at the wait for them, copies at a random time. So a place that is
// reused too early, or read before it is full, gives a wrong result. Addresses of shared memory name the block of the
// cluster in their top byte, as on the device.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

struct float2 {
  float x, y;
};
using std::max;
using std::min;

namespace emulator {

typedef unsigned int u32;
constexpr u32 FIRST = 0x400, BLOCK_BITS = 24, MASK = (1u << BLOCK_BITS) - 1;
typedef std::vector<std::function<void()>> Work;

struct Index {
  u32 x;
};

struct Warp {
  u32 value[32][6];
  int arrived = 0, generation = 0;
};

struct Barrier {
  int arrivals = 0, left = 0, phase = 0;
  long bytes = 0;
};

struct Named {
  int arrived = 0, generation = 0;
};

struct Block {
  std::vector<unsigned char> room = std::vector<unsigned char>(1 << 18);
  std::map<u32, Barrier> barriers;
  std::map<int, Named> named;
  std::vector<Warp> warps = std::vector<Warp>(32);
  unsigned char* memory() { return (unsigned char*)(((size_t)room.data() + 1023) / 1024 * 1024); }
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread, block;
  u32 rank;
  bool done = false;
  Work open_products, open_stores;
  std::vector<Work> products, stores;
};

inline std::vector<Block> blocks;
inline Fiber* current;
inline ucontext_t scheduler;
inline Index grid;
inline Work flights;
inline Named everyone;
inline int threads_of_cluster, threads_of_block;
inline long progress;
inline bool failed;  // an arrival too many
inline unsigned seed;

inline u32 chance(u32 below) {
  seed = seed * 1664525u + 1013904223u;
  return (seed >> 8) % below;
}

inline void yield() { swapcontext(&current->context, &scheduler); }

template <class Condition>
void wait(Condition condition) {
  while (!condition()) yield();
  progress++;
}

inline u32 address(const void* pointer) {
  return (u32)((unsigned char*)pointer - blocks[current->rank].memory()) + FIRST | current->rank << BLOCK_BITS;
}

inline unsigned char* at(u32 address) { return blocks[address >> BLOCK_BITS].memory() + (address & MASK) - FIRST; }

inline u32 swizzle(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// The number that an operand of so many bytes stands for: float16, float32 cut to TF32, or float8 (e4m3).
inline float wide(const unsigned char* from, int size) {
  if (size == 1) {
    const int exponent = *from >> 3 & 15, fraction = *from & 7;
    const float x = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    return *from >> 7 ? -x : x;
  }
  if (size == 4) {
    u32 bits;
    memcpy(&bits, from, 4);
    bits &= ~0x1FFFu;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  _Float16 x;
  memcpy(&x, from, 2);
  return x;
}

inline u32 pack(float low, float high) {
  _Float16 pair[2] = {(_Float16)low, (_Float16)high};
  u32 y;
  memcpy(&y, pair, 4);
  return y;
}

inline float2 unpack(u32 pair) {
  _Float16 both[2];
  memcpy(both, &pair, 4);
  return {(float)both[0], (float)both[1]};
}

// GELU of two float16, each x (1 + tanh u) / 2 (epilogue.cuh); rounded once, where the device rounds at each step.
inline u32 gelu_pair(u32 pair) {
  const float2 both = unpack(pair);
  auto gelu = [](float x) {
    const float t = fminf(x * x, 32.0f), u = x * (0.797507883f + t * (0.0370056466f - 0.000351516847f * t));
    return 0.5f * x * (1.0f + tanhf(u));
  };
  return pack(gelu(both.x), gelu(both.y));
}

// ---- barriers -----------------------------------------------------------------------------------------------------

inline void meet(Named& named, int count) {
  const int generation = named.generation;
  if (++named.arrived == count) named.arrived = 0, named.generation++;
  wait([&] { return named.generation != generation; });
}

inline void arrive_named(Named& named, int count) {
  progress++;
  if (++named.arrived == count) named.arrived = 0, named.generation++;
}

inline Barrier& barrier(u32 address) { return blocks[address >> BLOCK_BITS].barriers[address & MASK]; }

inline void settle(Barrier& one) {
  progress++;
  if (one.left == 0 && one.bytes == 0) one.left = one.arrivals, one.phase++;
}

inline void arrive(Barrier& one, long bytes = 0) {
  one.bytes += bytes, one.left--;
  if (one.left < 0) failed = true;
  settle(one);
}

inline void sync_warp() {
  Warp& warp = blocks[current->rank].warps[current->thread.x / 32];
  const int generation = warp.generation;
  if (++warp.arrived == 32) warp.arrived = 0, warp.generation++;
  wait([&] { return warp.generation != generation; });
}

inline Warp& own_warp() { return blocks[current->rank].warps[current->thread.x / 32]; }

inline float shuffle_xor(float x, int mask) {
  Warp& warp = own_warp();
  const u32 lane = current->thread.x % 32;
  memcpy(&warp.value[lane][0], &x, 4);
  sync_warp();
  memcpy(&x, &warp.value[lane ^ mask][0], 4);
  sync_warp();
  return x;
}

// ---- the copy engine ----------------------------------------------------------------------------------------------

struct Map {
  unsigned char* data;
  unsigned long long columns, rows, box_rows, size;  // bytes of an element
};

// Bring a box into a block, with zeros outside of the matrix.
inline void copy_box(u32 to, const void* map, int column, int row, u32 barrier_at) {
  Map one;
  memcpy(&one, map, sizeof one);
  flights.push_back([=] {
    for (u32 r = 0; r < one.box_rows; r++)
      for (u32 c = 0; c < 128 / one.size; c++) {
        const bool inside = row + r < one.rows && column + c < one.columns;
        unsigned char* place = at(swizzle(to + r * 128 + c * one.size));
        if (inside)
          memcpy(place, one.data + ((row + r) * one.columns + column + c) * one.size, one.size);
        else
          memset(place, 0, one.size);
      }
    Barrier& full = barrier(barrier_at);
    full.bytes -= one.box_rows * 128;
    settle(full);
  });
}

inline void store_box(const void* map, int column, int row, u32 from) {
  Map one;
  memcpy(&one, map, sizeof one);
  current->open_stores.push_back([=] {
    for (u32 r = 0; r < one.box_rows; r++)
      for (u32 c = 0; c < 64; c++)
        if (row + r < one.rows && column + c < one.columns)
          memcpy(one.data + ((row + r) * one.columns + column + c) * 2, at(swizzle(from + r * 128 + c * 2)), 2);
  });
}

inline void end(Work& open, std::vector<Work>& groups) {
  groups.push_back(std::move(open));
  open.clear();
}

inline void await(std::vector<Work>& groups, size_t left) {
  while (groups.size() > left) {
    for (auto& one : groups.front()) one();
    groups.erase(groups.begin());
  }
}

// ---- products -----------------------------------------------------------------------------------------------------

// This thread's sums of 64 rows and `columns` columns, from 32 bytes of depth of both operands as their descriptors name
// them, of elements of `size` bytes.
inline void multiply(float* c, int columns, u32 a, u32 w, int add, int size) {
  const u32 rank = current->rank, warp = current->thread.x % 128 / 32, lane = current->thread.x % 32;
  current->open_products.push_back([=] {
    auto element = [&](u32 descriptor, u32 row, u32 depth) {
      const u32 linear = (descriptor & 0x3FFF) * 16 + row / 8 * 1024 + row % 8 * 128 + depth * size;
      return wide(at(swizzle(linear) | rank << BLOCK_BITS), size);
    };
    for (int i = 0; i < 2; i++) {
      float left[32];
      for (int d = 0; d < 32 / size; d++) left[d] = element(a, warp * 16 + lane / 4 + 8 * i, d);
      for (int j = 0; j < columns / 8; j++)
        for (int e = 0; e < 2; e++) {
          float& sum = c[4 * j + 2 * i + e];
          if (!add) sum = 0;
          for (int d = 0; d < 32 / size; d++) sum += left[d] * element(w, 8 * j + lane % 4 * 2 + e, d);
        }
    }
  });
}

// Matrices of 8 x 8 of 16 bits between registers and the rows whose addresses the lanes give.
inline void move_matrices(u32 address, u32* registers, bool store) {
  Warp& warp = own_warp();
  const u32 lane = current->thread.x % 32;
  warp.value[lane][0] = address;
  sync_warp();
  for (int matrix = 0; matrix < 4; matrix++) {
    unsigned char* place = at(warp.value[matrix * 8 + lane / 4][0]) + lane % 4 * 4;
    store ? memcpy(place, registers + matrix, 4) : memcpy(registers + matrix, place, 4);
  }
  sync_warp();
}

// mma.m16n8k16: lane l holds rows l / 4 and 8 further of A, column l / 4 of W, at depths l % 4 * 2 and 8 further.
inline void multiply_fragments(float* c, const u32* a, u32 b0, u32 b1) {
  Warp& warp = own_warp();
  const u32 lane = current->thread.x % 32;
  const u32 own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(warp.value[lane], own, sizeof own);
  sync_warp();
  auto element = [&](u32 line, u32 first, u32 depth) {
    return wide((unsigned char*)&warp.value[line * 4 + depth % 8 / 2][first] + depth % 2 * 2, 2);
  };
  for (int i = 0; i < 2; i++)
    for (int e = 0; e < 2; e++)
      for (int d = 0; d < 16; d++)
        c[2 * i + e] += element(lane / 4, i + d / 8 * 2, d) * element(lane % 4 * 2 + e, 4 + d / 8, d);
  sync_warp();
}

// ---- the launch ---------------------------------------------------------------------------------------------------

inline std::function<void()> body;

inline void enter() {
  body();
  current->done = true;
  yield();
}

// Run the clusters of a grid one after another. Returns 0, or 1 for a deadlock or an arrival too many.
inline int run(int blocks_of_grid, int threads, int cluster, unsigned first_seed, std::function<void()> kernel) {
  body = kernel, seed = first_seed, failed = false, grid.x = blocks_of_grid;
  threads_of_block = threads, threads_of_cluster = threads * cluster;
  for (int first = 0; first < blocks_of_grid; first += cluster) {
    blocks = std::vector<Block>(cluster);
    for (auto& block : blocks) std::fill(block.room.begin(), block.room.end(), 0xFF);
    everyone = Named(), flights.clear();
    std::vector<std::unique_ptr<Fiber>> fibers;
    for (int i = 0; i < threads_of_cluster; i++) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack.reset(new char[1 << 16]);
      fiber->rank = i / threads, fiber->thread.x = i % threads, fiber->block.x = first + i / threads;
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get(), fiber->context.uc_stack.ss_size = 1 << 16;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, enter, 0);
      fibers.push_back(std::move(fiber));
    }
    int idle = 0;
    while (!fibers.empty()) {
      const long before = progress;
      // Warps in random order; the threads of one meet so often that their own order says nothing.
      for (size_t start = fibers.size() / 32 * 32; start > 32; start -= 32) {
        const auto end = fibers.begin() + start;
        std::swap_ranges(end - 32, end, fibers.begin() + chance(start / 32 - 1) * 32);
      }
      for (auto& fiber : fibers) {
        current = fiber.get();
        swapcontext(&scheduler, &fiber->context);
        if (!flights.empty() && chance(64) == 0) {
          std::swap(flights[chance(flights.size())], flights.back());
          flights.back()();
          flights.pop_back();
        }
      }
      fibers.erase(std::remove_if(fibers.begin(), fibers.end(), [](auto& fiber) { return fiber->done; }), fibers.end());
      idle = progress == before && flights.empty() ? idle + 1 : 0;
      if (failed || idle > 100) return 1;
    }
  }
  return 0;
}

template <class... Types, size_t... I>
void call(void (*kernel)(Types...), void** parameters, std::index_sequence<I...>) {
  kernel(*(Types*)parameters[I]...);
}
template <class... Types>
void call(void (*kernel)(Types...), void** parameters) {
  call(kernel, parameters, std::index_sequence_for<Types...>());
}

}  // namespace emulator

#define threadIdx emulator::current->thread
#define blockIdx emulator::current->block
#define gridDim emulator::grid
#define __cvta_generic_to_shared(pointer) emulator::address(pointer)
#define __ldg(pointer) (*(pointer))
#define __syncwarp emulator::sync_warp
#define __syncthreads() emulator::meet(emulator::blocks[emulator::current->rank].named[0], emulator::threads_of_block)
#define __saturatef(x) fminf(fmaxf(x, 0.0f), 1.0f)
#define __fdividef(x, y) ((x) / (y))
#define __frcp_rn(x) (1.0f / (x))
#define rsqrtf(x) (1.0f / sqrtf(x))
#define __shfl_sync(mask, value, lane) (value)  // of values that a warp's lanes share
#define __shfl_xor_sync(mask, value, lanes) emulator::shuffle_xor(value, lanes)
