"""ONNX's own backend cases: models with inputs and expected outputs, from the installed `onnx` package."""

import functools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from irpar.onnx_io.versions import NEWEST_IR_WRITTEN, NEWEST_OPSET
from irpar.runtime.engines.ort_versions import ALWAYS_LOADED

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
"""Kinds whose models and data are in the package; the `real` ones are in tests/test_light_networks.py."""


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        kind: one of KINDS.
        name: its name in ONNX.
        model: the model as it is in ONNX.
        data: (inputs, expected outputs) of each data set; arrays, lists of them, or None for an absent optional.
        rtol, atol: the tolerances of the case.
    """

    kind: str
    name: str
    model: onnx.ModelProto
    data: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float

    def __str__(self) -> str:
        return self.name if self.kind == "node" else f"{self.kind}/{self.name}"


@functools.cache
def cases(kind: str = "node") -> tuple[Case, ...]:
    """All cases of a kind."""
    with warnings.catch_warnings():
        # making the case data divides by zero and overflows on purpose
        warnings.simplefilter("ignore")
        return tuple(map(_case, made_cases(kind)))


def made_cases(kind: str) -> list[Any]:
    """The cases of a kind as ONNX makes them, but for three of its pools, of which it takes seconds for each."""
    from onnx.backend.test.loader import load_model_tests
    from onnx.reference.ops import op_pool_common

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_pool_common, "pool", functools.partial(pooled, op_pool_common.pool))
        return load_model_tests(kind=kind)


MANY_WINDOWS = 50_000


def pooled(
    pool: Callable[..., np.ndarray],
    x: np.ndarray,
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    out_shape: Sequence[int],
    how: str,
    *padded: Any,
    least: int = MANY_WINDOWS,
    **more: Any,
) -> np.ndarray:
    """What ONNX's `pool` gives; of many windows without padding, one step apart, all are computed at once."""
    if padded or more.keys() - {"p"} or set(strides or ()) != {1} or math.prod(out_shape) < least / shape[0] / shape[1]:
        return pool(x, shape, kernel, strides, out_shape, how, *padded, **more)
    windows = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=tuple(range(2, x.ndim)))
    over, p = tuple(range(x.ndim, windows.ndim)), more.get("p", 1)
    if how == "LPPOOL":
        return ((np.abs(windows) ** p).sum(over) ** (1 / p)).astype(x.dtype)
    return {"AVG": np.mean, "MAX": np.max}[how](windows, over).astype(x.dtype)


def all_cases() -> Iterator[Case]:
    """The cases of all kinds."""
    for kind in KINDS:
        yield from cases(kind)


def _case(found: Any) -> Case:
    if found.model is not None:
        data = [(list(map(numbers, given)), list(map(numbers, wanted))) for given, wanted in found.data_sets]
        return Case(found.kind, found.name, found.model, tuple(data), found.rtol, found.atol)
    folder = Path(found.model_dir)
    model = onnx.load(folder / "model.onnx")
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    data = [
        (_read(place, "input", inputs), _read(place, "output", list(model.graph.output))) for place in _sets(folder)
    ]
    return Case(found.kind, found.name, model, tuple(data), found.rtol, found.atol)


def _sets(folder: Path) -> list[Path]:
    return sorted(folder.glob("test_data_set_*"))


def _read(folder: Path, role: str, values: list[onnx.ValueInfoProto]) -> list[Any]:
    """The numbers of `input_0.pb`, `input_1.pb` ..., which are of the types that the model declares."""
    kinds = {"sequence_type": onnx.SequenceProto, "optional_type": onnx.OptionalProto}
    made = []
    for index, value in enumerate(values):
        proto = kinds.get(value.type.WhichOneof("value"), onnx.TensorProto)()
        proto.ParseFromString((folder / f"{role}_{index}.pb").read_bytes())
        made.append(numbers(proto))
    return made


def numbers(value: Any) -> Any:
    """A value of a case as arrays, lists of them, or None."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, onnx.SequenceProto):
        return numpy_helper.to_list(value)
    if isinstance(value, onnx.OptionalProto):
        return numpy_helper.to_optional(value)
    if isinstance(value, list):
        return [numbers(item) for item in value]
    if value is None:
        return None
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "US" else array


def readable(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model, in no newer opset than irpar reads; for operators that did not change after it."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    for entry in made.opset_import:
        entry.version = min(entry.version, NEWEST_OPSET) if entry.domain == "" else entry.version
    return made


def within_range(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as an exporter for ONNX Runtime would write it: opset 26, where it is a valid model of that too.

    Whether it still means the same is for the data of the case to say.
    """
    made = onnx.ModelProto()
    made.CopyFrom(model)
    made.ir_version = min(made.ir_version, NEWEST_IR_WRITTEN)
    imports = [entry for holder in (made, *made.functions) for entry in holder.opset_import]
    newer = [entry for entry in imports if entry.domain == "" and entry.version > ALWAYS_LOADED]
    for entry in newer:
        entry.version = ALWAYS_LOADED
    if newer:
        try:
            onnx.checker.check_model(made, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            return model
    return made


def assert_identical(a: Any, b: Any) -> None:
    """Assert that two values are the same, bit by bit but for the kind of NaN."""
    if isinstance(a, list):
        assert isinstance(b, list)
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_identical(left, right)
    elif a is None:
        assert b is None
    else:
        assert b is not None
        a, b = np.asarray(a), np.asarray(b)
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        if a.dtype.isbuiltin != 1:  # a type of ml_dtypes, which NumPy's comparison does not know
            assert a.tobytes() == b.tobytes()
        else:
            np.testing.assert_array_equal(a, b)


def assert_close(result: Any, expected: Any, rtol: float, atol: float) -> None:
    """Assert that a value is an expected one: dtype, shape, and numbers within a tolerance."""
    if expected is None:
        assert result is None
        return
    if isinstance(expected, list):
        assert isinstance(result, list)
        assert len(result) == len(expected)
        for left, right in zip(result, expected, strict=True):
            assert_close(left, right, rtol, atol)
        return
    result, expected = np.asarray(result), np.asarray(expected)
    if expected.dtype.kind in "OUST":
        assert result.shape == expected.shape
        assert list(map(_text, result.ravel())) == list(map(_text, expected.ravel()))
        return
    assert result.dtype == expected.dtype, f"{result.dtype} instead of {expected.dtype}"
    assert result.shape == expected.shape, f"shape {result.shape} instead of {expected.shape}"
    if expected.dtype.isbuiltin != 1:  # a type of ml_dtypes, which NumPy's comparison does not know
        result, expected = result.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_allclose(result, expected, rtol=rtol, atol=atol)


def _text(item: Any) -> str:
    return item.decode() if isinstance(item, bytes) else str(item)
