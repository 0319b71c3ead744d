// Copies between arrays of any strides, in elements of BYTES bytes: what moves does not matter, only how much of it.
//
// Sizes and strides are of up to 5 dims, the last ones where there are fewer (RANK), of which the last is the fastest in
// what is written. Strides are in elements.

#ifndef BYTES
#define BYTES 4
#endif
#ifndef RANK
#define RANK 2
#endif

#if BYTES == 1
typedef unsigned char Element;
#elif BYTES == 2
typedef unsigned short Element;
#elif BYTES == 4
typedef unsigned int Element;
#elif BYTES == 8
typedef unsigned long long Element;
#else
typedef uint4 Element;
#endif

typedef long long Index;

// Each thread copies one element at a time, neighbours in what is written.
extern "C" __global__ void __launch_bounds__(256)
    copy(const Element* __restrict__ from, Element* __restrict__ to, unsigned count, unsigned n0, unsigned n1,
         unsigned n2, unsigned n3, unsigned n4, Index f0, Index f1, Index f2, Index f3, Index f4, Index t0, Index t1,
         Index t2, Index t3, Index t4) {
  const unsigned sizes[5] = {n0, n1, n2, n3, n4};
  const Index from_strides[5] = {f0, f1, f2, f3, f4}, to_strides[5] = {t0, t1, t2, t3, t4};
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned rest = i;
    Index source = 0, target = 0;
#pragma unroll
    for (int dim = 4; dim >= 5 - RANK; --dim) {
      unsigned place = rest;
      if (dim > 5 - RANK) {
        unsigned above = rest / sizes[dim];
        place = rest - above * sizes[dim];
        rest = above;
      }
      source += place * from_strides[dim];
      target += place * to_strides[dim];
    }
    to[target] = from[source];
  }
}

// Two dims change places: columns (n4, fastest in what is written) are f4 elements apart where they are read, rows (n3)
// are 1 apart there. A block moves a square through shared memory, so that both ways go along memory.
constexpr int SIDE = BYTES <= 2 ? 64 : 32;
constexpr int LINES = 8;

extern "C" __global__ void __launch_bounds__(SIDE * LINES)
    transpose(const Element* __restrict__ from, Element* __restrict__ to, unsigned n0, unsigned n1, unsigned n2,
              unsigned n3, unsigned n4, Index f0, Index f1, Index f2, Index f4, Index t0, Index t1, Index t2, Index t3) {
  extern __shared__ __align__(16) unsigned char shared[];
  Element* square = reinterpret_cast<Element*>(shared);  // SIDE rows of SIDE + 1
  const unsigned outer = n0 * n1 * n2, down = (n3 + SIDE - 1) / SIDE, across = (n4 + SIDE - 1) / SIDE;
  for (Index block = blockIdx.x; block < static_cast<Index>(outer) * down * across; block += gridDim.x) {
    unsigned column = block % across * SIDE, row = block / across % down * SIDE, rest = block / across / down;
    unsigned i2 = rest % n2, i1 = rest / n2 % n1, i0 = rest / n2 / n1;
    const Element* source = from + i0 * f0 + i1 * f1 + i2 * f2;
    Element* target = to + i0 * t0 + i1 * t1 + i2 * t2;
#pragma unroll
    for (int line = 0; line < SIDE; line += LINES) {
      unsigned y = column + threadIdx.y + line, x = row + threadIdx.x;
      if (y < n4 && x < n3) square[(threadIdx.y + line) * (SIDE + 1) + threadIdx.x] = source[y * f4 + x];
    }
    __syncthreads();
#pragma unroll
    for (int line = 0; line < SIDE; line += LINES) {
      unsigned y = row + threadIdx.y + line, x = column + threadIdx.x;
      if (y < n3 && x < n4) target[y * t3 + x] = square[threadIdx.x * (SIDE + 1) + threadIdx.y + line];
    }
    __syncthreads();
  }
}

// Up to 8 arrays of rows beside each other, in rows of what is written: w elements of a row of each, s from row to row.
#define PART(i) const Element *p##i, unsigned w##i, Index s##i
extern "C" __global__ void __launch_bounds__(256)
    join(Element* __restrict__ to, unsigned rows, unsigned width, Index stride, PART(0), PART(1), PART(2), PART(3),
         PART(4), PART(5), PART(6), PART(7)) {
  const Element* const parts[8] = {p0, p1, p2, p3, p4, p5, p6, p7};
  const unsigned widths[8] = {w0, w1, w2, w3, w4, w5, w6, w7};
  const Index strides[8] = {s0, s1, s2, s3, s4, s5, s6, s7};
  const unsigned count = rows * width, step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned row = i / width, column = i - row * width, before = 0;
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      if (column >= before && column - before < widths[part])
        to[row * stride + column] = parts[part][row * strides[part] + (column - before)];
      before += widths[part];
    }
  }
}

// Heads of up to 4 parts behind each other in each place of each batch, of which `count` elements are written: n heads of a
// part, and its steps from batch to batch, from place to place and from head to head.
#define HEADS(i) const Element *p##i, unsigned n##i, Index b##i, Index s##i, Index h##i
extern "C" __global__ void __launch_bounds__(256)
    join_heads(Element* __restrict__ to, unsigned count, unsigned places, unsigned heads, unsigned size, HEADS(0), HEADS(1),
               HEADS(2), HEADS(3)) {
  const Element* const parts[4] = {p0, p1, p2, p3};
  const unsigned counts[4] = {n0, n1, n2, n3};
  const Index batches[4] = {b0, b1, b2, b3}, rows[4] = {s0, s1, s2, s3}, steps[4] = {h0, h1, h2, h3};
  const unsigned step = gridDim.x * blockDim.x;
  for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
    unsigned above = i / size, column = i - above * size, row = above / heads, head = above - row * heads;
    unsigned batch = row / places, place = row - batch * places, before = 0;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      if (head >= before && head - before < counts[part])
        to[i] = parts[part][batch * batches[part] + place * rows[part] + (head - before) * steps[part] + column];
      before += counts[part];
    }
  }
}
