// Attention by tensor cores, without a matrix of scores in memory: of 16-bit elements, and of float32 rounded to TF32.
//
// After FlashAttention-2 (Dao, 2023): a block computes ROWS queries of one head; keys and values pass through shared
// memory in tiles, copied while the tile before is computed; the softmax is updated tile by tile, in float32.
// A warp computes TILES times 16 queries, so that what it loads of keys and values serves them all.
//
// `logarithms`, where they are asked for, are those to base 2 of what the weights of each query are normalised by.
//
// Fragments of mma.m16n8k16 by lane, with g = lane / 4 and t = lane % 4: sums hold rows g and g + 8, columns 2t and
// 2t + 1; so do both 8 x 8 halves of what is multiplied, which is why scores turn into weights without a move.
// In those of m16n8k8, of TF32, halves hold columns t and t + 4. Keys 2t and 2t + 1 of values are taken for them: in
// which order a sum runs over keys is nobody's concern.
//
// Tensor cores drop the last 13 bits of a float32; weights drop them before they are summed, which keeps their mean.

#include "attention.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef KEYS
#define KEYS 64
#endif

constexpr int THREADS = WARPS * 32;
constexpr int ROWS = WARPS * TILES * 16;
constexpr int CHUNK = 16 / sizeof(Element);
constexpr int STEP = 2 * CHUNK;  // what one product sums over
constexpr int SIZE = (HEAD + STEP - 1) / STEP * STEP;  // padded with zeros
constexpr int VALUE_SIZE = (VALUE_HEAD + STEP - 1) / STEP * STEP;
// Elements from row to row: an odd number of 16-byte chunks, so that the 8 rows of a matrix lie in different banks.
constexpr int STRIDE = SIZE + CHUNK;
constexpr int VALUE_STRIDE = VALUE_SIZE + CHUNK;
constexpr int WIDE_STRIDE = STRIDE > VALUE_STRIDE ? STRIDE : VALUE_STRIDE;
constexpr int STAGE = KEYS * (STRIDE + VALUE_STRIDE);
// In registers, where they leave room for the rest.
constexpr bool KEEPS_QUERIES = TILES * (SIZE / STEP * 4 + VALUE_SIZE / 2 + KEYS / 2) <= 160;

// Start to copy rows of a tile; zeros behind `limit` and behind the head's size.
template <int COUNT, int GIVEN, int PADDED, int TO_STRIDE>
__device__ __forceinline__ void copy_rows(Element* to, const Element* from, int stride, int first, int limit) {
  constexpr int CHUNKS = PADDED / CHUNK;
  if constexpr (THREADS % CHUNKS == 0 && COUNT % (THREADS / CHUNKS) == 0) {  // a thread copies of one column
    constexpr int AT_ONCE = THREADS / CHUNKS;
    int row = threadIdx.x / CHUNKS, column = threadIdx.x % CHUNKS * CHUNK;
    to += row * TO_STRIDE + column;
    const Element* place = from + static_cast<long long>(first + row) * stride + column;
#pragma unroll
    for (int pass = 0; pass < COUNT / AT_ONCE; ++pass) {
      bool is_given = first + row + pass * AT_ONCE < limit && column < GIVEN;
      copy_async(to + pass * AT_ONCE * TO_STRIDE, is_given ? place : from, is_given);
      place += AT_ONCE * stride;
    }
  } else {
#pragma unroll
    for (int chunk = threadIdx.x; chunk < COUNT * CHUNKS; chunk += THREADS) {
      int row = chunk / CHUNKS, column = chunk % CHUNKS * CHUNK;
      bool is_given = first + row < limit && column < GIVEN;
      const Element* place = from + static_cast<long long>(first + row) * stride + column;
      copy_async(to + row * TO_STRIDE + column, is_given ? place : from, is_given);
    }
  }
}

// A weight as products take it.
__device__ __forceinline__ float as_multiplied(float weight) {
#if ELEMENT == 0
  return bits_value(value_bits(weight) & 0xffffe000u);
#else
  return weight;
#endif
}

// Register i of the weights that a product takes in a step, where scores were.
__device__ __forceinline__ unsigned weights_of(const float (&scores)[KEYS / 8][4], int step, int i) {
#if ELEMENT == 0
  return value_bits(scores[step][i % 2 * 2 + i / 2]);
#else
  const float* pair = scores[2 * step + i / 2] + i % 2 * 2;
  return pair_of(pair[0], pair[1]);
#endif
}

// Two elements side by side, the first at an even place.
__device__ __forceinline__ void store_two(Element* to, float low, float high) {
#if ELEMENT == 0
  to[0] = low, to[1] = high;
#else
  *reinterpret_cast<unsigned*>(to) = pair_of(low, high);
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
              const void* __restrict__ mask, const long long* __restrict__ valid, Element* __restrict__ y,
              float* __restrict__ logarithms, int group, int queries, int keys, int offset, int left, int right, float scale, float cap, long long q_batch,
              long long q_head, int q_row, long long k_batch, long long k_head, int k_row,
              long long v_batch, long long v_head, int v_row, long long mask_batch, long long mask_head,
              long long mask_row, long long mask_key, long long y_batch, long long y_head, long long y_row) {
  extern __shared__ __align__(128) unsigned char shared[];
  Element* query_tile = reinterpret_cast<Element*>(shared);
  Element* stages = query_tile + ROWS * WIDE_STRIDE;

  const int batch = blockIdx.z, head = blockIdx.x, heads = gridDim.x;
  const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;  // those that see most keys begin first
  const int last = (first + ROWS < queries ? first + ROWS : queries) - 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = warp * TILES * 16;  // the warp's first row of the tile
  const int own_last = first + own + TILES * 16 - 1 < last ? first + own + TILES * 16 - 1 : last;
  const Sight sight(keys, queries, offset, left, right, valid, batch);
  const int begin = sight.begin(first) / KEYS * KEYS, end = sight.end(last);

  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  const long long mask_start = batch * mask_batch + head * mask_head;

  copy_rows<ROWS, HEAD, SIZE, WIDE_STRIDE>(query_tile, q, q_row, first, queries);
  if (begin < end) {
    copy_rows<KEYS, HEAD, SIZE, STRIDE>(stages, k, k_row, begin, sight.limit);
    copy_rows<KEYS, VALUE_HEAD, VALUE_SIZE, VALUE_STRIDE>(stages + KEYS * STRIDE, v, v_row, begin, sight.limit);
  }

#if SHAPED
  const float factor = LOG2_E;
#else
  const float factor = scale * LOG2_E;
#endif
  float sums[TILES][VALUE_SIZE / 8][4] = {};
  float bases[TILES][2], norms[TILES][2];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
    for (int half = 0; half < 2; ++half) bases[tile][half] = NOTHING, norms[tile][half] = 0.0f;
  unsigned kept[KEEPS_QUERIES ? TILES : 1][KEEPS_QUERIES ? SIZE / STEP : 1][4];

  // Rows and columns that a lane addresses of a 16 x STEP piece: of queries and transposed values, and of keys.
  const int piece_row = lane % 16, piece_column = lane / 16 * CHUNK;
  const int key_row = lane / 16 * 8 + lane % 8, key_column = lane / 8 % 2 * CHUNK;
  const Element* query_piece = query_tile + (own + piece_row) * WIDE_STRIDE + piece_column;

  for (int start = begin; start < end; start += KEYS) {
    const int stage = (start - begin) / KEYS % 2;
    const Element* key_tile = stages + stage * STAGE;
    const Element* value_tile = key_tile + KEYS * STRIDE;
    wait_for_copies();
    __syncthreads();  // the tile is there, and nobody reads the one before any more
    if (start + KEYS < end) {
      Element* next = stages + (1 - stage) * STAGE;
      copy_rows<KEYS, HEAD, SIZE, STRIDE>(next, k, k_row, start + KEYS, sight.limit);
      copy_rows<KEYS, VALUE_HEAD, VALUE_SIZE, VALUE_STRIDE>(next + KEYS * STRIDE, v, v_row, start + KEYS, sight.limit);
    }
    if (KEEPS_QUERIES && start == begin) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int step = 0; step < SIZE / STEP; ++step)
          load_matrices(kept[KEEPS_QUERIES ? tile : 0][KEEPS_QUERIES ? step : 0],
                        query_piece + tile * 16 * WIDE_STRIDE + step * STEP);
    }

    float scores[TILES][KEYS / 8][4] = {};
#pragma unroll
    for (int step = 0; step < SIZE / STEP; ++step) {
      unsigned loaded[TILES][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        if (KEEPS_QUERIES) {
#pragma unroll
          for (int i = 0; i < 4; ++i) loaded[tile][i] = kept[KEEPS_QUERIES ? tile : 0][KEEPS_QUERIES ? step : 0][i];
        } else {
          load_matrices(loaded[tile], query_piece + tile * 16 * WIDE_STRIDE + step * STEP);
        }
      }
#pragma unroll
      for (int piece = 0; piece < KEYS / 16; ++piece) {
        unsigned b[4];
        load_matrices(b, key_tile + (piece * 16 + key_row) * STRIDE + step * STEP + key_column);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          multiply_add(scores[tile][2 * piece], loaded[tile], b[0], b[1]);
          multiply_add(scores[tile][2 * piece + 1], loaded[tile], b[2], b[3]);
        }
      }
    }

    const bool sees_all = sight.sees_all(first + own, own_last, start, start + KEYS - 1);
    if (SHAPED || !sees_all) {
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int query = first + own + tile * 16 + half * 8 + lane / 4, column = start + lane % 4 * 2;
          const int from = sight.begin(query) - column, to = query < queries ? sight.end(query) - column : from;
          const long long at = mask_start + query * mask_row + column * mask_key;
          const unsigned char* mask_place = static_cast<const unsigned char*>(mask) + at * MASK_BYTES;
#pragma unroll
          for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              float score = scores[tile][n][2 * half + i];
              const int key = n * 8 + i;
              if (key < from || key >= to) {
                score = NOTHING;
              } else if (SHAPED) {
                score = shaped(score, scale, cap, mask_place, i * mask_key);
              }
              scores[tile][n][2 * half + i] = score;
            }
            mask_place += 8 * MASK_BYTES * mask_key;
          }
        }
    }

#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float peak = NOTHING;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
          peak = fmaxf(peak, fmaxf(scores[tile][n][2 * half], scores[tile][n][2 * half + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)) * factor;
        float shrink = 1.0f;
        if (peak > bases[tile][half] + MOST_RISE) {
          shrink = fast_exp2(bases[tile][half] - peak);
          bases[tile][half] = peak;
        }
        const float base = bases[tile][half] == NOTHING ? 0.0f : bases[tile][half];
        float norm = norms[tile][half] * shrink;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            scores[tile][n][i] = as_multiplied(fast_exp2(scores[tile][n][i] * factor - base));
            norm += scores[tile][n][i];
          }
        norms[tile][half] = norm;
        if (__any_sync(0xffffffffu, shrink != 1.0f)) {
#pragma unroll
          for (int n = 0; n < VALUE_SIZE / 8; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) sums[tile][n][i] *= shrink;
        }
      }

#pragma unroll
    for (int step = 0; step < KEYS / STEP; ++step) {
      unsigned weights[TILES][4];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int i = 0; i < 4; ++i) weights[tile][i] = weights_of(scores[tile], step, i);
#if ELEMENT == 0
      const float* place = value_tile + (step * 8 + lane % 4 * 2) * VALUE_STRIDE + lane / 4;
#pragma unroll
      for (int n = 0; n < VALUE_SIZE / 8; ++n) {
        const unsigned b0 = value_bits(place[n * 8]), b1 = value_bits(place[VALUE_STRIDE + n * 8]);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) multiply_add(sums[tile][n], weights[tile], b0, b1);
      }
#else
#pragma unroll
      for (int piece = 0; piece < VALUE_SIZE / 16; ++piece) {
        unsigned b[4];
        load_transposed(b, value_tile + (step * 16 + piece_row) * VALUE_STRIDE + piece * 16 + piece_column);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          multiply_add(sums[tile][2 * piece], weights[tile], b[0], b[1]);
          multiply_add(sums[tile][2 * piece + 1], weights[tile], b[2], b[3]);
        }
      }
#endif
    }
  }

  // The results go through the warp's rows of the query tile, so that they leave in 16-byte chunks.
  wait_for_copies();
  __syncthreads();
  Element* result = query_tile + own * WIDE_STRIDE;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float norm = norms[tile][half];
      norm += __shfl_xor_sync(0xffffffffu, norm, 1);
      norm += __shfl_xor_sync(0xffffffffu, norm, 2);
      float part = norm == 0.0f ? 0.0f : 1.0f / norm;  // a query that sees no key gets zeros
      int query = first + own + tile * 16 + half * 8 + lane / 4;
      if (logarithms != nullptr && lane % 4 == 0 && query < queries)
        logarithms[(static_cast<long long>(batch) * heads + head) * queries + query] =
            norm == 0.0f ? -NOTHING : bases[tile][half] + log2f(norm);
      Element* row = result + (tile * 16 + half * 8 + lane / 4) * WIDE_STRIDE + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < VALUE_SIZE / 8; ++n)
        store_two(row + n * 8, sums[tile][n][2 * half] * part, sums[tile][n][2 * half + 1] * part);
    }
  __syncwarp();
  y += batch * y_batch + head * y_head;
  constexpr int CHUNKS = VALUE_HEAD / CHUNK;
  for (int chunk = lane; chunk < TILES * 16 * CHUNKS; chunk += 32) {
    int row = chunk / CHUNKS, column = chunk % CHUNKS * CHUNK;
    if (first + own + row < queries)
      *reinterpret_cast<uint4*>(y + (first + own + row) * y_row + column) =
          *reinterpret_cast<const uint4*>(result + row * WIDE_STRIDE + column);
  }
}
