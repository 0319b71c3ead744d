// For launches that may begin before what is before them on their stream has ended (programmatic dependent launch).
// A kernel waits before it reads or writes anything that others may have written or read.

#ifndef EMULATED  // tests give it on a processor

// All that was before has ended, and what it wrote can be read.
__device__ __forceinline__ void wait_for_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next launch may begin when all blocks have come here.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#endif
