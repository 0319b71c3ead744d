// Attention of few queries: bound by the memory that keys and values are read from, each once.
//
// A block computes ROWS queries, of the heads that share a head of keys, over one of several ranges of keys, so that all
// of the device reads (Flash-Decoding; Dao et al., 2023); `combine` joins the ranges. LANES lanes of a warp hold one key
// in 16-byte chunks, so that a warp reads SLOTS keys at once, COUNT times before it uses the first. Each such group of
// lanes updates a softmax of its own; they meet at the end.
//
// Keys are a past's and those that follow it. Where a present is asked for, what is read is written there.

#include "attention.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef COUNT
#define COUNT (ROWS > 2 ? 2 : 4)
#endif

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk

constexpr int KEY_CHUNKS = HEAD / WIDTH, VALUE_CHUNKS = VALUE_HEAD / WIDTH;
constexpr int CHUNKS = KEY_CHUNKS > VALUE_CHUNKS ? KEY_CHUNKS : VALUE_CHUNKS;
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
constexpr int SLOTS = 32 / LANES;
constexpr int KEY_LOADS = (KEY_CHUNKS + LANES - 1) / LANES, VALUE_LOADS = (VALUE_CHUNKS + LANES - 1) / LANES;
constexpr int STEP = SLOTS * COUNT;  // keys that a warp reads at once

__device__ __forceinline__ void spread(float (&to)[WIDTH], uint4 chunk) {
  const unsigned words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#if ELEMENT == 0
    to[i] = bits_value(words[i]);
#else
    to[2 * i] = element_value(static_cast<Element>(words[i] & 0xffffu));
    to[2 * i + 1] = element_value(static_cast<Element>(words[i] >> 16));
#endif
  }
}

struct Rows {  // of keys or of values of one head
  const Element* past;
  const Element* added;
  Element* present;  // of the rows of both, one behind the other; or none
  long long past_row, added_row;
  int count;  // of the past

  template <int SIZE>
  __device__ __forceinline__ uint4 read(int key, int column) const {
    bool is_past = key < count;
    const Element* from = is_past ? past + key * past_row : added + (key - count) * added_row;
    uint4 chunk = *reinterpret_cast<const uint4*>(from + column);
    if (present != nullptr) *reinterpret_cast<uint4*>(present + static_cast<long long>(key) * SIZE + column) = chunk;
    return chunk;
  }
};

// Shared memory: for each warp and row the peak and the norm, then the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    decode(const Element* __restrict__ q, const Element* past_key, const Element* k, Element* present_key,
           const Element* past_value, const Element* v, Element* present_value, const void* __restrict__ mask,
           const long long* __restrict__ valid, Element* __restrict__ y, float* __restrict__ parts,
           float* __restrict__ states, int heads, int group, int queries, int past, int keys, int seen, int range,
           int offset, int left, int right, float scale, float cap, long long q_batch, long long q_head,
           long long q_row, long long past_key_batch, long long past_key_head, long long past_key_row,
           long long k_batch, long long k_head, long long k_row, long long past_value_batch, long long past_value_head,
           long long past_value_row, long long v_batch, long long v_head, long long v_row, long long mask_batch,
           long long mask_head, long long mask_row, long long mask_key, long long y_batch, long long y_head,
           long long y_row) {
  extern __shared__ __align__(128) unsigned char shared[];
  const int total = group * queries;  // rows that share a head of keys
  const int blocks = (total + ROWS - 1) / ROWS;
  const int key_head = blockIdx.y / blocks, first = blockIdx.y % blocks * ROWS, batch = blockIdx.z;
  const int split = blockIdx.x, splits = gridDim.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slot = lane / LANES, part = lane % LANES;
  const Sight sight(seen, queries, offset, left, right, valid, batch);
  const bool writes = first == 0 && present_key != nullptr;
  const long long key_place = static_cast<long long>(batch) * (heads / group) + key_head;
  const Rows key_rows = {past_key + batch * past_key_batch + key_head * past_key_head,
                         k + batch * k_batch + key_head * k_head,
                         writes ? present_key + key_place * keys * HEAD : nullptr, past_key_row, k_row, past};
  const Rows value_rows = {past_value + batch * past_value_batch + key_head * past_value_head,
                           v + batch * v_batch + key_head * v_head,
                           writes ? present_value + key_place * keys * VALUE_HEAD : nullptr, past_value_row, v_row,
                           past};

  float query[ROWS][KEY_LOADS][WIDTH] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    int number = first + row;
    if (number < total) {
      const Element* from =
          q + batch * q_batch + (key_head * group + number / queries) * q_head + number % queries * q_row;
#pragma unroll
      for (int i = 0; i < KEY_LOADS; ++i)
        if (part + i * LANES < KEY_CHUNKS)
          spread(query[row][i], *reinterpret_cast<const uint4*>(from + (part + i * LANES) * WIDTH));
    }
  }

  float peaks[ROWS], norms[ROWS], sums[ROWS][VALUE_LOADS][WIDTH] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) peaks[row] = NOTHING, norms[row] = 0.0f;

  // What is written has to be read even where no query sees it.
  int begin = split * range, end = begin + range < keys ? begin + range : keys;
  if (!writes) {
    int from = sight.begin(0), to = sight.end(queries - 1);
    begin = begin > from ? begin : from;
    end = end < to ? end : to;
  }
  for (int start = begin + warp * STEP; start < end; start += WARPS * STEP) {
    uint4 key_chunks[COUNT][KEY_LOADS] = {}, value_chunks[COUNT][VALUE_LOADS] = {};
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      int key = start + n * SLOTS + slot;
      if (key < end) {
#pragma unroll
        for (int i = 0; i < KEY_LOADS; ++i)
          if (part + i * LANES < KEY_CHUNKS)
            key_chunks[n][i] = key_rows.read<HEAD>(key, (part + i * LANES) * WIDTH);
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; ++i)
          if (part + i * LANES < VALUE_CHUNKS)
            value_chunks[n][i] = value_rows.read<VALUE_HEAD>(key, (part + i * LANES) * WIDTH);
      }
    }

    float scores[ROWS][COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      int key = start + n * SLOTS + slot;
      float products[ROWS] = {};
#pragma unroll
      for (int i = 0; i < KEY_LOADS; ++i) {
        float numbers[WIDTH];
        spread(numbers, key_chunks[n][i]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) products[row] = fmaf(query[row][i][j], numbers[j], products[row]);
      }
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        float product = products[row];
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) product += __shfl_xor_sync(0xffffffffu, product, other);
        int number = first + row, place = number % queries;
        if (number >= total || key >= end || !sight.sees(place, key)) {
          product = NOTHING;
        } else {
          long long at = batch * mask_batch + (key_head * group + number / queries) * mask_head + place * mask_row +
                         key * mask_key;
          product = shaped(product, scale, cap, mask, at) * LOG2_E;
        }
        scores[row][n] = product;
      }
    }

#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float peak = peaks[row];
#pragma unroll
      for (int n = 0; n < COUNT; ++n) peak = fmaxf(peak, scores[row][n]);
      float base = peak == NOTHING ? 0.0f : peak;
      float shrink = exp2_of(peaks[row] - base);
      peaks[row] = peak;
      norms[row] *= shrink;
#pragma unroll
      for (int n = 0; n < COUNT; ++n) norms[row] += scores[row][n] = exp2_of(scores[row][n] - base);
#pragma unroll
      for (int i = 0; i < VALUE_LOADS; ++i)
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) sums[row][i][j] *= shrink;
    }
#pragma unroll
    for (int n = 0; n < COUNT; ++n)
#pragma unroll
      for (int i = 0; i < VALUE_LOADS; ++i) {
        float numbers[WIDTH];
        spread(numbers, value_chunks[n][i]);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) sums[row][i][j] = fmaf(scores[row][n], numbers[j], sums[row][i][j]);
      }
  }

  // The groups of a warp meet, then the warps.
  float* warp_states = reinterpret_cast<float*>(shared);
  float* warp_sums = warp_states + WARPS * ROWS * 2;
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float peak = peaks[row];
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
    float shrink = exp2_of(peaks[row] - (peak == NOTHING ? 0.0f : peak));
    float norm = norms[row] * shrink;
#pragma unroll
    for (int other = LANES; other < 32; other *= 2) norm += __shfl_xor_sync(0xffffffffu, norm, other);
    if (lane == 0) {
      warp_states[(warp * ROWS + row) * 2] = peak;
      warp_states[(warp * ROWS + row) * 2 + 1] = norm;
    }
#pragma unroll
    for (int i = 0; i < VALUE_LOADS; ++i)
#pragma unroll
      for (int j = 0; j < WIDTH; ++j) {
        float sum = sums[row][i][j] * shrink;
#pragma unroll
        for (int other = LANES; other < 32; other *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, other);
        if (slot == 0 && part + i * LANES < VALUE_CHUNKS)
          warp_sums[(warp * ROWS + row) * VALUE_HEAD + (part + i * LANES) * WIDTH + j] = sum;
      }
  }
  __syncthreads();

  for (int place = threadIdx.x; place < ROWS * VALUE_HEAD; place += THREADS) {
    int row = place / VALUE_HEAD, column = place % VALUE_HEAD, number = first + row;
    if (number >= total) break;
    float peak = NOTHING, norm = 0.0f, sum = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) peak = fmaxf(peak, warp_states[(other * ROWS + row) * 2]);
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      float shrink = exp2_of(warp_states[(other * ROWS + row) * 2] - (peak == NOTHING ? 0.0f : peak));
      norm += warp_states[(other * ROWS + row) * 2 + 1] * shrink;
      sum += warp_sums[(other * ROWS + row) * VALUE_HEAD + column] * shrink;
    }
    int head = key_head * group + number / queries;
    if (splits == 1) {
      y[batch * y_batch + head * y_head + number % queries * y_row + column] =
          element_of(norm == 0.0f ? 0.0f : sum / norm);
    } else {
      long long at = ((static_cast<long long>(batch) * heads + head) * queries + number % queries) * splits + split;
      parts[at * VALUE_HEAD + column] = sum;
      if (column == 0) states[2 * at] = peak, states[2 * at + 1] = norm;
    }
  }
}

constexpr int COLUMNS = (VALUE_HEAD + 31) / 32 * 32;
constexpr int GROUPS = 512 / COLUMNS;  // of threads that each join some of the ranges

// Join the ranges of keys of one query of one head: a block for each, of COLUMNS * GROUPS threads.
// Shared memory: the sums of each group.
extern "C" __global__ void __launch_bounds__(COLUMNS * GROUPS)
    combine(const float* __restrict__ parts, const float* __restrict__ states, Element* __restrict__ y, int splits,
            long long y_batch, long long y_head, long long y_row) {
  extern __shared__ __align__(128) unsigned char shared[];
  float* sums = reinterpret_cast<float*>(shared);
  const int query = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS, lane = threadIdx.x % 32;
  const long long start =
      ((static_cast<long long>(batch) * gridDim.y + head) * gridDim.x + query) * static_cast<long long>(splits);
  parts += start * VALUE_HEAD;
  states += start * 2;

  float peak = NOTHING, norm = 0.0f, sum = 0.0f;
  for (int split = lane; split < splits; split += 32) peak = fmaxf(peak, states[2 * split]);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, other));
  const float base = peak == NOTHING ? 0.0f : peak;
  for (int split = lane; split < splits; split += 32) norm += states[2 * split + 1] * exp2_of(states[2 * split] - base);
#pragma unroll
  for (int other = 16; other > 0; other /= 2) norm += __shfl_xor_sync(0xffffffffu, norm, other);

  if (column < VALUE_HEAD) {
#pragma unroll 8
    for (int split = group; split < splits; split += GROUPS)
      sum += parts[split * VALUE_HEAD + column] * exp2_of(states[2 * split] - base);
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (group > 0 || column >= VALUE_HEAD) return;
#pragma unroll
  for (int other = 1; other < GROUPS; ++other) sum += sums[other * COLUMNS + column];
  y[batch * y_batch + head * y_head + query * y_row + column] = element_of(norm == 0.0f ? 0.0f : sum / norm);
}
