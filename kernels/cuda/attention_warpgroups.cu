// Attention of 16-bit elements by products of warpgroups (compute capability 9.0); see attention.cu for the rest.
//
// After FlashAttention-2 and 3 (Dao, 2023; Shah et al., 2024): each warpgroup of a block computes 64 queries of one head.
// Tiles of keys and values pass through STAGES places in shared memory; barriers tell when one is there, and when all
// have done with it, so that warpgroups drift apart: one's softmax is computed beside the products of others, as it is
// beside those of other blocks of the multiprocessor. Scores of a tile are asked for before the sums of the tile before,
// so that tensor cores have both to do. Weights stay in registers: sums of products have the layout that factors need.

#include "attention.cuh"
#include "warpgroups.cuh"

#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef BLOCKS
#define BLOCKS 2
#endif
#ifndef KEYS
#define KEYS 64
#endif
#ifndef STAGES
#define STAGES 4
#endif

constexpr int THREADS = GROUPS * GROUP;
constexpr int GROUP_ROWS = 64;
constexpr int ROWS = GROUPS * GROUP_ROWS;
constexpr int STAGE = KEYS * (HEAD + VALUE_HEAD);
static_assert(STAGES > 2, "two tiles are in use while another is copied");
constexpr int AHEAD = STAGES - 2;  // tiles that are asked for before they are needed, while two are in use

// Scores of a warpgroup's queries and a tile of keys: asked for.
__device__ __forceinline__ void ask_for_scores(float (&scores)[KEYS / 8][4], const Element* queries, const Element* keys) {
#pragma unroll
  for (int step = 0; step < HEAD / 16; ++step) {
    const Element* a = queries + step / 4 * ROWS * SLAB + step % 4 * 16;
    const Element* b = keys + step / 4 * KEYS * SLAB + step % 4 * 16;
    multiply<0, 0>(scores, described(a, 0), described(b, 0), step > 0);
  }
}

// Values by weights, added to a warpgroup's sums: asked for.
__device__ __forceinline__ void ask_for_sums(float (&sums)[VALUE_HEAD / 8][4], const unsigned (&weights)[KEYS / 16][4],
                                             const Element* values) {
#pragma unroll
  for (int step = 0; step < KEYS / 16; ++step)
    multiply<1>(sums, weights[step], described(values + step * 16 * SLAB, KEYS * SLAB * 2));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    attention(const Element* __restrict__ q, const Element* __restrict__ k, const Element* __restrict__ v,
              const void* __restrict__ mask, const long long* __restrict__ valid, Element* __restrict__ y,
              float* __restrict__ logarithms, int group, int queries, int keys, int offset, int left, int right, float scale, float cap, long long q_batch,
              long long q_head, int q_row, long long k_batch, long long k_head, int k_row,
              long long v_batch, long long v_head, int v_row, long long mask_batch, long long mask_head,
              long long mask_row, long long mask_key, long long y_batch, long long y_head, long long y_row) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Element* query_tile = reinterpret_cast<Element*>(shared);
  Element* stages = query_tile + ROWS * (HEAD > VALUE_HEAD ? HEAD : VALUE_HEAD);
  Barrier* filled = reinterpret_cast<Barrier*>(stages + STAGES * STAGE);
  Barrier* emptied = filled + STAGES;

  const int batch = blockIdx.z, head = blockIdx.x, heads = gridDim.x;
  const int first = (gridDim.y - 1 - blockIdx.y) * ROWS;  // those that see most keys begin first
  const int last = (first + ROWS < queries ? first + ROWS : queries) - 1;
  const int place = uniform(threadIdx.x / GROUP), lane = threadIdx.x % 32;
  const int own_first = first + place * GROUP_ROWS;
  const int own_last = own_first + GROUP_ROWS - 1 < last ? own_first + GROUP_ROWS - 1 : last;
  const Sight sight(keys, queries, offset, left, right, valid, batch);

  // Tiles of the block, and those of the warpgroup among them.
  const int begin = sight.begin(first) / KEYS * KEYS;
  const int tiles = (sight.end(last) - begin + KEYS - 1) / KEYS;
  const int own_begin = (sight.begin(own_first) - begin) / KEYS;
  const int behind = (sight.end(own_last) - begin + KEYS - 1) / KEYS;
  const int own_end = own_first > last || behind < own_begin ? 0 : behind;

  q += batch * q_batch + head * q_head;
  k += batch * k_batch + head / group * k_head;
  v += batch * v_batch + head / group * v_head;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      begin_barrier(filled + stage, THREADS);
      begin_barrier(emptied + stage, THREADS / 32);
    }
  }
  __syncthreads();

  auto copy = [&](int tile) {
    const int stage = tile % STAGES;
    Element* to = stages + stage * STAGE;
    if (tile >= STAGES) wait_for(emptied + stage, (tile / STAGES - 1) % 2);
    copy_tile<THREADS, KEYS, HEAD>(to, k, k_row, begin + tile * KEYS, sight.limit);
    copy_tile<THREADS, KEYS, VALUE_HEAD>(to + KEYS * HEAD, v, v_row, begin + tile * KEYS, sight.limit);
    arrive_with_copies(filled + stage);
  };
  auto wait_for_tile = [&](int tile) {
    wait_for(filled + tile % STAGES, tile / STAGES % 2);
    show_to_products();
  };

  auto copy_ahead = [&](int tile) {
    if (tile + AHEAD < tiles) copy(tile + AHEAD);
  };
  auto release = [&](int tile) {
    if (tile >= 0 && lane == 0) arrive(emptied + tile % STAGES);
  };

  copy_tile<THREADS, ROWS, HEAD>(query_tile, q, q_row, first, queries);
  for (int tile = 0; tile < AHEAD && tile < tiles; ++tile) copy(tile);

#if SHAPED
  const float factor = LOG2_E;
#else
  const float factor = scale * LOG2_E;
#endif
  const int row = threadIdx.x % GROUP / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const Element* own_queries = query_tile + place * GROUP_ROWS * SLAB;
  float scores[KEYS / 8][4];
  float sums[VALUE_HEAD / 8][4] = {};
  float bases[2] = {NOTHING, NOTHING}, norms[2] = {0.0f, 0.0f};  // of the exponents; weights are at most 2^MOST_RISE

  unsigned weights[KEYS / 16][4];  // of the tile before

  int tile = 0;
  for (; tile < own_begin && tile < tiles; ++tile) {
    copy_ahead(tile);
    release(tile - 1);
  }
  for (; tile < own_end; ++tile) {
    wait_for_tile(tile);
    hold(sums);
    hold(scores);
    begin_products();
    ask_for_scores(scores, own_queries, stages + tile % STAGES * STAGE);
    commit_products();
    if (tile > own_begin) {
      begin_products();
      ask_for_sums(sums, weights, stages + (tile - 1) % STAGES * STAGE + KEYS * HEAD);
    }
    commit_products();
    copy_ahead(tile);
    wait_for_products<1>();
    hold(scores);

    const int start = begin + tile * KEYS;
    const bool sees_all = sight.sees_all(own_first, own_last, start, start + KEYS - 1);
    if (SHAPED || !sees_all) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = own_first + row + half * 8;
        const int from = sight.begin(query) - start - column;
        const int to = query < queries ? sight.end(query) - start - column : from;
        const long long at = batch * mask_batch + head * mask_head + query * mask_row + (start + column) * mask_key;
        const unsigned char* mask_place = static_cast<const unsigned char*>(mask) + at * MASK_BYTES;
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float score = scores[n][2 * half + i];
            const int key = n * 8 + i;
            if (key < from || key >= to) {
              score = NOTHING;
            } else if (SHAPED) {
              score = shaped(score, scale, cap, mask_place, i * mask_key);
            }
            scores[n][2 * half + i] = score;
          }
          mask_place += 8 * MASK_BYTES * mask_key;
        }
      }
    }

    float shrinks[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float peak = NOTHING;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) peak = fmaxf(peak, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
      peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2)) * factor;
      shrinks[half] = 1.0f;
      if (peak > bases[half] + MOST_RISE) {
        shrinks[half] = exp2_of(bases[half] - peak);
        bases[half] = peak;
      }
      const float base = bases[half] == NOTHING ? 0.0f : bases[half];
      float norm = 0.0f;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int i = 2 * half; i < 2 * half + 2; ++i) {
          scores[n][i] = exp2_of(scores[n][i] * factor - base);
          norm += scores[n][i];
        }
      norms[half] = norms[half] * shrinks[half] + norm;
    }
    wait_for_products<0>();
    hold(sums);
    release(tile - 1);
    if (__any_sync(0xffffffffu, shrinks[0] != 1.0f || shrinks[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < VALUE_HEAD / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] *= shrinks[i / 2];
    }

#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = scores[2 * step + i / 2] + i % 2 * 2;
        weights[step][i] = pair_of(pair[0], pair[1]);
      }
  }
  if (own_begin < own_end) {
    hold(sums);
    begin_products();
    ask_for_sums(sums, weights, stages + (own_end - 1) % STAGES * STAGE + KEYS * HEAD);
    commit_products();
    wait_for_products<0>();
    hold(sums);
  }
  for (; tile < tiles; ++tile) {
    copy_ahead(tile);
    release(tile - 1);
  }

  // The results go through the warpgroup's rows of the query tile, so that they leave in 16-byte chunks.
  wait_for_copies();
  meet_group(place);
  Element* result = query_tile + place * GROUP_ROWS * SLAB;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float norm = norms[half];
    norm += __shfl_xor_sync(0xffffffffu, norm, 1);
    norm += __shfl_xor_sync(0xffffffffu, norm, 2);
    const float part = norm == 0.0f ? 0.0f : 1.0f / norm;  // a query that sees no key gets zeros
    const int query = own_first + row + half * 8;
    if (logarithms != nullptr && lane % 4 == 0 && query < queries)
      logarithms[(static_cast<long long>(batch) * heads + head) * queries + query] =
          norm == 0.0f ? -NOTHING : bases[half] + log2f(norm);
#pragma unroll
    for (int n = 0; n < VALUE_HEAD / 8; ++n)
      *reinterpret_cast<unsigned*>(result + n / 8 * ROWS * SLAB + swizzled(row + half * 8, n % 8) + column) =
          pair_of(sums[n][2 * half] * part, sums[n][2 * half + 1] * part);
  }
  meet_group(place);
  y += batch * y_batch + head * y_head;
  constexpr int CHUNKS = VALUE_HEAD / 8;
#pragma unroll
  for (int pass = 0; pass < GROUP_ROWS * CHUNKS / GROUP; ++pass) {
    const int place = threadIdx.x % GROUP + pass * GROUP, row = place / CHUNKS, chunk = place % CHUNKS;
    if (own_first + row < queries)
      *reinterpret_cast<uint4*>(y + (own_first + row) * y_row + chunk * 8) =
          *reinterpret_cast<const uint4*>(result + chunk / 8 * ROWS * SLAB + swizzled(row, chunk % 8));
  }
}
