// A kernel on the host: the threads of a block are fibers that run in turn from one meeting point to the next.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
using namespace std;

#define DEVICE static inline
#define DEVICE_MEMBER inline
#define DEVICE_SPECIAL inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(n)
#define __shared__ static
#define __restrict__

struct Three { unsigned x; };
static Three threadIdx, blockIdx, blockDim, gridDim;
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct half_t { unsigned short bits; };
struct bfloat_t { unsigned short bits; };

DEVICE float of_bits(unsigned u) { float x; memcpy(&x, &u, 4); return x; }
DEVICE unsigned bits_of(float x) { unsigned u; memcpy(&u, &x, 4); return u; }
DEVICE float infinity() { return of_bits(0x7f800000u); }
DEVICE float not_a_number() { return of_bits(0x7fc00000u); }
DEVICE float widen(bfloat_t x) { return of_bits((unsigned)x.bits << 16); }
DEVICE float widen(half_t x) { _Float16 y; memcpy(&y, &x.bits, 2); return (float)y; }
DEVICE half_t to_half(float x) { _Float16 y = (_Float16)x; half_t z; memcpy(&z.bits, &y, 2); return z; }

static ucontext_t scheduler;
static vector<ucontext_t> fibers;
static vector<char> finished;
static uint64_t exchanged[1024];

// All other threads of the block come as far as this one is before it goes on.
static void meet() { unsigned own = threadIdx.x; swapcontext(&fibers[own], &scheduler); threadIdx.x = own; }
DEVICE void __syncthreads() { meet(); }
DEVICE void __threadfence() {}
DEVICE unsigned atomicAdd(unsigned* p, unsigned added) { unsigned before = *p; *p += added; return before; }
template <class T> DEVICE T __shfl_xor_sync(unsigned, T value, int offset) {
  memcpy(&exchanged[threadIdx.x], &value, sizeof(T));
  meet();
  T found;
  memcpy(&found, &exchanged[threadIdx.x ^ offset], sizeof(T));
  meet();
  return found;
}

static void (*body)();
static void enter(unsigned own) { threadIdx.x = own; body(); finished[own] = 1; swapcontext(&fibers[own], &scheduler); }
static void run_grid(unsigned grid, unsigned block, void (*given)()) {
  unique_ptr<char[]> stacks(new char[1024 * 65536]);
  body = given;
  gridDim.x = grid;
  blockDim.x = block;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
    fibers.assign(block, ucontext_t());
    finished.assign(block, 0);
    for (unsigned i = 0; i < block; ++i) {
      getcontext(&fibers[i]);
      fibers[i].uc_stack.ss_sp = &stacks[i * 65536];
      fibers[i].uc_stack.ss_size = 65536;
      makecontext(&fibers[i], (void (*)())enter, 1, i);
    }
    for (bool is_left = true; is_left;) {
      is_left = false;
      for (unsigned i = 0; i < block; ++i)
        if (!finished[i]) { swapcontext(&scheduler, &fibers[i]); is_left = true; }
    }
  }
}
