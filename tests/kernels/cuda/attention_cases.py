"""Random calls of Attention, and what they are compared with: irpar's own kernel in float64."""

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from irpar.kernels import lookup
from irpar.kernels.cuda import lookup as lookup_cuda
from irpar.kernels.cuda.cublas_lt import tf32

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
DTYPES["tf32"] = DTYPES["f32"]
TOLERANCES = {"f32": 2e-6, "tf32": 2e-3, "f16": 2e-3, "bf16": 1.6e-2}
"""Of the largest result, about two roundings of it."""


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        dtype: of operands; tf32 is float32 that may be rounded so.
        mask: its dtype, and which of its dims (batch, heads, queries, keys) are 1; or None.
        mask_keys: how many keys it reaches; 0 for all.
        valid: whether it is told how many keys are there.
        layout: "heads" [B, H, S, D], "rows" [B, S, H * D], "strided" [B, H, S, D] of rows, "odd" not aligned.
    """

    dtype: str = "f16"
    batch: int = 1
    heads: int = 2
    key_heads: int = 2
    queries: int = 40
    keys: int = 40
    past: int = 0
    head: int = 32
    value_head: int = 0
    mask: tuple[str, str] | None = None
    mask_keys: int = 0
    valid: bool = False
    layout: str = "heads"
    attributes: dict[str, Any] = field(default_factory=dict)
    results: int = 1

    def __str__(self) -> str:
        words = [self.dtype, f"{self.batch}x{self.heads}/{self.key_heads}", f"{self.queries}x{self.past}+{self.keys}"]
        words += [str(self.head), *([str(self.value_head)] if self.value_head else []), self.layout]
        words += [*([":".join(self.mask)] if self.mask else []), *(f"{k}{v}" for k, v in self.attributes.items())]
        return "-".join(words)


def operands(case: Case, seed: int = 0) -> list[Any]:
    """Numbers for a call, as numpy arrays."""
    rng = np.random.default_rng(seed)
    dtype, value_head = DTYPES[case.dtype], case.value_head or case.head

    def numbers(heads: int, places: int, size: int) -> Any:
        x = rng.standard_normal((case.batch, places, heads, size)).astype(dtype)
        if case.layout == "rows":
            return x.reshape(case.batch, places, heads * size)
        if case.layout == "strided":
            return x.transpose(0, 2, 1, 3)
        if case.layout == "odd":
            wide = np.zeros((case.batch, heads, places, size + 3), dtype)
            wide[..., 1:-2] = x.transpose(0, 2, 1, 3)
            return wide[..., 1:-2]
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3))

    def cache(size: int) -> Any:
        return rng.standard_normal((case.batch, case.key_heads, case.past, size)).astype(dtype)

    given = [numbers(case.heads, case.queries, case.head), numbers(case.key_heads, case.keys, case.head)]
    given += [numbers(case.key_heads, case.keys, value_head), None, None, None, None]
    if case.mask is not None:
        of, ones = case.mask
        full = (case.batch, case.heads, case.queries, case.mask_keys or case.past + case.keys)
        shape = [1 if letter in ones else size for letter, size in zip("bhqk", full, strict=True)]
        mask = rng.standard_normal(shape)
        given[3] = mask > -0.5 if of == "bool" else mask.astype(DTYPES[of])
        if of != "bool":
            given[3][mask < -1] = -np.inf
    if case.past:
        given[4:6] = [cache(case.head), cache(value_head)]
    if case.valid:
        given[6] = rng.integers(0, case.past + case.keys + 1, case.batch)
    return given


def attributes_of(case: Case) -> dict[str, Any]:
    """The node's."""
    heads = {"q_num_heads": case.heads, "kv_num_heads": case.key_heads} if case.layout == "rows" else {}
    return {**heads, **case.attributes}


def expected(case: Case, given: list[Any]) -> tuple[Any, ...]:
    """The results in float64, of TF32 for operands without the bits that tensor cores drop."""
    kernel = lookup("", "Attention", 24)
    assert kernel is not None
    wide = [x.astype(np.float64) if x is not None and x.dtype in DTYPES.values() else x for x in given]
    if case.dtype == "tf32":
        wide[:3] = [(x.copy().view(np.uint32) & 0xFFFFE000).view(np.float32).astype(np.float64) for x in given[:3]]
    return kernel(np, wide, attributes_of(case), case.results)


def found(gpu: Any, case: Case, given: list[Any], outs: Any = None) -> tuple[Any, ...] | None:
    """The results of the CUDA kernel."""
    kernel = lookup_cuda("", "Attention", 24)
    assert kernel is not None
    with tf32(case.dtype == "tf32"):
        return kernel(gpu, given, attributes_of(case), case.results, outs)


def check(case: Case, results: tuple[Any, ...] | None, given: list[Any]) -> None:
    """Compare results, numpy arrays, with float64."""
    assert results is not None
    wanted = expected(case, given)
    assert len(results) == len(wanted)
    for result, right in zip(results, wanted, strict=True):
        assert result.shape == right.shape
        assert result.dtype == DTYPES[case.dtype]
    tolerance = TOLERANCES[case.dtype] * max(1.0, float(np.abs(wanted[0]).max()))
    np.testing.assert_allclose(results[0].astype(np.float64), wanted[0], rtol=0, atol=tolerance)
    for result, right in zip(results[1:], wanted[1:], strict=True):
        np.testing.assert_array_equal(result.astype(np.float64), right)
