// Attention of float32, exact to its rounding, without a matrix of scores in memory.
//
// The tiles of attention.cu, multiplied by 16 x 16 threads: each has TILES queries, of scores every 16th key, and of
// results 4 of 64 columns. Weights go through shared memory; who reads them is in the warp that wrote them.

#ifndef ELEMENT
#define ELEMENT 0
#endif
#include "attention.cuh"

#ifndef TILES
#define TILES 4
#endif
#ifndef KEYS
#define KEYS 32
#endif

constexpr int THREADS = 256;
constexpr int ROWS = 16 * TILES;
// Elements from row to row: an odd number of 16-byte chunks, so that 8 rows lie in different banks.
constexpr int STRIDE = HEAD + 4;
constexpr int WEIGHT_STRIDE = KEYS + 4;
constexpr int STAGE = KEYS * (STRIDE + VALUE_HEAD);
constexpr int COLUMNS = (VALUE_HEAD + 63) / 64;

#include "attention_f32.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_f32(const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
                  const void* __restrict__ mask, const long long* __restrict__ valid, float* __restrict__ y,
                  float* __restrict__ logarithms, int group, int queries, int keys, int offset, int left, int right, float scale, float cap, long long q_batch,
                  long long q_head, int q_row, long long k_batch, long long k_head, int k_row,
                  long long v_batch, long long v_head, int v_row, long long mask_batch, long long mask_head,
                  long long mask_row, long long mask_key, long long y_batch, long long y_head, long long y_row) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* query_tile = reinterpret_cast<float*>(shared);
  float* weights = query_tile + ROWS * STRIDE;
  float* stages = weights + ROWS * WEIGHT_STRIDE;

  const int batch = blockIdx.z, head = blockIdx.x, heads = gridDim.x;
  const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;  // those that see most keys begin first
  const int last = (first + ROWS < queries ? first + ROWS : queries) - 1;
  const int column = threadIdx.x % 16, own = threadIdx.x / 16 * TILES;  // the thread's first row of the tile
  const Sight sight(keys, queries, offset, left, right, valid, batch);
  const int begin = sight.begin(first) / KEYS * KEYS, end = sight.end(last);

  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;
  const long long mask_start = batch * mask_batch + head * mask_head;

  copy_rows<ROWS, HEAD, STRIDE>(query_tile, q, q_row, first, queries);
  if (begin < end) {
    copy_rows<KEYS, HEAD, STRIDE>(stages, k, k_row, begin, sight.limit);
    copy_rows<KEYS, VALUE_HEAD, VALUE_HEAD>(stages + KEYS * STRIDE, v, v_row, begin, sight.limit);
  }

  float sums[TILES][COLUMNS][4] = {};
  float peaks[TILES], norms[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) peaks[i] = NOTHING, norms[i] = 0.0f;

  for (int start = begin; start < end; start += KEYS) {
    const int stage = (start - begin) / KEYS % 2;
    const float* key_tile = stages + stage * STAGE;
    const float* value_tile = key_tile + KEYS * STRIDE;
    wait_for_copies();
    __syncthreads();  // the tile is there, and nobody reads the one before any more
    if (start + KEYS < end) {
      float* next = stages + (1 - stage) * STAGE;
      copy_rows<KEYS, HEAD, STRIDE>(next, k, k_row, start + KEYS, sight.limit);
      copy_rows<KEYS, VALUE_HEAD, VALUE_HEAD>(next + KEYS * STRIDE, v, v_row, start + KEYS, sight.limit);
    }

    float scores[TILES][KEYS / 16] = {};
#pragma unroll 2
    for (int inner = 0; inner < HEAD; inner += 4) {
      float4 a[TILES], b[KEYS / 16];
#pragma unroll
      for (int i = 0; i < TILES; ++i)
        a[i] = *reinterpret_cast<const float4*>(query_tile + (own + i) * STRIDE + inner);
#pragma unroll
      for (int j = 0; j < KEYS / 16; ++j)
        b[j] = *reinterpret_cast<const float4*>(key_tile + (column + 16 * j) * STRIDE + inner);
#pragma unroll
      for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < KEYS / 16; ++j) {
          scores[i][j] = fmaf(a[i].x, b[j].x, scores[i][j]);
          scores[i][j] = fmaf(a[i].y, b[j].y, scores[i][j]);
          scores[i][j] = fmaf(a[i].z, b[j].z, scores[i][j]);
          scores[i][j] = fmaf(a[i].w, b[j].w, scores[i][j]);
        }
    }

    const bool sees_all = sight.sees_all(first, last, start, start + KEYS - 1);
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
      int query = first + own + i;
      float peak = peaks[i];
#pragma unroll
      for (int j = 0; j < KEYS / 16; ++j) {
        int key = start + column + 16 * j;
        if (query >= queries || !(sees_all || sight.sees(query, key))) {
          scores[i][j] = NOTHING;
        } else {
          long long at = mask_start + query * mask_row + key * mask_key;
          scores[i][j] = shaped(scores[i][j], scale, cap, mask, at) * LOG2_E;
        }
        peak = fmaxf(peak, scores[i][j]);
      }
#pragma unroll
      for (int other = 8; other > 0; other /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
      float base = peak == NOTHING ? 0.0f : peak;
      float shrink = exp2_of(peaks[i] - base);
      peaks[i] = peak;
      norms[i] *= shrink;
#pragma unroll
      for (int j = 0; j < KEYS / 16; ++j) {
        float weight = exp2_of(scores[i][j] - base);
        norms[i] += weight;
        weights[(own + i) * WEIGHT_STRIDE + column + 16 * j] = weight;
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][n][j] *= shrink;
    }
    __syncwarp();

#pragma unroll 2
    for (int inner = 0; inner < KEYS; inner += 4) {
      float part[TILES][4];
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
        float4 four = *reinterpret_cast<const float4*>(weights + (own + i) * WEIGHT_STRIDE + inner);
        part[i][0] = four.x, part[i][1] = four.y, part[i][2] = four.z, part[i][3] = four.w;
      }
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        int place = n * 64 + column * 4;
        if (VALUE_HEAD % 64 && place >= VALUE_HEAD) break;
#pragma unroll
        for (int key = 0; key < 4; ++key) {
          float4 b = *reinterpret_cast<const float4*>(value_tile + (inner + key) * VALUE_HEAD + place);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            sums[i][n][0] = fmaf(part[i][key], b.x, sums[i][n][0]);
            sums[i][n][1] = fmaf(part[i][key], b.y, sums[i][n][1]);
            sums[i][n][2] = fmaf(part[i][key], b.z, sums[i][n][2]);
            sums[i][n][3] = fmaf(part[i][key], b.w, sums[i][n][3]);
          }
        }
      }
    }
    __syncwarp();  // the weights of the next tile go where these were
  }

  wait_for_copies();
  y += batch * y_batch + head * y_head;
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    float norm = norms[i];
#pragma unroll
    for (int other = 8; other > 0; other /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, other);
    float part = norm == 0.0f ? 0.0f : 1.0f / norm;  // a query that sees no key gets zeros
    int query = first + own + i;
    if (logarithms != nullptr && column == 0 && query < queries)
      logarithms[(static_cast<long long>(batch) * heads + head) * queries + query] =
          norm == 0.0f ? -NOTHING : peaks[i] + log2f(norm);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      int place = n * 64 + column * 4;
      if (query < queries && place < VALUE_HEAD)
        *reinterpret_cast<float4*>(y + query * y_row + place) =
            make_float4(sums[i][n][0] * part, sums[i][n][1] * part, sums[i][n][2] * part, sums[i][n][3] * part);
    }
  }
}
