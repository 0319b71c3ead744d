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

  __device__ __forceinline__ Element operator()(float sum, int place, int feature) const {
    if (bias != nullptr) sum += widened(bias[feature]);
    if (residual != nullptr) sum += widened(residual[place]);
    return narrowed(activated(sum));
  }

  // The same for a chunk, with what there is of a bias and a residual.
  __device__ __forceinline__ Chunk operator()(float (&sums)[WIDTH], const Chunk& own_bias,
                                              const Chunk& own_residual) const {
    if (bias != nullptr) add(sums, own_bias);
    if (residual != nullptr) add(sums, own_residual);
    Chunk made;
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) made.of[i] = narrowed(activated(sums[i]));
    return made;
  }

  // The same, read for the chunk whose first element lies at a place.
  __device__ __forceinline__ Chunk operator()(float (&sums)[WIDTH], int place, int feature) const {
    Chunk own_bias = {}, own_residual = {};
    if (bias != nullptr) own_bias = read(bias + feature);
    if (residual != nullptr) own_residual = read(residual + place);
    return (*this)(sums, own_bias, own_residual);
  }

  static __device__ __forceinline__ Chunk read(const Element* from) { return *reinterpret_cast<const Chunk*>(from); }

  static __device__ __forceinline__ void add(float (&sums)[WIDTH], const Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < WIDTH; ++i) sums[i] += widened(chunk.of[i]);
  }
};
