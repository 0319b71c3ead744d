// What the kernels of attention in float32 share; it is included behind THREADS, the threads of a block.

// Start to copy rows of a tile; zeros behind `limit`.
template <int COUNT, int SIZE, int TO_STRIDE>
__device__ __forceinline__ void copy_rows(float* to, const float* from, long long stride, int first, int limit) {
  constexpr int CHUNKS = SIZE / 4;
  for (int chunk = threadIdx.x; chunk < COUNT * CHUNKS; chunk += THREADS) {
    int row = chunk / CHUNKS, column = chunk % CHUNKS * 4;
    bool is_given = first + row < limit;
    copy_async(to + row * TO_STRIDE + column, is_given ? from + (first + row) * stride + column : from, is_given);
  }
}
