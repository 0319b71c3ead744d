"""What kernels allocate beside their results and lent memory is no more than they declare, for operands of megabytes."""

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from irpar.ir import plain_attribute
from irpar.kernels import Kernel, Shaped, lookup, supported
from irpar.kernels.scratch import SCRATCH
from irpar.ops import FactorRule, Kind, factor_rule
from tests.ops.rule_proof import Array, Constant, Sample
from tests.ops.samples import SAMPLES

LARGE_BYTES = 1 << 21
"""Of the operand that grows: an array like it that nobody declares would show."""
ALLOWED_BYTES = 3 << 18
"""What is allocated at most without being declared: pieces that lie in a core's cache, and Python's objects."""
PER_OPERATOR = 4
"""Samples that are measured."""
UNMEASURED = {
    **dict.fromkeys(("Range", "Constant"), "the result is all that there is"),
    **dict.fromkeys(("NonZero", "Unique", "NonMaxSuppression"), "nobody knows the result's shape before it runs"),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), "constants of a model"),
    **dict.fromkeys(
        (
            *("AddRows", "AttentionForward", "AttentionGradient", "ConvChannelsLast", "CrossEntropyForward"),
            *("CrossEntropyGradient", "Fused", "FusedEach", "GroupNormChannelsLast", "JoinHeads", "PoolChannelsLast"),
            "SharedMatMul",
        ),
        "they stand in the programs of devices",
    ),
}
"""Kernels without samples, and why."""
QUICK = ("AveragePool", "MaxPool", "PRelu", "Resize", "Trilu")
NOT_GROWN = {"ConstantOfShape", "Scatter"}
"""The one has no operand that could grow; the other is ScatterElements by the name of version 9."""
OPERATORS = sorted(
    {sample.operator for sample in SAMPLES if lookup(sample.domain, sample.op, sample.version)} - NOT_GROWN
)
HALF = [
    pytest.param(name, marks=() if name == "Add" else pytest.mark.slow)
    for name in ("Add", "Div", "Exp", "Relu", "Clip", "Pow", "MatMul", "Gemm", "Conv", "Gelu", "Softmax", "AveragePool")
]
"""What mixed precision computes in float16."""
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in OPERATORS]


def grown(sample: Sample, rule: FactorRule, factor: int) -> list[Array | None] | None:
    """The operands with a factor of so many times its size that one has LARGE_BYTES; None where nothing has it."""
    arrays = sample.arrays
    places = [
        [dim for dim, parts in enumerate(factors) if factor in parts and parts[0] == factor]
        for factors in rule.operands
    ]
    sizes = [array.nbytes for array, dims in zip(arrays, places, strict=True) if array is not None and dims]
    if not any(sizes):
        return None
    found: list[Array | None] = []
    for array, dims in zip(arrays, places, strict=True):
        for dim in dims if array is not None else ():
            array = np.concatenate([array] * max(2, LARGE_BYTES // max(sizes)), axis=dim)
        found.append(None if array is None else np.ascontiguousarray(array))
    return found


def allocated(kernel: Kernel, operands: Sequence[Array | None], sample: Sample, attributes: dict[str, Any]) -> int:
    """What a call allocates at most beyond results, lent memory and what it declares."""
    results = kernel(np, operands, attributes, sample.results)
    known = [
        None if x is None else Shaped(x.shape, x.dtype, not x.flags.c_contiguous, isinstance(given, Constant))
        for x, given in zip(operands, sample.operands, strict=True)
    ]
    made = [Shaped(x.shape, x.dtype) for x in results]
    lent = np.empty(kernel.scratch_bytes(known, made, attributes), np.uint8)
    outs = tuple(np.empty(x.shape, x.dtype) for x in results)
    del results
    SCRATCH._memory.clear()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        found = kernel(np, operands, attributes, sample.results, outs[0] if len(outs) == 1 else outs, None, lent)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    writes = kernel.signature.writes_outs or (kernel.signature.writes_out and len(outs) == 1)
    new = 0 if writes else sum(x.nbytes for x in found)  # Else the engine copies it to where it was told to go.
    return most - before - new - kernel.temporary_bytes(known, made, attributes)


def in_half(array: Array | Constant | None) -> Array | Constant | None:
    """An operand of float32 in float16."""
    if isinstance(array, Constant):
        return Constant(in_half(array.array))  # type: ignore[arg-type]
    return array.astype(np.float16) if array is not None and array.dtype == np.float32 else array


def in_columns(operands: Sequence[Array | None], sample: Sample) -> list[Array | None]:
    """Operands whose elements lie in the order of their dims from the last to the first, constants apart."""
    pairs = zip(operands, sample.operands, strict=True)
    return [x if x is None or isinstance(given, Constant) else np.asfortranarray(x) for x, given in pairs]


def calls(operator: str, is_half: bool = False, is_strided: bool = False) -> Iterator[tuple[Sample, int, int]]:
    """Samples of an operator, the factor that has grown in each, and what is allocated beyond what is declared."""
    count = 1 if is_strided else PER_OPERATOR
    for sample in [sample for sample in SAMPLES if sample.operator == operator][:count]:
        kernel, rule = lookup(sample.domain, sample.op, sample.version), factor_rule(sample.node)
        assert rule is not None
        if kernel is None:
            continue
        attributes = {name: plain_attribute(value) for name, value in sample.node.attributes.items()}
        if is_half:
            sample = replace(sample, operands=tuple(map(in_half, sample.operands)))
        growing = {Kind.PASS, Kind.REDUCE}.intersection(rule.kinds) or set(rule.kinds)
        for factor, kind in enumerate(rule.kinds):
            operands = grown(sample, rule, factor) if kind in growing else None
            if operands is None:
                continue
            operands = in_columns(operands, sample) if is_strided else operands
            try:
                yield sample, factor, allocated(kernel, operands, sample, attributes)
            except ValueError:
                continue  # An attribute or a constant says how large it is.


@pytest.mark.parametrize("operator", EACH)
def test_kernels_allocate_what_they_declare(operator: str) -> None:
    found = list(calls(operator))
    assert found
    beyond = {f"{sample}, factor {factor}": size for sample, factor, size in found if size > ALLOWED_BYTES}
    assert not beyond


@pytest.mark.slow
@pytest.mark.parametrize("operator", OPERATORS)
def test_kernels_of_strided_operands_allocate_what_they_declare(operator: str) -> None:
    found = calls(operator, is_strided=True)
    assert not [f"{sample}, factor {factor}: {size}" for sample, factor, size in found if size > ALLOWED_BYTES]


@pytest.mark.parametrize("operator", HALF)
def test_kernels_of_small_floats_allocate_what_they_declare(operator: str) -> None:
    found = list(calls(operator, is_half=True))
    assert found
    assert not [f"{sample}, factor {factor}: {size}" for sample, factor, size in found if size > ALLOWED_BYTES]


def test_every_kernel_is_measured_or_says_why_not() -> None:
    assert {op_type for _, op_type in supported()} - {sample.op for sample in SAMPLES} == UNMEASURED.keys()
