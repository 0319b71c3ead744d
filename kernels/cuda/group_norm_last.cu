// Groups of channels of images with channels last, standardised: sums of the channels of ranges of places, from which
// the block of an image that comes last makes mean and factor of each channel; then (x - mean) * factor + bias.
//
// A thread has 16 bytes of channels, and every so many places of a range. Sums are of differences from the first place of
// an image, so that little is lost where channels are far from zero.

#include "channels_last.cuh"

// What a block has of an image: lanes along chunks, so many places at once, and a range of places.
struct Part {
  int chunk, row, rows;  // of this thread; `row` is below zero for one that has no place
  unsigned first, end;

  __device__ __forceinline__ Part(int lanes, unsigned chunks, unsigned places, unsigned each) {
    rows = blockDim.x / lanes;
    row = threadIdx.x / lanes;
    chunk = blockIdx.x * lanes + threadIdx.x % lanes;
    first = blockIdx.y * each;
    end = places - first < each ? places : first + each;
    if (row >= rows || chunk >= static_cast<int>(chunks)) row = -1;
  }
};

// x: [images, places, chunks]; sums: [images, ranges, 2, channels]; found: [images, 2, channels], means and factors.
extern "C" __global__ void __launch_bounds__(256)
    measure(const Chunk* __restrict__ x, const Element* __restrict__ scale, float* __restrict__ sums, float* __restrict__ found,
            unsigned* __restrict__ counters, unsigned places, unsigned chunks, unsigned each, int lanes, int groups, float epsilon) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* own = reinterpret_cast<float*>(shared);  // [2][WIDTH][256], then [2][channels]
  unsigned* is_last = reinterpret_cast<unsigned*>(own);
  const Part part(lanes, chunks, places, each);
  const unsigned channels = chunks * WIDTH, image = blockIdx.z, ranges = gridDim.y;
  const Chunk* from = x + static_cast<Index>(image) * places * chunks;
  float total[WIDTH], squares[WIDTH], base[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) total[w] = squares[w] = base[w] = 0;
  if (part.row >= 0) {
    const Chunk start = from[part.chunk];
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) base[w] = widened(start.of[w]);
    for (unsigned place = part.first + part.row; place < part.end; place += part.rows) {
      const Chunk given = from[static_cast<Index>(place) * chunks + part.chunk];
#pragma unroll
      for (int w = 0; w < WIDTH; ++w) {
        const float apart = widened(given.of[w]) - base[w];
        total[w] += apart;
        squares[w] += apart * apart;
      }
    }
  }
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    own[w * 256 + threadIdx.x] = total[w];
    own[(WIDTH + w) * 256 + threadIdx.x] = squares[w];
  }
  __syncthreads();
  if (part.row == 0) {
    float* to = sums + (static_cast<Index>(image) * ranges + blockIdx.y) * 2 * channels + part.chunk * WIDTH;
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      for (int row = 1; row < part.rows; ++row) {
        total[w] += own[w * 256 + row * lanes + threadIdx.x];
        squares[w] += own[(WIDTH + w) * 256 + row * lanes + threadIdx.x];
      }
      to[w] = total[w];
      to[channels + w] = squares[w];
    }
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *is_last = atomicAdd(counters + image, 1u) == gridDim.x * ranges - 1;
  __syncthreads();
  const bool is_mine = *is_last != 0;
  __syncthreads();
  if (!is_mine) return;
  __threadfence();
  if (threadIdx.x == 0) counters[image] = 0;
  // Of each channel its mean, and the sum of squares of differences from it.
  const Element* places_first = reinterpret_cast<const Element*>(from);
  const float count = places;
  for (unsigned channel = threadIdx.x; channel < channels; channel += blockDim.x) {
    const float* of = sums + static_cast<Index>(image) * ranges * 2 * channels + channel;
    float sum = 0, square = 0;
    for (unsigned range = 0; range < ranges; ++range) {
      sum += of[static_cast<Index>(range) * 2 * channels];
      square += of[static_cast<Index>(range) * 2 * channels + channels];
    }
    own[channel] = widened(places_first[channel]) + sum / count;
    own[channels + channel] = square - sum * (sum / count);
  }
  __syncthreads();
  const unsigned size = channels / groups;
  float* to = found + static_cast<Index>(image) * 2 * channels;
  for (unsigned channel = threadIdx.x; channel < channels; channel += blockDim.x) {
    const unsigned begin = channel / size * size;
    float mean = 0, square = 0;
    for (unsigned other = begin; other < begin + size; ++other) mean += own[other] - own[begin];
    mean = own[begin] + mean / size;
    for (unsigned other = begin; other < begin + size; ++other) {
      const float apart = own[other] - mean;
      square += own[channels + other] + count * apart * apart;
    }
    const float variance = square > 0 || square != square ? square / (count * size) : 0;
    const float factor = 1 / sqrtf(variance + epsilon);
    to[channel] = mean;
    to[channels + channel] = scale == nullptr ? factor : factor * widened(scale[channel]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    standardise(const Chunk* __restrict__ x, const Element* __restrict__ bias, const float* __restrict__ found, Chunk* __restrict__ y,
                unsigned places, unsigned chunks, unsigned each, int lanes, int activation, float low, float high) {
  const Part part(lanes, chunks, places, each);
  const Following following{nullptr, nullptr, activation, low, high};
  if (part.row < 0) return;
  const unsigned channels = chunks * WIDTH;
  const float* of = found + static_cast<Index>(blockIdx.z) * 2 * channels + part.chunk * WIDTH;
  float mean[WIDTH], factor[WIDTH], added[WIDTH];
#pragma unroll
  for (int w = 0; w < WIDTH; ++w) {
    mean[w] = of[w];
    factor[w] = of[channels + w];
    added[w] = bias == nullptr ? 0 : widened(bias[part.chunk * WIDTH + w]);
  }
  const Index begin = static_cast<Index>(blockIdx.z) * places * chunks + part.chunk;
  for (unsigned place = part.first + part.row; place < part.end; place += part.rows) {
    const Chunk given = x[begin + static_cast<Index>(place) * chunks];
    Chunk made;
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
      made.of[w] = narrowed(following.activated((widened(given.of[w]) - mean[w]) * factor[w] + added[w]));
    }
    y[begin + static_cast<Index>(place) * chunks] = made;
  }
}
