// Copies of rows of 16-bit numbers that begin at any place, in what is read and in what is written, 16 bytes at once.

typedef long long Index;
typedef unsigned short Element;

constexpr int THREADS = 256;
constexpr int WIDTH = 8;  // elements of 16 bytes

// The 8 elements from a place on, out of the one or two chunks of 16 bytes that have them.
__device__ __forceinline__ uint4 chunk_from(const Element* from) {
  const size_t address = reinterpret_cast<size_t>(from);
  const int shift = static_cast<int>(address & 15);
  const uint4* chunks = reinterpret_cast<const uint4*>(address - shift);
  uint4 low = chunks[0];
  if (shift == 0) return low;
  const uint4 high = chunks[1];
  unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (shift & 8) {
#pragma unroll
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if (shift & 4) {
#pragma unroll
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  if (shift & 2) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = words[i] >> 16 | words[i + 1] << 16;
  }
  low.x = words[0];
  low.y = words[1];
  low.z = words[2];
  low.w = words[3];
  return low;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    copy_rows(const Element* __restrict__ x, Element* __restrict__ y, Index rows, Index length, Index x_row,
              Index y_row) {
  for (Index row = blockIdx.y; row < rows; row += gridDim.y) {
    const Element* from = x + row * x_row;
    Element* to = y + row * y_row;
    const Index before = (16 - (reinterpret_cast<size_t>(to) & 15)) % 16 / 2, head = before < length ? before : length;
    const Index chunks = (length - head) / WIDTH, rest = length - head - chunks * WIDTH;
    for (Index i = static_cast<Index>(blockIdx.x) * THREADS + threadIdx.x; i < chunks;
         i += static_cast<Index>(gridDim.x) * THREADS)
      *reinterpret_cast<uint4*>(to + head + i * WIDTH) = chunk_from(from + head + i * WIDTH);
    if (blockIdx.x == 0 && threadIdx.x < head + rest) {
      const Index place = threadIdx.x < head ? threadIdx.x : length - rest + threadIdx.x - head;
      to[place] = from[place];
    }
  }
}
