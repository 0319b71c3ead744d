"""Cases over two devices: every input cut along every dim, run by both engines."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx

import irpar
from irpar.api import Engine
from irpar.ir import Module
from irpar.onnx_io import to_module
from irpar.ops import factor_rule
from irpar.pass_manager.default_pipeline import NORMALISE
from irpar.sharding import IrparError

from .cases import Case, assert_close, within_range
from .round_trips import ATOL, RTOL

MESH = {"x": 2}
ENGINES: tuple[Engine, ...] = ("ort", "numpy")
_NAMED_BY_NUMBERS = frozenset({np.dtype(np.int32), np.dtype(np.int64)})

_ROUNDED = {np.dtype(np.float16): 4 * 2.0**-10, np.dtype(ml_dtypes.bfloat16): 4 * 2.0**-7}
"""Relative tolerance of short floats: the blocks of a sum are rounded, then their sum."""


@dataclass
class Cuts:
    """What came of cutting one case.

    Attributes:
        runs: runs whose results were the expected ones, by engine.
        refused: cuts that irpar refuses, with the reason.
        not_run: engines that cannot run the case on one device, with the reason.
        other_alone: engines that give other results than the data on one device too; cuts are compared with those.
        wrong: cuts with other results, or another exception.
    """

    case: Case
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ENGINES, 0))
    refused: list[str] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    other_alone: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def ruled(cases: Iterable[Case]) -> Iterator[tuple[Case, onnx.ModelProto]]:
    """Those cases in which an operator has a rule, with what a rule must know as constants."""
    for case in cases:
        for model in (within_range(case.model), with_constants(case)):
            if _has_rule(model):
                yield case, model
                break


def with_constants(case: Case) -> onnx.ModelProto:
    """The model with its axes, sizes and the like (integers of rank 0 and 1 after the first operand) as constants."""
    model = onnx.ModelProto()
    model.CopyFrom(within_range(case.model))
    named = {
        name: array
        for name, array in list(given(case).items())[1:]
        if isinstance(array, np.ndarray) and array.ndim <= 1 and array.dtype in _NAMED_BY_NUMBERS
    }
    kept = [value for value in model.graph.input if value.name not in named]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    for name, array in named.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def given(case: Case) -> dict[str, Any]:
    """The first inputs of a case by name."""
    weights = {tensor.name for tensor in case.model.graph.initializer}
    names = [value.name for value in case.model.graph.input if value.name not in weights]
    return dict(zip(names, case.data[0][0], strict=True))


def _has_rule(model: onnx.ModelProto) -> bool:
    try:
        module = normalised(to_module(model))
    except IrparError:
        return False
    return any(factor_rule(node) is not None for node in module.graph)


def normalised(module: Module) -> Module:
    """The module as the default pipeline has it before it shards."""
    irpar.PassManager.parse(NORMALISE).run(module)
    return module


def cut(case: Case, model: onnx.ModelProto) -> Cuts:
    """Cut each input of a case along each of its dims, and compare the results of both engines with the data."""
    found = Cuts(case)
    names = {value.name for value in model.graph.input}
    feeds = {name: value for name, value in given(case).items() if name in names}
    wanted = dict(zip((value.name for value in model.graph.output), case.data[0][1], strict=True))
    references = _references(found, model, feeds, wanted)
    for name, spec in _specs(feeds):
        try:
            module = to_module(model)
            module.shard(name, spec)
            partition = irpar.partition(module, MESH)
        except IrparError as error:
            found.refused.append(f"{name} {spec}: {error.what}")
            continue
        except Exception as error:
            found.wrong.append(f"{name} {spec}: {type(error).__name__}: {error}")
            continue
        for engine, reference in references.items():
            _run(found, partition, engine, feeds, reference, f"{engine}, {name} {spec}")
    return found


def _references(
    found: Cuts, model: onnx.ModelProto, feeds: dict[str, Any], wanted: dict[str, Any]
) -> dict[Engine, dict[str, Any]]:
    """What each engine must give: the case's data, or what the engine gives on one device where that is not it."""
    references: dict[Engine, dict[str, Any]] = {}
    try:
        whole = irpar.partition(to_module(model), {"x": 1})
    except IrparError as error:
        found.not_run.append(error.what)
        return references
    for engine in ENGINES:
        try:
            alone = whole.executor(engine).run(feeds)
        except IrparError as error:
            found.not_run.append(f"{engine}: {error.what}")
            continue
        try:
            _compare(found.case, alone, wanted)
            references[engine] = wanted
        except AssertionError:
            found.other_alone.append(engine)
            references[engine] = alone
    return references


def _specs(feeds: dict[str, Any]) -> Iterator[tuple[str, list[str | None]]]:
    """Every way to shard one dim of one input."""
    for name, array in feeds.items():
        if isinstance(array, np.ndarray):
            for dim, size in enumerate(array.shape):
                if size > 1:
                    yield name, ["x" if other == dim else None for other in range(array.ndim)]


def _run(
    found: Cuts,
    partition: irpar.Partition,
    engine: Engine,
    feeds: dict[str, Any],
    reference: dict[str, Any],
    label: str,
) -> None:
    try:
        _compare(found.case, partition.executor(engine).run(feeds, check_replicas=True), reference)
        found.runs[engine] += 1
    except Exception as error:
        found.wrong.append(f"{label}: {type(error).__name__}: {error}")


def _compare(case: Case, results: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        rtol = max(case.rtol, RTOL, _ROUNDED.get(getattr(value, "dtype", None), 0.0))
        assert_close(results[name], value, rtol, max(case.atol, ATOL))
