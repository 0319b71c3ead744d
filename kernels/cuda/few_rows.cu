// Products of few rows: y[row, column] = sum of x[row, i] * w[i, column], as long as it takes to read w once.
//
// Where w lies row by row, lanes have chunks of a row of it, and warps different rows (columns_of); blocks take ranges of
// rows, so that all of the device reads, and `join` adds up what they found, in the order of the ranges. Where w lies
// column by column, a warp computes whole columns (dots).

#include "finish.cuh"

#ifndef ROWS
#define ROWS 1
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk
constexpr int COLUMNS = 32 * WIDTH;          // of a block
constexpr int COUNT = ROWS > 2 ? 4 : 8;      // chunks that a lane reads before it uses the first
constexpr int EACH = 2;                      // columns of a warp, where they are whole

struct alignas(16) Chunk {
  Element of[WIDTH];
};

__device__ __forceinline__ Chunk read(const Element* from) { return *reinterpret_cast<const Chunk*>(from); }

// Shared memory: the sums of WARPS * ROWS rows of COLUMNS. Where there are several ranges, parts has the sums of each.
extern "C" __global__ void __launch_bounds__(THREADS)
    columns_of(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y,
               float* __restrict__ parts, const Element* __restrict__ bias, const Element* residual, Index depth,
               Index columns, Index range, Index x_row, Index w_row, float alpha, float beta, int activation) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index begin = static_cast<Index>(blockIdx.x) * COLUMNS, column = begin + lane * WIDTH;
  const Index first = blockIdx.y * range, end = depth - first < range ? depth : first + range;
  float own[ROWS][WIDTH];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) own[r][c] = 0.0f;
  if (column < columns) {
    for (Index base = first + warp; base < end; base += WARPS * COUNT) {
      Chunk chunks[COUNT];
      float values[COUNT][ROWS];
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const Index row = base + i * WARPS, taken = row < end ? row : base;
        chunks[i] = read(w + taken * w_row + column);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) values[i][r] = widened(x[r * x_row + taken]);
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        if (base + i * WARPS < end) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int c = 0; c < WIDTH; ++c) own[r][c] += values[i][r] * widened(chunks[i].of[c]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) sums[(warp * ROWS + r) * COLUMNS + c * 32 + lane] = own[r][c];
  __syncthreads();
  const Finish finish = {bias, residual, alpha, beta, activation};
  for (int i = threadIdx.x; i < ROWS * COLUMNS; i += THREADS) {
    const int r = i / COLUMNS, own_column = i % COLUMNS;
    if (begin + own_column >= columns) continue;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other)
      sum += sums[(other * ROWS + r) * COLUMNS + own_column % WIDTH * 32 + own_column / WIDTH];
    const Index place = r * columns + begin + own_column;
    if (gridDim.y == 1)
      y[place] = finish(sum, place, begin + own_column);
    else
      parts[blockIdx.y * ROWS * columns + place] = sum;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    join(const float* __restrict__ parts, Element* __restrict__ y, const Element* __restrict__ bias,
         const Element* residual, Index columns, int ranges, float alpha, float beta, int activation) {
  const Index place = static_cast<Index>(blockIdx.x) * THREADS + threadIdx.x, count = ROWS * columns;
  if (place >= count) return;
  float sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < ranges; ++i) sum += parts[i * count + place];
  const Finish finish = {bias, residual, alpha, beta, activation};
  y[place] = finish(sum, place, place % columns);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dots(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y,
         const Element* __restrict__ bias, const Element* residual, Index depth, Index columns, Index x_row,
         Index w_column, float alpha, float beta, int activation) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index first = (static_cast<Index>(blockIdx.x) * WARPS + warp) * EACH;
  if (first >= columns) return;
  const Element* from[EACH];
#pragma unroll
  for (int e = 0; e < EACH; ++e) from[e] = w + (first + e < columns ? first + e : first) * w_column;
  float own[ROWS][EACH];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int e = 0; e < EACH; ++e) own[r][e] = 0.0f;
#pragma unroll 4
  for (Index i = lane * WIDTH; i < depth; i += 32 * WIDTH) {
    Chunk chunks[EACH], rows[ROWS];
#pragma unroll
    for (int e = 0; e < EACH; ++e) chunks[e] = read(from[e] + i);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) rows[r] = read(x + r * x_row + i);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) own[r][e] += widened(rows[r].of[c]) * widened(chunks[e].of[c]);
  }
  const Finish finish = {bias, residual, alpha, beta, activation};
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      float sum = own[r][e];
#pragma unroll
      for (int other = 16; other > 0; other /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
      const Index column = first + e, place = r * columns + column;
      if (lane == 0 && column < columns) y[place] = finish(sum, place, column);
    }
}
