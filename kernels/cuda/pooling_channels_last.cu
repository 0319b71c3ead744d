// Pools of images with channels last: a thread makes BYTES of the channels of a place; MEAN: the mean of a window, else
// its greatest element. Where places are few, several threads share the lines of a window.

#include "elements.cuh"
#include "geometry.cuh"

#ifndef BYTES
#define BYTES 16
#endif
#ifndef MEAN
#define MEAN 0
#endif

constexpr int WIDTH = BYTES / sizeof(Element);
constexpr int AHEAD = 4;  // pieces of a line that are under way at once

struct alignas(BYTES) Chunk {
  Element of[WIDTH];
};

// How many steps it takes to come as far; most steps are of one, which no division need tell.
__device__ __forceinline__ int steps_up_to(int distance, int step) {
  return distance <= 0 ? 0 : step == 1 ? distance : (distance + step - 1) / step;
}

__device__ __forceinline__ int lesser(int a, int b) { return a < b ? a : b; }

// The part of a window along a dim that lies in the image.
struct Range {
  int first, count;  // place of the first element, and how many
  int terms;         // those that count in a mean

  // `behind`: how much padding behind the image counts; below zero: no padding does.
  __device__ __forceinline__ Range(int place, int size, int kernel, int stride, int gap, int before, int behind) {
    const int start = place * stride - before;
    const int skipped = steps_up_to(-start, gap);
    const int end = lesser(kernel, steps_up_to(size - start, gap));
    first = start + skipped * gap;
    count = end > skipped ? end - skipped : 0;
    terms = behind < 0 ? count : lesser(kernel, steps_up_to(size + behind - start, gap));
  }
};

__device__ __forceinline__ Wide joined(Wide made, Wide value) {
#if MEAN
  return made + value;
#else
  return value > made || value != value ? value : made;  // Nothing is greater than NaN.
#endif
}

// x, y: [images, n0 n1 n2, chunks] and [images, o0 o1 o2, chunks], of which `count` in all; b0 b1 b2: see `behind`.
extern "C" __global__ void __launch_bounds__(256)
    pool(const Chunk* __restrict__ x, Chunk* __restrict__ y, unsigned count, unsigned chunks, int lanes, GEOMETRY, int b0,
         int b1, int b2) {
  extern __shared__ __align__(16) unsigned char shared[];
  Wide* partial = reinterpret_cast<Wide*>(shared);  // [shares][WIDTH][lanes], where there are several
  const int shares = blockDim.x / lanes, lane = threadIdx.x % lanes, share = threadIdx.x / lanes;
  for (unsigned begin = blockIdx.x * lanes; begin < count; begin += gridDim.x * lanes) {
    const unsigned i = begin + lane;
    const unsigned place = i / chunks, chunk = i - place * chunks;
    const unsigned line = place / o2, plane = line / o1, image = plane / o0;
    const Range range0(plane - image * o0, n0, k0, s0, d0, p0, b0), range1(line - plane * o1, n1, k1, s1, d1, p1, b1);
    const Range range2(place - line * o2, n2, k2, s2, d2, p2, b2);
    Wide made[WIDTH];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) made[w] = MEAN ? static_cast<Wide>(0) : static_cast<Wide>(bits_value(0xff800000u));
    const Index gap = static_cast<Index>(d2) * chunks;
    const int lines = i < count ? range0.count * range1.count : 0;
    for (int number = share; number < lines; number += shares) {
      const int down = number / range1.count, across = number - down * range1.count;
      const Index above = (static_cast<Index>(image) * n0 + range0.first + down * d0) * n1 + range1.first + across * d1;
      const Chunk* from = x + (above * n2 + range2.first) * chunks + chunk;
      for (int t = 0; t < range2.count; t += AHEAD, from += AHEAD * gap) {
        Chunk given[AHEAD];
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
          if (t + u < range2.count) given[u] = from[u * gap];
        }
#pragma unroll
        for (int u = 0; u < AHEAD; ++u) {
          if (t + u >= range2.count) break;
#pragma unroll
          for (int w = 0; w < WIDTH; ++w) made[w] = joined(made[w], widened(given[u].of[w]));
        }
      }
    }
    if (shares > 1) {
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) partial[(share * WIDTH + w) * lanes + lane] = made[w];
      __syncthreads();
      for (int other = 1; share == 0 && other < shares; ++other) {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) made[w] = joined(made[w], partial[(other * WIDTH + w) * lanes + lane]);
      }
      __syncthreads();
    }
    if (share == 0 && i < count) {
      Chunk result;
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) {
#if MEAN
        made[w] /= static_cast<Wide>(range0.terms * range1.terms * range2.terms);
#endif
        result.of[w] = narrowed(made[w]);
      }
      y[i] = result;
    }
  }
}
