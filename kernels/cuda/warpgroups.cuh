// Products of warpgroups (four warps) on devices of compute capability 9.0, and barriers in shared memory.
//
// A tile of 16-bit elements lies in shared memory in slabs of 64 columns: a row of a slab has 128 bytes, in which chunks
// of 16 bytes are swapped by the row's number (`swizzled`), so that 8 rows of one column lie in different banks.
// Slabs begin at addresses that 1,024 bytes divide, and have a multiple of 8 rows.

constexpr int GROUP = 128;  // threads of a warpgroup
constexpr int SLAB = 64;    // columns of a slab

// Where a chunk of 8 elements of a row begins in its slab.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * SLAB + (chunk ^ row % 8) * 8; }

typedef unsigned long long Barrier;

#ifndef EMULATED  // tests give what follows on a processor

__device__ __forceinline__ unsigned shared_place(const void* address) {
  return static_cast<unsigned>(__cvta_generic_to_shared(address));
}

// A number that all threads of the warp have, for the compiler to know it.
__device__ __forceinline__ int uniform(int number) { return __shfl_sync(0xffffffffu, number, 0); }

// A barrier whose phase is over when `count` have arrived.
__device__ __forceinline__ void begin_barrier(Barrier* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_place(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_place(barrier)) : "memory");
}

// Arrive when all copies that this thread has started are there.
__device__ __forceinline__ void arrive_with_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_place(barrier)) : "memory");
}

// Wait for the end of the phase of a parity.
__device__ __forceinline__ void wait_for(Barrier* barrier, int parity) {
  unsigned is_over;
  do {
    asm volatile(
        "{\n.reg .pred over;\nmbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.u32 %0, 1, 0, over;\n}"
        : "=r"(is_over)
        : "r"(shared_place(barrier)), "r"(parity)
        : "memory");
  } while (!is_over);
  __syncwarp();
}

// What was written to shared memory and is known to be there can be multiplied.
__device__ __forceinline__ void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The threads of one warpgroup wait for each other.
__device__ __forceinline__ void meet_group(int group) { asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory"); }

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most `PENDING` groups of products are under way.
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Nothing that needs these numbers is moved before this.
template <int COUNT>
__device__ __forceinline__ void hold(float (&sums)[COUNT][4]) {
#pragma unroll
  for (int n = 0; n < COUNT; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[n][i])::"memory");
}

#if ELEMENT == 2
#define KIND "bf16"
#else
#define KIND "f16"
#endif
#define PLACES_32                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define PLACES_64                                                                                                    \
  PLACES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
            "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define SUMS_16(n) SUMS_4(n), SUMS_4(n + 1), SUMS_4(n + 2), SUMS_4(n + 3)
#define SUMS_32 SUMS_16(0), SUMS_16(4)
#define SUMS_64 SUMS_32, SUMS_16(8), SUMS_16(12)

// sums = or += a b for 64 rows of a and 16 columns of b's rows, both tiles in shared memory described by `described`.
// A_DOWN, B_DOWN: whether what is summed over lies in the rows of the tile of a, or of b.
template <int A_DOWN, int B_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[8][4], unsigned long long a, unsigned long long b, bool adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." KIND
               "." KIND " {" PLACES_32 "}, %32, %33, adds, 1, 1, %35, %36;\n}"
               : SUMS_32
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(A_DOWN), "n"(B_DOWN));
}
template <int A_DOWN, int B_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[16][4], unsigned long long a, unsigned long long b, bool adds) {
  asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." KIND
               "." KIND " {" PLACES_64 "}, %64, %65, adds, 1, 1, %67, %68;\n}"
               : SUMS_64
               : "l"(a), "l"(b), "r"(static_cast<int>(adds)), "n"(A_DOWN), "n"(B_DOWN));
}

// The same, with a in registers: fragments as those of mma.m16n8k16, a warp's 16 rows under those of the warp before.
template <int B_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[8][4], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32." KIND
               "." KIND " {" PLACES_32 "}, {%32, %33, %34, %35}, %36, adds, 1, 1, %37;\n}"
               : SUMS_32
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_DOWN));
}
template <int B_DOWN>
__device__ __forceinline__ void multiply(float (&sums)[16][4], const unsigned (&a)[4], unsigned long long b) {
  asm volatile("{\n.reg .pred adds;\nsetp.eq.b32 adds, 0, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32." KIND
               "." KIND " {" PLACES_64 "}, {%64, %65, %66, %67}, %68, adds, 1, 1, %69;\n}"
               : SUMS_64
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_DOWN));
}

#endif

// How products find a part of a tile: where it begins, and how far it is from each slab to the next (needed where what
// is summed over lies in rows) and from 8 rows to the next 8; 1 << 62: rows of 128 bytes, their chunks swapped.
__device__ __forceinline__ unsigned long long described(const void* begin, int slab_bytes) {
  unsigned long long place = shared_place(begin) >> 4, across = slab_bytes >> 4, down = 8 * SLAB * 2 >> 4;
  return place | across << 16 | down << 32 | 1ull << 62;
}

// Start to copy COUNT rows of a tile by all threads of a block; zeros behind `limit`.
template <int THREADS, int COUNT, int WIDTH>
__device__ __forceinline__ void copy_tile(Element* to, const Element* from, int stride, int first, int limit) {
  constexpr int CHUNKS = WIDTH / 8, STEP = THREADS / CHUNKS;
  const int chunk = threadIdx.x % CHUNKS, row = threadIdx.x / CHUNKS;
  to += chunk / 8 * COUNT * SLAB + swizzled(row, chunk % 8);
  const Element* place = from + static_cast<long long>(first + row) * stride + chunk * 8;
#pragma unroll
  for (int pass = 0; pass < (COUNT + STEP - 1) / STEP; ++pass) {
    bool is_given = first + row + pass * STEP < limit;
    if (COUNT % STEP == 0 || row + pass * STEP < COUNT)
      copy_async(to + pass * STEP * SLAB, is_given ? place : from, is_given);
    place += static_cast<long long>(STEP) * stride;
  }
}
