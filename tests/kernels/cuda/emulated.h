// A block of CUDA threads on a processor: fibers, barriers, warps' exchanges, and instructions by PTX's layouts.
//
// The kernel is included between this and a main that calls `launch`. Copies to shared memory happen when they are
// waited for, as late as they may, so that a kernel that does not wait reads what was there before.

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <ucontext.h>
#include <utility>
#include <vector>

#define EMULATED
#ifndef ELEMENT
#define ELEMENT 0
#endif
#define __global__
#define __device__
#define __shared__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __restrict__

struct uint4 {
  unsigned x, y, z, w;
} __attribute__((aligned(16)));
struct float4 {
  float x, y, z, w;
} __attribute__((aligned(16)));
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Dim3 {
  int x = 1, y = 1, z = 1;
};
static Dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int MOST_SHARED_BYTES = 256 * 1024;
alignas(1024) unsigned char shared[MOST_SHARED_BYTES];

static void fail(const char* what) {
  std::fprintf(stderr, "%s: block %d %d %d\n", what, blockIdx.x, blockIdx.y, blockIdx.z);
  std::abort();
}

// -- fibers ----------------------------------------------------------------------------------------------------------

struct Copy {
  void* to;
  const void* from;
  bool is_given;
  int group;
  int bytes;
};
struct Product {  // of a warpgroup: rows of a in registers, or in shared memory as b is; see warpgroups.cuh
  float* sums;
  int columns;
  bool adds, is_held, is_a_down, is_b_down;
  unsigned held[4];
  unsigned long long a, b;
};
constexpr size_t STACK_BYTES = 256 * 1024;
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool is_done = false;
  std::vector<Copy> copies;
  int group = 0;  // of the next copy
  unsigned given[8] = {};  // what the lane gives to its warp
  std::vector<Product> products;
  std::vector<size_t> groups;  // how many products there were at each commit
};
static std::vector<Fiber> fibers;
static std::deque<int> ready;
static ucontext_t scheduler;
static int current;
static std::function<void()> body;
static std::vector<std::vector<int>> waiting;  // at the barrier of each warp, of the block, and of each warpgroup

static void leave() { swapcontext(&fibers[current].context, &scheduler); }

static void meet(int barrier, int count) {
  auto& there = waiting[barrier];
  there.push_back(current);
  if (static_cast<int>(there.size()) == count) {
    for (int fiber : there) ready.push_back(fiber);
    there.clear();
  }
  leave();
}

static void begin_fiber() {
  body();
  fibers[current].is_done = true;
  leave();
}

static int threads_of_block() { return blockDim.x * blockDim.y * blockDim.z; }
static int warp() { return current / 32; }
static int lane() { return current % 32; }
inline void __syncthreads() { meet(threads_of_block() / 32, threads_of_block()); }
inline void __syncwarp() { meet(warp(), 32); }

static void run_block() {
  int count = threads_of_block();
  fibers.resize(count);
  waiting.assign(count / 32 + 1 + count / 128, {});
  for (int i = 0; i < count; ++i) {
    auto& fiber = fibers[i];
    if (!fiber.stack) fiber.stack.reset(new char[STACK_BYTES]);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    fiber.context.uc_link = nullptr;
    fiber.is_done = false;
    fiber.group = 0;
    makecontext(&fiber.context, begin_fiber, 0);
    ready.push_back(i);
  }
  while (!ready.empty()) {
    current = ready.front();
    ready.pop_front();
    threadIdx = {current % blockDim.x, current / blockDim.x % blockDim.y, current / blockDim.x / blockDim.y};
    swapcontext(&scheduler, &fibers[current].context);
  }
  for (auto& fiber : fibers) {
    if (!fiber.is_done) fail("threads wait for others that have ended");
    if (!fiber.copies.empty()) fail("copies that nobody waits for");
    if (!fiber.products.empty()) fail("products that nobody waits for");
  }
}

// Run a kernel block by block, from the last to the first or on, with arguments by address; shared memory holds NaNs at
// the start of each.
template <class... Parameters, size_t... Places>
static void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Places...>) {
  kernel(*static_cast<Parameters*>(arguments[Places])...);
}
template <class... Parameters>
static void launch(void (*kernel)(Parameters...), const int* grid, const int* block, int bytes, void** arguments,
                   bool backwards) {
  body = [=] { call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
  gridDim = {grid[0], grid[1], grid[2]};
  blockDim = {block[0], block[1], block[2]};
  for (int z = 0; z < grid[2]; ++z)
    for (int y = 0; y < grid[1]; ++y)
      for (int x = 0; x < grid[0]; ++x) {
        blockIdx = backwards ? Dim3{grid[0] - 1 - x, grid[1] - 1 - y, grid[2] - 1 - z} : Dim3{x, y, z};
        std::memset(shared, 0xff, sizeof shared);
        run_block();
        for (int i = bytes; i < MOST_SHARED_BYTES; ++i)
          if (shared[i] != 0xff) fail("shared memory behind what the launch gives is written");
      }
  fibers.clear();  // Hundreds of programs stay loaded.
}

// -- exchanges and instructions --------------------------------------------------------------------------------------

inline float bits_value(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned value_bits(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float __shfl_xor_sync(unsigned, float value, int other) {
  fibers[current].given[0] = value_bits(value);
  __syncwarp();
  float found = bits_value(fibers[current ^ other].given[0]);
  __syncwarp();
  return found;
}

inline float __shfl_sync(unsigned, float value, int lane) {
  fibers[current].given[0] = value_bits(value);
  __syncwarp();
  float found = bits_value(fibers[warp() * 32 + lane].given[0]);
  __syncwarp();
  return found;
}

inline int __shfl_sync(unsigned, int value, int from) {
  fibers[current].given[0] = value;
  __syncwarp();
  int found = fibers[warp() * 32 + from].given[0];
  __syncwarp();
  return found;
}

inline int __any_sync(unsigned, int predicate) {
  fibers[current].given[0] = predicate != 0;
  __syncwarp();
  int found = 0;
  for (int other = 0; other < 32; ++other) found |= fibers[warp() * 32 + other].given[0];
  __syncwarp();
  return found;
}

// Blocks run one after the other.
inline void __threadfence() {}
inline unsigned atomicAdd(unsigned* to, unsigned count) {
  unsigned before = *to;
  *to += count;
  return before;
}
inline unsigned arrive(unsigned* counter) { return atomicAdd(counter, 1u); }
template <class Number>
inline Number __ldcg(const Number* from) {
  return *from;
}

inline float fp16_value(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return value;
}
inline unsigned fp16_bits(float value) {
  _Float16 half = static_cast<_Float16>(value);
  unsigned short bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned fp16_pair(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }
inline unsigned bf16_bits(float value) {
  unsigned bits = value_bits(value);
  if (value != value) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned bf16_pair(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline float fast_exp2(float x) { return std::exp2(x); }

inline void check_aligned(const void* address, int bytes = 16) {
  if (reinterpret_cast<size_t>(address) % bytes) fail("an address that is not aligned");
}
template <int bytes>
inline void copy_few_async(void* to, const void* from, bool is_given) {
  check_aligned(to, bytes);
  check_aligned(from, bytes);
  auto& fiber = fibers[current];
  fiber.copies.push_back({to, from, is_given, fiber.group, bytes});
}
inline void copy_async(void* to, const void* from, bool is_given) { copy_few_async<16>(to, from, is_given); }
inline void copy_once(void* to, const void* from, bool is_given) { copy_async(to, from, is_given); }
static void perform(const Copy& copy) {
  if (copy.is_given)
    std::memcpy(copy.to, copy.from, copy.bytes);
  else
    std::memset(copy.to, 0, copy.bytes);
}
static void wait_for_groups(int behind) {
  std::vector<Copy> left;
  for (auto& copy : fibers[current].copies) {
    if (copy.group >= behind)
      left.push_back(copy);
    else
      perform(copy);
  }
  fibers[current].copies = left;
}
inline void wait_for_copies() { wait_for_groups(fibers[current].group + 1); }
inline void end_copies() { ++fibers[current].group; }
template <int COUNT>
inline void wait_for_copies_but() {
  wait_for_groups(fibers[current].group - COUNT);
}

// ldmatrix .x4: register i of lane l holds elements 2 (l % 4) and the next of row l / 4 of matrix i, whose row r lies at
// the address of lane 8 i + r. Transposed: elements (2 (l % 4), l / 4) and the next row's.
static void matrices(unsigned (&to)[4], const unsigned short* row, bool transposed) {
  static const unsigned short* rows[64][32];
  check_aligned(row);
  rows[warp()][lane()] = row;
  __syncwarp();
  int g = lane() / 4, t = lane() % 4;
  for (int i = 0; i < 4; ++i) {
    unsigned low = transposed ? rows[warp()][8 * i + 2 * t][g] : rows[warp()][8 * i + g][2 * t];
    unsigned high = transposed ? rows[warp()][8 * i + 2 * t + 1][g] : rows[warp()][8 * i + g][2 * t + 1];
    to[i] = low | high << 16;
  }
  __syncwarp();
}
inline void load_matrices(unsigned (&to)[4], const unsigned short* row) { matrices(to, row, false); }
inline void load_transposed(unsigned (&to)[4], const unsigned short* row) { matrices(to, row, true); }
// Of float32: element l % 4 of row l / 4.
inline void load_matrices(unsigned (&to)[4], const float* row) {
  static const float* rows[64][32];
  check_aligned(row);
  rows[warp()][lane()] = row;
  __syncwarp();
  for (int i = 0; i < 4; ++i) to[i] = value_bits(rows[warp()][8 * i + lane() / 4][lane() % 4]);
  __syncwarp();
}

// mma.m16n8k16. a (16 x 16): register i holds row l / 4 + 8 (i % 2), columns 2 (l % 4) + 8 (i / 2) and the next.
// b (16 x 8): register i holds rows 2 (l % 4) + 8 i and the next, column l / 4.
// The sums (16 x 8): register i holds row l / 4 + 8 (i / 2), column 2 (l % 4) + i % 2.
// m16n8k8 of TF32. a (16 x 8): register i holds row l / 4 + 8 (i % 2), column l % 4 + 4 (i / 2).
// b (8 x 8): register i holds row l % 4 + 4 i, column l / 4.
static float part_value(unsigned pair, int part) {
  unsigned short bits = pair >> (16 * part) & 0xffff;
  return ELEMENT == 2 ? bits_value(static_cast<unsigned>(bits) << 16) : fp16_value(bits);
}
static void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  unsigned* given = fibers[current].given;
  std::memcpy(given, a, 16);
  given[4] = b0;
  given[5] = b1;
  __syncwarp();
  const Fiber* lanes = &fibers[warp() * 32];
  for (int i = 0; i < 4; ++i) {
    int row = lane() / 4 + 8 * (i / 2), column = 2 * (lane() % 4) + i % 2;
    double sum = sums[i];
#if ELEMENT == 0
    for (int k = 0; k < 8; ++k) {
      unsigned left = lanes[row % 8 * 4 + k % 4].given[row / 8 + k / 4 * 2];
      unsigned right = lanes[column * 4 + k % 4].given[4 + k / 4];
      sum += static_cast<double>(bits_value(left & 0xffffe000u)) * bits_value(right & 0xffffe000u);
    }
#else
    for (int k = 0; k < 16; ++k) {
      unsigned left = lanes[row % 8 * 4 + k % 8 / 2].given[row / 8 + k / 8 * 2];
      unsigned right = lanes[column * 4 + k % 8 / 2].given[4 + k / 8];
      sum += static_cast<double>(part_value(left, k % 2)) * part_value(right, k % 2);
    }
#endif
    sums[i] = static_cast<float>(sum);
  }
  __syncwarp();
}

// -- barriers in shared memory, and products of warpgroups -------------------------------------------------------------

// A barrier: the number of its phase, and how many arrive in each, and have yet to in this one. Arrivals with copies
// happen when somebody waits for them.
struct Counts {
  unsigned phase;
  unsigned short all, missing;
};
static_assert(sizeof(Counts) == 8);
struct Arrival {
  void* barrier;
  std::vector<Copy> copies;
};
static std::vector<Arrival> arrivals;

inline void begin_barrier(unsigned long long* barrier, int count) {
  auto all = static_cast<unsigned short>(count);
  *reinterpret_cast<Counts*>(barrier) = {0, all, all};
}
static void arrive(void* barrier) {
  auto& counts = *static_cast<Counts*>(barrier);
  if (--counts.missing == 0) ++counts.phase, counts.missing = counts.all;
}
inline void arrive_with_copies(unsigned long long* barrier) {
  arrivals.push_back({barrier, {}});
  std::swap(arrivals.back().copies, fibers[current].copies);
}
inline void wait_for(unsigned long long* barrier, int parity) {
  auto& counts = *reinterpret_cast<Counts*>(barrier);
  for (int turn = 0; counts.phase % 2 == static_cast<unsigned>(parity); ++turn) {
    if (turn == 100'000) fail("a barrier that is never reached");
    for (size_t place = 0; place < arrivals.size();) {
      if (arrivals[place].barrier == barrier) {
        for (auto& copy : arrivals[place].copies) perform(copy);
        arrivals.erase(arrivals.begin() + place);
        arrive(barrier);
      } else {
        ++place;
      }
    }
    ready.push_back(current);
    leave();
  }
  __syncwarp();
}

inline unsigned shared_place(const void* address) {
  return static_cast<unsigned>(static_cast<const unsigned char*>(address) - shared);
}
inline int uniform(int number) {
  if (__shfl_sync(0xffffffffu, number, 0) != number) fail("a number that differs in a warp");
  return number;
}
inline void meet_group(int group) { meet(threads_of_block() / 32 + 1 + group, 128); }
inline void show_to_products() {}
inline void begin_products() {}
template <int COUNT>
inline void hold(float (&)[COUNT][4]) {}
inline void commit_products() { fibers[current].groups.push_back(fibers[current].products.size()); }

// An element of a tile, by a descriptor: its place among rows or columns of the result, and in what is summed over.
static float described_value(unsigned long long descriptor, bool is_down, int place, int k) {
  if (descriptor >> 62 != 1) fail("a descriptor of other rows than of 128 bytes");
  auto field = [&](int bit) { return static_cast<unsigned>(descriptor >> bit & 0x3fff) << 4; };
  int row = is_down ? k : place, column = is_down ? place : k;
  unsigned at = field(0) + row / 8 * field(32) + row % 8 * 128 + column % 64 * 2;
  if (is_down) at += column / 64 * field(16);
  at ^= (at >> 7 & 7) << 4;
  unsigned short bits;
  std::memcpy(&bits, shared + at, 2);
  return part_value(bits, 0);
}

// m64nNk16 as late as it may be done. Sums: as those of m16n8k16, 8 columns by 8 columns, 16 rows of each warp.
template <int PENDING>
inline void wait_for_products() {
  const int group = current / 128;
  auto& own = fibers[current];
  const size_t ended = own.groups.size() > PENDING ? own.groups[own.groups.size() - PENDING - 1] : 0;
  meet_group(group);
  for (size_t place = 0; place < ended; ++place) {
    const Product& product = own.products[place];
    const int lane = current % 32, rows = current % 128 / 32 * 16;
    float a[2][16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) {
        const Product& given = fibers[current / 4 * 4 + k % 8 / 2].products[place];
        a[half][k] = product.is_held ? part_value(given.held[half + k / 8 * 2], k % 2)
                                     : described_value(product.a, product.is_a_down, rows + half * 8 + lane / 4, k);
      }
    for (int n = 0; n < product.columns / 8; ++n)
      for (int i = 0; i < 4; ++i) {
        double sum = product.adds ? product.sums[4 * n + i] : 0.0;
        for (int k = 0; k < 16; ++k)
          sum += static_cast<double>(a[i / 2][k]) *
                 described_value(product.b, product.is_b_down, n * 8 + lane % 4 * 2 + i % 2, k);
        product.sums[4 * n + i] = static_cast<float>(sum);
      }
  }
  meet_group(group);
  own.products.erase(own.products.begin(), own.products.begin() + ended);
  own.groups.erase(own.groups.begin(), own.groups.end() - (own.groups.size() > PENDING ? PENDING : own.groups.size()));
  for (auto& count : own.groups) count -= ended;
}
template <int A_DOWN, int B_DOWN, int COUNT>
inline void multiply(float (&sums)[COUNT][4], unsigned long long a, unsigned long long b, bool adds) {
  fibers[current].products.push_back({sums[0], COUNT * 8, adds, false, A_DOWN != 0, B_DOWN != 0, {}, a, b});
}
template <int B_DOWN, int COUNT>
inline void multiply(float (&sums)[COUNT][4], const unsigned (&a)[4], unsigned long long b) {
  fibers[current].products.push_back({sums[0], COUNT * 8, true, true, false, B_DOWN != 0, {a[0], a[1], a[2], a[3]}, 0, b});
}
