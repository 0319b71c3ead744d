// Gradients of attention of 16-bit elements by tensor cores, without a matrix of scores in memory.
//
// After FlashAttention-2 (Dao, 2023): weights are computed again, from scores and what normalises each query's, and with
// them the gradients of scores. A block has ROWS rows of its own, over which it sums: queries (OF_KEYS 0: the gradient of
// q) or keys (OF_KEYS 1: those of k and v); the others pass by in tiles of COLUMNS. So nothing is added by several
// blocks, and every run gives the same bits. Fragments are those of attention.cu.

#include "attention.cuh"
#include "attention_means.cuh"

#ifndef OF_KEYS
#define OF_KEYS 0
#endif
#ifndef COLUMNS
#define COLUMNS 32
#endif

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * 16;
constexpr int SIZE = (HEAD + 15) / 16 * 16;  // padded with zeros
constexpr int VALUE_SIZE = (VALUE_HEAD + 15) / 16 * 16;
constexpr int STRIDE = SIZE + 8;  // see attention.cu
constexpr int VALUE_STRIDE = VALUE_SIZE + 8;
constexpr int STAGE = COLUMNS * (STRIDE + VALUE_STRIDE);

// Start to copy rows of a tile; zeros behind `limit` and behind the head's size.
template <int COUNT, int GIVEN, int PADDED, int TO_STRIDE>
__device__ __forceinline__ void copy_rows(Element* to, const Element* from, long long stride, int first, int limit) {
  constexpr int CHUNKS = PADDED / 8;
#pragma unroll
  for (int chunk = threadIdx.x; chunk < COUNT * CHUNKS; chunk += THREADS) {
    int row = chunk / CHUNKS, column = chunk % CHUNKS * 8;
    bool is_given = first + row < limit && column < GIVEN;
    copy_async(to + row * TO_STRIDE + column, is_given ? from + (first + row) * stride + column : from, is_given);
  }
}

// Scores, or the gradients of weights: rows of the block's own by columns of a tile.
template <int DEPTH, int ROW_STRIDE>
__device__ __forceinline__ void multiply(float (&products)[COLUMNS / 8][4], const Element* own, const Element* tile) {
  const int lane = threadIdx.x % 32;
  const Element* a_row = own + lane % 16 * ROW_STRIDE + lane / 16 * 8;
  const Element* b_row = tile + (lane / 16 * 8 + lane % 8) * ROW_STRIDE + lane / 8 % 2 * 8;
#pragma unroll
  for (int step = 0; step < DEPTH / 16; ++step) {
    unsigned a[4];
    load_matrices(a, a_row + step * 16);
#pragma unroll
    for (int piece = 0; piece < COLUMNS / 16; ++piece) {
      unsigned b[4];
      load_matrices(b, b_row + piece * 16 * ROW_STRIDE + step * 16);
      multiply_add(products[2 * piece], a, b[0], b[1]);
      multiply_add(products[2 * piece + 1], a, b[2], b[3]);
    }
  }
}

// sums += factors times a tile, whose rows are the factors' columns.
template <int WIDTH, int ROW_STRIDE>
__device__ __forceinline__ void accumulate(float (&sums)[WIDTH / 8][4], const float (&factors)[COLUMNS / 8][4],
                                           const Element* tile) {
  const int lane = threadIdx.x % 32;
  const Element* b_row = tile + lane % 16 * ROW_STRIDE + lane / 16 * 8;
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step) {
    unsigned a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = factors[2 * step + i / 2] + i % 2 * 2;
      a[i] = pair_of(pair[0], pair[1]);
    }
#pragma unroll
    for (int piece = 0; piece < WIDTH / 16; ++piece) {
      unsigned b[4];
      load_transposed(b, b_row + step * 16 * ROW_STRIDE + piece * 16);
      multiply_add(sums[2 * piece], a, b[0], b[1]);
      multiply_add(sums[2 * piece + 1], a, b[2], b[3]);
    }
  }
}

template <int GIVEN, int WIDTH>
__device__ __forceinline__ void write_rows(Element* to, const float (&sums)[WIDTH / 8][4], float factor, int first,
                                           int limit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int row = first + half * 8 + lane / 4;
    if (row < limit) {
#pragma unroll
      for (int n = 0; n < GIVEN / 8; ++n)
        *reinterpret_cast<unsigned*>(to + static_cast<long long>(row) * GIVEN + n * 8 + lane % 4 * 2) =
            pair_of(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
    }
  }
}

// `logarithms` are those of attention.cu, `means` those of attention_means.cuh; results are dense.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_gradient(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
                       const Element* __restrict__ dy, const void* __restrict__ mask, const float* __restrict__ logarithms,
                       const float* __restrict__ means, Element* __restrict__ dq_or_dk, Element* __restrict__ dv,
                       int group, int queries, int keys, int offset, int left, int right, float scale, float factor,
                       long long q_batch, long long q_head, long long q_row, long long k_batch, long long k_head,
                       long long k_row, long long v_batch, long long v_head, long long v_row, long long dy_batch,
                       long long dy_head, long long dy_row, long long mask_batch, long long mask_head,
                       long long mask_row, long long mask_key) {
  extern __shared__ __align__(128) unsigned char shared[];
  Element* own_tile = reinterpret_cast<Element*>(shared);
  Element* own_values = own_tile + ROWS * STRIDE;
  Element* stages = own_values + ROWS * VALUE_STRIDE;

  const int batch = blockIdx.z, own_head = blockIdx.y, first = blockIdx.x * ROWS;
  const int count = OF_KEYS ? keys : queries, others = OF_KEYS ? queries : keys;
  const int last = (first + ROWS < count ? first + ROWS : count) - 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, own = warp * 16;
  const Sight sight(keys, queries, offset, left, right, nullptr, batch);
  const int heads = gridDim.y * (OF_KEYS ? group : 1);

  // Which of the others meet these rows: keys that queries see, or queries that see keys.
  int begin, end;
  if (OF_KEYS) {
    begin = right < 0 ? 0 : first - right - offset;
    end = left < 0 ? queries : last + left - offset + 1;
    begin = begin < 0 ? 0 : begin;
    end = end > queries ? queries : end;
  } else {
    begin = sight.begin(first);
    end = sight.end(last);
  }
  begin = begin / COLUMNS * COLUMNS;

  float sums[SIZE / 8][4] = {};
#if OF_KEYS
  float value_sums[VALUE_SIZE / 8][4] = {};
#endif

  for (int member = 0; member < (OF_KEYS ? group : 1); ++member) {
    const int head = OF_KEYS ? own_head * group + member : own_head;
    const int key_head = head / group;
    const Element* q_rows = q + batch * q_batch + head * q_head;
    const Element* k_rows = k + batch * k_batch + key_head * k_head;
    const Element* v_rows = v + batch * v_batch + key_head * v_head;
    const Element* dy_rows = dy + batch * dy_batch + head * dy_head;
    const long long of_head = (static_cast<long long>(batch) * heads + head) * queries;
    const long long mask_start = batch * mask_batch + head * mask_head;
    const Element* rows = OF_KEYS ? k_rows : q_rows;
    const Element* row_values = OF_KEYS ? v_rows : dy_rows;
    const Element* columns = OF_KEYS ? q_rows : k_rows;
    const Element* column_values = OF_KEYS ? dy_rows : v_rows;
    const long long row_stride = OF_KEYS ? k_row : q_row, row_value_stride = OF_KEYS ? v_row : dy_row;
    const long long column_stride = OF_KEYS ? q_row : k_row, column_value_stride = OF_KEYS ? dy_row : v_row;

    if (member == 0) {
      copy_rows<ROWS, HEAD, SIZE, STRIDE>(own_tile, rows, row_stride, first, count);
      copy_rows<ROWS, VALUE_HEAD, VALUE_SIZE, VALUE_STRIDE>(own_values, row_values, row_value_stride, first, count);
    } else {
      __syncthreads();  // nobody reads the last tiles of the head before any more
    }
    if (begin < end) {
      copy_rows<COLUMNS, HEAD, SIZE, STRIDE>(stages, columns, column_stride, begin, others);
      copy_rows<COLUMNS, VALUE_HEAD, VALUE_SIZE, VALUE_STRIDE>(stages + COLUMNS * STRIDE, column_values,
                                                               column_value_stride, begin, others);
    }

    for (int start = begin; start < end; start += COLUMNS) {
      const int stage = (start - begin) / COLUMNS % 2;
      const Element* tile = stages + stage * STAGE;
      const Element* tile_values = tile + COLUMNS * STRIDE;
      const int behind = start + COLUMNS - 1;
      const bool sees_all = OF_KEYS ? behind < queries && sight.sees_all(start, behind, first, last)
                                    : last == first + ROWS - 1 && sight.sees_all(first, last, start, behind);
      wait_for_copies();
      __syncthreads();  // the tile is there, and nobody reads the one before any more
      if (start + COLUMNS < end) {
        Element* next = stages + (1 - stage) * STAGE;
        copy_rows<COLUMNS, HEAD, SIZE, STRIDE>(next, columns, column_stride, start + COLUMNS, others);
        copy_rows<COLUMNS, VALUE_HEAD, VALUE_SIZE, VALUE_STRIDE>(next + COLUMNS * STRIDE, column_values,
                                                                 column_value_stride, start + COLUMNS, others);
      }

      float weights[COLUMNS / 8][4] = {}, gradients[COLUMNS / 8][4] = {};
      multiply<SIZE, STRIDE>(weights, own_tile + own * STRIDE, tile);
      multiply<VALUE_SIZE, VALUE_STRIDE>(gradients, own_values + own * VALUE_STRIDE, tile_values);
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int row = first + own + lane / 4 + i / 2 * 8, column = start + n * 8 + lane % 4 * 2 + i % 2;
          int query = OF_KEYS ? column : row, key = OF_KEYS ? row : column;
          float weight = 0.0f, gradient = 0.0f;
          if (sees_all || (query < queries && sight.sees(query, key))) {
            long long at = mask_start + query * mask_row + key * mask_key;
            float score = shaped(weights[n][i], scale, 0.0f, mask, at) * LOG2_E;
            weight = exp2_of(score - logarithms[of_head + query]);
            gradient = weight * (gradients[n][i] - means[of_head + query]);
          }
          weights[n][i] = weight;
          gradients[n][i] = gradient;
        }
      accumulate<SIZE, STRIDE>(sums, gradients, tile);
#if OF_KEYS
      accumulate<VALUE_SIZE, VALUE_STRIDE>(value_sums, weights, tile_values);
#endif
    }
  }

  wait_for_copies();
  const long long place = static_cast<long long>(batch) * gridDim.y + own_head;
  write_rows<HEAD, SIZE>(dq_or_dk + place * count * HEAD, sums, factor, first + own, count);
#if OF_KEYS
  write_rows<VALUE_HEAD, VALUE_SIZE>(dv + place * count * VALUE_HEAD, value_sums, 1.0f, first + own, count);
#endif
}
