// Reading and adding rows by index. PLACE is the type of an index. What an index outside of its range reads is the first
// row; it sets `fault`.

#include "elements.cuh"

#ifndef BYTES
#define BYTES 4
#endif
#ifndef PLACE
#define PLACE long long
#endif
#ifndef APART
#define APART 0
#endif

#if BYTES == 1
typedef unsigned char Unit;
#elif BYTES == 2
typedef unsigned short Unit;
#elif BYTES == 4
typedef unsigned int Unit;
#elif BYTES == 8
typedef unsigned long long Unit;
#else
typedef uint4 Unit;
#endif

__device__ __forceinline__ unsigned row_of(PLACE index, unsigned length, bool* fault) {
  Index row = index;
  if (row < 0) row += length;
  if (row >= 0 && row < length) return static_cast<unsigned>(row);
  *fault = true;
  return 0;
}

// y[outer, place, inner] = x[outer, indices[place], inner], in units of BYTES.
extern "C" __global__ void __launch_bounds__(256)
    gather(const Unit* __restrict__ x, const PLACE* __restrict__ indices, Unit* __restrict__ y, bool* fault,
           unsigned outer, unsigned places, unsigned length, unsigned inner, Index outer_stride, Index row_stride) {
  const unsigned count = outer * places * inner, step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned above = i / inner, column = i - above * inner;
    unsigned group = above / places, place = above - group * places;
    y[i] = x[group * outer_stride + row_of(indices[place], length, fault) * row_stride + column];
  }
}

// y[indices[place], :] += updates[place, :], in the order of the places: the same sums at every run. APART: updates are as
// wide as they are added, and their sum is rounded before it is added to a row.
//
// A block for each place. That of the first place of an index adds the rows of all places of it, others end at once.
#if APART
typedef Wide Update;
__device__ __forceinline__ Wide update_value(Update x) { return x; }
#else
typedef Element Update;
__device__ __forceinline__ Wide update_value(Update x) { return widened(x); }
#endif

constexpr int THREADS = 256;
constexpr int COLUMNS = 8;  // of a thread
constexpr int EACH = 4;     // places that a thread looks at
constexpr int TILE = EACH * THREADS;

extern "C" __global__ void __launch_bounds__(THREADS)
    add_rows(const PLACE* __restrict__ indices, const Update* __restrict__ updates, Element* __restrict__ y,
             bool* fault, unsigned places, unsigned length, unsigned inner) {
  extern __shared__ __align__(16) unsigned char shared[];
  unsigned char* is_same = shared;  // EACH flags of each thread
  const unsigned* words = reinterpret_cast<const unsigned*>(shared);
  volatile int* found = reinterpret_cast<int*>(shared + THREADS);  // for two tiles in turn
  const unsigned own = blockIdx.x, first_column = blockIdx.y * THREADS * COLUMNS + threadIdx.x;
  const Index given = indices[own], wanted = given < 0 ? given + length : given;
  if (wanted < 0 || wanted >= length) {
    if (threadIdx.x == 0) *fault = true;
    return;
  }
  if (threadIdx.x < 2) found[threadIdx.x] = 0;
  __syncthreads();
  for (unsigned place = threadIdx.x; place < own; place += THREADS) {
    Index other = indices[place];
    if ((other < 0 ? other + length : other) == wanted) found[0] = 1;
  }
  __syncthreads();
  const bool is_taken = found[0];
  __syncthreads();
  if (is_taken) return;

  Wide sums[COLUMNS];
  Element* row = y + wanted * inner;
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    unsigned column = first_column + i * THREADS;
    sums[i] = !APART && column < inner ? widened(row[column]) : Wide(0);
  }
  int turn = 0;
  for (unsigned start = own; start < places; start += TILE, turn ^= 1) {
    unsigned flags = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      unsigned place = start + threadIdx.x * EACH + i;
      if (place >= places) break;
      Index other = indices[place];
      if ((other < 0 ? other + length : other) == wanted) flags |= 1u << i;
    }
    is_same[threadIdx.x] = flags;
    if (flags) found[turn] = 1;
    __syncthreads();
    if (threadIdx.x == 0) found[turn ^ 1] = 0;
    if (found[turn]) {
      for (int i = 0; i < THREADS / 4; ++i) {
        for (unsigned word = words[i], bit = 0; word; word >>= 1, ++bit) {
          if (!(word & 1)) continue;
          unsigned place = start + (4 * i + bit / 8) * EACH + bit % 8;
          const Update* update = updates + static_cast<Index>(place) * inner;
#pragma unroll
          for (int j = 0; j < COLUMNS; ++j) {
            unsigned column = first_column + j * THREADS;
            if (column < inner) sums[j] += update_value(update[column]);
          }
        }
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    unsigned column = first_column + i * THREADS;
    if (column >= inner) continue;
    row[column] = narrowed(APART ? widened(row[column]) + widened(narrowed(sums[i])) : sums[i]);
  }
}

// y[outer, depth, inner]: ends[1] where indices[outer, inner] is the place in depth, else ends[0].
extern "C" __global__ void __launch_bounds__(256)
    one_hot(const PLACE* __restrict__ indices, const Unit* __restrict__ ends, Unit* __restrict__ y, unsigned outer,
            unsigned depth, unsigned inner) {
  const unsigned count = outer * depth * inner, step = gridDim.x * blockDim.x;
  const Unit off = ends[0], on = ends[1];
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned above = i / inner, column = i - above * inner;
    unsigned group = above / depth, place = above - group * depth;
    Index wanted = indices[static_cast<Index>(group) * inner + column];
    y[i] = (wanted < 0 ? wanted + depth : wanted) == place ? on : off;
  }
}
