// Gradients of attention of float32, exact to its rounding, without a matrix of scores in memory.
//
// What attention_gradient.cu computes, in the manner of attention_f32.cu: 16 x 16 threads, of which each has TILES rows
// of the block's own and every 16th column of a tile. Weights and gradients of scores go through shared memory.

#ifndef ELEMENT
#define ELEMENT 0
#endif
#include "attention.cuh"
#include "attention_means.cuh"

#ifndef OF_KEYS
#define OF_KEYS 0
#endif

constexpr int THREADS = 256;
constexpr int TILES = 4;
constexpr int ROWS = 16 * TILES;
constexpr int COLUMNS = 32;
constexpr int STRIDE = HEAD + 4;  // see attention_f32.cu
constexpr int VALUE_STRIDE = VALUE_HEAD + 4;
constexpr int FACTOR_STRIDE = COLUMNS + 4;
constexpr int STAGE = COLUMNS * (STRIDE + VALUE_STRIDE);
constexpr int WIDTH = (HEAD + 63) / 64;

#include "attention_f32.cuh"

// Scores, or the gradients of weights: the thread's rows by its columns of a tile.
template <int DEPTH, int ROW_STRIDE>
__device__ __forceinline__ void multiply(float (&products)[TILES][COLUMNS / 16], const float* own, const float* tile) {
#pragma unroll 2
  for (int inner = 0; inner < DEPTH; inner += 4) {
    float4 a[TILES], b[COLUMNS / 16];
#pragma unroll
    for (int i = 0; i < TILES; ++i) a[i] = *reinterpret_cast<const float4*>(own + i * ROW_STRIDE + inner);
#pragma unroll
    for (int j = 0; j < COLUMNS / 16; ++j)
      b[j] = *reinterpret_cast<const float4*>(tile + (threadIdx.x % 16 + 16 * j) * ROW_STRIDE + inner);
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS / 16; ++j) {
        products[i][j] = fmaf(a[i].x, b[j].x, products[i][j]);
        products[i][j] = fmaf(a[i].y, b[j].y, products[i][j]);
        products[i][j] = fmaf(a[i].z, b[j].z, products[i][j]);
        products[i][j] = fmaf(a[i].w, b[j].w, products[i][j]);
      }
  }
}

// sums += factors of the thread's rows times a tile, of which it has 4 of 64 columns.
template <int SIZE, int PIECES, int ROW_STRIDE>
__device__ __forceinline__ void accumulate(float (&sums)[TILES][PIECES][4], const float* factors, const float* tile) {
#pragma unroll 2
  for (int inner = 0; inner < COLUMNS; inner += 4) {
    float part[TILES][4];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      float4 four = *reinterpret_cast<const float4*>(factors + i * FACTOR_STRIDE + inner);
      part[i][0] = four.x, part[i][1] = four.y, part[i][2] = four.z, part[i][3] = four.w;
    }
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      int place = n * 64 + threadIdx.x % 16 * 4;
      if (SIZE % 64 && place >= SIZE) break;
#pragma unroll
      for (int row = 0; row < 4; ++row) {
        float4 b = *reinterpret_cast<const float4*>(tile + (inner + row) * ROW_STRIDE + place);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
          sums[i][n][0] = fmaf(part[i][row], b.x, sums[i][n][0]);
          sums[i][n][1] = fmaf(part[i][row], b.y, sums[i][n][1]);
          sums[i][n][2] = fmaf(part[i][row], b.z, sums[i][n][2]);
          sums[i][n][3] = fmaf(part[i][row], b.w, sums[i][n][3]);
        }
      }
    }
  }
}

template <int SIZE, int PIECES>
__device__ __forceinline__ void write_rows(float* to, const float (&sums)[TILES][PIECES][4], float factor, int first,
                                           int limit) {
#pragma unroll
  for (int i = 0; i < TILES; ++i)
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
      int place = n * 64 + threadIdx.x % 16 * 4;
      if (first + i < limit && place < SIZE)
        *reinterpret_cast<float4*>(to + static_cast<long long>(first + i) * SIZE + place) =
            make_float4(sums[i][n][0] * factor, sums[i][n][1] * factor, sums[i][n][2] * factor,
                        sums[i][n][3] * factor);
    }
}

// See attention_gradient.cu.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_gradient(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                       const float* __restrict__ dy, const void* __restrict__ mask,
                       const float* __restrict__ logarithms, const float* __restrict__ means,
                       float* __restrict__ dq_or_dk, float* __restrict__ dv, int group, int queries, int keys,
                       int offset, int left, int right, float scale, float factor, long long q_batch, long long q_head,
                       long long q_row, long long k_batch, long long k_head, long long k_row, long long v_batch,
                       long long v_head, long long v_row, long long dy_batch, long long dy_head, long long dy_row,
                       long long mask_batch, long long mask_head, long long mask_row, long long mask_key) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* own_tile = reinterpret_cast<float*>(shared);
  float* own_values = own_tile + ROWS * STRIDE;
  float* of_scores = own_values + ROWS * VALUE_STRIDE;
  float* of_values = of_scores + ROWS * FACTOR_STRIDE;
  float* stages = of_values + ROWS * FACTOR_STRIDE;

  const int batch = blockIdx.z, own_head = blockIdx.y, first = blockIdx.x * ROWS;
  const int count = OF_KEYS ? keys : queries, others = OF_KEYS ? queries : keys;
  const int last = (first + ROWS < count ? first + ROWS : count) - 1;
  const int own = threadIdx.x / 16 * TILES;  // the thread's first row of the tile
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

  float sums[TILES][WIDTH][4] = {};
#if OF_KEYS
  constexpr int VALUE_WIDTH = (VALUE_HEAD + 63) / 64;
  float value_sums[TILES][VALUE_WIDTH][4] = {};
#endif

  for (int member = 0; member < (OF_KEYS ? group : 1); ++member) {
    const int head = OF_KEYS ? own_head * group + member : own_head;
    const int key_head = head / group;
    const float* q_rows = q + batch * q_batch + head * q_head;
    const float* k_rows = k + batch * k_batch + key_head * k_head;
    const float* v_rows = v + batch * v_batch + key_head * v_head;
    const float* dy_rows = dy + batch * dy_batch + head * dy_head;
    const long long of_head = (static_cast<long long>(batch) * heads + head) * queries;
    const long long mask_start = batch * mask_batch + head * mask_head;
    const float* rows = OF_KEYS ? k_rows : q_rows;
    const float* row_values = OF_KEYS ? v_rows : dy_rows;
    const float* columns = OF_KEYS ? q_rows : k_rows;
    const float* column_values = OF_KEYS ? dy_rows : v_rows;
    const long long row_stride = OF_KEYS ? k_row : q_row, row_value_stride = OF_KEYS ? v_row : dy_row;
    const long long column_stride = OF_KEYS ? q_row : k_row, column_value_stride = OF_KEYS ? dy_row : v_row;

    if (member == 0) {
      copy_rows<ROWS, HEAD, STRIDE>(own_tile, rows, row_stride, first, count);
      copy_rows<ROWS, VALUE_HEAD, VALUE_STRIDE>(own_values, row_values, row_value_stride, first, count);
    } else {
      __syncthreads();  // nobody reads the last tiles of the head before any more
    }
    if (begin < end) {
      copy_rows<COLUMNS, HEAD, STRIDE>(stages, columns, column_stride, begin, others);
      copy_rows<COLUMNS, VALUE_HEAD, VALUE_STRIDE>(stages + COLUMNS * STRIDE, column_values, column_value_stride,
                                                   begin, others);
    }

    for (int start = begin; start < end; start += COLUMNS) {
      const int stage = (start - begin) / COLUMNS % 2;
      const float* tile = stages + stage * STAGE;
      const float* tile_values = tile + COLUMNS * STRIDE;
      const int behind = start + COLUMNS - 1;
      const bool sees_all = OF_KEYS ? behind < queries && sight.sees_all(start, behind, first, last)
                                    : last == first + ROWS - 1 && sight.sees_all(first, last, start, behind);
      wait_for_copies();
      __syncthreads();  // the tile is there, and nobody reads the one before any more
      if (start + COLUMNS < end) {
        float* next = stages + (1 - stage) * STAGE;
        copy_rows<COLUMNS, HEAD, STRIDE>(next, columns, column_stride, start + COLUMNS, others);
        copy_rows<COLUMNS, VALUE_HEAD, VALUE_STRIDE>(next + COLUMNS * STRIDE, column_values, column_value_stride,
                                                     start + COLUMNS, others);
      }

      float scores[TILES][COLUMNS / 16] = {}, gradients[TILES][COLUMNS / 16] = {};
      multiply<HEAD, STRIDE>(scores, own_tile + own * STRIDE, tile);
      multiply<VALUE_HEAD, VALUE_STRIDE>(gradients, own_values + own * VALUE_STRIDE, tile_values);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < COLUMNS / 16; ++j) {
          int row = first + own + i, column = start + threadIdx.x % 16 + 16 * j;
          int query = OF_KEYS ? column : row, key = OF_KEYS ? row : column;
          float weight = 0.0f, gradient = 0.0f;
          if (sees_all || (query < queries && sight.sees(query, key))) {
            long long at = mask_start + query * mask_row + key * mask_key;
            float score = shaped(scores[i][j], scale, 0.0f, mask, at) * LOG2_E;
            weight = exp2_of(score - logarithms[of_head + query]);
            gradient = weight * (gradients[i][j] - means[of_head + query]);
          }
          int place = (own + i) * FACTOR_STRIDE + threadIdx.x % 16 + 16 * j;
          of_scores[place] = gradient;
          if (OF_KEYS) of_values[place] = weight;
        }
      __syncwarp();
      accumulate<HEAD, WIDTH, STRIDE>(sums, of_scores + own * FACTOR_STRIDE, tile);
#if OF_KEYS
      accumulate<VALUE_HEAD, VALUE_WIDTH, VALUE_STRIDE>(value_sums, of_values + own * FACTOR_STRIDE, tile_values);
#endif
      __syncwarp();  // the next tile's go where these were
    }
  }

  wait_for_copies();
  const long long place = static_cast<long long>(batch) * gridDim.y + own_head;
  write_rows<HEAD, WIDTH>(dq_or_dk + place * count * HEAD, sums, factor, first + own, count);
#if OF_KEYS
  write_rows<VALUE_HEAD, VALUE_WIDTH>(dv + place * count * VALUE_HEAD, value_sums, 1.0f, first + own, count);
#endif
}
