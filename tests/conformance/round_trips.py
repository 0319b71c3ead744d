"""Cases through import, text and export: what ONNX Runtime computes before and after."""

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import onnx
import onnxruntime

from irpar.ir import ArrayTensor
from irpar.ir.text.files import parse_module, print_module
from irpar.onnx_io import OnnxError, to_module, to_proto
from irpar.runtime.engines.ort_values import from_ort, to_ort

from .cases import Case, assert_close, assert_identical, within_range

RTOL, ATOL = 1e-3, 1e-5
"""Least tolerances of what ONNX Runtime computes against what a case expects."""


class Before(Enum):
    """What ONNX Runtime does with the model as it is."""

    FAILS = "ONNX Runtime does not run it"
    DIFFERS = "ONNX Runtime gives something else than the case expects"
    RIGHT = "ONNX Runtime gives what the case expects"


class After(Enum):
    """What comes of the round trip."""

    REFUSED = "irpar refuses it"
    DIFFERS = "other results"
    SAME = "the same results"


@dataclass(frozen=True)
class RoundTrip:
    """One case; `note` says what differs or why it is refused."""

    case: Case
    before: Before
    after: After
    note: str = ""


def round_trip(case: Case) -> RoundTrip:
    """Run a case in ONNX Runtime, as it is and after import, print, parse and export.

    Raises:
        AssertionError: the text does not give the module back, or the written model is no valid ONNX model.
    """
    model = within_range(case.model)
    found = [run(model, inputs) for inputs, _ in case.data]
    before = _before(case, found)
    try:
        module = to_module(model)
    except OnnxError as error:
        return RoundTrip(case, before, After.REFUSED, error.what)
    written = through_text(module)
    for (inputs, _), expected in zip(case.data, found, strict=True):
        if expected is None:
            continue
        try:
            assert_identical(run(written, inputs), expected)
        except AssertionError as error:
            return RoundTrip(case, before, After.DIFFERS, str(error))
    return RoundTrip(case, before, After.SAME)


def through_text(module: Any) -> onnx.ModelProto:
    """The model that a module is written as, which is the same after it was printed and parsed."""
    direct = to_proto(module)
    printed = print_module(module)
    written = to_proto(parse_module(printed.text, resources=printed.resources))
    assert written.SerializeToString(deterministic=True) == direct.SerializeToString(deterministic=True)
    onnx.checker.check_model(written)
    again = to_proto(to_module(written))
    assert again.SerializeToString(deterministic=True) == written.SerializeToString(deterministic=True)
    return written


def _before(case: Case, found: list[list[Any] | None]) -> Before:
    if any(results is None for results in found):
        return Before.FAILS
    try:
        for results, (_, expected) in zip(found, case.data, strict=True):
            assert_close(results, expected, max(case.rtol, RTOL), max(case.atol, ATOL))
    except AssertionError:
        return Before.DIFFERS
    return Before.RIGHT


def run(model: onnx.ModelProto, inputs: list[Any]) -> list[Any] | None:
    """What ONNX Runtime computes, or None where it cannot."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        given, results = session.get_inputs(), session.get_outputs()
        feeds = {place.name: value for place, value in zip(given, inputs, strict=True)}
        types = {place.type for place in (*given, *results)}
        if "tensor(string)" in types or not all(type_.startswith("tensor(") for type_ in types):
            return list(session.run(None, feeds))
        values = {name: to_ort(np.asarray(array, order="C"), ArrayTensor(array).dtype) for name, array in feeds.items()}
        return [from_ort(value) for value in session.run_with_ort_values(None, values)]
    except Exception:
        return None
