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
// Sizes of what is multiplied.
struct Sizes {
  int rows;      // places of the result in all images
  int channels;  // of x
  int depth;     // channels of a group
  int features;  // of a group
  int total;     // features of all groups
};

// Where a window begins, in elements of x, and which of its rows (from bit 16 on) and columns lie in x; and planes.
struct Begin {
  int offset;
  unsigned inside;
#if SPATIAL == 3
  unsigned planes, unused;
#endif
};
constexpr int BEGINS = (ROWS * sizeof(Begin) + 1023) / 1024 * 1024;  // bytes, in front of the tiles

// Where an element of a tile lies.
__device__ __forceinline__ int swapped(int row, int element) {
  return row * DEPTH + ((element / WIDTH ^ row % 8) * WIDTH | element % WIDTH);
}

// Start a copy to a tile.
__device__ __forceinline__ void copy_elements(Element* to, const Element* from, bool is_given) {
  if constexpr (COPIED * sizeof(Element) == 16)
    copy_async(to, from, is_given);
  else
    copy_few_async<COPIED * sizeof(Element)>(to, from, is_given);
}

// Copies the chunks of one column of each tile, step by step.
class Copier {
 public:
  __device__ __forceinline__ Copier(const Element* x, const Element* w, const Begin* begins, const Sizes& sizes,
                                    int first_feature, int step, GEOMETRY)
      : x_(x), w_(w), begins_(begins), k0_(k0), k1_(k1), k2_(k2), plane_(d0 * n1 * n2 * sizes.channels),
        line_(d1 * n2 * sizes.channels), pixel_(d2 * sizes.channels), depth_(sizes.depth),
        length_(k0 * k1 * k2 * sizes.depth), left_(sizes.features - first_feature - first_row()),
        whole_(DEPTH / sizes.depth), rest_(DEPTH % sizes.depth) {
    w_ += (first_feature + first_row()) * length_;
    const int at = step * DEPTH + column(), place = at / depth_;
    channel_ = at % depth_;
    c_ = place % k2_;
    b_ = place / k2_ % k1_;
    a_ = place / k2_ / k1_;
    if constexpr (IS_HELD) {
#pragma unroll
      for (int pass = 0; pass < X_PASSES; ++pass) held_[pass] = begins_[first_row() + pass * AT_ONCE];
    }
  }

  // Start the copies of a step, and go to the next.
  __device__ __forceinline__ void copy(Element* tile) {
    const bool is_any = a_ < k0_;
    const unsigned needed = is_any ? 0x10000u << b_ | 1u << c_ : 0xffffffffu;  // of what lies inside; not all ever do
    const Element* from = x_ + a_ * plane_ + b_ * line_ + c_ * pixel_ + channel_;
#pragma unroll
    for (int pass = 0; pass < X_PASSES; ++pass) {
      const int row = first_row() + pass * AT_ONCE;
      const Begin begin = IS_HELD ? held_[IS_HELD ? pass : 0] : begins_[row];
      bool is_given = (begin.inside & needed) == needed;
#if SPATIAL == 3
      is_given = is_given && (begin.planes >> a_ & 1);
#endif
      copy_elements(tile + swapped(row, column()), from + begin.offset, is_given);
    }
    tile += ROWS * DEPTH;
    from = w_ + ((a_ * k1_ + b_) * k2_ + c_) * depth_ + channel_;
#pragma unroll
    for (int pass = 0; pass < W_PASSES; ++pass) {
      const bool is_given = is_any && pass * AT_ONCE < left_;
      copy_elements(tile + swapped(first_row() + pass * AT_ONCE, column()), from, is_given);
      from += AT_ONCE * length_;
    }
    go_on();
  }

 private:
  static constexpr int AT_ONCE = THREADS / COLUMNS, X_PASSES = ROWS / AT_ONCE, W_PASSES = FEATURES / AT_ONCE;
  // Whether windows are held in registers, where these are enough.
  static constexpr bool IS_HELD = X_PASSES <= 8;
  static __device__ __forceinline__ int column() { return threadIdx.x % COLUMNS * COPIED; }
  static __device__ __forceinline__ int first_row() { return threadIdx.x / COLUMNS; }

  __device__ __forceinline__ void go_on() {
    channel_ += rest_;
    c_ += whole_;
    if (channel_ >= depth_) channel_ -= depth_, ++c_;
    while (c_ >= k2_) c_ -= k2_, ++b_;
    while (b_ >= k1_) b_ -= k1_, ++a_;
  }

  const Element *x_, *w_;
  const Begin* begins_;
  int k0_, k1_, k2_, plane_, line_, pixel_, depth_, length_, left_, whole_, rest_;
  int channel_, a_, b_, c_;
  Begin held_[IS_HELD ? X_PASSES : 1];
};

// Which of the elements of a window that begins at a place lie among `size`.
__device__ __forceinline__ unsigned inside(int begin, int step, int count, int size) {
  unsigned found = 0;
  for (int i = 0; i < count; ++i)
    if (static_cast<unsigned>(begin + i * step) < static_cast<unsigned>(size)) found |= 1u << i;
  return found;
}

// Note where the windows of the block's places begin.
__device__ __forceinline__ void note_begins(Begin* begins, int first, const Sizes& sizes, GEOMETRY) {
  for (int row = threadIdx.x; row < ROWS; row += THREADS) {
    Begin begin = {};
    int place = first + row;
    if (place < sizes.rows) {
      const int z = place % o2 * s2 - p2, y = place / o2 % o1 * s1 - p1;
      place = place / o2 / o1;
      const int plane = place % o0 * s0 - p0;
      begin.offset = (((place / o0 * n0 + plane) * n1 + y) * n2 + z) * sizes.channels;
      begin.inside = inside(y, d1, k1, n1) << 16 | inside(z, d2, k2, n2);
#if SPATIAL == 3
      begin.planes = inside(plane, d0, k0, n0);
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
#pragma unroll 2
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
