import onnx
import pytest
from onnx import defs

from irpar.ops.collectives import KINDS, POINT_TO_POINT

from .models import model

HEADER = '<ir_version: 10, opset_import: ["" : 21, "irpar" : 1]>\n'
CALLS = {
    "AllReduce": 'axes = ["tp"], reduce = "sum", id = 0',
    "AllGather": 'axes = ["tp"], dim = 0, id = 0, sizes = [3, 1]',
    "ReduceScatter": 'axes = ["tp"], dim = 0, reduce = "sum", id = 0',
    "AllToAll": 'axes = ["tp"], split_dim = 0, concat_dim = 1, id = 0',
    "CollectivePermute": 'axes = ["tp"], pairs = [0, 1], id = 0',
    "Broadcast": 'axes = ["tp"], root = 0, id = 0',
    "AllSlice": 'axes = ["tp"], dim = 0',
}


@pytest.mark.parametrize("name", CALLS)
def test_checker_and_inference_know_the_collectives(name: str) -> None:
    made = model(f"g (float[4, 6] x) => (float[a, b] y) {{ y = irpar.{name}<{CALLS[name]}>(x) }}", HEADER)
    onnx.checker.check_model(made, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    assert inferred.graph.output[0].type.tensor_type.elem_type == 1


@pytest.mark.parametrize("name", CALLS)
def test_checker_refuses_a_collective_without_its_attributes(name: str) -> None:
    made = model(f"g (float[4, 6] x) => (float[a, b] y) {{ y = irpar.{name}(x) }}", HEADER)
    with pytest.raises(onnx.checker.ValidationError, match=r"Required attribute .* is missing"):
        onnx.checker.check_model(made)


def test_inference_opens_only_the_dims_that_change() -> None:
    made = model(
        f"g (float[4, 6] x) => (int64 y) {{ u = irpar.AllGather<{CALLS['AllGather']}>(x) y = Size(u) }}", HEADER
    )
    inferred = onnx.shape_inference.infer_shapes(made, strict_mode=True)
    (u,) = inferred.graph.value_info
    first, second = u.type.tensor_type.shape.dim
    assert not first.HasField("dim_value")
    assert second.dim_value == 6


def test_every_collective_has_a_schema() -> None:
    assert KINDS.keys() - POINT_TO_POINT <= CALLS.keys(), "a collective without a call"
    assert all(defs.has(name, "irpar") for name in CALLS)
