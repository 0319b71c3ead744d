// Products of few rows: y[row, column] = sum of x[row, i] * w[i, column], as long as it takes to read w once.
//
// Where w lies row by row (columns_of), it is cut into tiles of COLUMNS columns, and these into steps of STEP rows. A
// block takes `each` steps, one after the other, of a tile and of those that follow: all blocks read as much. Lanes have
// chunks of a row, copied AHEAD steps before they are used. What several blocks found of a tile is added up by the one
// that comes last, in the order of the blocks; `arrived` counts them, and is zero again at the end.
//
// Where w lies column by column, a warp computes whole columns (dots).

#include "ahead.cuh"
#include "arrivals.cuh"
#include "finish.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef GATED
#define GATED 0
#endif

constexpr int WARPS = 8;
constexpr int THREADS = WARPS * 32;
constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk
constexpr int COLUMNS = 32 * WIDTH;          // of a tile
constexpr int DEEP = 4;                      // rows of a warp in a step
constexpr int STEP = WARPS * DEEP;           // rows of a step
constexpr int AHEAD = 3;                     // steps that are on their way
constexpr int TOGETHER = GATED ? 2 : 1;      // tiles that become one
constexpr int EACH = 2;                      // columns of a warp, where they are whole
constexpr int JOINED = ROWS > 2 ? 4 : 18 / ROWS;  // blocks whose sums are read before the first is used

static_assert(COLUMNS <= THREADS, "a thread has one column of a tile");
static_assert(ROWS * DEEP <= 32, "a lane has one number of x");

struct alignas(16) Chunk {
  Element of[WIDTH];
};

__device__ __forceinline__ Chunk read(const Element* from) { return *reinterpret_cast<const Chunk*>(from); }

struct Tile {  // of one of the matrices
  const Element* w;
  Element* y;
  Index columns, w_row, left;
};

// Shared memory: the chunks that are on their way, then the sums of WARPS * ROWS rows of COLUMNS.
// Of up to three matrices, one behind the other; absent ones have no columns. GATED: of two with as many columns, tiles
// in turn; activation(x w) * (x w1) is the one result.
// parts: what block b found of tile t lies at b + t, ROWS rows of COLUMNS.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    columns_of(const Element* x, const Element* w, const Element* w1, const Element* w2, Element* y, Element* y1,
               Element* y2, float* parts, unsigned* arrived, const Element* bias, const Element* residual, Index depth,
               Index columns, Index columns1, Index columns2, int each, Index x_row, Index w_row, Index w1_row,
               Index w2_row, float alpha, float beta, int activation) {
  extern __shared__ __align__(16) unsigned char shared[];
  Chunk* const chunks = reinterpret_cast<Chunk*>(shared) + threadIdx.x;
  float* const sums = reinterpret_cast<float*>(shared + AHEAD * DEEP * THREADS * sizeof(Chunk));
  int* const is_last = reinterpret_cast<int*>(sums);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = static_cast<int>((depth + STEP - 1) / STEP);  // of a tile
  const auto tiles_of = [](Index count) { return static_cast<int>((count + COLUMNS - 1) / COLUMNS); };
  const int tiles = tiles_of(columns), tiles1 = tiles_of(columns1);
  const int all = (tiles + tiles1 + tiles_of(columns2)) * steps;
  const int begin = blockIdx.x * each, end = all - begin < each ? all : begin + each;

  const auto tile_at = [&](int tile) {
#if GATED
    const int number = tile % 2, place = tile / 2;
#else
    const int number = tile < tiles ? 0 : tile < tiles + tiles1 ? 1 : 2;
    const int place = tile - (number > 0 ? tiles : 0) - (number > 1 ? tiles1 : 0);
#endif
    return Tile{number == 0 ? w : number == 1 ? w1 : w2, number == 0 ? y : number == 1 ? y1 : y2,
                number == 0 ? columns : number == 1 ? columns1 : columns2,
                number == 0 ? w_row : number == 1 ? w1_row : w2_row, static_cast<Index>(place) * COLUMNS};
  };
  // The copies that begin next, and from where.
  int ahead = begin, row;
  Tile from;
  const Element* source;
  const auto aim = [&] {
    from = tile_at(ahead / steps);
    row = ahead % steps * STEP + warp * DEEP;
    const Index column = from.left + lane * WIDTH;  // of what is behind the last nothing is written
    source = from.w + row * from.w_row + (column < from.columns ? column : 0);
  };
  const auto copy = [&](int slot) {
    if (ahead < end) {
      Chunk* const to = chunks + slot * DEEP * THREADS;
      if (row + DEEP <= depth) {
#pragma unroll
        for (int j = 0; j < DEEP; ++j) copy_once(to + j * THREADS, source + j * from.w_row, true);
      } else {
#pragma unroll
        for (int j = 0; j < DEEP; ++j)
          copy_once(to + j * THREADS, row + j < depth ? source + j * from.w_row : x, row + j < depth);
      }
      ++ahead;
      row += STEP;
      source += STEP * from.w_row;
      if (row - warp * DEEP >= depth) aim();
    }
    end_copies();
  };
  const Element* const numbers = x + lane / DEEP * x_row + warp * DEEP + lane % DEEP;
  const auto number = [&](int in_tile) {  // of x: that of row lane / DEEP at the warp's place lane % DEEP
    const int place = in_tile * STEP;
    const bool is_given = lane < ROWS * DEEP && place + warp * DEEP + lane % DEEP < depth;
    return is_given ? numbers[place] : Element(0);
  };

  aim();
  int tile = begin / steps, in_tile = begin % steps;
  float own[ROWS][WIDTH] = {};
  Element following = number(in_tile);  // not waited for before it is used
#if GATED
  float gates[ROWS] = {};
#endif
  // Copies alone at first, so that there is one place in the program where they begin.
#pragma unroll 1
  for (int step = begin - AHEAD, slot = 0; step < end; ++step, slot = slot + 1 == AHEAD ? 0 : slot + 1) {
    Chunk taken[DEEP];
    if (step >= begin) {
      wait_for_copies_but<AHEAD - 1>();
#pragma unroll
      for (int j = 0; j < DEEP; ++j) taken[j] = chunks[(slot * DEEP + j) * THREADS];
    }
    copy(slot);
    if (step < begin) continue;
    const float current = widened(following);
    following = number(in_tile + 1 == steps ? 0 : in_tile + 1);
#pragma unroll
    for (int j = 0; j < DEEP; ++j)
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const float factor = __shfl_sync(0xffffffffu, current, r * DEEP + j);
#pragma unroll
        for (int c = 0; c < WIDTH; ++c) own[r][c] += factor * widened(taken[j].of[c]);
      }
    if (++in_tile < steps && step + 1 < end) continue;

    // The end of what the block has of a tile: its warps meet.
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int c = 0; c < WIDTH; ++c) {
        sums[(warp * ROWS + r) * COLUMNS + c * 32 + lane] = own[r][c];
        own[r][c] = 0.0f;
      }
    __syncthreads();
    const Tile at = tile_at(tile);
    const int place = threadIdx.x;  // of a column in the tile
    const Index column = at.left + place;
    const bool has_column = place < COLUMNS && column < at.columns;
    float found[ROWS] = {};
    if (has_column) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int other = 0; other < WARPS; ++other)
          found[r] += sums[(other * ROWS + r) * COLUMNS + place % WIDTH * 32 + place / WIDTH];
    }
    // The blocks that have some of it; of two tiles that become one, all count.
    const auto first_of = [&](int tile) { return tile * steps / each; };
    const auto last_of = [&](int tile) { return ((tile + 1) * steps - 1) / each; };
    const int before = tile / TOGETHER * TOGETHER, behind = before + TOGETHER - 1;
    bool is_done = first_of(before) == last_of(behind);
    if (is_done) {
#if GATED
      is_done = tile == behind;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) gates[r] = is_done ? gates[r] : found[r];
#endif
    } else {
      if (has_column) {
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
          parts[(static_cast<Index>(blockIdx.x + tile) * ROWS + r) * COLUMNS + place] = found[r];
      }
      __syncthreads();
      // A block that has the end of the one and the beginning of the other counts twice.
      int awaited = last_of(before) - first_of(before);
      if (before < behind) awaited += last_of(behind) - first_of(behind) + 1;
      if (threadIdx.x == 0) {
        *is_last = arrive(arrived + before) == static_cast<unsigned>(awaited);
        if (*is_last) arrived[before] = 0;
      }
      __syncthreads();
      is_done = *is_last;
      const auto join = [&](int tile, float (&total)[ROWS]) {
        const int first = first_of(tile), last = last_of(tile);
        const float* from = parts + static_cast<Index>(first + tile) * (ROWS * COLUMNS) + place;
#pragma unroll
        for (int r = 0; r < ROWS; ++r) total[r] = 0.0f;
#pragma unroll 1
        for (int i = first; i <= last; i += JOINED, from += JOINED * ROWS * COLUMNS) {
          float given[JOINED][ROWS];
#pragma unroll
          for (int j = 0; j < JOINED; ++j)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
              given[j][r] = i + j <= last ? __ldcg(from + (j * ROWS + r) * COLUMNS) : 0.0f;
#pragma unroll
          for (int j = 0; j < JOINED; ++j)
#pragma unroll
            for (int r = 0; r < ROWS; ++r) total[r] += given[j][r];
        }
      };
      if (is_done && has_column) {
        join(behind, found);
#if GATED
        join(before, gates);
#endif
      }
    }
    if (is_done && has_column) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const Index to = r * at.columns + column;
#if GATED
        y[to] = narrowed(activated(gates[r], activation) * found[r]);
#else
        at.y[to] = Finish{bias, residual, alpha, beta, activation}(found[r], to, column);
#endif
      }
    }
    __syncthreads();
    ++tile;
    in_tile = 0;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    dots(const Element* x, const Element* w, Element* __restrict__ y,
         const Element* bias, const Element* residual, Index depth, Index columns, Index x_row,
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
