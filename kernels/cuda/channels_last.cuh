// Convolutions of images with channels last: what follows on their sums, and 16 bytes at once.

#include "elements.cuh"
#include "geometry.cuh"

constexpr int WIDTH = 16 / sizeof(Element);  // elements of a chunk

struct alignas(16) Chunk {
  Element of[WIDTH];
};

#define FOLLOWING const Element *__restrict__ bias, const Element *__restrict__ residual, int activation, float low, float high

// activation(sum + bias + residual), rounded once; what is no number stays none.
struct Following {
  const Element* bias;      // a number for each feature, or null
  const Element* residual;  // like the result, or null
  int activation;           // 1 Relu, 2 Clip, 3 Sigmoid, 4 HardSwish, 5 Silu
  float low, high;

  __device__ __forceinline__ float activated(float value) const {
    if (activation == 1) return value < 0.0f ? 0.0f : value;
    if (activation == 2) {
      value = value < low ? low : value;
      return value > high ? high : value;
    }
    if (activation == 3) return 1.0f / (1.0f + expf(-value));
    if (activation == 4) {
      float gate = value / 6.0f + 0.5f;
      gate = gate < 0.0f ? 0.0f : gate;
      return value * (gate > 1.0f ? 1.0f : gate);
    }
    if (activation == 5) return value * (1.0f / (1.0f + expf(-value)));
    return value;
  }

  __device__ __forceinline__ Element operator()(float sum, Index place, int feature) const {
    if (bias != nullptr) sum += widened(bias[feature]);
    if (residual != nullptr) sum += widened(residual[place]);
    return narrowed(activated(sum));
  }

  // The same for a chunk, of which the place is that of its first element.
  __device__ __forceinline__ Chunk operator()(const float (&sums)[WIDTH], Index place, int feature) const {
    float values[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] = sums[i];
    if (bias != nullptr) add(values, bias + feature);
    if (residual != nullptr) add(values, residual + place);
    Chunk made;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) made.of[i] = narrowed(activated(values[i]));
    return made;
  }

  static __device__ __forceinline__ void add(float (&values)[WIDTH], const Element* from) {
    const Chunk chunk = *reinterpret_cast<const Chunk*>(from);
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) values[i] += widened(chunk.of[i]);
  }
};
