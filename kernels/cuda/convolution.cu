// Convolutions: columns of windows for a matrix product, what follows on that, and each channel with kernels of its own.

#include "elements.cuh"
#include "geometry.cuh"

constexpr int THREADS = 256;

// columns[image, channel, element of the window, place], with zeros in the padding and from the last place on.
extern "C" __global__ void __launch_bounds__(THREADS)
    lay_columns(const Element* __restrict__ x, Element* __restrict__ columns, int channels, int length, GEOMETRY) {
  const int place = blockIdx.x * THREADS + threadIdx.x;
  if (place >= length) return;
  const bool is_any = place < o0 * o1 * o2;
  const int at2 = place % o2 * s2 - p2, at1 = place / o2 % o1 * s1 - p1, at0 = place / o2 / o1 * s0 - p0;
  for (int channel = blockIdx.y; channel < channels; channel += gridDim.y) {
    const Index plane = static_cast<Index>(blockIdx.z) * channels + channel;
    const Element* from = x + plane * n0 * n1 * n2;
    Element* to = columns + plane * k0 * k1 * k2 * length + place;
    for (int a = 0; a < k0; ++a) {
      const int x0 = at0 + a * d0;
      for (int b = 0; b < k1; ++b) {
        const int x1 = at1 + b * d1;
        const bool is_row = is_any && x0 >= 0 && x0 < n0 && x1 >= 0 && x1 < n1;
        for (int c = 0; c < k2; ++c) {
          const int x2 = at2 + c * d2;
          const bool is_inside = is_row && x2 >= 0 && x2 < n2;
          *to = is_inside ? from[(x0 * n1 + x1) * n2 + x2] : narrowed(0);
          to += length;
        }
      }
    }
  }
}

// y[image, feature, place] = sums[image, feature, place] + bias[feature], of which the sums lie in rows of `length`.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_bias(const Wide* sums, Element* y, const Element* __restrict__ bias, int features, int places, int length) {
  const int place = blockIdx.x * THREADS + threadIdx.x;
  if (place >= places) return;
  for (int feature = blockIdx.y; feature < features; feature += gridDim.y) {
    const Index row = static_cast<Index>(blockIdx.z) * features + feature;
    const Wide sum = sums[row * length + place];
    y[row * places + place] = narrowed(bias == nullptr ? sum : sum + widened(bias[feature]));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    depthwise(const Element* __restrict__ x, const Element* __restrict__ weight, const Element* __restrict__ bias,
              Element* __restrict__ y, int features, int multiplier, GEOMETRY) {
  const int place = blockIdx.x * THREADS + threadIdx.x, places = o0 * o1 * o2;
  if (place >= places) return;
  const int at2 = place % o2 * s2 - p2, at1 = place / o2 % o1 * s1 - p1, at0 = place / o2 / o1 * s0 - p0;
  for (int feature = blockIdx.y; feature < features; feature += gridDim.y) {
    const Index image = blockIdx.z;
    const Element* from = x + (image * (features / multiplier) + feature / multiplier) * n0 * n1 * n2;
    const Element* kernel = weight + static_cast<Index>(feature) * k0 * k1 * k2;
    Wide sum = bias == nullptr ? Wide(0) : widened(bias[feature]);
    for (int a = 0; a < k0; ++a) {
      const int x0 = at0 + a * d0;
      if (x0 < 0 || x0 >= n0) continue;
      for (int b = 0; b < k1; ++b) {
        const int x1 = at1 + b * d1;
        if (x1 < 0 || x1 >= n1) continue;
        for (int c = 0; c < k2; ++c) {
          const int x2 = at2 + c * d2;
          if (x2 < 0 || x2 >= n2) continue;
          sum += widened(from[(x0 * n1 + x1) * n2 + x2]) * widened(kernel[(a * k1 + b) * k2 + c]);
        }
      }
    }
    y[(image * features + feature) * places + place] = narrowed(sum);
  }
}
