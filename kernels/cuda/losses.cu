// Cross-entropy of rows of scores: a block for each row, sums in float32, then one block for the mean.
//
// Rows are those of a batch and of places in it; classes lie one after the other. WEIGHTED: classes have weights. PLACE:
// the type of a label. WIDE: a loss and weights are floats, whatever scores are.

#include "elements.cuh"

#ifndef PLACE
#define PLACE long long
#endif
#ifndef WEIGHTED
#define WEIGHTED 0
#endif
#ifndef WIDE
#define WIDE 0
#endif

#if WIDE
typedef float Loss;
__device__ __forceinline__ Loss loss_value(float x) { return x; }
__device__ __forceinline__ float weight_value(Loss x) { return x; }
#else
typedef Element Loss;
__device__ __forceinline__ Loss loss_value(float x) { return narrowed(x); }
__device__ __forceinline__ float weight_value(Loss x) { return widened(x); }
#endif

constexpr int THREADS = 256;
constexpr int EACH = 16 / sizeof(Element);  // elements of a word of 16 bytes
constexpr int WORDS = 4;                    // that a thread reads before it uses the first
#define LEAST bits_value(0xff800000u)       // minus infinity

// As a power of 2, which is what the device computes.
__device__ __forceinline__ float exponential(float x) { return exp2f(x * 1.44269504f); }

struct alignas(16) Word {
  Element of[EACH];
};

// How many elements lie before the first whole 16 bytes of a row.
__device__ __forceinline__ unsigned before_words(const Element* row) {
  return (16 - reinterpret_cast<unsigned long long>(row) % 16) % 16 / sizeof(Element);
}

// A maximum, and the sum of the exponentials of numbers less it: no number where there is one that is none.
struct Sum {
  float most, sum;
};

__device__ __forceinline__ Sum joined(Sum a, Sum b) {
  float most = fmaxf(a.most, b.most);
  if (most == LEAST) return {most, a.sum + b.sum};
  return {most, a.sum * exponential(a.most - most) + b.sum * exponential(b.most - most)};
}

template <int COUNT> __device__ __forceinline__ void add(Sum& own, const float (&values)[COUNT]) {
  float most = own.most;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) most = fmaxf(most, values[i]);
  const float shift = most == LEAST ? 0.0f : most;
  float sum = own.most == LEAST ? own.sum : own.sum * exponential(own.most - shift);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) sum += exponential(values[i] - shift);
  own = {most, sum};
}

// losses[row] = (log(sum of exp(x)) - x[label]) * share, and shares[row]: the weight of its class, 0 where ignored. What
// is taken off the scores of a row to make them logarithms: norms[row] first, then norms[rows + row].
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    cross_entropy(const Element* __restrict__ scores, const PLACE* __restrict__ labels,
                  const Loss* __restrict__ weights, float* __restrict__ losses, float* __restrict__ shares,
                  float* __restrict__ norms, bool* fault, unsigned rows, unsigned places, unsigned classes,
                  Index batch_stride, Index place_stride, Index ignored, int is_any_ignored) {
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* sums = reinterpret_cast<Sum*>(shared);  // THREADS
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned batch = row / places;
    const Element* x = scores + batch * batch_stride + (row - batch * places) * place_stride;
    const unsigned before = before_words(x) < classes ? before_words(x) : classes;
    const unsigned count = (classes - before) / EACH, behind = before + count * EACH;
    const Word* words = reinterpret_cast<const Word*>(x + before);
    Sum own = {LEAST, 0};
    for (unsigned start = threadIdx.x; start < count; start += WORDS * THREADS) {
      Word read[WORDS];
      float values[WORDS * EACH];
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (start + i * THREADS < count) read[i] = words[start + i * THREADS];
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
#pragma unroll
        for (int j = 0; j < EACH; ++j)
          values[i * EACH + j] = start + i * THREADS < count ? widened(read[i].of[j]) : LEAST;
      add(own, values);
    }
    {
      // What lies around the words, which is less than two of them.
      const unsigned place = threadIdx.x < before ? threadIdx.x : behind + threadIdx.x - before;
      const float values[1] = {place < classes ? widened(x[place]) : LEAST};
      add(own, values);
    }
    sums[threadIdx.x] = own;
    for (int half = THREADS / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[threadIdx.x] = joined(sums[threadIdx.x], sums[threadIdx.x + half]);
    }
    __syncthreads();
    const float most = sums[0].most, rest = logf(sums[0].sum);
    if (threadIdx.x == 0) {
      Index label = labels[row];
      bool is_counted = !is_any_ignored || label != ignored;
      float share = is_counted ? 1.0f : 0.0f;
      if (!is_counted) label = 0;
      if (label < 0 || label >= classes) {
        *fault = true;
        label = 0;
      }
#if WEIGHTED
      share *= weight_value(weights[label]);
#endif
      losses[row] = -((widened(x[label]) - most) - rest) * share;
      shares[row] = share;
      norms[row] = most;
      norms[rows + row] = rest;
    }
    __syncthreads();
  }
}

// gradients[row] = (softmax(x) - one_hot(label)) * factors[row], by the norms that `cross_entropy` gave; zeros behind the
// classes of a row. A label counts from the end where it is negative.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    cross_entropy_gradient(const Element* __restrict__ scores, const PLACE* __restrict__ labels,
                           const float* __restrict__ norms, const float* __restrict__ factors,
                           Element* __restrict__ gradients, unsigned rows, unsigned places, unsigned classes,
                           unsigned length, Index batch_stride, Index place_stride) {
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned batch = row / places;
    const Element* x = scores + batch * batch_stride + (row - batch * places) * place_stride;
    Element* y = gradients + static_cast<Index>(row) * length;
    const float most = norms[row], rest = norms[rows + row], factor = factors[row];
    const Index given = labels[row], label = given < 0 ? given + classes : given;
    auto slope = [&](Element score, unsigned place) {
      return (exponential((widened(score) - most) - rest) - (place == label ? 1.0f : 0.0f)) * factor;
    };
    auto one = [&](unsigned place) { y[place] = narrowed(place < classes ? slope(x[place], place) : 0.0f); };
    const unsigned before = before_words(y) < length ? before_words(y) : length;
    const unsigned count = (length - before) / EACH, behind = before + count * EACH;
    if (threadIdx.x < before) one(threadIdx.x);
    if (behind + threadIdx.x < length) one(behind + threadIdx.x);
    // Words of both lie alike where the rows of both begin alike.
    const bool is_alike = before_words(x) == before_words(y) && before <= classes;
    const unsigned whole = is_alike ? (classes - before) / EACH : 0;
    for (unsigned start = threadIdx.x; start < whole; start += WORDS * THREADS) {
      Word read[WORDS];
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        if (start + i * THREADS < whole) read[i] = reinterpret_cast<const Word*>(x + before)[start + i * THREADS];
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const unsigned word = start + i * THREADS;
        if (word >= whole) break;
        Word made;
        const unsigned first = before + word * EACH;
        if (label >= first && label < first + EACH) {
#pragma unroll
          for (int j = 0; j < EACH; ++j) made.of[j] = narrowed(slope(read[i].of[j], first + j));
        } else {
#pragma unroll
          for (int j = 0; j < EACH; ++j)
            made.of[j] = narrowed(exponential((widened(read[i].of[j]) - most) - rest) * factor);
        }
        reinterpret_cast<Word*>(y + before)[word] = made;
      }
    }
    for (unsigned word = whole + threadIdx.x; word < count; word += THREADS) {
      Word made;
#pragma unroll
      for (int j = 0; j < EACH; ++j) {
        const unsigned place = before + word * EACH + j;
        made.of[j] = narrowed(place < classes ? slope(x[place], place) : 0.0f);
      }
      reinterpret_cast<Word*>(y + before)[word] = made;
    }
  }
}

// The logarithms of the probabilities, as they lie one after the other: batch, class, place. Scores are read along classes
// and logarithms written along places, so a block moves a square of both through shared memory.
constexpr int SIDE = 32;
constexpr int LINES = THREADS / SIDE;

extern "C" __global__ void __launch_bounds__(THREADS)
    logarithms(const Element* __restrict__ scores, const float* __restrict__ norms, Element* __restrict__ logs,
               unsigned batches, unsigned places, unsigned classes, Index batch_stride, Index place_stride) {
  extern __shared__ __align__(16) unsigned char shared[];
  float* square = reinterpret_cast<float*>(shared);  // SIDE places of SIDE + 1 classes
  const unsigned rows = batches * places, across = (classes + SIDE - 1) / SIDE, down = (places + SIDE - 1) / SIDE;
  const unsigned x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  for (Index block = blockIdx.x; block < static_cast<Index>(batches) * down * across; block += gridDim.x) {
    const unsigned first_class = block % across * SIDE, first_place = block / across % down * SIDE;
    const unsigned batch = block / across / down;
    for (int line = y; line < SIDE; line += LINES) {
      unsigned place = first_place + line, column = first_class + x, row = batch * places + place;
      if (place < places && column < classes) {
        float score = widened(scores[batch * batch_stride + place * place_stride + column]);
        square[line * (SIDE + 1) + x] = (score - norms[row]) - norms[rows + row];
      }
    }
    __syncthreads();
    for (int line = y; line < SIDE; line += LINES) {
      unsigned place = first_place + x, column = first_class + line;
      if (place < places && column < classes)
        logs[(static_cast<Index>(batch) * classes + column) * places + place] = narrowed(square[x * (SIDE + 1) + line]);
    }
    __syncthreads();
  }
}

// The same where a batch has one place.
extern "C" __global__ void __launch_bounds__(THREADS)
    logarithms_of_rows(const Element* __restrict__ scores, const float* __restrict__ norms, Element* __restrict__ logs,
                       unsigned rows, unsigned classes, Index stride) {
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const float most = norms[row], rest = norms[rows + row];
    for (unsigned column = threadIdx.x; column < classes; column += THREADS)
      logs[static_cast<Index>(row) * classes + column] = narrowed((widened(scores[row * stride + column]) - most) - rest);
  }
}

// The losses as they are (kind 0), their sum (1), or that divided by the sum of the shares (2), for which one block runs.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduced(const float* __restrict__ losses, const float* __restrict__ shares, Loss* __restrict__ y, unsigned rows,
            int kind) {
  if (kind == 0) {
    unsigned row = blockIdx.x * THREADS + threadIdx.x;
    if (row < rows) y[row] = loss_value(losses[row]);
    return;
  }
  extern __shared__ __align__(16) unsigned char shared[];
  double* of_losses = reinterpret_cast<double*>(shared);
  double* of_shares = of_losses + THREADS;
  double loss = 0, share = 0;
  for (unsigned row = threadIdx.x; row < rows; row += THREADS) {
    loss += losses[row];
    share += shares[row];
  }
  of_losses[threadIdx.x] = loss;
  of_shares[threadIdx.x] = share;
  for (int half = THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) {
      of_losses[threadIdx.x] += of_losses[threadIdx.x + half];
      of_shares[threadIdx.x] += of_shares[threadIdx.x + half];
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) y[0] = loss_value(static_cast<float>(kind == 1 ? of_losses[0] : of_losses[0] / of_shares[0]));
}
