// Rotary embeddings: pairs of elements of each head are rotated by an angle of their row, WIDTH pairs by a thread.
//
// INTERLEAVED: pairs stand next to each other, else half of what is rotated apart. PLACED: rows have places in the
// tables of cosines and sines, of the type PLACE; else the tables have the rows. Strides are in elements.

#include "elements.cuh"

#ifndef WIDTH
#define WIDTH 1
#endif
#ifndef INTERLEAVED
#define INTERLEAVED 0
#endif
#ifndef PLACED
#define PLACED 0
#endif
#ifndef PLACE
#define PLACE long long
#endif

struct alignas(WIDTH * sizeof(Element)) Elements {
  Element of[WIDTH];
};

__device__ __forceinline__ Elements read(const Element* from) { return *reinterpret_cast<const Elements*>(from); }
__device__ __forceinline__ void write(Element* to, const Elements& given) { *reinterpret_cast<Elements*>(to) = given; }

extern "C" __global__ void __launch_bounds__(256)
    rotate(const Element* x, const Element* cosines, const Element* sines,
           const PLACE* places, Element* __restrict__ y, bool* fault, unsigned batches, unsigned rows,
           unsigned heads, unsigned size, unsigned half, unsigned length, Index x_batch, Index x_row, Index x_head,
           Index y_batch, Index y_row, Index y_head, Index cos_batch, Index cos_row, Index sin_batch, Index sin_row,
           Index place_batch, Index place_row) {
  const unsigned chunks = (size - half) / WIDTH, count = batches * rows * heads * chunks;
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned rest = i / chunks, column = (i - rest * chunks) * WIDTH;
    unsigned head = rest % heads, row = rest / heads % rows, batch = rest / heads / rows;
    const Element* from = x + batch * x_batch + row * x_row + head * x_head;
    Element* to = y + batch * y_batch + row * y_row + head * y_head;
    if (column >= half) {  // behind what is rotated
      write(to + half + column, read(from + half + column));
      continue;
    }
#if PLACED
    Index place = places[batch * place_batch + row * place_row];
    if (place < 0) place += length;
    if (place < 0 || place >= length) {
      if (fault != nullptr) *fault = true;
      place = 0;
    }
    const Elements cosine = read(cosines + place * cos_row + column), sine = read(sines + place * sin_row + column);
#else
    const Elements cosine = read(cosines + batch * cos_batch + row * cos_row + column);
    const Elements sine = read(sines + batch * sin_batch + row * sin_row + column);
#endif
    const unsigned first = INTERLEAVED ? 2 * column : column, second = INTERLEAVED ? first + WIDTH : half + column;
    Elements pieces[2] = {read(from + first), read(from + second)};
#pragma unroll
    for (int j = 0; j < WIDTH; ++j) {
      Element& left = INTERLEAVED ? pieces[2 * j / WIDTH].of[2 * j % WIDTH] : pieces[0].of[j];
      Element& right = INTERLEAVED ? pieces[(2 * j + 1) / WIDTH].of[(2 * j + 1) % WIDTH] : pieces[1].of[j];
      Wide a = widened(left), b = widened(right), c = widened(cosine.of[j]), s = widened(sine.of[j]);
      left = narrowed(c * a - s * b);
      right = narrowed(s * a + c * b);
    }
    write(to + first, pieces[0]);
    write(to + second, pieces[1]);
  }
}
