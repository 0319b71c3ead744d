"""The engines numpy and cupy (on a stand-in for a device) on ONNX's own cases of control flow, sequences, optionals and functions."""

from collections.abc import Iterator

import onnx
import pytest

from irpar.onnx_io import to_module
from irpar.runtime.errors import EngineError
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from tests.conformance.cases import Case, assert_close, cases, readable

from .devices import strict_device

OPS = frozenset(
    {
        *("If", "Loop", "Scan", "SequenceMap", "SequenceInsert", "SequenceConstruct", "SequenceEmpty", "SequenceAt"),
        *("SequenceErase", "SequenceLength", "ConcatFromSequence", "SplitToSequence"),
        *("Optional", "OptionalHasElement", "OptionalGetElement"),
    }
)


def cases_of_these() -> Iterator[Case]:
    return (case for case in cases("node") if _is_about_these(case.model))


def _is_about_these(model: onnx.ModelProto) -> bool:
    """Cases of these ops (and Identity of sequences); Scan of opset 8 is refused on import."""
    version = model.opset_import[0].version
    ops = {node.op_type for node in model.graph.node}
    is_sequence = any(not value.type.HasField("tensor_type") for value in model.graph.input)
    return bool(ops & OPS or is_sequence) and not (version < 9 and "Scan" in ops)


def test_cases(subtests: pytest.Subtests) -> None:
    for case in cases_of_these():
        with subtests.test(case.name):
            check(case, "numpy")


@pytest.mark.parametrize("host_elements", [0, 64])
def test_cases_on_a_device(host_elements: int, subtests: pytest.Subtests) -> None:
    with strict_device(host_elements):
        for case in cases_of_these():
            with subtests.test(case.name):
                check(case, "cupy")


def check(case: Case, engine: str) -> None:
    """Run a case, or skip it where the engine lacks an operator."""
    module = to_module(readable(case.model))
    names = [value.name for value in case.model.graph.input]
    try:
        executor = Executor(module, Mesh({"x": 1}), engine=engine)
    except EngineError as error:
        pytest.skip(error.what)
    with executor:
        for inputs, outputs in case.data:
            results = executor.run(dict(zip(names, inputs, strict=True)))
            for result, expected in zip(results.values(), outputs, strict=True):
                assert_close(result, expected, max(case.rtol, 1e-3), max(case.atol, 1e-5))
