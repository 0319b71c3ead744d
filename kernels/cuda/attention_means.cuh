// The mean of the gradients of a query's weights, by these: the product of its result and the gradient of that.
// MEAN_LANES of a warp compute one query of one head, 16 bytes at a time.

#include "attention.cuh"

constexpr int MEAN_CHUNKS = VALUE_HEAD * static_cast<int>(sizeof(Element)) / 16;
constexpr int MEAN_LANES = MEAN_CHUNKS > 16 ? 32 : MEAN_CHUNKS > 8 ? 16 : MEAN_CHUNKS > 4 ? 8 : MEAN_CHUNKS > 2 ? 4 : 2;

// sum + the product of numbers that lie in one word.
__device__ __forceinline__ float add_products(unsigned one, unsigned other, float sum) {
#if ELEMENT == 0
  return fmaf(bits_value(one), bits_value(other), sum);
#else
  sum = fmaf(element_value(one & 0xffffu), element_value(other & 0xffffu), sum);
  return fmaf(element_value(one >> 16), element_value(other >> 16), sum);
#endif
}

extern "C" __global__ void mean_gradients(const Element* __restrict__ y, const Element* __restrict__ dy,
                                          float* __restrict__ means, int queries, long long y_batch, long long y_head,
                                          long long y_row, long long dy_batch, long long dy_head, long long dy_row) {
  const int batch = blockIdx.z, head = blockIdx.y, lane = threadIdx.x % MEAN_LANES;
  const int query = blockIdx.x * (blockDim.x / MEAN_LANES) + threadIdx.x / MEAN_LANES;
  float sum = 0.0f;
  if (query < queries) {
    const uint4* one = reinterpret_cast<const uint4*>(y + batch * y_batch + head * y_head + query * y_row);
    const uint4* other = reinterpret_cast<const uint4*>(dy + batch * dy_batch + head * dy_head + query * dy_row);
    for (int chunk = lane; chunk < MEAN_CHUNKS; chunk += MEAN_LANES) {
      uint4 a = one[chunk], b = other[chunk];
      sum = add_products(a.x, b.x, add_products(a.y, b.y, sum));
      sum = add_products(a.z, b.z, add_products(a.w, b.w, sum));
    }
  }
#pragma unroll
  for (int step = MEAN_LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  if (lane == 0 && query < queries)
    means[(static_cast<long long>(batch) * gridDim.y + head) * queries + query] = sum;
}
