"""Array kernels for ONNX operators: one source for NumPy and CuPy, knowing nothing of the rest of irpar.

kernel = lookup("", "MatMul", 21)
(y,) = kernel(numpy, [a, b], {}, 1)
"""

# Importing a family enters its kernels in the table.
from . import (  # noqa: F401
    activation,
    attention,
    cast,
    convolution,
    elementwise,
    fourier,
    fused,
    gated,
    generate,
    indexing,
    linear_attention,
    logic,
    loss,
    matmul,
    normalization,
    optimizer,
    pad,
    pooling,
    quantization,
    recurrent,
    reduction,
    resize,
    shape,
    signal,
    vision,
)
from .registry import Kernel, KernelError, kernel, lookup, register, supported

__all__ = ["Kernel", "KernelError", "kernel", "lookup", "register", "supported"]
