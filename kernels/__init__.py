"""Array kernels for ONNX operators: one source for NumPy and CuPy, knowing nothing of the rest of irpar.

kernel = lookup("", "MatMul", 21)
(y,) = kernel(numpy, [a, b], {}, 1)
"""

from . import (
    activation,
    attention,
    cast,
    elementwise,
    generate,
    indexing,
    logic,
    matmul,
    normalization,
    pad,
    quantization,
    reduction,
    shape,
)
from .registry import Kernel, KernelError, kernel, lookup, register, supported

__all__ = ["Kernel", "KernelError", "kernel", "lookup", "register", "supported"]
