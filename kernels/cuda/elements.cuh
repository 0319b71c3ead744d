// Floats as they lie in memory, and as they are computed with: ELEMENT is 0 float, 1 fp16, 2 bf16, 3 double.

#ifndef ELEMENT
#define ELEMENT 0
#endif

typedef long long Index;

#ifndef EMULATED  // tests give it on a processor
__device__ __forceinline__ float bits_value(unsigned bits) { return __uint_as_float(bits); }
#endif

#if ELEMENT == 0
typedef float Element;
typedef float Wide;
__device__ __forceinline__ Wide widened(Element x) { return x; }
__device__ __forceinline__ Element narrowed(Wide x) { return x; }
#elif ELEMENT == 3
typedef double Element;
typedef double Wide;
__device__ __forceinline__ Wide widened(Element x) { return x; }
__device__ __forceinline__ Element narrowed(Wide x) { return x; }
#else
typedef unsigned short Element;
typedef float Wide;
#ifndef EMULATED
__device__ __forceinline__ float fp16_value(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
__device__ __forceinline__ unsigned short fp16_bits(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
__device__ __forceinline__ unsigned short bf16_bits(float value) {
#if __CUDA_ARCH__ >= 800
  unsigned short found;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(value));
  return found;
#else
  unsigned bits = __float_as_uint(value);
  // To nearest, ties to even; a NaN stays one.
  return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
#endif
}
#endif
#if ELEMENT == 1
__device__ __forceinline__ Wide widened(Element x) { return fp16_value(x); }
__device__ __forceinline__ Element narrowed(Wide x) { return fp16_bits(x); }
#else
__device__ __forceinline__ Wide widened(Element x) { return bits_value(static_cast<unsigned>(x) << 16); }
__device__ __forceinline__ Element narrowed(Wide x) { return bf16_bits(x); }
#endif
#endif
