// Convolutions with channels last without products of matrices: of channels in small groups; and what goes before and
// behind those by products. Places in arrays are numbers of 32 bits.

#include "channels_last.cuh"

constexpr int THREADS = 256;
constexpr int STRIP = 4;  // places side by side that a thread computes

// Each channel with a kernel of its own. A thread computes WIDTH channels of STRIP places; a block `lanes` times so many
// channels, whose kernels it holds in shared memory, element of the window by element. Blocks of channels: grid y.
extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y, FOLLOWING,
              int images, int channels, int lanes, GEOMETRY) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* kernels = reinterpret_cast<float*>(shared);
  const int window = k0 * k1 * k2, width = lanes * WIDTH, first = blockIdx.y * width;
  for (int i = threadIdx.x; i < window * width; i += THREADS) {
    const int channel = i / window, element = i % window;
    kernels[element * width + channel] =
        first + channel < channels ? widened(w[(first + channel) * window + element]) : 0.0f;
  }
  __syncthreads();
  const int own = threadIdx.x % lanes * WIDTH, channel = first + own, strips = (o2 + STRIP - 1) / STRIP;
  const int row = threadIdx.x / lanes, rows = THREADS / lanes, strip = blockIdx.x * rows + row;
  if (row >= rows || strip >= images * o0 * o1 * strips || channel >= channels) return;
  const int line = strip / strips, place = strip % strips * STRIP;
  const int at0 = line / o1 % o0 * s0 - p0, at1 = line % o1 * s1 - p1, at2 = place * s2 - p2;
  const Element* from = x + line / o1 / o0 * n0 * n1 * n2 * channels + channel;
  float sums[STRIP][WIDTH] = {};
  for (int a = 0; a < k0; ++a) {
    const int x0 = at0 + a * d0;
    if (x0 < 0 || x0 >= n0) continue;
    for (int b = 0; b < k1; ++b) {
      const int x1 = at1 + b * d1;
      if (x1 < 0 || x1 >= n1) continue;
      const Element* pixels = from + (x0 * n1 + x1) * n2 * channels;
      const float* kernel = kernels + (a * k1 + b) * k2 * width + own;
      for (int c = 0; c < k2; ++c, kernel += width) {
        Chunk chunks[STRIP] = {};
#pragma unroll
        for (int t = 0; t < STRIP; ++t) {
          const int x2 = at2 + t * s2 + c * d2;
          if (x2 >= 0 && x2 < n2) chunks[t] = Following::read(pixels + x2 * channels);
        }
        float factors[WIDTH];
#pragma unroll
        for (int i = 0; i < WIDTH; i += 4)
          *reinterpret_cast<float4*>(factors + i) = *reinterpret_cast<const float4*>(kernel + i);
#pragma unroll
        for (int t = 0; t < STRIP; ++t)
#pragma unroll
          for (int i = 0; i < WIDTH; ++i) sums[t][i] += widened(chunks[t].of[i]) * factors[i];
      }
    }
  }
  const Following following = {bias, residual, activation, low, high};
#pragma unroll
  for (int t = 0; t < STRIP; ++t) {
    if (place + t >= o2) continue;
    const int to = (line * o2 + place + t) * channels + channel;
    *reinterpret_cast<Chunk*>(y + to) = following(sums[t], to, channel);
  }
}

// Any groups, element by element.
extern "C" __global__ void __launch_bounds__(THREADS)
    grouped(const Element* __restrict__ x, const Element* __restrict__ w, Element* __restrict__ y, FOLLOWING, int images,
            int channels, int depth, int features, int total, GEOMETRY) {
  const unsigned count = images * o0 * o1 * o2 * total, step = gridDim.x * THREADS;
  const Following following = {bias, residual, activation, low, high};
  for (unsigned to = blockIdx.x * THREADS + threadIdx.x; to < count; to += step) {
    const int feature = to % total, place = to / total, line = place / o2;
    const int at0 = line / o1 % o0 * s0 - p0, at1 = line % o1 * s1 - p1, at2 = place % o2 * s2 - p2;
    const Element* from = x + line / o1 / o0 * n0 * n1 * n2 * channels + feature / features * depth;
    const Element* kernel = w + feature * k0 * k1 * k2 * depth;
    float sum = 0.0f;
    for (int a = 0; a < k0; ++a) {
      const int x0 = at0 + a * d0;
      if (x0 < 0 || x0 >= n0) continue;
      for (int b = 0; b < k1; ++b) {
        const int x1 = at1 + b * d1;
        if (x1 < 0 || x1 >= n1) continue;
        for (int c = 0; c < k2; ++c) {
          const int x2 = at2 + c * d2;
          if (x2 < 0 || x2 >= n2) continue;
          const Element* taken = from + ((x0 * n1 + x1) * n2 + x2) * channels;
          const Element* factors = kernel + ((a * k1 + b) * k2 + c) * depth;
          for (int i = 0; i < depth; ++i) sum += widened(taken[i]) * widened(factors[i]);
        }
      }
    }
    y[to] = following(sum, to, feature);
  }
}

// What follows on sums that lie in memory, WIDTH at once where the features are whole chunks; y may be the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    follow(const float* sums, Element* y, FOLLOWING, int count, int total, int is_whole) {
  const Following following = {bias, residual, activation, low, high};
  const int at = blockIdx.x * THREADS + threadIdx.x, place = is_whole ? at * WIDTH : at;
  if (place >= count) return;
  if (!is_whole) {
    y[place] = following(sums[place], place, place % total);
    return;
  }
  float values[WIDTH];
#pragma unroll
  for (int i = 0; i < WIDTH; i += 4)
    *reinterpret_cast<float4*>(values + i) = *reinterpret_cast<const float4*>(sums + place + i);
  *reinterpret_cast<Chunk*>(y + place) = following(values, place, place % total);
}

template <int COUNT>
struct alignas(COUNT * sizeof(Element)) Some {
  Element of[COUNT];
};

// Images line by line: how far apart lines and what is in them lie in x, and how long they are and become.
struct Lines {
  int images, lines, width, channels;
  int image_step, line_step, pixel_step, channel_step;
  int lead, wide, padded;  // pixels in front of a line, and of all; channels
};

template <int COUNT>
__device__ __forceinline__ void pad_some(const Element* __restrict__ x, Element* __restrict__ y, const Lines& of) {
  const int groups = of.padded / COUNT;
  const unsigned count = static_cast<unsigned>(of.images) * of.lines * of.wide * groups, step = gridDim.x * THREADS;
  for (unsigned i = blockIdx.x * THREADS + threadIdx.x; i < count; i += step) {
    const int first = i % groups * COUNT, at = i / groups, line = at / of.wide, pixel = at % of.wide - of.lead;
    const bool is_inside = pixel >= 0 && pixel < of.width;
    const Element* from = x + line / of.lines * of.image_step + line % of.lines * of.line_step + pixel * of.pixel_step;
    Some<COUNT> made;
#pragma unroll
    for (int c = 0; c < COUNT; ++c)
      made.of[c] = is_inside && first + c < of.channels ? from[(first + c) * of.channel_step] : narrowed(0);
    *reinterpret_cast<Some<COUNT>*>(y + i * COUNT) = made;
  }
}

// Images in order, with more channels than there are of x, and pixels around each line: zeros. x has steps of its own, in
// elements.
extern "C" __global__ void __launch_bounds__(THREADS)
    pad_channels(const Element* __restrict__ x, Element* __restrict__ y, int images, int lines, int width, int channels,
                 int image_step, int line_step, int pixel_step, int channel_step, int lead, int wide, int padded) {
  const Lines of = {images, lines, width, channels, image_step, line_step, pixel_step, channel_step, lead, wide, padded};
  if (padded == 2)
    pad_some<2>(x, y, of);
  else
    pad_some<4>(x, y, of);
}
