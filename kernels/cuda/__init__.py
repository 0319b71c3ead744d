"""Kernels in CUDA C++ for operators of which CuPy's functions take several launches, or temporaries, or too long.

kernel = lookup("", "Softmax", 13)
results = kernel(gpu, [x], {"axis": -1}, 1, out)  # None: not for this one, irpar.kernels computes it
"""

from .gpu import CompileError, Gpu, Gpus
from .programs import Program
from .registry import CudaKernel, cuda_kernel, has_kernel, lookup, supported

__all__ = ["CompileError", "CudaKernel", "Gpu", "Gpus", "Program", "cuda_kernel", "has_kernel", "lookup", "supported"]
