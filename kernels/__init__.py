"""Array kernels for ONNX operators: one source for NumPy and CuPy, knowing nothing of the rest of irpar.

kernel = lookup("", "MatMul", 21)
(y,) = kernel(numpy, [a, b], {}, 1)
"""

from .registry import Kept, Kernel, KernelError, Shaped, has_kernel, kernel, lookup, register, supported

__all__ = ["Kept", "Kernel", "KernelError", "Shaped", "has_kernel", "kernel", "lookup", "register", "supported"]
