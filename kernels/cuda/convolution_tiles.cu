// Convolutions with channels last as matrix products, by tensor cores, or of float32 by plain arithmetic.
//
// What is shared, and what is defined by who compiles: see convolution_tiles.cuh. Defined beside:
//   WARPGROUPS   1: products of four warps each, for sm_90a

#ifndef ROWS
#define ROWS 128
#endif
#ifndef FEATURES
#define FEATURES 64
#endif
#ifndef ELEMENT
#define ELEMENT 1
#endif
#ifndef WARPGROUPS
#define WARPGROUPS 0
#endif

#if WARPGROUPS
constexpr int THREADS = ROWS * 2;
#else
constexpr int THREADS = ELEMENT == 0 || ROWS * FEATURES > 128 * 64 ? 256 : 128;
#endif
constexpr int STAGES = ROWS * FEATURES > 64 * 64 ? 3 : 4;
constexpr int BLOCKS = ELEMENT == 0 || ROWS * FEATURES > 128 * 64 ? 2 : 3;  // of a multiprocessor, at the same time

#include "convolution_tiles.cuh"
#if WARPGROUPS
#include "warpgroups.cuh"
#endif

#if ELEMENT == 0

constexpr int DOWN = ROWS / 16, ACROSS = FEATURES / 16;

// Sums of a thread: of rows and features that are 16 apart from one to the next.
struct Sums {
  float of[DOWN][ACROSS] = {};

  __device__ __forceinline__ void add(const Element* tile) {
    const int row = threadIdx.x / 16, feature = threadIdx.x % 16;
    const Element* other = tile + ROWS * DEPTH;
#pragma unroll 1
    for (int at = 0; at < DEPTH; at += 4) {
      float4 left[DOWN];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) left[i] = *reinterpret_cast<const float4*>(tile + swapped(row + 16 * i, at));
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) {
        const float4 right = *reinterpret_cast<const float4*>(other + swapped(feature + 16 * j, at));
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
          of[i][j] += left[i].x * right.x;
          of[i][j] += left[i].y * right.y;
          of[i][j] += left[i].z * right.z;
          of[i][j] += left[i].w * right.w;
        }
      }
    }
  }

  __device__ __forceinline__ void leave(float* to) const {
    to += threadIdx.x / 16 * SUM_STRIDE + threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int j = 0; j < ACROSS; ++j) to[16 * i * SUM_STRIDE + 16 * j] = of[i][j];
  }
};

#elif WARPGROUPS

// Sums of a warpgroup, of 64 rows: as fragments of m16n8k16, those of a warp under those of the warp before.
struct Sums {
  float of[FEATURES / 8][4] = {};

  // The products of a step are under way until they are waited for.
  __device__ __forceinline__ void add(const Element* tile) {
    const Element* left = tile + uniform(threadIdx.x / GROUP) * 64 * DEPTH;
    const Element* right = tile + ROWS * DEPTH;
    begin_products();
#pragma unroll
    for (int at = 0; at < DEPTH; at += 16) multiply<0, 0>(of, described(left + at, 0), described(right + at, 0), true);
    commit_products();
  }

  __device__ __forceinline__ void wait() {
    wait_for_products<0>();
    hold(of);
  }

  __device__ __forceinline__ void leave(float* to) const {
    const int lane = threadIdx.x % 32;
    to += (threadIdx.x / 32 * 16 + lane / 4) * SUM_STRIDE + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < FEATURES / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* at = to + 8 * half * SUM_STRIDE + 8 * j;
        at[0] = of[j][2 * half];
        at[1] = of[j][2 * half + 1];
      }
  }
};

#else

constexpr int WARPS_DOWN = 2, WARPS_ACROSS = THREADS / 32 / WARPS_DOWN;
constexpr int DOWN = ROWS / WARPS_DOWN / 16, ACROSS = FEATURES / WARPS_ACROSS / 8;

// Sums of a warp, in fragments of mma.m16n8k16: with g = lane / 4 and t = lane % 4 rows g and g + 8, columns 2t and 2t + 1.
struct Sums {
  float of[DOWN][ACROSS][4] = {};

  static __device__ __forceinline__ int first_row() { return threadIdx.x / 32 % WARPS_DOWN * DOWN * 16; }
  static __device__ __forceinline__ int first_feature() { return threadIdx.x / 32 / WARPS_DOWN * ACROSS * 8; }

  __device__ __forceinline__ void add(const Element* tile) {
    // Rows and elements that a lane addresses of a 16 x 16 piece: of places, and of features.
    const int lane = threadIdx.x % 32;
    const int row = first_row() + lane % 16, element = lane / 16 * 8;
    const int feature = first_feature() + lane / 16 * 8 + lane % 8, other_element = lane / 8 % 2 * 8;
    const Element* other = tile + ROWS * DEPTH;
#pragma unroll
    for (int at = 0; at < DEPTH; at += 16) {
      unsigned left[DOWN][4];
#pragma unroll
      for (int i = 0; i < DOWN; ++i) load_matrices(left[i], tile + swapped(row + 16 * i, at + element));
#pragma unroll
      for (int j = 0; j < ACROSS; j += 2) {
        unsigned right[4];
        load_matrices(right, other + swapped(feature + 8 * j, at + other_element));
#pragma unroll
        for (int i = 0; i < DOWN; ++i) {
          multiply_add(of[i][j], left[i], right[0], right[1]);
          multiply_add(of[i][j + 1], left[i], right[2], right[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void leave(float* to) const {
    const int lane = threadIdx.x % 32;
    to += (first_row() + lane / 4) * SUM_STRIDE + first_feature() + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < DOWN; ++i)
#pragma unroll
      for (int j = 0; j < ACROSS; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* at = to + (16 * i + 8 * half) * SUM_STRIDE + 8 * j;
          at[0] = of[i][j][2 * half];
          at[1] = of[i][j][2 * half + 1];
        }
  }
};

#endif

// Blocks by tiles, those of one row of tiles one after the other; in y those that share a tile, each with `steps` of it.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    convolve(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y,
             float* __restrict__ parts, unsigned* arrived, FOLLOWING, int rows, int channels, int depth, int features, int total, int steps,
             int is_whole, GEOMETRY) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Begin* begins = reinterpret_cast<Begin*>(shared);
  Element* stages = reinterpret_cast<Element*>(shared + BEGINS);
  const Sizes sizes = {rows, channels, depth, features, total};
  const int tiles_across = (features + FEATURES - 1) / FEATURES, across = total / features * tiles_across;
  const int tile = blockIdx.x % across, group = tile / tiles_across;
  const int first = blockIdx.x / across * ROWS, first_feature = tile % tiles_across * FEATURES;

  note_begins(begins, first, sizes, n0, n1, n2, k0, k1, k2, o0, o1, o2, s0, s1, s2, d0, d1, d2, p0, p1, p2);
  __syncthreads();
  const int begin = blockIdx.y * steps, all = (k0 * k1 * k2 * depth + DEPTH - 1) / DEPTH;
  const int count = all - begin < steps ? all - begin : steps;
  Copier copier(x + group * depth, w + group * features * k0 * k1 * k2 * depth, begins, sizes,
                first_feature, begin, n0, n1, n2, k0, k1, k2, o0, o1, o2, s0, s1, s2, d0, d1, d2, p0, p1, p2);
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) {
    if (step < count) copier.copy(stages + step * STAGE);
    end_copies();
  }
  Sums sums;
  int stage = 0, next = STAGES - 1;
  for (int step = 0; step < count; ++step) {
    wait_for_copies_but<STAGES - 2>();
#if WARPGROUPS
    show_to_products();
    sums.wait();
#endif
    __syncthreads();  // the step's tiles are there, and nobody reads those before any more
#if WARPGROUPS
    sums.add(stages + stage * STAGE);
#endif
    if (step + STAGES - 1 < count) copier.copy(stages + next * STAGE);
    end_copies();
#if !WARPGROUPS
    sums.add(stages + stage * STAGE);
#endif
    stage = stage + 1 < STAGES ? stage + 1 : 0;
    next = next + 1 < STAGES ? next + 1 : 0;
  }
  wait_for_copies();
#if WARPGROUPS
  sums.wait();
#endif
  __syncthreads();
  float* left = reinterpret_cast<float*>(stages);
  sums.leave(left);
  __syncthreads();
  if (gridDim.y > 1 && !join_parts(left, parts, arrived, reinterpret_cast<int*>(begins))) return;
  const Target target = {y, first, first_feature, group};
  const Following following = {bias, residual, activation, low, high};
  if (is_whole)
    write_chunks(left, target, following, sizes);
  else
    write_elements(left, target, following, sizes);
}
