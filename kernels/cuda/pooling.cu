// Pools over windows of images: each thread makes one element. MEAN: the mean of a window, else its greatest element.
//
// Strides are elements of x; what is written lies one after the other. Places count from before the padding.

#include "elements.cuh"

#ifndef MEAN
#define MEAN 0
#endif

extern "C" __global__ void __launch_bounds__(256)
    pool(const Element* __restrict__ x, Element* __restrict__ y, unsigned count, unsigned channels, unsigned rows,
         unsigned columns, int height, int width, Index batch_stride, Index channel_stride, Index row_stride,
         Index column_stride, int kernel_height, int kernel_width, int step_down, int step_across, int gap_down,
         int gap_across, int top, int left, int bottom, int right) {
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    const unsigned above = i / columns, column = i - above * columns;
    const unsigned map = above / rows, row = above - map * rows;
    const unsigned batch = map / channels, channel = map - batch * channels;
    const Element* from = x + batch * batch_stride + channel * channel_stride;
    const int first_row = static_cast<int>(row) * step_down - top;
    const int first_column = static_cast<int>(column) * step_across - left;
#if MEAN
    Wide sum = 0;
    int terms = 0;
#else
    bool is_first = true;
    Element most = 0;
    Wide greatest = 0;
#endif
    for (int v = 0; v < kernel_height; ++v) {
      const int place_down = first_row + v * gap_down;
      for (int h = 0; h < kernel_width; ++h) {
        const int place_across = first_column + h * gap_across;
        const bool is_inside = place_down >= 0 && place_down < height && place_across >= 0 && place_across < width;
#if MEAN
        // Of the padding what `bottom` and `right` say counts too: none, or what was asked for.
        if (is_inside) sum += widened(from[place_down * row_stride + place_across * column_stride]);
        const bool is_counted = is_inside || (bottom >= 0 && place_down < height + bottom && place_across < width + right);
        terms += is_counted;
#else
        if (!is_inside) continue;
        Element given = from[place_down * row_stride + place_across * column_stride];
        Wide value = widened(given);
        if (is_first || value > greatest || value != value) {
          most = given;
          greatest = value;
          is_first = false;
          if (value != value) v = kernel_height, h = kernel_width;  // Nothing is greater than NaN.
        }
#endif
      }
    }
#if MEAN
    y[i] = narrowed(sum / static_cast<Wide>(terms));
#else
    y[i] = is_first ? narrowed(static_cast<Wide>(bits_value(0xff800000u))) : most;
#endif
  }
}
