// Sums over rows, of matrices beside each other: y[group, column] = scale * sum of x[group, row, column].
//
// Blocks add up ranges of rows; where there are several, the same kernel adds up what they found, in the order of the
// ranges: the same sums at every run. What is only read again here stays as wide as it is added (TO_WIDE, FROM_WIDE).

#include "elements.cuh"

#ifndef FROM_WIDE
#define FROM_WIDE 0
#endif
#ifndef TO_WIDE
#define TO_WIDE 0
#endif
#ifndef WIDTH
#define WIDTH 1
#endif

#if FROM_WIDE
typedef Wide Source;
__device__ __forceinline__ Wide source_value(Source x) { return x; }
#else
typedef Element Source;
__device__ __forceinline__ Wide source_value(Source x) { return widened(x); }
#endif
#if TO_WIDE
typedef Wide Target;
__device__ __forceinline__ Target target_value(Wide x) { return x; }
#else
typedef Element Target;
__device__ __forceinline__ Target target_value(Wide x) { return narrowed(x); }
#endif

struct alignas(WIDTH * sizeof(Source)) Sources {
  Source of[WIDTH];
};

constexpr int ACROSS = 32;  // threads along columns, WIDTH columns each
constexpr int DOWN = 8;

// Strides are elements, of x; y has a place for each range of each group.
extern "C" __global__ void __launch_bounds__(ACROSS * DOWN)
    sum_rows(const Source* __restrict__ x, Target* __restrict__ y, unsigned rows, unsigned columns, unsigned each,
             Index group_stride, Index row_stride, Wide scale) {
  extern __shared__ __align__(16) unsigned char shared[];
  Wide* sums = reinterpret_cast<Wide*>(shared);  // DOWN rows of ACROSS * WIDTH
  const unsigned column = (blockIdx.x * ACROSS + threadIdx.x) * WIDTH, range = blockIdx.y, group = blockIdx.z;
  const unsigned first = range * each, end = rows - first < each ? rows : first + each;
  const Source* from = x + group * group_stride + column;
  Wide own[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) own[i] = 0;
  if (column < columns) {
#pragma unroll 4
    for (unsigned row = first + threadIdx.y; row < end; row += DOWN) {
      Sources read = *reinterpret_cast<const Sources*>(from + row * row_stride);
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) own[i] += source_value(read.of[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < WIDTH; ++i) sums[threadIdx.y * ACROSS * WIDTH + i * ACROSS + threadIdx.x] = own[i];
  for (int half = DOWN / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        int place = threadIdx.y * ACROSS * WIDTH + i * ACROSS + threadIdx.x;
        sums[place] += sums[place + half * ACROSS * WIDTH];
      }
    }
  }
  if (threadIdx.y == 0 && column < columns) {
    Target* to = y + (static_cast<Index>(group) * gridDim.y + range) * columns + column;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) to[i] = target_value(sums[i * ACROSS + threadIdx.x] * scale);
  }
}
