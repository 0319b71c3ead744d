// What the generator's kernels are made of: conversions, vectors in memory, ONNX's operators on one element, reductions.
// Compiled as host C++ (no __CUDACC__) the emulation that includes it gives the conversions and the shuffles.

#ifdef __CUDACC__
#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define DEVICE_SPECIAL __device__ __forceinline__

struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };

DEVICE float widen(half_t x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEVICE float widen(bfloat_t x) { return __uint_as_float((unsigned)x.bits << 16); }
DEVICE half_t to_half(float x) { half_t y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
DEVICE float not_a_number() { return __uint_as_float(0x7fc00000u); }
#endif

DEVICE bfloat_t to_bfloat(float x) {
  unsigned u = bits_of(x);
  // To nearest, ties to even; a NaN stays one.
  unsigned rounded = x != x ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  bfloat_t y;
  y.bits = (unsigned short)rounded;
  return y;
}

template <class T> DEVICE T widen(T x) { return x; }
template <class S> struct Store {
  template <class T> static DEVICE_MEMBER S of(T x) { return (S)x; }
};
template <> struct Store<half_t> {
  static DEVICE_MEMBER half_t of(float x) { return to_half(x); }
};
template <> struct Store<bfloat_t> {
  static DEVICE_MEMBER bfloat_t of(float x) { return to_bfloat(x); }
};

// -- vectors, in words of up to 16 bytes

template <int BYTES> struct Word;
template <> struct Word<1> { typedef unsigned char type; };
template <> struct Word<2> { typedef unsigned short type; };
template <> struct Word<4> { typedef unsigned int type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<16> { typedef uint4 type; };
struct Words32 { uint4 first, second; };
struct Words64 { Words32 first, second; };
template <> struct Word<32> { typedef Words32 type; };
template <> struct Word<64> { typedef Words64 type; };

template <int V, class S> union Vector {
  typename Word<V * sizeof(S)>::type word;
  S items[V];
};
template <int V, class S> DEVICE Vector<V, S> load(const S* p) {
  Vector<V, S> found;
  found.word = *reinterpret_cast<const typename Word<V * sizeof(S)>::type*>(p);
  return found;
}
template <int V, class S> DEVICE void store(S* p, const Vector<V, S>& given) {
  *reinterpret_cast<typename Word<V * sizeof(S)>::type*>(p) = given.word;
}

// -- operators

template <class T> DEVICE T op_Add(T a, T b) { return (T)(a + b); }
template <class T> DEVICE T op_Sub(T a, T b) { return (T)(a - b); }
template <class T> DEVICE T op_Mul(T a, T b) { return (T)(a * b); }
template <class T> DEVICE T op_Div(T a, T b) { return b == 0 ? (T)0 : (T)-1 < (T)0 && b == (T)-1 ? (T)(0 - a) : (T)(a / b); }
template <> DEVICE_SPECIAL float op_Div<float>(float a, float b) { return a / b; }
template <> DEVICE_SPECIAL double op_Div<double>(double a, double b) { return a / b; }
template <class T> DEVICE T op_Max(T a, T b) { return a > b || a != a ? a : b; }
template <class T> DEVICE T op_Min(T a, T b) { return a < b || a != a ? a : b; }
template <class T> DEVICE T op_FMod(T a, T b) { return b == 0 || ((T)-1 < (T)0 && b == (T)-1) ? (T)0 : (T)(a % b); }
template <> DEVICE_SPECIAL float op_FMod<float>(float a, float b) { return fmod(a, b); }
template <> DEVICE_SPECIAL double op_FMod<double>(double a, double b) { return fmod(a, b); }
template <class T> DEVICE T op_Mod(T a, T b) {
  T rest = op_FMod<T>(a, b);
  return rest != 0 && (rest < 0) != (b < 0) ? (T)(rest + b) : rest;
}
template <class T> DEVICE T float_mod(T a, T b) {
  T rest = fmod(a, b);
  if (rest != 0 && (rest < 0) != (b < 0)) rest += b;
  return rest == 0 ? copysign(rest, b) : rest;
}
template <> DEVICE_SPECIAL float op_Mod<float>(float a, float b) { return float_mod(a, b); }
template <> DEVICE_SPECIAL double op_Mod<double>(double a, double b) { return float_mod(a, b); }
template <class T> DEVICE T op_Pow(T a, T b) { return pow(a, b); }
template <class T> DEVICE T op_Square(T a) { return a * a; }
template <class T> DEVICE T op_Cube(T a) { return a * a * a; }
template <class T> DEVICE T op_PRelu(T a, T b) { return a < 0 ? b * a : a; }

template <class T> DEVICE T op_BitwiseAnd(T a, T b) { return (T)(a & b); }
template <class T> DEVICE T op_BitwiseOr(T a, T b) { return (T)(a | b); }
template <class T> DEVICE T op_BitwiseXor(T a, T b) { return (T)(a ^ b); }
template <class T> DEVICE T op_BitwiseNot(T a) { return (T)~a; }

template <class T> DEVICE bool op_Equal(T a, T b) { return a == b; }
template <class T> DEVICE bool op_Greater(T a, T b) { return a > b; }
template <class T> DEVICE bool op_GreaterOrEqual(T a, T b) { return a >= b; }
template <class T> DEVICE bool op_Less(T a, T b) { return a < b; }
template <class T> DEVICE bool op_LessOrEqual(T a, T b) { return a <= b; }
template <class T> DEVICE bool op_And(T a, T b) { return a && b; }
template <class T> DEVICE bool op_Or(T a, T b) { return a || b; }
template <class T> DEVICE bool op_Xor(T a, T b) { return a != b; }
template <class T> DEVICE bool op_Not(T a) { return !a; }
template <class T> DEVICE bool op_IsNaN(T a) { return a != a; }
template <class T> DEVICE bool op_IsInf(T a, int negative, int positive) {
  return a - a != a - a && a == a && (a > 0 ? positive : negative);
}
template <class T> DEVICE T op_Where(bool condition, T a, T b) { return condition ? a : b; }

template <class T> DEVICE T op_Abs(T a) { return a < 0 ? (T)(0 - a) : a; }
template <> DEVICE_SPECIAL float op_Abs<float>(float a) { return fabs(a); }
template <> DEVICE_SPECIAL double op_Abs<double>(double a) { return fabs(a); }
template <class T> DEVICE T op_Neg(T a) { return (T)(-a); }
template <class T> DEVICE T op_Sign(T a) { return a != a ? a : (T)((a > 0) - (a < 0)); }
template <class T> DEVICE T op_Ceil(T a) { return ceil(a); }
template <class T> DEVICE T op_Floor(T a) { return floor(a); }
template <class T> DEVICE T op_Round(T a) { return rint(a); }
template <class T> DEVICE T op_Exp(T a) { return exp(a); }
template <class T> DEVICE T op_Log(T a) { return log(a); }
template <class T> DEVICE T op_Sqrt(T a) { return sqrt(a); }
template <class T> DEVICE T op_Sin(T a) { return sin(a); }
template <class T> DEVICE T op_Cos(T a) { return cos(a); }
template <class T> DEVICE T op_Tan(T a) { return tan(a); }
template <class T> DEVICE T op_Asin(T a) { return asin(a); }
template <class T> DEVICE T op_Acos(T a) { return acos(a); }
template <class T> DEVICE T op_Atan(T a) { return atan(a); }
template <class T> DEVICE T op_Sinh(T a) { return sinh(a); }
template <class T> DEVICE T op_Cosh(T a) { return cosh(a); }
template <class T> DEVICE T op_Tanh(T a) { return tanh(a); }
template <class T> DEVICE T op_Asinh(T a) { return asinh(a); }
template <class T> DEVICE T op_Acosh(T a) { return acosh(a); }
template <class T> DEVICE T op_Atanh(T a) { return atanh(a); }
template <class T> DEVICE T op_Erf(T a) { return erf(a); }
template <class T> DEVICE T op_Reciprocal(T a) { return (T)1 / a; }
template <class T> DEVICE T op_Relu(T a) { return op_Max<T>(a, (T)0); }
template <class T> DEVICE T op_Sigmoid(T a) { return (T)1 / ((T)1 + exp(-a)); }
template <class T> DEVICE T op_Softplus(T a) { return op_Max<T>(a, (T)0) + log1p(exp(-fabs(a))); }
template <class T> DEVICE T op_Softsign(T a) { return a / ((T)1 + fabs(a)); }
template <class T> DEVICE T op_Mish(T a) { return a * tanh(op_Softplus<T>(a)); }
template <class T> DEVICE T op_Gelu(T a) { return (T)0.5 * a * ((T)1 + erf(a * (T)0.70710678118654752440)); }
template <class T> DEVICE T op_GeluTanh(T a) {
  T inner = (T)0.79788456080286535588 * (a + (T)0.044715 * (a * a * a));
  return (T)0.5 * a * ((T)1 + tanh(inner));
}
template <class T> DEVICE T op_Swish(T a, T alpha) { return a * op_Sigmoid<T>(alpha * a); }
template <class T> DEVICE T op_HardSigmoid(T a, T alpha, T beta) {
  return op_Min<T>(op_Max<T>(alpha * a + beta, (T)0), (T)1);
}
template <class T> DEVICE T op_HardSwish(T a) { return a * op_Min<T>(op_Max<T>(a / (T)6 + (T)0.5, (T)0), (T)1); }
template <class T> DEVICE T op_LeakyRelu(T a, T alpha) { return a < 0 ? alpha * a : a; }
template <class T> DEVICE T op_Elu(T a, T alpha) { return a > 0 ? a : alpha * expm1(a); }
template <class T> DEVICE T op_Celu(T a, T alpha) { return a > 0 ? a : alpha * expm1(a / alpha); }
template <class T> DEVICE T op_Selu(T a, T alpha, T gamma) { return gamma * (a > 0 ? a : alpha * expm1(a)); }
template <class T> DEVICE T op_Shrink(T a, T bias, T lambd) { return a < -lambd ? a + bias : a > lambd ? a - bias : (T)0; }
template <class T> DEVICE T op_ThresholdedRelu(T a, T alpha) { return a > alpha ? a : (T)0; }

// Floats become integers without their fractions; what is beyond the narrower integers wraps around.
template <class S, class T> struct Conversion {
  static DEVICE_MEMBER T of(S x) { return (T)x; }
};
template <class S, class T> struct Wrapped {
  static DEVICE_MEMBER T of(S x) { return (T)(long long)x; }
};
template <class T> struct Conversion<float, T> : Wrapped<float, T> {};
template <class T> struct Conversion<double, T> : Wrapped<double, T> {};
#define PLAIN(S, T) \
  template <> struct Conversion<S, T> { static DEVICE_MEMBER T of(S x) { return (T)x; } };
PLAIN(float, float) PLAIN(float, double) PLAIN(float, unsigned long long)
PLAIN(double, float) PLAIN(double, double) PLAIN(double, unsigned long long)
#undef PLAIN
template <class S> struct Conversion<S, bool> { static DEVICE_MEMBER bool of(S x) { return x != 0; } };
template <> struct Conversion<float, bool> { static DEVICE_MEMBER bool of(float x) { return x != 0; } };
template <> struct Conversion<double, bool> { static DEVICE_MEMBER bool of(double x) { return x != 0; } };
template <class S, class T> DEVICE T convert(S x) { return Conversion<S, T>::of(x); }

// -- reductions of what the THREADS threads of a row hold; each gets the result

template <class T> struct Sum { static DEVICE_MEMBER T of(T a, T b) { return a + b; } };
template <class T> struct Greatest { static DEVICE_MEMBER T of(T a, T b) { return op_Max<T>(a, b); } };
template <class T> struct Least { static DEVICE_MEMBER T of(T a, T b) { return op_Min<T>(a, b); } };

template <int THREADS, class O, class T> DEVICE T reduced(T value) {
#pragma unroll
  for (int offset = (THREADS < 32 ? THREADS : 32) / 2; offset; offset /= 2)
    value = O::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  if (THREADS > 32) {
    __shared__ T parts[32];
    __syncthreads();  // What was reduced before is read.
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[threadIdx.x % (THREADS / 32 ? THREADS / 32 : 1)];
#pragma unroll
    for (int offset = THREADS / 64; offset; offset /= 2)
      value = O::of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}
