// What follows on a sum of products: activation(alpha * sum + beta * residual + bias), rounded once.

#include "elements.cuh"

// 1 relu, 2 gelu by tanh, 3 silu
__device__ __forceinline__ Wide activated(Wide value, int activation) {
  if (activation == 1) value = value < Wide(0) ? Wide(0) : value;
  if (activation == 2) {
    Wide inner = Wide(0.79788456080286536) * (value + Wide(0.044715) * value * value * value);
    value = Wide(0.5) * value * (Wide(1) + tanh(inner));
  }
  if (activation == 3) value = value / (Wide(1) + exp(-value));
  return value;
}

struct Finish {
  const Element* bias;
  const Element* residual;
  Wide alpha, beta;
  int activation;

  __device__ __forceinline__ Element operator()(Wide sum, Index place, Index column) const {
    Wide value = alpha * sum;
    if (residual != nullptr) value += beta * widened(residual[place]);
    if (bias != nullptr) value += widened(bias[column]);
    return narrowed(activated(value, activation));
  }
};
