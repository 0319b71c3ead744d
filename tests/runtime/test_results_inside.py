"""Results of ONNX's own cases in the middle of a program, where they lie in an arena: each doubled by a Concat."""

import numpy as np
import onnx
import pytest
from onnx import helper

from irpar.onnx_io import to_module
from irpar.runtime.errors import EngineError
from irpar.runtime.executor import Executor
from irpar.sharding import IrparError, Mesh
from tests.conformance.cases import Case, assert_close, cases, readable
from tests.kernels.conformance import EXCLUDED

LEAST = 1400
"""Of about 2,000 cases: results of no dims, and of dtypes that Concat does not take, stay as they are."""


def doubled(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The model with each result concatenated with itself; None where that cannot be."""
    made = readable(model)
    results = list(made.graph.output)
    if not all(value.type.HasField("tensor_type") and value.type.tensor_type.shape.dim for value in results):
        return None
    del made.graph.output[:]
    for value in results:
        name = f"{value.name} doubled"
        made.graph.node.append(helper.make_node("Concat", [value.name] * 2, [name], axis=0))
        made.graph.output.append(helper.make_tensor_value_info(name, value.type.tensor_type.elem_type, None))
    return made


def is_right(case: Case) -> bool | None:
    """Whether the engine numpy gives what the case says, twice; None where it cannot run it."""
    model = doubled(case.model)
    if model is None or case.name in EXCLUDED:
        return None
    names = [value.name for value in case.model.graph.input]
    try:
        module = to_module(model)
        executor = Executor(module, Mesh({"x": 1}), engine="numpy")
    except EngineError:
        return None
    except IrparError as error:
        if "Concat" not in error.what and "opset" not in error.what:
            raise
        return None
    with executor:
        for inputs, outputs in case.data:
            results = executor.run(dict(zip(names, inputs, strict=True)))
            for result, expected in zip(results.values(), outputs, strict=True):
                assert_close(result, np.concatenate([expected] * 2), max(case.rtol, 2e-2), max(case.atol, 1e-4))
    return True


@pytest.mark.slow
def test_cases(subtests: pytest.Subtests) -> None:
    right = 0
    for case in cases("node"):
        with subtests.test(case.name):
            right += bool(is_right(case))
    assert right >= LEAST
