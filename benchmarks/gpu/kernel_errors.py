"""Each kernel on the device: ONNX's case data, and its error against float64 in f32, f16 and bf16."""

import importlib
import math
import zlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from irpar import kernels

from .findings import Context, Findings, markdown_table, problem_text
from .trials import FLOATS, Array, Arrays, Trial, trials

BOUNDS = {"f32": 1e-5, "f16": 2.0**-10, "bf16": 2.0**-7}
"""Largest |a - b| / (1 + |b|) of a result in the dtype and one in float64 of the same operands."""
OWN_FACTOR = 4.0
"""Where numpy's own error in the dtype is larger than the bound, the device may have this many times that."""
SMALL_FLOATS = frozenset(
    np.dtype(kind)
    for kind in (
        *(ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz),
        *(ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn),
    )
)
_ROUNDED = (FLOATS["f16"], FLOATS["bf16"])
ALONE_FACTOR = 4.0
"""A kernel by itself may differ from numpy in the same dtype by this many bounds: both may have an error."""
STAND_INS = frozenset(
    ("irpar", name)
    for name in (
        "AddRows",
        "AttentionForward",
        "AttentionGradient",
        "ConvChannelsLast",
        "CrossEntropyForward",
        "CrossEntropyGradient",
        "Fused",
        "FusedEach",
        "FusedMatMul",
        "JoinHeads",
        "GroupNormChannelsLast",
        "PoolChannelsLast",
        "SharedMatMul",
    )
)
"""Operators of no model: the engine puts them in the place of others. The part `tests` tries their kernels."""
COMPARED_FLOATS = frozenset(np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))


def run(context: Context) -> Findings:
    """Check the kernels of this process's share of the operators."""
    found = Findings(figures={"cases": 0, "operators": {}, "fallbacks": {}, "bounds": dict(BOUNDS)})
    left, seen = 0, set()
    for trial in trials():
        seen.update((call.kernel.domain, call.kernel.op_type) for call in trial.calls)
        if not context.mine(zlib.crc32((trial.operator or trial.name).encode())):
            continue
        if context.is_late:
            left += 1
            continue
        _try(trial, context.engine, found)
    if left:
        found.failures.append(f"out of time: {left} nodes were not tried")
    if context.shard == 0:
        missing = sorted(f"{domain}.{name}".lstrip(".") for domain, name in set(kernels.supported()) - STAND_INS - seen)
        found.check(f"nothing tries the kernels of {', '.join(missing)}" if missing else None)
    return found


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    operators = figures.get("operators", {})
    header = ("operator", *(f"{dtype} (numpy)" for dtype in FLOATS), "nodes", "on the host")
    rows = []
    for operator, row in sorted(operators.items()):
        errors = row["errors"]
        cells = [f"{errors[d]['error']:.1e} ({errors[d]['numpy']:.1e})" if d in errors else "" for d in FLOATS]
        rows.append((operator, *cells, row["nodes"], row["on_host"] or ""))
    bounds = ", ".join(f"{dtype} {bound:.1e}" for dtype, bound in figures.get("bounds", {}).items())
    fallbacks = [
        (operator, reason, count)
        for operator, reasons in sorted(figures.get("fallbacks", {}).items())
        for reason, count in sorted(reasons.items())
    ]
    return [
        f"{figures.get('cases', 0)} of ONNX's backend cases; {len(operators)} operators. Errors: the largest "
        "|a - b| / (1 + |b|) against the same kernel on numpy in float64, of the same rounded operands; in brackets "
        f"that of numpy in the dtype itself. Bounds: {bounds}, or {OWN_FACTOR:g} times numpy's own error.",
        "",
        *markdown_table(header, rows),
        "",
        "Computed on the host instead of the device:" if fallbacks else "Nothing was computed on the host.",
        "",
        *(markdown_table(("operator", "why", "nodes"), fallbacks) if fallbacks else ()),
    ]


def _try(trial: Trial, engine: str, found: Findings) -> None:
    """A trial as it is, and in the other dtypes."""
    _one(trial, _dtype_of(trial), engine, found)
    if trial.operator is not None:
        for dtype in FLOATS:
            changed = trial.in_dtype(dtype) if dtype != "f32" else None
            if changed is not None and _taken(changed):
                _one(changed, dtype, engine, found)


def _dtype_of(trial: Trial) -> str | None:
    """The dtype whose error a trial tells of as it is: that of all its float operands."""
    kinds = {array.dtype for array in trial.arrays.values() if array.dtype in COMPARED_FLOATS}
    names = [name for name, dtype in FLOATS.items() if kinds == {dtype}]
    return names[0] if names and trial.operator is not None else None


def _taken(trial: Trial) -> bool:
    try:
        trial.on_numpy()
    except kernels.KernelError:
        return False
    return True


def _one(trial: Trial, dtype: str | None, engine: str, found: Findings) -> None:
    """Run a trial on the engine and compare; `dtype` names the column that its error belongs to."""
    label = f"{trial.name} in {dtype}" if dtype is not None else trial.name
    try:
        values = trial.on_numpy()
        got, notes = trial.on_engine(engine, values)
        own = {name: values[name] for name in trial.outputs}
        problem = _case_problem(trial, got) if trial.expected is not None else _exact_problem(got, own)
        if dtype is not None and problem is None:
            problem = _note_errors(trial, dtype, got, own, bool(notes), found)
        if problem is None and not notes and trial.operator is not None:
            problem = _alone_problem(trial, engine, own, found)
    except Exception as error:
        notes, problem = (), problem_text(error)
    _note_fallbacks(notes, found)
    found.figures["cases"] += trial.expected is not None
    found.check(f"{label}: {problem}" if problem else None)


def _alone_problem(trial: Trial, engine: str, own: Arrays, found: Findings) -> str | None:
    """The kernel by itself on the device: the engine computes small integers on the host."""
    module: Any = importlib.import_module(engine)
    try:
        got = trial.on_module(module)
    except Exception as error:
        told = problem_text(error, lines=1)
        if not isinstance(error, ValueError) and type(error).__name__ != "CompileException":
            return f"alone on {engine}: {told}"
        # The engine would compute it on the host, as it has done with these few numbers.
        _note_fallbacks((f"{trial.operator} runs on the host: {told}",), found)
        return None
    # Where the module gives a wider float, the engine rounds it.
    floats = {name for name, one in own.items() if one.dtype in COMPARED_FLOATS and got[name].dtype in COMPARED_FLOATS}
    got = {name: array.astype(own[name].dtype) if name in floats else array for name, array in got.items()}
    problem = _exact_problem(got, own)
    for name in floats if problem is None else ():
        error = error_of(got[name], own[name], own[name].dtype)
        allowed = ALONE_FACTOR * BOUNDS.get(_name_of(own[name].dtype), BOUNDS["f32"])
        if not error <= allowed:
            problem = f"{name} differs by {error:.2g} from numpy, allowed {allowed:.2g}"
    return f"alone on {engine}: {problem}" if problem else None


def _name_of(dtype: "np.dtype[Any]") -> str:
    return next((name for name, known in FLOATS.items() if known == dtype), "")


def _case_problem(trial: Trial, got: Arrays) -> str | None:
    from tests.conformance.cases import assert_close

    assert trial.expected is not None
    for name, expected in trial.expected.items():
        try:
            # Two units of a small float: the data is rounded at every step, or once, as the operator's text has it.
            units = 2 * float(ml_dtypes.finfo(expected.dtype).eps) if expected.dtype in _ROUNDED else 0.0
            assert_close(got[name], expected, max(trial.rtol, units), trial.atol)
        except AssertionError as error:
            return f"not ONNX's data: {problem_text(error, lines=8)}"
    return None


def _exact_problem(got: Arrays, own: Arrays) -> str | None:
    """Dtypes and shapes, and results that are no floats, must be those of numpy."""
    for name, expected in own.items():
        result = np.asarray(got[name])
        if (result.dtype, result.shape) != (expected.dtype, expected.shape):
            return f"{name} is {result.dtype}{list(result.shape)}, on numpy {expected.dtype}{list(expected.shape)}"
        if expected.dtype in COMPARED_FLOATS or expected.dtype.kind == "c":
            continue
        differ = result != expected
        if expected.dtype in SMALL_FLOATS:
            differ &= ~(np.isnan(result.astype(np.float32)) & np.isnan(expected.astype(np.float32)))
        if np.any(differ):
            return f"{name}: {int(np.sum(differ))} of {expected.size} elements are not those of numpy"
    return None


def _note_errors(trial: Trial, dtype: str, got: Arrays, own: Arrays, is_on_host: bool, found: Findings) -> str | None:
    """Enter the error of a trial; tells where it is beyond the bound."""
    try:
        references = trial.in_float64().on_numpy()
    except kernels.KernelError:
        references = dict(own)  # It takes no float64: numpy's result in the dtype has to do.
    row = found.figures["operators"].setdefault(trial.operator, {"nodes": 0, "on_host": 0, "errors": {}})
    row["nodes"] += 1
    row["on_host"] += is_on_host
    for name, expected in own.items():
        if expected.dtype not in COMPARED_FLOATS:
            continue
        error, least = (error_of(array, references[name], expected.dtype) for array in (got[name], expected))
        known = row["errors"].get(dtype)
        if known is None or not error <= known["error"]:
            row["errors"][dtype] = {"error": error, "numpy": least, "node": trial.name}
        allowed = max(BOUNDS[dtype], OWN_FACTOR * least)
        if not error <= allowed:
            return f"{name}: error {error:.2g} against float64, allowed {allowed:.2g}, numpy's own {least:.2g}"
    return None


def error_of(array: Array, reference: Array, dtype: "np.dtype[Any]") -> float:
    """The largest |a - b| / (1 + |b|); inf where one has an infinity or NaN that the other has not.

    Args:
        array: a result.
        reference: the same in float64.
        dtype: of the result: what is infinite in it may be so.
    """
    got = np.asarray(array).astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = np.asarray(reference).astype(np.float64)
        rounded = wanted.astype(dtype).astype(np.float64)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        errors = np.where(same & ~np.isfinite(rounded), 0.0, np.abs(got - wanted) / (1.0 + np.abs(wanted)))
    return float(np.max(np.where(np.isnan(errors), math.inf, errors), initial=0.0))


def _note_fallbacks(notes: tuple[str, ...], found: Findings) -> None:
    """Count what an engine computed on the host, by operator and reason."""
    for note in notes:
        operator, _, reason = note.partition(" runs on the host: ")
        reasons = found.figures["fallbacks"].setdefault(operator, {})
        reason = reason.rsplit(" (node ", 1)[0] or note
        reasons[reason] = reasons.get(reason, 0) + 1
