// Products of few rows: y[row, column] = sum of x[row, i] * w[i, column], as long as it takes to read w once.
//
// Where w lies row by row (columns_of), it is cut into tiles of COLUMNS columns, and these into steps of STEP rows. A
// block takes `each` steps, one after the other, of a tile and of those that follow: all blocks read as much. Lanes have
// chunks of a row, copied AHEAD steps before they are used. What several blocks found of a tile is added up by the one
// that comes last, in the order of the blocks; `arrived` counts them, and is zero again at the end.
//
// Where w lies column by column, a warp computes whole columns (dots).

#include "ahead.cuh"
#include "finish.cuh"

#ifndef ROWS
#define ROWS 1
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk
constexpr int COLUMNS = 32 * WIDTH;          // of a tile
constexpr int DEEP = 4;                      // rows of a warp in a step
constexpr int STEP = WARPS * DEEP;           // rows of a step
constexpr int AHEAD = 3;                     // steps that are on their way
constexpr int EACH = 2;                      // columns of a warp, where they are whole
constexpr int JOINED = ROWS > 2 ? 2 : 8;      // blocks whose sums are read before the first is used

static_assert(COLUMNS <= THREADS, "a thread has one column of a tile");
static_assert(ROWS * DEEP <= 32, "a lane has one number of x");

struct alignas(16) Chunk {
  Element of[WIDTH];
};

__device__ __forceinline__ Chunk read(const Element* from) { return *reinterpret_cast<const Chunk*>(from); }

// Shared memory: the chunks that are on their way, then the sums of WARPS * ROWS rows of COLUMNS.
// parts: what block b found of tile t lies at b + t, ROWS rows of COLUMNS.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    columns_of(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y, float* parts,
               unsigned* arrived, const Element* __restrict__ bias, const Element* residual, Index depth,
               Index columns, int each, Index x_row, Index w_row, float alpha, float beta, int activation) {
  extern __shared__ __align__(16) unsigned char shared[];
  Chunk* const chunks = reinterpret_cast<Chunk*>(shared) + threadIdx.x;
  float* const sums = reinterpret_cast<float*>(shared + AHEAD * DEEP * THREADS * sizeof(Chunk));
  int* const is_last = reinterpret_cast<int*>(sums);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = static_cast<int>((depth + STEP - 1) / STEP);  // of a tile
  const int tiles = static_cast<int>((columns + COLUMNS - 1) / COLUMNS), all = tiles * steps;
  const int begin = blockIdx.x * each, end = all - begin < each ? all : begin + each;
  const Finish finish = {bias, residual, alpha, beta, activation};

  const auto copy = [&](int step, int slot) {
    if (step < end) {
      const int tile = step / steps;
      const Index row = static_cast<Index>(step - tile * steps) * STEP + warp * DEEP;
      const Index column = static_cast<Index>(tile) * COLUMNS + lane * WIDTH;
#pragma unroll
      for (int j = 0; j < DEEP; ++j) {
        const bool is_given = row + j < depth && column < columns;
        copy_once(chunks + (slot * DEEP + j) * THREADS, is_given ? w + (row + j) * w_row + column : w, is_given);
      }
    }
    end_copies();
  };
  const auto number = [&](int step) {  // of x: that of row lane / DEEP at the warp's place lane % DEEP
    const Index place = static_cast<Index>(step % steps) * STEP + warp * DEEP + lane % DEEP;
    return lane < ROWS * DEEP && place < depth ? widened(x[lane / DEEP * x_row + place]) : 0.0f;
  };

#pragma unroll 1
  for (int i = 0; i < AHEAD; ++i) copy(begin + i, i);
  float own[ROWS][WIDTH] = {}, following = number(begin);
  for (int step = begin, slot = 0; step < end; ++step, slot = slot + 1 == AHEAD ? 0 : slot + 1) {
    const float numbers = following;
    if (step + 1 < end) following = number(step + 1);
    wait_for_copies_but<AHEAD - 1>();
    Chunk taken[DEEP];
#pragma unroll
    for (int j = 0; j < DEEP; ++j) taken[j] = chunks[(slot * DEEP + j) * THREADS];
    copy(step + AHEAD, slot);
#pragma unroll
    for (int j = 0; j < DEEP; ++j)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float factor = __shfl_sync(0xffffffffu, numbers, r * DEEP + j);
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) own[r][c] += factor * widened(taken[j].of[c]);
      }
    const int tile = step / steps;
    if (step + 1 < end && step + 1 < (tile + 1) * steps) continue;

    // The end of what the block has of a tile: its warps meet.
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < WIDTH; ++c) {
        sums[(warp * ROWS + r) * COLUMNS + c * 32 + lane] = own[r][c];
        own[r][c] = 0.0f;
      }
    __syncthreads();
    const int place = threadIdx.x;  // of a column in the tile
    const Index column = static_cast<Index>(tile) * COLUMNS + place;
    const bool has_column = place < COLUMNS && column < columns;
    float found[ROWS] = {};
    if (has_column) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int other = 0; other < WARPS; ++other)
          found[r] += sums[(other * ROWS + r) * COLUMNS + place % WIDTH * 32 + place / WIDTH];
    }
    const int first = tile * steps / each, last = ((tile + 1) * steps - 1) / each;  // the blocks that have some of it
    bool is_done = first == last;
    if (!is_done) {
      if (has_column) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          parts[(static_cast<Index>(blockIdx.x + tile) * ROWS + r) * COLUMNS + place] = found[r];
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) *is_last = atomicAdd(arrived + tile, 1u) == static_cast<unsigned>(last - first);
      __syncthreads();
      is_done = *is_last;
      if (is_done) {
        __threadfence();
        if (threadIdx.x == 0) arrived[tile] = 0;
      }
      if (is_done && has_column) {
        const float* from = parts + static_cast<Index>(first + tile) * (ROWS * COLUMNS) + place;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) found[r] = 0.0f;
#pragma unroll(JOINED)
        for (int i = first; i <= last; ++i, from += ROWS * COLUMNS)
#pragma unroll
          for (int r = 0; r < ROWS; ++r) found[r] += __ldcg(from + r * COLUMNS);
      }
    }
    if (is_done && has_column) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) y[r * columns + column] = finish(found[r], r * columns + column, column);
    }
    __syncthreads();
  }
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
