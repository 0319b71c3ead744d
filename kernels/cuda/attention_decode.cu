// Attention of few queries: bound by the memory that keys and values are read from, each once.
//
// A block computes ROWS queries, of the heads that share a head of keys, over one of several ranges of keys, so that all
// of the device reads (Flash-Decoding; Dao et al., 2023); the block of them that comes last joins the ranges in their
// order: `arrived` counts them, and is zero again at the end. LANES lanes of a warp hold one key in 16-byte chunks, so
// that a warp reads SLOTS keys at once. Chunks are copied to shared memory AHEAD turns of COUNT keys before the lane uses
// them that asked for them. Each group of lanes updates a softmax of its own; they meet at the end.
//
// Keys are a past's and those that follow it. Where a present is asked for, what is read is written there.

#include "ahead.cuh"
#include "arrivals.cuh"
#include "attention.cuh"

#ifndef ROWS
#define ROWS 1
#endif
#ifndef WARPS
#define WARPS 16
#endif

constexpr int THREADS = WARPS * 32;
constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk
constexpr int COUNT = 2, AHEAD = 2;
constexpr int JOINED = 16;  // ranges whose sums are read before the first is used

constexpr int KEY_CHUNKS = HEAD / WIDTH, VALUE_CHUNKS = VALUE_HEAD / WIDTH;
constexpr int CHUNKS = KEY_CHUNKS > VALUE_CHUNKS ? KEY_CHUNKS : VALUE_CHUNKS;
constexpr int LANES = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
constexpr int SLOTS = 32 / LANES;
constexpr int KEY_LOADS = (KEY_CHUNKS + LANES - 1) / LANES, VALUE_LOADS = (VALUE_CHUNKS + LANES - 1) / LANES;
constexpr int LOADS = KEY_LOADS + VALUE_LOADS;
constexpr int STEP = WARPS * SLOTS;  // keys that a block reads at once

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

template <int SIZE>
struct Rows {  // of keys or of values of one head
  const Element* past;
  const Element* added;
  Element* present;  // of the rows of both, one behind the other; or none
  int past_row, added_row;
  int count;  // of the past

  __device__ __forceinline__ void copy(uint4* to, int key, int chunk, bool is_given) const {
    const bool is_past = key < count;
    const int place = is_past ? key : key - count, row = is_past ? past_row : added_row;
    const Element* from = (is_past ? past : added) + static_cast<long long>(place) * row;
    is_given = is_given && chunk < SIZE / WIDTH;
    copy_once(to, is_given ? from + chunk * WIDTH : added, is_given);
  }

  __device__ __forceinline__ void keep(uint4 read, int key, int chunk) const {
    if (present != nullptr && chunk < SIZE / WIDTH)
      *reinterpret_cast<uint4*>(present + static_cast<long long>(key) * SIZE + chunk * WIDTH) = read;
  }
};

// Shared memory: the chunks that are on their way; then, for each warp and row, the peak and the norm, and the sums; at
// last the peaks and norms of all ranges.
extern "C" __global__ void __launch_bounds__(THREADS)
    decode(const Element* q, const Element* past_key, const Element* k, Element* present_key,
           const Element* past_value, const Element* v, Element* present_value, const void* mask,
           const long long* valid, Element* __restrict__ y, float* parts, float* states,
           unsigned* arrived, int heads, int group, int queries, int past, int keys, int seen, int range, int offset,
           int left, int right, float scale, float cap, long long q_batch, long long q_head, long long q_row,
           long long past_key_batch, long long past_key_head, long long past_key_row, long long k_batch,
           long long k_head, long long k_row, long long past_value_batch, long long past_value_head,
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
  const Rows<HEAD> key_rows = {past_key + batch * past_key_batch + key_head * past_key_head,
                               k + batch * k_batch + key_head * k_head,
                               writes ? present_key + key_place * keys * HEAD : nullptr,
                               static_cast<int>(past_key_row), static_cast<int>(k_row), past};
  const Rows<VALUE_HEAD> value_rows = {past_value + batch * past_value_batch + key_head * past_value_head,
                                       v + batch * v_batch + key_head * v_head,
                                       writes ? present_value + key_place * keys * VALUE_HEAD : nullptr,
                                       static_cast<int>(past_value_row), static_cast<int>(v_row), past};

  // What is written has to be read even where no query sees it.
  int begin = split * range, end = begin + range < keys ? begin + range : keys;
  if (!writes) {
    int from = sight.begin(0), to = sight.end(queries - 1);
    begin = begin > from ? begin : from;
    end = end < to ? end : to;
  }
  uint4* const chunks = reinterpret_cast<uint4*>(shared) + threadIdx.x;
  const int own = begin + warp * SLOTS;  // the first key of the warp
  const auto copy = [&](int start, int place) {
    if (start < end) {
#pragma unroll
      for (int n = 0; n < COUNT; ++n) {
        const int key = start + slot + n * STEP;
        uint4* const to = chunks + (place * COUNT + n) * LOADS * THREADS;
#pragma unroll
        for (int i = 0; i < KEY_LOADS; ++i) key_rows.copy(to + i * THREADS, key, part + i * LANES, key < end);
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; ++i)
          value_rows.copy(to + (KEY_LOADS + i) * THREADS, key, part + i * LANES, key < end);
      }
    }
    end_copies();
  };
#pragma unroll 1
  for (int i = 0; i < AHEAD; ++i) copy(own + i * COUNT * STEP, i);

  float query[ROWS][KEY_LOADS][WIDTH] = {};
  int from[ROWS], to[ROWS];  // the keys that a row sees
#if MASK > 0
  long long masked[ROWS];
#endif
  int head = first / queries, place = first - head * queries;  // behind the last row it is repeated
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row > 0 && first + row < total && ++place == queries) place = 0, ++head;
    const Element* at = q + batch * q_batch + (key_head * group + head) * q_head + place * q_row;
#pragma unroll
    for (int i = 0; i < KEY_LOADS; ++i)
      if (part + i * LANES < KEY_CHUNKS)
        spread(query[row][i], *reinterpret_cast<const uint4*>(at + (part + i * LANES) * WIDTH));
    from[row] = sight.begin(place), to[row] = sight.end(place);
    if (to[row] > end) to[row] = end;
#if MASK > 0
    masked[row] = batch * mask_batch + (key_head * group + head) * mask_head + place * mask_row;
#endif
  }

  float peaks[ROWS], norms[ROWS], sums[ROWS][VALUE_LOADS][WIDTH] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) peaks[row] = NOTHING, norms[row] = 0.0f;

#pragma unroll 1
  for (int start = own, turn = 0; start < end; start += COUNT * STEP, turn = turn + 1 == AHEAD ? 0 : turn + 1) {
    wait_for_copies_but<AHEAD - 1>();
    const uint4* const given = chunks + turn * COUNT * LOADS * THREADS;
    float scores[ROWS][COUNT];
#pragma unroll
    for (int n = 0; n < COUNT; ++n) {
      const int key = start + slot + n * STEP;
      float products[ROWS] = {};
#pragma unroll
      for (int i = 0; i < KEY_LOADS; ++i) {
        const uint4 chunk = given[(n * LOADS + i) * THREADS];
        if (key < end) key_rows.keep(chunk, key, part + i * LANES);
        float numbers[WIDTH];
        spread(numbers, chunk);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) products[row] = fmaf(query[row][i][j], numbers[j], products[row]);
      }
#pragma unroll
      for (int other = LANES / 2; other > 0; other /= 2)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) products[row] += __shfl_xor_sync(0xffffffffu, products[row], other);
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        scores[row][n] = NOTHING;
        if (key < from[row] || key >= to[row]) continue;
#if MASK > 0
        scores[row][n] = shaped(products[row], scale, cap, mask, masked[row] + key * mask_key) * LOG2_E;
#elif SHAPED
        scores[row][n] = shaped(products[row], scale, cap, mask, 0) * LOG2_E;
#else
        scores[row][n] = products[row] * (scale * LOG2_E);
#endif
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
        const int key = start + slot + n * STEP;
        const uint4 chunk = given[(n * LOADS + KEY_LOADS + i) * THREADS];
        if (key < end) value_rows.keep(chunk, key, part + i * LANES);
        float numbers[WIDTH];
        spread(numbers, chunk);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
#pragma unroll
          for (int j = 0; j < WIDTH; ++j) sums[row][i][j] = fmaf(scores[row][n], numbers[j], sums[row][i][j]);
      }
    copy(start + AHEAD * COUNT * STEP, turn);
  }

  // The groups of a warp meet, then the warps.
  float* warp_states = reinterpret_cast<float*>(shared);
  float* warp_sums = warp_states + WARPS * ROWS * 2;
  __syncthreads();
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

  const int left_over = total - first < ROWS ? total - first : ROWS;
  const auto result = [&](int row) {
    const int number = first + row;
    return y + batch * y_batch + (key_head * group + number / queries) * y_head + number % queries * y_row;
  };
  const long long at = ((static_cast<long long>(batch) * gridDim.y + blockIdx.y) * splits) * ROWS;
#pragma unroll 1
  for (int place = threadIdx.x; place < left_over * VALUE_HEAD; place += THREADS) {
    const int row = place / VALUE_HEAD, column = place % VALUE_HEAD;
    float peak = NOTHING, norm = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (int other = 0; other < WARPS; ++other) peak = fmaxf(peak, warp_states[(other * ROWS + row) * 2]);
#pragma unroll 4
    for (int other = 0; other < WARPS; ++other) {
      float shrink = exp2_of(warp_states[(other * ROWS + row) * 2] - (peak == NOTHING ? 0.0f : peak));
      norm += warp_states[(other * ROWS + row) * 2 + 1] * shrink;
      sum += warp_sums[(other * ROWS + row) * VALUE_HEAD + column] * shrink;
    }
    if (splits == 1) {
      result(row)[column] = element_of(norm == 0.0f ? 0.0f : sum / norm);
    } else {
      parts[(at + split * ROWS + row) * VALUE_HEAD + column] = sum;
      if (column == 0) states[2 * (at + split * ROWS + row)] = peak, states[2 * (at + split * ROWS + row) + 1] = norm;
    }
  }
  if (splits == 1) return;

  // The last of the blocks of some rows joins what all of them found.
  int* const is_last = reinterpret_cast<int*>(shared);
  float* const all = reinterpret_cast<float*>(shared) + 4;
  unsigned* const count = arrived + batch * gridDim.y + blockIdx.y;
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = arrive(count) == static_cast<unsigned>(splits - 1);
    if (*is_last) *count = 0;
  }
  __syncthreads();
  if (!*is_last) return;
#pragma unroll 1
  for (int place = threadIdx.x; place < splits * ROWS * 2; place += THREADS) all[place] = __ldcg(states + 2 * at + place);
  __syncthreads();
#pragma unroll 1
  for (int place = threadIdx.x; place < left_over * VALUE_HEAD; place += THREADS) {
    const int row = place / VALUE_HEAD, column = place % VALUE_HEAD;
    float peak = NOTHING, norm = 0.0f, sum = 0.0f;
#pragma unroll 4
    for (int other = 0; other < splits; ++other) peak = fmaxf(peak, all[2 * (other * ROWS + row)]);
    const float base = peak == NOTHING ? 0.0f : peak;
    const float* from = parts + (at + row) * VALUE_HEAD + column;
#pragma unroll 1
    for (int start = 0; start < splits; start += JOINED, from += JOINED * ROWS * VALUE_HEAD) {
      float given[JOINED];
#pragma unroll
      for (int i = 0; i < JOINED; ++i) given[i] = start + i < splits ? __ldcg(from + i * ROWS * VALUE_HEAD) : 0.0f;
#pragma unroll
      for (int i = 0; i < JOINED; ++i) {
        if (start + i >= splits) break;
        const float shrink = exp2_of(all[2 * ((start + i) * ROWS + row)] - base);
        norm += all[2 * ((start + i) * ROWS + row) + 1] * shrink;
        sum += given[i] * shrink;
      }
    }
    result(row)[column] = element_of(norm == 0.0f ? 0.0f : sum / norm);
  }
}
