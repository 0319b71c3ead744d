// Products by tensor cores, of 16-bit elements, or of float32 rounded to TF32. It is included behind the type Element.

#include "ahead.cuh"

#ifndef EMULATED  // tests give it on a processor

// Four 8 x 8 matrices of 16-bit elements, or 8 x 4 of float32; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], const Element* row) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(place)
               : "memory");
}

// The same of 16-bit elements, each matrix transposed.
__device__ __forceinline__ void load_transposed(unsigned (&to)[4], const Element* row) {
  unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(place)
               : "memory");
}

// sums += a b, with a 16 x 16 and b 16 x 8, of the kind ELEMENT; of float32 a is 16 x 8 and b 8 x 8.
__device__ __forceinline__ void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if ELEMENT == 0
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
#elif ELEMENT == 2
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
#endif
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif
