// What the products of convolutions share, whatever multiplies: tiles copied to shared memory, sums that leave it.
//
// A block computes ROWS places of the result, in any image, times FEATURES. What is summed over, elements of the window
// and channels of the group, passes through shared memory in steps of 128 bytes for each place and feature; windows are
// never laid out anywhere else. Where there are fewer tiles than the device takes blocks, several share the steps of one:
// the last of them to end adds up what all have found, in their order.
//
// Rows of a tile have 8 chunks of 16 bytes, swapped by the row's number, so that chunks of one column of 8 rows lie in
// different banks.
//
// Defined by who compiles:
//   ROWS, FEATURES   of a block: 64 or 128
//   COPIED           elements that are copied at once, as many as always lie one after the other: 16, 8 or 4 bytes
//   SPATIAL          dims of images: 2, or 3

#include "channels_last.cuh"
#include "tensor_cores.cuh"

#ifndef ROWS
#define ROWS 128
#endif
#ifndef FEATURES
#define FEATURES 64
#endif
#ifndef COPIED
#define COPIED (16 / sizeof(Element))
#endif
#ifndef SPATIAL
#define SPATIAL 2
#endif

constexpr int DEPTH = 128 / sizeof(Element);  // of a step
constexpr int COLUMNS = DEPTH / COPIED;       // copies of a row
constexpr int STAGE = (ROWS + FEATURES) * DEPTH;
constexpr int SUM_STRIDE = FEATURES + 8;
constexpr int STAGED_BYTES = STAGES * STAGE * sizeof(Element);
constexpr int SUMMED_BYTES = ROWS * SUM_STRIDE * 4;
constexpr int BEGINS = STAGED_BYTES > SUMMED_BYTES ? STAGED_BYTES : SUMMED_BYTES;  // bytes before where windows begin

// Sizes of what is multiplied.
struct Sizes {
  int rows;      // places of the result in all images
  int channels;  // of x
  int depth;     // channels of a group
  int features;  // of a group
  int total;     // features of all groups
};

// Where a window begins: in elements of x, and among its rows (high half) and columns (low half), planes.
struct Begin {
  int offset, at;
#if SPATIAL == 3
  int plane, unused;
#endif
};

// Where an element of a tile lies.
__device__ __forceinline__ int swapped(int row, int element) {
  return row * DEPTH + ((element / WIDTH ^ row % 8) * WIDTH | element % WIDTH);
}

template <int COUNT>
__device__ __forceinline__ void copy_elements(Element* to, const Element* from, bool is_given) {
  if constexpr (COUNT * sizeof(Element) == 16)
    copy_async(to, from, is_given);
  else
    copy_few_async<COUNT * sizeof(Element)>(to, from, is_given);
}

// Copies the chunks of one column of each tile, step by step.
class Copier {
 public:
  __device__ __forceinline__ Copier(const Element* x, const Element* w, const Begin* begins, const Sizes& sizes,
                                    int first_feature, int step, GEOMETRY)
      : x_(x), w_(w), begins_(begins), n0_(n0), n1_(n1), n2_(n2), k0_(k0), k1_(k1), k2_(k2), d0_(d0), d1_(d1), d2_(d2),
        channels_(sizes.channels), depth_(sizes.depth), length_(k0 * k1 * k2 * sizes.depth),
        left_(sizes.features - first_feature), whole_(DEPTH / sizes.depth), rest_(DEPTH % sizes.depth) {
    at_ = step * DEPTH + column() * COPIED;
    int place = at_ / depth_;
    channel_ = at_ % depth_;
    c_ = place % k2_;
    b_ = place / k2_ % k1_;
    a_ = place / k2_ / k1_;
    w_ += first_feature * length_;
  }

  // Start the copies of a step, and go to the next.
  __device__ __forceinline__ void copy(Element* tile) {
    const int down = b_ * d1_, across = c_ * d2_;
    const int offset = ((a_ * d0_ * n1_ + down) * n2_ + across) * channels_ + channel_;
    const bool is_any = at_ < length_;
#pragma unroll
    for (int pass = 0; pass < ROWS / AT_ONCE; ++pass) {
      const int row = first_row() + pass * AT_ONCE;
      const Begin begin = begins_[row];
      const unsigned y = (begin.at >> 16) + down, z = static_cast<short>(begin.at) + across;
      bool is_given = is_any && y < n1_ && z < n2_;
#if SPATIAL == 3
      is_given = is_given && static_cast<unsigned>(begin.plane + a_ * d0_) < n0_;
#endif
      copy_elements<COPIED>(tile + swapped(row, column() * COPIED), x_ + (is_given ? begin.offset + offset : 0), is_given);
    }
    tile += ROWS * DEPTH;
#pragma unroll
    for (int pass = 0; pass < FEATURES / AT_ONCE; ++pass) {
      const int row = first_row() + pass * AT_ONCE;
      const bool is_given = is_any && row < left_;
      copy_elements<COPIED>(tile + swapped(row, column() * COPIED), w_ + (is_given ? row * length_ + at_ : 0), is_given);
    }
    go_on();
  }

 private:
  static constexpr int AT_ONCE = THREADS / COLUMNS;
  static __device__ __forceinline__ int column() { return threadIdx.x % COLUMNS; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / COLUMNS; }

  __device__ __forceinline__ void go_on() {
    at_ += DEPTH;
    channel_ += rest_;
    c_ += whole_;
    if (channel_ >= depth_) channel_ -= depth_, ++c_;
    while (c_ >= k2_) c_ -= k2_, ++b_;
    while (b_ >= k1_) b_ -= k1_, ++a_;
  }

  const Element *x_, *w_;
  const Begin* begins_;
  unsigned n0_, n1_, n2_;
  int k0_, k1_, k2_, d0_, d1_, d2_, channels_, depth_, length_, left_, whole_, rest_;
  int at_, channel_, a_, b_, c_;
};

// Note where the windows of the block's places begin.
__device__ __forceinline__ void note_begins(Begin* begins, int first, const Sizes& sizes, GEOMETRY) {
  for (int row = threadIdx.x; row < ROWS; row += THREADS) {
    Begin begin = {};
    begin.at = 0x8000 << 16;  // a row that is never there
    int place = first + row;
    if (place < sizes.rows) {
      const int z = place % o2 * s2 - p2, y = place / o2 % o1 * s1 - p1;
      place = place / o2 / o1;
      const int plane = place % o0 * s0 - p0;
      begin.offset = (((place / o0 * n0 + plane) * n1 + y) * n2 + z) * sizes.channels;
      begin.at = y << 16 | (z & 0xffff);
#if SPATIAL == 3
      begin.plane = plane;
#endif
    }
    begins[row] = begin;
  }
}

// Where a block's sums belong. Places in arrays are numbers of 32 bits.
struct Target {
  Element* y;
  int first, first_feature, group;

  // The feature of a column of the tile.
  __device__ __forceinline__ int feature(int column, const Sizes& sizes) const {
    return group * sizes.features + first_feature + column;
  }
  __device__ __forceinline__ int place(int row, int column, const Sizes& sizes) const {
    return (first + row) * sizes.total + feature(column, sizes);
  }
};

// Give the block's sums to the last of its tile, which takes those of all blocks in their order; whether this is the last.
// Before a launch and behind it `arrived` is zero.
__device__ __forceinline__ bool join_parts(float* sums, float* __restrict__ parts, unsigned* arrived, int* is_last) {
  constexpr int COUNT = ROWS * FEATURES, TOGETHER = 4, PASSES = COUNT / 4 / THREADS;
  const auto place = [](int pass) { return (pass * THREADS + static_cast<int>(threadIdx.x)) * 4; };
  const auto own = [&](int pass) {
    return reinterpret_cast<float4*>(sums + place(pass) / FEATURES * SUM_STRIDE + place(pass) % FEATURES);
  };
  parts += static_cast<Index>(blockIdx.x) * gridDim.y * COUNT;
#pragma unroll
  for (int pass = 0; pass < PASSES; ++pass)
    *reinterpret_cast<float4*>(parts + blockIdx.y * COUNT + place(pass)) = *own(pass);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *is_last = atomicAdd(arrived + blockIdx.x, 1u) == static_cast<unsigned>(gridDim.y) - 1;
  __syncthreads();
  if (!*is_last) return false;
  __threadfence();
  if (threadIdx.x == 0) arrived[blockIdx.x] = 0;
#pragma unroll 1
  for (int pass = 0; pass < PASSES; pass += TOGETHER) {
    float4 added[TOGETHER] = {};
#pragma unroll 4
    for (int part = 0; part < static_cast<int>(gridDim.y); ++part)
#pragma unroll
      for (int i = 0; i < TOGETHER; ++i) {
        const float4 found = __ldcg(reinterpret_cast<const float4*>(parts + part * COUNT + place(pass + i)));
        added[i].x += found.x, added[i].y += found.y, added[i].z += found.z, added[i].w += found.w;
      }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) *own(pass + i) = added[i];
  }
  __syncthreads();
  return true;
}

// Write the block's sums, which lie in shared memory in rows of SUM_STRIDE, chunk by chunk. Residuals of several rows are
// read before the first is needed.
__device__ __forceinline__ void write_chunks(const float* sums, const Target& to, const Following& following,
                                             const Sizes& sizes) {
  constexpr int ACROSS = FEATURES / WIDTH, AT_ONCE = THREADS / ACROSS, PASSES = ROWS / AT_ONCE;
  constexpr int AHEAD = PASSES < 4 ? PASSES : 4;
  const int column = threadIdx.x % ACROSS * WIDTH, first_row = threadIdx.x / ACROSS;
  if (to.first_feature + column >= sizes.features) return;
  Chunk bias = {}, residuals[AHEAD];
  if (following.bias != nullptr) bias = Following::read(following.bias + to.feature(column, sizes));
  for (int pass = 0; pass < PASSES; pass += AHEAD) {
    if (following.residual != nullptr) {
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const int row = first_row + (pass + i) * AT_ONCE;
        if (to.first + row < sizes.rows)
          residuals[i] = Following::read(following.residual + to.place(row, column, sizes));
      }
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int row = first_row + (pass + i) * AT_ONCE;
      if (to.first + row >= sizes.rows) continue;
      float values[WIDTH];
#pragma unroll
      for (int each = 0; each < WIDTH; each += 4)
        *reinterpret_cast<float4*>(values + each) =
            *reinterpret_cast<const float4*>(sums + row * SUM_STRIDE + column + each);
      *reinterpret_cast<Chunk*>(to.y + to.place(row, column, sizes)) = following(values, bias, residuals[i]);
    }
  }
}

// The same, element by element.
__device__ __forceinline__ void write_elements(const float* sums, const Target& to, const Following& following,
                                               const Sizes& sizes) {
  for (int i = threadIdx.x; i < ROWS * FEATURES; i += THREADS) {
    const int row = i / FEATURES, column = i % FEATURES;
    if (to.first + row >= sizes.rows || to.first_feature + column >= sizes.features) continue;
    const int place = to.place(row, column, sizes);
    to.y[place] = following(sums[row * SUM_STRIDE + column], place, to.feature(column, sizes));
  }
}
