// What the kernels of attention share: elements, masks, and which keys a query sees.
//
// Defined by who compiles:
//   ELEMENT     of q, k, v and y: 0 float, 1 fp16, 2 bf16
//   HEAD, VALUE_HEAD   sizes of a head of q and k, and of v; multiples of 8
//   MASK        0 none, 1 flags, 2 float, 3 fp16, 4 bf16 that is added
//   SHAPED      1: scores are scaled before the exponential, as a mask is added, or the scale is not positive; 2: they
//               are capped too

#ifndef ELEMENT
#define ELEMENT 1
#endif
#ifndef HEAD
#define HEAD 64
#endif
#ifndef VALUE_HEAD
#define VALUE_HEAD HEAD
#endif
#ifndef MASK
#define MASK 0
#endif
#ifndef SHAPED
#define SHAPED (MASK > 0)
#endif

#if ELEMENT == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

#include "tensor_cores.cuh"

#define MASK_BYTES (MASK == 2 ? 4 : MASK > 2 ? 2 : MASK)  // of an element

#define NOTHING bits_value(0xff800000u)  // minus infinity, the score of a key that is not seen
constexpr float LOG2_E = 1.4426950408889634f;
// What the largest exponent of weights may rise over their base before the base, and with it all sums, is changed.
#define MOST_RISE 8.0f

#ifndef EMULATED  // tests give what follows on a processor

__device__ __forceinline__ float fp16_value(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// Two numbers rounded to fp16, the first in the low half.
__device__ __forceinline__ unsigned fp16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ unsigned bf16_pair(float low, float high) {
  unsigned pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ float bits_value(unsigned bits) { return __uint_as_float(bits); }
__device__ __forceinline__ unsigned value_bits(float value) { return __float_as_uint(value); }

__device__ __forceinline__ float fast_exp2(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

#endif

__device__ __forceinline__ float bf16_value(unsigned short bits) {
  return bits_value(static_cast<unsigned>(bits) << 16);
}

__device__ __forceinline__ unsigned pair_of(float low, float high) {
#if ELEMENT == 2
  return bf16_pair(low, high);
#else
  return fp16_pair(low, high);
#endif
}

__device__ __forceinline__ float element_value(Element x) {
#if ELEMENT == 0
  return x;
#elif ELEMENT == 1
  return fp16_value(x);
#else
  return bf16_value(x);
#endif
}

__device__ __forceinline__ Element element_of(float value) {
#if ELEMENT == 0
  return value;
#else
  return static_cast<Element>(pair_of(value, 0.0f) & 0xffffu);
#endif
}

// The exponential to base 2, as exact as the elements ask for.
__device__ __forceinline__ float exp2_of(float x) {
#if ELEMENT == 0
  return exp2f(x);
#else
  return fast_exp2(x);
#endif
}

// A score, capped and with the mask at an element applied.
__device__ __forceinline__ float shaped(float product, float scale, float cap, const void* mask, long long at) {
  float score = product * scale;
#if SHAPED == 2
  score = cap * tanhf(score / cap);
#endif
#if MASK == 1
  if (!static_cast<const unsigned char*>(mask)[at]) score = NOTHING;
#elif MASK == 2
  score += static_cast<const float*>(mask)[at];
#elif MASK == 3
  score += fp16_value(static_cast<const unsigned short*>(mask)[at]);
#elif MASK == 4
  score += bf16_value(static_cast<const unsigned short*>(mask)[at]);
#endif
  return score;
}

// Which keys queries see: those before `limit`, and of them by place, where `left` and `right` are not negative, those
// from `left` before to `right` behind the query's own place, which is its number and `offset`.
struct Sight {
  int limit, offset, left, right;

  // `valid` counts, for each member of the batch, the keys that are there, the last of which is the last query's place.
  __device__ __forceinline__ Sight(int keys, int queries, int offset_, int left_, int right_, const long long* valid,
                                   int batch)
      : limit(keys), offset(offset_), left(left_), right(right_) {
    if (valid != nullptr) {
      long long count = valid[batch];
      offset = static_cast<int>(count) - queries;
      if (count < limit) limit = count < 0 ? 0 : static_cast<int>(count);
    }
  }

  __device__ __forceinline__ bool sees(int query, int key) const {
    int distance = key - query - offset;
    return key < limit && (right < 0 || distance <= right) && (left < 0 || distance >= -left);
  }

  // Whether all of some queries see all of some keys.
  __device__ __forceinline__ bool sees_all(int first, int last, int first_key, int last_key) const {
    return sees(first, last_key) && sees(last, first_key);
  }

  // One behind the last key that a query up to `last` sees.
  __device__ __forceinline__ int end(int last) const {
    int behind = last + offset + right + 1;
    return right < 0 || behind > limit ? limit : behind < 0 ? 0 : behind;
  }

  // The first key that a query from `first` on sees.
  __device__ __forceinline__ int begin(int first) const {
    int before = first + offset - left;
    return left < 0 || before < 0 ? 0 : before;
  }

  // The first query that sees a key from `first` on.
  __device__ __forceinline__ int first_query(int first) const {
    int before = first - right - offset;
    return right < 0 || before < 0 ? 0 : before;
  }

  // One behind the last of the queries that see a key up to `last`.
  __device__ __forceinline__ int end_of_queries(int last, int queries) const {
    int behind = last + left - offset + 1;
    return left < 0 || behind > queries ? queries : behind < 0 ? 0 : behind;
  }
};
