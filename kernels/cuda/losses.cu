// Cross-entropy of rows of scores: a block for each row, sums in float32, then one block for the mean.
//
// Rows are those of a batch and of places in it; classes lie one after the other. WEIGHTED: classes have weights. PLACE:
// the type of a label.

#include "elements.cuh"

#ifndef PLACE
#define PLACE long long
#endif
#ifndef WEIGHTED
#define WEIGHTED 0
#endif

constexpr int THREADS = 512;
constexpr int EACH = 16 / sizeof(Element);  // scores that a thread reads before it uses the first
#define LEAST bits_value(0xff800000u)  // minus infinity

// A maximum, and the sum of the exponentials of numbers less it.
struct Sum {
  float most, sum;
};

__device__ __forceinline__ Sum joined(Sum a, Sum b) {
  float most = a.most > b.most || a.most != a.most ? a.most : b.most;
  if (most == LEAST) return {most, a.sum + b.sum};
  return {most, a.sum * expf(a.most - most) + b.sum * expf(b.most - most)};
}

// losses[row] = (log(sum of exp(x)) - x[label]) * share, and shares[row]: the weight of its class, 0 where ignored. What
// is taken off the scores of a row to make them logarithms: norms[row] first, then norms[rows + row].
extern "C" __global__ void __launch_bounds__(THREADS)
    cross_entropy(const Element* __restrict__ scores, const PLACE* __restrict__ labels,
                  const Element* __restrict__ weights, float* __restrict__ losses, float* __restrict__ shares,
                  float* __restrict__ norms, bool* fault, unsigned rows, unsigned places, unsigned classes,
                  Index batch_stride, Index place_stride, Index ignored, int is_any_ignored) {
  extern __shared__ __align__(16) unsigned char shared[];
  Sum* sums = reinterpret_cast<Sum*>(shared);  // THREADS
  for (unsigned row = blockIdx.x; row < rows; row += gridDim.x) {
    const unsigned batch = row / places;
    const Element* x = scores + batch * batch_stride + (row - batch * places) * place_stride;
    Sum own = {LEAST, 0};
    for (unsigned start = threadIdx.x; start < classes; start += EACH * THREADS) {
      float values[EACH];
      float most = own.most;
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        unsigned column = start + i * THREADS;
        values[i] = column < classes ? widened(x[column]) : LEAST;
        if (values[i] > most || values[i] != values[i]) most = values[i];
      }
      if (most == LEAST) continue;
      float sum = own.sum * expf(own.most - most);
#pragma unroll
      for (int i = 0; i < EACH; ++i) sum += expf(values[i] - most);
      own = {most, sum};
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
      share *= widened(weights[label]);
#endif
      losses[row] = -((widened(x[label]) - most) - rest) * share;
      shares[row] = share;
      norms[row] = most;
      norms[rows + row] = rest;
    }
    __syncthreads();
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
    reduced(const float* __restrict__ losses, const float* __restrict__ shares, Element* __restrict__ y, unsigned rows,
            int kind) {
  if (kind == 0) {
    unsigned row = blockIdx.x * THREADS + threadIdx.x;
    if (row < rows) y[row] = narrowed(losses[row]);
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
  if (threadIdx.x == 0) y[0] = narrowed(static_cast<float>(kind == 1 ? of_losses[0] : of_losses[0] / of_shares[0]));
}
