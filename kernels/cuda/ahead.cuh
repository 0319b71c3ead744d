// Copies from global to shared memory that a thread starts ahead of their use and waits for alone.

#ifndef EMULATED  // tests give it on a processor

// 16 bytes from global to shared memory, zeros where they are not given; nothing is read then.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool is_given) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  int bytes = is_given ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes) : "memory");
}

// The same with 8 or 4 bytes.
template <int BYTES>
__device__ __forceinline__ void copy_few_async(void* to, const void* from, bool is_given) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  int bytes = is_given ? BYTES : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(place), "l"(from), "n"(BYTES), "r"(bytes)
               : "memory");
}

// What is read but once, and not to displace in the cache what is read again; zeros where it is not given.
__device__ __forceinline__ void copy_once(void* to, const void* from, bool is_given) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(to));
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(place), "l"(from),
               "r"(is_given ? 16 : 0), "l"(policy)
               : "memory");
}

// The copies since the last call are one group.
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for all groups of this thread's but the last COUNT.
template <int COUNT>
__device__ __forceinline__ void wait_for_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(COUNT) : "memory");
}

// Wait for all copies of this thread.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif
