// What follows on a product whose sums lie in memory, in one pass; the result may take their place.

#include "finish.cuh"

extern "C" __global__ void __launch_bounds__(256)
    finish(const Wide* sums, Element* y, const Element* __restrict__ bias, const Element* residual, Index count,
           Index columns, Wide alpha, Wide beta, int activation) {
  const Finish finished = {bias, residual, alpha, beta, activation};
  const Index step = static_cast<Index>(gridDim.x) * 256;
  for (Index place = static_cast<Index>(blockIdx.x) * 256 + threadIdx.x; place < count; place += step)
    y[place] = finished(sums[place], place, bias == nullptr ? 0 : place % columns);
}
