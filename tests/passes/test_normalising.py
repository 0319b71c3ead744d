"""The normalising passes together: PyTorch exports with dynamic dims become static and compute the same."""

import numpy as np
import onnx
import pytest

from irpar.analysis.types.symbols import require_static
from irpar.ir import TensorType
from tests.budget import every, of_each
from tests.test_exports import EXPORTS, FIXTURES, model_of, numbers_of

NORMALISE = "infer-types,fold-constants,cse,dce"
SHAPE_OPS = {"Shape", "Size", "Range", "ConstantOfShape", "NonZero"}


def binds(model, inputs):
    """The pass that binds the symbols of a model to the sizes of its inputs, if it has any."""
    sizes = {
        dim.dim_param: size
        for value in model.graph.input
        for dim, size in zip(value.type.tensor_type.shape.dim, inputs[value.name].shape, strict=True)
        if dim.dim_param
    }
    return f"bind-dims{{{', '.join(f'{name}={size}' for name, size in sizes.items())}}}," if sizes else ""


@pytest.mark.parametrize("export", every(2, of_each(model_of, EXPORTS)))
def test_exports_become_static_and_compute_the_same(export, check_numbers):
    inputs, _ = numbers_of(export)
    model = onnx.load(FIXTURES / f"{export}.onnx")
    module = check_numbers(model, binds(model, inputs) + NORMALISE, inputs, exactly=False)
    require_static(module)
    has_bodies = any(True for node in module.graph for _ in node.nested_graphs())
    for value in module.graph.values():
        # What a loop stacks has as many rows as there are trips.
        assert has_bodies or (isinstance(value.type, TensorType) and value.type.is_static), value
    assert not SHAPE_OPS & {node.op_type for node in module.graph}
    for node in module.graph:
        if node.op_type == "Reshape":
            assert node.inputs[1].is_constant


@pytest.mark.parametrize("batch", [1, 3])
def test_other_sizes_work_as_well(batch, check_numbers):
    model = onnx.load(FIXTURES / "llama_torchscript_dynamic.onnx")
    ids = np.random.default_rng(0).integers(0, 50, (batch, 5))
    module = check_numbers(model, f"bind-dims{{batch={batch}, seq=5}}," + NORMALISE, {"input_ids": ids}, exactly=False)
    assert module.graph.outputs[0].shape[:2] == (batch, 5)


def test_weights_keep_their_names_and_their_bytes(check_numbers):
    model = onnx.load(FIXTURES / "gpt_torchscript_dynamic.onnx")
    ids = np.zeros((2, 4), np.int64)
    module = check_numbers(model, "bind-dims{batch=2, seq=4}," + NORMALISE, {"input_ids": ids}, exactly=False)
    kept = {value.source for value in module.graph.constants}
    matrices = {item.name for item in model.graph.initializer if len(item.dims) > 1}
    assert matrices <= kept


def test_a_second_round_changes_nothing():
    from irpar.onnx_io import load
    from irpar.pass_manager import PassManager

    module = load(FIXTURES / "llama_torchscript_dynamic.onnx")
    manager = PassManager.parse("bind-dims{batch=2, seq=4}," + NORMALISE)
    assert manager.run(module).changed
    before = str(module)
    assert not PassManager.parse(NORMALISE).run(module).changed
    assert str(module) == before
