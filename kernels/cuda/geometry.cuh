// Sizes of the operand, the kernel and the result; strides, dilations, padding in front: of three spatial dims.
#define GEOMETRY                                                                                                     \
  int n0, int n1, int n2, int k0, int k1, int k2, int o0, int o1, int o2, int s0, int s1, int s2, int d0, int d1,    \
      int d2, int p0, int p1, int p2
