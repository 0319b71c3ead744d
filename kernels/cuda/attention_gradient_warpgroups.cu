// Gradients of attention of 16-bit elements by products of warpgroups; see attention_gradient.cu for what is computed.
//
// One launch: blocks of keys (gradients of k and v) come first, as they have most to do, then those of queries. Each
// warpgroup of a block has 64 rows of its own; the others pass by in tiles as in attention_warpgroups.cu. Weights and
// their gradients have the block's own rows as rows, so that they are factors in registers of what is summed.

#include "attention.cuh"
#include "attention_means.cuh"
#include "warpgroups.cuh"

#ifndef GROUPS
#define GROUPS 1
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef STAGES
#define STAGES 2
#endif

constexpr int THREADS = GROUPS * GROUP;
constexpr int GROUP_ROWS = 64;
constexpr int ROWS = GROUPS * GROUP_ROWS;
constexpr int COLUMNS = 64;
constexpr int TILE = COLUMNS * (HEAD + VALUE_HEAD);
constexpr int AHEAD = STAGES / 2;  // tiles that are asked for before they are needed

// sums = rows of the block's own by those of a tile; both have what is summed over side by side.
template <int DEPTH>
__device__ __forceinline__ void multiply_rows(float (&sums)[COLUMNS / 8][4], const Element* own, const Element* tile) {
#pragma unroll
  for (int step = 0; step < DEPTH / 16; ++step) {
    const Element* a = own + step / 4 * ROWS * SLAB + step % 4 * 16;
    const Element* b = tile + step / 4 * COLUMNS * SLAB + step % 4 * 16;
    multiply<0, 0>(sums, described(a, 0), described(b, 0), step > 0);
  }
}

// sums += factors times a tile, whose rows are the factors' columns.
template <int COUNT>
__device__ __forceinline__ void accumulate(float (&sums)[COUNT][4], const unsigned (&factors)[COLUMNS / 16][4],
                                           const Element* tile) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step)
    multiply<1>(sums, factors[step], described(tile + step * 16 * SLAB, COLUMNS * SLAB * 2));
}

__device__ __forceinline__ void round_pairs(unsigned (&factors)[COLUMNS / 16][4], const float (&numbers)[COLUMNS / 8][4]) {
#pragma unroll
  for (int step = 0; step < COLUMNS / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = numbers[2 * step + i / 2] + i % 2 * 2;
      factors[step][i] = pair_of(pair[0], pair[1]);
    }
}

// Rows of a warpgroup to dense memory, through its rows of a tile, so that they leave in 16-byte chunks.
template <int WIDTH>
__device__ __forceinline__ void write_rows(Element* to, const float (&sums)[WIDTH / 8][4], float factor, Element* through,
                                           int place, int first, int limit) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4;
  meet_group(place);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int n = 0; n < WIDTH / 8; ++n)
      *reinterpret_cast<unsigned*>(through + n / 8 * ROWS * SLAB + swizzled(row + half * 8, n % 8) + lane % 4 * 2) =
          pair_of(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
  meet_group(place);
  constexpr int CHUNKS = WIDTH / 8;
#pragma unroll
  for (int pass = 0; pass < GROUP_ROWS * CHUNKS / GROUP; ++pass) {
    const int number = threadIdx.x % GROUP + pass * GROUP, row = number / CHUNKS, chunk = number % CHUNKS;
    if (first + row < limit)
      *reinterpret_cast<uint4*>(to + static_cast<long long>(first + row) * WIDTH + chunk * 8) =
          *reinterpret_cast<const uint4*>(through + chunk / 8 * ROWS * SLAB + swizzled(row, chunk % 8));
  }
}

// Rows of one head of an operand.
struct Rows {
  const Element* begin;
  int stride;
};

// What one block needs to know of the launch.
struct Task {
  const void* mask;
  const float *logarithms, *means;
  int queries, keys;
  float scale, factor;
  long long mask_row, mask_key;
};

// The rows from `first` of keys (OF_KEYS), or of queries, of one head: each tile of the others, `members` times over (the
// heads of queries that share one of keys).
template <bool OF_KEYS, class Others>
__device__ __forceinline__ void sum_over(const Task& task, const Sight& sight, int first, int members, Rows own, Rows own_values,
                                         Others others, Element* gradient, Element* value_gradient) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* own_tile = reinterpret_cast<Element*>(shared);
  Element* own_value_tile = own_tile + ROWS * HEAD;
  Element* stages = own_value_tile + ROWS * VALUE_HEAD;
  float* numbers = reinterpret_cast<float*>(stages + STAGES * TILE);  // of queries: logarithms and means
  Barrier* filled = reinterpret_cast<Barrier*>(numbers + STAGES * 2 * COLUMNS);
  Barrier* emptied = filled + STAGES;

  const int queries = task.queries, count = OF_KEYS ? task.keys : queries, other_count = OF_KEYS ? queries : task.keys;
  const int last = (first + ROWS < count ? first + ROWS : count) - 1;
  const int place = uniform(threadIdx.x / GROUP), lane = threadIdx.x % 32;
  const int own_first = first + place * GROUP_ROWS, own_last = own_first + GROUP_ROWS - 1;
  const int row = threadIdx.x % GROUP / 32 * 16 + lane / 4, column = lane % 4 * 2;

  // Which of the others meet these rows: keys that queries see, or queries that see keys.
  const int begin = (OF_KEYS ? sight.first_query(first) : sight.begin(first)) / COLUMNS * COLUMNS;
  const int end = OF_KEYS ? sight.end_of_queries(last, queries) : sight.end(last);
  const int of_member = end > begin ? (end - begin + COLUMNS - 1) / COLUMNS : 0, tiles = members * of_member;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      begin_barrier(filled + stage, THREADS);
      begin_barrier(emptied + stage, THREADS / 32);
    }
  }
  __syncthreads();

  auto copy = [&](int tile) {
    const int stage = tile % STAGES, start = begin + tile % of_member * COLUMNS;
    Element* to = stages + stage * TILE;
    if (tile >= STAGES) wait_for(emptied + stage, (tile / STAGES - 1) % 2);
    const auto given = others(tile / of_member);
    copy_tile<THREADS, COLUMNS, HEAD>(to, given.rows.begin, given.rows.stride, start, other_count);
    copy_tile<THREADS, COLUMNS, VALUE_HEAD>(to + COLUMNS * HEAD, given.values.begin, given.values.stride, start, other_count);
    if (OF_KEYS && threadIdx.x < 2 * COLUMNS) {
      const float* from = (threadIdx.x < COLUMNS ? task.logarithms : task.means) + given.first_query;
      const int query = start + threadIdx.x % COLUMNS;
      copy_few_async<4>(numbers + stage * 2 * COLUMNS + threadIdx.x, query < queries ? from + query : from, query < queries);
    }
    arrive_with_copies(filled + stage);
  };

  copy_tile<THREADS, ROWS, HEAD>(own_tile, own.begin, own.stride, first, count);
  copy_tile<THREADS, ROWS, VALUE_HEAD>(own_value_tile, own_values.begin, own_values.stride, first, count);
  for (int tile = 0; tile < AHEAD && tile < tiles; ++tile) copy(tile);

  float own_logarithms[2] = {}, own_means[2] = {};
  if (!OF_KEYS) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = own_first + row + half * 8;
      if (query < queries) {
        own_logarithms[half] = task.logarithms[others(0).first_query + query];
        own_means[half] = task.means[others(0).first_query + query];
      }
    }
  }

#if SHAPED
  const float factor = LOG2_E;
#else
  const float factor = task.scale * LOG2_E;
#endif
  float sums[HEAD / 8][4] = {}, value_sums[OF_KEYS ? VALUE_HEAD / 8 : 1][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % STAGES, start = begin + tile % of_member * COLUMNS, behind = start + COLUMNS - 1;
    const Element* rows = stages + stage * TILE;
    const Element* values = rows + COLUMNS * HEAD;
    if (tile > 0 && lane == 0) arrive(emptied + (tile - 1) % STAGES);
    if (tile + AHEAD < tiles) copy(tile + AHEAD);
    wait_for(filled + stage, tile / STAGES % 2);
    show_to_products();

    float weights[COLUMNS / 8][4], gradients[COLUMNS / 8][4];
    begin_products();
    multiply_rows<HEAD>(weights, own_tile + place * GROUP_ROWS * SLAB, rows);
    multiply_rows<VALUE_HEAD>(gradients, own_value_tile + place * GROUP_ROWS * SLAB, values);
    commit_products();
    wait_for_products<0>();
    hold(weights);
    hold(gradients);

    const bool sees_all = OF_KEYS ? behind < queries && sight.sees_all(start, behind, own_first, own_last)
                                  : own_last < queries && sight.sees_all(own_first, own_last, start, behind);
    const long long mask_start = others(tile / of_member).mask_start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own_row = own_first + row + half * 8;
      int from = 0, to = COLUMNS;
      if (!sees_all) {
        from = (OF_KEYS ? sight.first_query(own_row) : sight.begin(own_row)) - start - column;
        to = (OF_KEYS ? sight.end_of_queries(own_row, queries) : sight.end(own_row)) - start - column;
        if (own_row >= count) to = from;
      }
#if SHAPED
      const long long step = OF_KEYS ? task.mask_row : task.mask_key;
      const long long at = (start + column) * step + own_row * (OF_KEYS ? task.mask_key : task.mask_row);
      const unsigned char* mask_place = static_cast<const unsigned char*>(task.mask) + (mask_start + at) * MASK_BYTES;
#endif
#pragma unroll
      for (int n = 0; n < COLUMNS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int other = n * 8 + i;
          float &weight = weights[n][2 * half + i], &gradient = gradients[n][2 * half + i];
          float logarithm = own_logarithms[half], mean = own_means[half];
          if (OF_KEYS) {
            const float* of_query = numbers + stage * 2 * COLUMNS + column + other;
            logarithm = of_query[0];
            mean = of_query[COLUMNS];
          }
          const bool is_seen = sees_all || (other >= from && other < to);
#if SHAPED
          if (is_seen) weight = shaped(weight, task.scale, 0.0f, mask_place, i * step);
#endif
          weight = exp2_of((is_seen ? weight : NOTHING) * factor - logarithm);
          gradient = weight * (gradient - mean);
        }
#if SHAPED
        mask_place += 8 * MASK_BYTES * step;
#endif
      }
    }

    unsigned factors[COLUMNS / 16][4], value_factors[OF_KEYS ? COLUMNS / 16 : 1][4];
    round_pairs(factors, gradients);
    if constexpr (OF_KEYS) round_pairs(value_factors, weights);
    hold(sums);
    if constexpr (OF_KEYS) hold(value_sums);
    begin_products();
    accumulate(sums, factors, rows);
    if constexpr (OF_KEYS) accumulate(value_sums, value_factors, values);
    commit_products();
    wait_for_products<0>();
    hold(sums);
    if constexpr (OF_KEYS) hold(value_sums);
  }

  wait_for_copies();
  write_rows<HEAD>(gradient, sums, task.factor, own_tile + place * GROUP_ROWS * SLAB, place, own_first, count);
  if constexpr (OF_KEYS)
    write_rows<VALUE_HEAD>(value_gradient, value_sums, 1.0f, own_value_tile + place * GROUP_ROWS * SLAB, place, own_first, count);
}

// One head of queries for a block of keys, or the one of keys for a block of queries.
struct Other {
  Rows rows, values;
  long long first_query, mask_start;
};

// `logarithms` are those of attention.cu, `means` those of attention_means.cuh; results are dense.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention_gradient(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
                       const Element* __restrict__ dy, const void* __restrict__ mask, const float* __restrict__ logarithms,
                       const float* __restrict__ means, Element* __restrict__ dq, Element* __restrict__ dk, Element* __restrict__ dv,
                       int batches, int heads, int group, int queries, int keys, int offset, int left, int right, float scale, float factor,
                       long long q_batch, long long q_head, long long q_row, long long k_batch, long long k_head,
                       long long k_row, long long v_batch, long long v_head, long long v_row, long long dy_batch,
                       long long dy_head, long long dy_row, long long mask_batch, long long mask_head,
                       long long mask_row, long long mask_key) {
  const Task task{mask, logarithms, means, queries, keys, scale, factor, mask_row, mask_key};
  const int key_heads = heads / group, key_blocks = (keys + ROWS - 1) / ROWS * key_heads * batches;
  const bool is_of_keys = static_cast<int>(blockIdx.x) < key_blocks;
  const int number = is_of_keys ? blockIdx.x : blockIdx.x - key_blocks;
  const int own_heads = is_of_keys ? key_heads : heads;
  const int head = number % own_heads, batch = number / own_heads % batches, block = number / own_heads / batches;
  const int key_head = is_of_keys ? head : head / group;
  const Sight sight(keys, queries, offset, left, right, nullptr, batch);
  const Rows of_keys{k + batch * k_batch + key_head * k_head, static_cast<int>(k_row)};
  const Rows of_values{v + batch * v_batch + key_head * v_head, static_cast<int>(v_row)};
  auto of_queries = [&](int head) {
    return Other{{q + batch * q_batch + head * q_head, static_cast<int>(q_row)},
                 {dy + batch * dy_batch + head * dy_head, static_cast<int>(dy_row)},
                 (static_cast<long long>(batch) * heads + head) * queries,
                 batch * mask_batch + head * mask_head};
  };
  const long long place = static_cast<long long>(batch) * own_heads + head;
  if (is_of_keys) {
    auto others = [&](int member) { return of_queries(head * group + member); };
    sum_over<true>(task, sight, block * ROWS, group, of_keys, of_values, others, dk + place * keys * HEAD,
                   dv + place * keys * VALUE_HEAD);
  } else {
    const Other own = of_queries(head);
    auto others = [&](int) { return Other{of_keys, of_values, own.first_query, own.mask_start}; };
    const int first = ((queries + ROWS - 1) / ROWS - 1 - block) * ROWS;  // those that see most keys begin first
    sum_over<false>(task, sight, first, 1, own.rows, own.values, others, dq + place * queries * HEAD, nullptr);
  }
}
