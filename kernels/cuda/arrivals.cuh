// Blocks that count themselves, so that the last one goes on with what all of them wrote.

#ifndef EMULATED  // tests give it on a processor

// How many came before. One thread of a block calls it between two barriers: what the block wrote before the first can
// then be read, past the multiprocessor's own cache, by those behind the second of a block that comes later.
__device__ __forceinline__ unsigned arrive(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

#endif
