// Products with weights of BITS bits, in blocks of BLOCK of a column that share a scale: (number - point) * scale.
//
// Of few rows (few_rows): as long as it takes to read the weights once. A warp computes EACH columns; a lane reads chunks
// of 16 bytes of each. With 2^BITS + point taken off at the end of what shares a scale, numbers need no conversion: their
// bits are the first of the mantissa of 1 + number / 2^BITS. (So an infinite x gives NaN, as weights of both signs do.)
//
// Of many (floats): the weights as they are multiplied, each column one row.

#include "elements.cuh"

#ifndef BITS
#define BITS 4
#endif
#ifndef BLOCK
#define BLOCK 32
#endif
#ifndef POINTS
#define POINTS 0  // 0: all are half of 2^BITS; 1: packed as the numbers are; 2: floats
#endif
#ifndef ROWS
#define ROWS 1
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int EACH = ROWS > 2 ? 2 : 4;            // columns of a warp
constexpr int IN_WORD = 32 / BITS;                // numbers of 4 bytes
constexpr int NUMBERS = 4 * IN_WORD;              // of a chunk
constexpr int SHARED = BLOCK < NUMBERS ? BLOCK : NUMBERS;  // of a chunk that have one scale
constexpr int WORDS = SHARED / IN_WORD;
constexpr unsigned MASK = ((1u << BITS) - 1) << (23 - BITS);
constexpr float RANGE = 1 << BITS;

static_assert(BLOCK % SHARED == 0 && SHARED % IN_WORD == 0, "a scale is that of whole words");

#if POINTS == 2
typedef Element Point;
#else
typedef unsigned char Point;
#endif

struct alignas(16) Chunk {
  unsigned words[4];
};
constexpr int WIDTH = 16 / sizeof(Element) < IN_WORD ? 16 / sizeof(Element) : IN_WORD;
struct alignas(WIDTH * sizeof(Element)) Given {
  Element of[WIDTH];
};

// The zero point of a block of a column.
__device__ __forceinline__ float point_of(const Point* points, Index column, Index block, Index blocks) {
#if POINTS == 0
  return RANGE / 2;
#elif POINTS == 1
  const Index bytes = (blocks * BITS + 7) / 8;
  return static_cast<float>(points[column * bytes + block * BITS / 8] >> block * BITS % 8 & ((1 << BITS) - 1));
#else
  return widened(points[column * blocks + block]);
#endif
}

// 1 + number / 2^BITS of a number of a word.
__device__ __forceinline__ float above_one(unsigned word, int number) {
  const int right = number * BITS - (23 - BITS);
  return bits_value((right < 0 ? word << -right : word >> right) & MASK | 0x3f800000u);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    few_rows(const Element* x, const unsigned char* weights, const Element* scales, const Point* points,
             const Element* bias, Element* __restrict__ y, Index depth, Index columns, Index blocks, Index x_row) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index first = (static_cast<Index>(blockIdx.x) * WARPS + warp) * EACH, padded = blocks * BLOCK;
  if (first >= columns) return;
  Index column[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) column[e] = first + e < columns ? first + e : first;
  float own[ROWS][EACH] = {};
#pragma unroll 2
  for (Index i = lane * NUMBERS; i < padded; i += 32 * NUMBERS) {
    Chunk chunks[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e)
      chunks[e] = *reinterpret_cast<const Chunk*>(weights + (column[e] * padded + i) * BITS / 8);
#pragma unroll
    for (int part = 0; part < NUMBERS / SHARED; ++part) {
      float sums[ROWS] = {}, products[ROWS][EACH] = {};
#pragma unroll
      for (int word = 0; word < WORDS; ++word) {
        const int place = part * WORDS + word;
        float values[EACH][IN_WORD];
#pragma unroll
        for (int e = 0; e < EACH; ++e)
#pragma unroll
          for (int j = 0; j < IN_WORD; ++j) values[e][j] = above_one(chunks[e].words[place], j);
        const Index start = i + place * IN_WORD;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
          const Element* const from = x + r * x_row + start;
          Element numbers[IN_WORD];
          if (start + IN_WORD <= depth) {
#pragma unroll
            for (int j = 0; j < IN_WORD; j += WIDTH) {
              const Given given = *reinterpret_cast<const Given*>(from + j);
#pragma unroll
              for (int c = 0; c < WIDTH; ++c) numbers[j + c] = given.of[c];
            }
          } else {
#pragma unroll
            for (int j = 0; j < IN_WORD; ++j) numbers[j] = start + j < depth ? from[j] : Element(0);
          }
#pragma unroll
          for (int j = 0; j < IN_WORD; ++j) {
            const float number = widened(numbers[j]);
            sums[r] += number;
#pragma unroll
            for (int e = 0; e < EACH; ++e) products[r][e] += number * values[e][j];
          }
        }
      }
      const Index block = (i + part * SHARED) / BLOCK;
      if (block < blocks) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
          const float scale = widened(scales[column[e] * blocks + block]);
          const float less = RANGE + point_of(points, column[e], block, blocks);
#pragma unroll
          for (int r = 0; r < ROWS; ++r) own[r][e] += scale * (RANGE * products[r][e] - less * sums[r]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float sum = own[r][e];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      if (lane == 0 && first + e < columns) {
        if (bias != nullptr) sum += widened(bias[first + e]);
        y[r * columns + first + e] = narrowed(sum);
      }
    }
}

// y[column, i], a word of numbers by a thread; columns have `depth` of them, the last block may have more.
extern "C" __global__ void __launch_bounds__(THREADS)
    floats(const unsigned* weights, const Element* scales, const Point* points, Element* __restrict__ y, Index depth,
           Index columns, Index blocks) {
  const Index words = blocks * BLOCK / IN_WORD, count = columns * words;
  for (Index i = static_cast<Index>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += gridDim.x * THREADS) {
    const Index column = i / words, start = (i - column * words) * IN_WORD, block = start / BLOCK;
    const float scale = widened(scales[column * blocks + block]);
    const float less = RANGE + point_of(points, column, block, blocks);
    const unsigned word = weights[i];
    Element* const to = y + column * depth + start;
#pragma unroll
    for (int j = 0; j < IN_WORD; ++j)
      if (start + j < depth) to[j] = narrowed(scale * (RANGE * above_one(word, j) - less));
  }
}
