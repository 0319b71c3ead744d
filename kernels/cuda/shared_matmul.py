"""Products of few rows with several matrices in one launch, each of which is read once; see few_rows."""

from collections.abc import Sequence

import numpy as np

from ..gemm import Gemm, contiguous_calls
from ..registry import Array
from . import few_rows
from .gpu import Gpu
from .registry import cuda_kernel


@cuda_kernel("SharedMatMul", since=1, domain="irpar")
def shared_matmul(
    gpu: Gpu, a: Array, *matrices: Array, gate: str = "none", outs: Sequence[Array | None] = ()
) -> tuple[Array, ...] | None:
    """See `irpar.kernels.shared_matmul.shared_matmul`."""
    if not 0 < len(matrices) <= few_rows.MOST_MATRICES or any(b.ndim != 2 for b in matrices) or a.ndim < 2:
        return None
    if any(b.shape[0] != a.shape[-1] for b in matrices) or not a.size:
        return None
    given, results, calls = (*outs, *(None for _ in matrices)), [], []
    for b, out in zip(matrices if gate == "none" else matrices[:1], given, strict=False):
        shape = (*a.shape[:-1], b.shape[1])
        is_fit = out is not None and out.shape == shape and out.dtype == a.dtype and out.flags.c_contiguous
        results.append(out if out is not None and is_fit else gpu.empty(shape, a.dtype))
    for b in matrices:
        call = _call(gpu, a, b, results[0])
        if call is None:
            return None
        calls.append(call)
    if gate == "none":
        few_rows.multiply_each(gpu, calls, a, matrices, results)
    elif len(matrices) == 2 and matrices[0].shape == matrices[1].shape:
        few_rows.multiply_gated(gpu, calls, a, matrices, results[0], gate)
    else:
        return None
    return tuple(results)


def _call(gpu: Gpu, a: Array, b: Array, result: Array) -> Gemm | None:
    """The product of all rows with a matrix that lies row by row; None where it is none of few rows."""
    if not b.size or not np.prod(b.shape) * b.itemsize >= few_rows.FEWEST_BYTES:
        return None
    left, right, calls = contiguous_calls(gpu.module, a, b, a.shape[:-2])
    if left is not a or right is not b or len(calls) > 1 or calls[0].b.transposed:
        return None
    is_fit = few_rows.is_fit(calls[0], a, b, result, (gpu.address(a), gpu.address(b)))
    return calls[0] if is_fit else None
