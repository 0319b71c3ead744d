"""Local programs: operators on blocks of what their rules need whole give what they give on full tensors."""

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import irpar
from irpar.ir import Node
from irpar.ir.text.files import parse_module
from irpar.ops import FactorRule, definition, definitions, factor_rule, program_factors, program_of
from irpar.ops.local_programs import exchange
from irpar.sharding import filled_blocks
from tests.budget import budget

from .nodes import check, nodes, partitioned, partitioned_node

MESHES = ({"p": 2}, {"p": 3}, {"p": 4}, {"p": 2, "q": 2})
OPERATORS = sorted(found.name for found in definitions() if found.local_program is not None)


def whole_node(folder: Path) -> Node:
    """The node of the model, typed."""
    module = irpar.load(folder / "model.onnx")
    irpar.PassManager.parse("infer-types").run(module)
    node = module.graph.first
    assert node is not None
    return node


def cut_factor(whole: Node, rule: FactorRule, axis: int) -> int:
    """The factor of the dim of x that is sharded, of several the last."""
    (factors,) = {
        factors for value, factors in zip(whole.operands, rule.operands, strict=True) if value and value.name == "x"
    }
    return factors[axis][-1]


def has_elements_everywhere(folder: Path, axis: int, parts: int) -> bool:
    """Whether every device has a part of what is sharded, as a local program needs; else the node is done whole."""
    whole = whole_node(folder)
    rule = factor_rule(whole)
    if rule is None or cut_factor(whole, rule, axis) not in program_factors(whole, rule, program_of(whole, rule)):
        return False
    factor = cut_factor(whole, rule, axis)
    values = (*whole.operands, *whole.results)
    (*majors, _) = next(dims for dims in rule.operands[rule.places[factor][0][0]] if factor in dims)
    if majors:  # These are sharded first, and all must divide.
        count = int(np.prod([rule.sizes[major] for major in majors]))
        return parts > count and parts % count == 0 and rule.sizes[factor] % (parts // count) == 0
    sizes = [values[tensor].shape[dim] for tensor, dim, _ in rule.places[factor]]
    return all(filled_blocks(size, parts) == parts for size in sizes)


def stays(folder: Path, name: str) -> bool:
    """Whether the node is one of its operator still when it is sharded: a Tile may have become an Expand."""
    if name != "Tile":
        return True
    module = irpar.load(folder / "model.onnx")
    irpar.PassManager.parse("infer-types,simplify-layout").run(module)
    return name in {node.op_type for node in module.graph}


CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.mark.parametrize("name", OPERATORS)
@settings(
    max_examples=budget(12, least=1), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS
)
@given(data=st.data())
def test_blocks_of_what_is_needed_whole(name: str, data: st.DataObject, tmp_path: Path) -> None:
    node, operands, axis = data.draw(nodes(name))
    mesh = data.draw(st.sampled_from(MESHES))
    partition = partitioned_node(node, operands, axis, mesh, tmp_path)
    check(partition, operands, tmp_path)
    if stays(tmp_path, name) and has_elements_everywhere(tmp_path, axis, int(np.prod(list(mesh.values())))):
        reasons = [entry["reason"] for entry in partition.plan.collectives]
        assert all("works along" in reason or "sums over" in reason for reason in reasons), "it was made whole"


@pytest.mark.parametrize("name", OPERATORS)
@settings(
    max_examples=budget(25, least=2), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS
)
@given(data=st.data())
def test_what_is_priced_is_what_is_sent(name: str, data: st.DataObject, tmp_path: Path) -> None:
    node, operands, axis = data.draw(nodes(name))
    mesh = data.draw(st.sampled_from(MESHES))
    partition = partitioned_node(node, operands, axis, mesh, tmp_path)
    whole = whole_node(tmp_path)
    found = definition(whole)
    assert found is not None
    assert found.local_program is not None
    parts = int(np.prod(list(mesh.values())))
    assume(stays(tmp_path, name) and has_elements_everywhere(tmp_path, axis, parts))
    rule = factor_rule(whole)
    assert rule is not None
    factor = cut_factor(whole, rule, axis)
    blocks = [
        value
        and tuple(-(-size // parts) if factor in dim else size for size, dim in zip(value.shape, dims, strict=True))
        for value, dims in zip(whole.operands, rule.operands, strict=True)
    ]
    priced = [(sent.kind, sent.bytes) for sent in found.local_program.sends(whole, blocks, {axis: parts})]
    made = [entry for entry in partition.plan.collectives if "works along" in entry["reason"]]
    assert priced == [(entry["kind"], entry["bytes"]) for entry in made]


def test_the_cheaper_of_both_is_taken(tmp_path: Path) -> None:
    """Where the statistics are no smaller than the data, the data is gathered."""
    node = helper.make_node("Softmax", ["x"], ["y"], axis=1)
    data = np.random.default_rng(0).standard_normal((6, 2)).astype(np.float32)
    partition = partitioned(node, {"x": data}, 1, {"p": 2}, tmp_path)
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_gather"]
    check(partition, {"x": data}, tmp_path)


def test_rows_of_strings_are_brought_together(tmp_path: Path) -> None:
    """ONNX Runtime does not look them up by place."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.STRING, [8, 4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.STRING, [5, 4])]
    bounds = [
        onnx.numpy_helper.from_array(np.array([number]), name) for name, number in {"a": 2, "b": 7, "c": 0}.items()
    ]
    graph = helper.make_graph([helper.make_node("Slice", ["x", *"abc"], ["y"])], "g", inputs, outputs, bounds)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    module.shard("x", ["p", None])
    words = np.array([[f"{row}.{column}" for column in range(4)] for row in range(8)], object)
    partition = irpar.partition(module, irpar.Mesh({"p": 3}))
    assert partition.run({"x": words}, engine="ort")["y"].tolist() == words[2:7].tolist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%y = Softmax(%x) : i64[4, 8]", 0),
        ("%y = Softmax(%x) {axis=0} : f32[4, 8]", 1),
        ("%y = MatMul(%x, %x) : f32[4, 8]", 0),
    ],
)
def test_which_factors_may_be_cut(text: str, expected: int) -> None:
    dtype = "i64" if "i64" in text else "f32"
    shape = "[8, 8]" if "MatMul" in text else "[4, 8]"
    text = text.replace("[4, 8]", shape)
    graph = parse_module(f"graph @g(%x: {dtype}{shape}) -> (%y) opset 21 {{\n  {text}\n}}").graph
    assert graph.first is not None
    rule = factor_rule(graph.first)
    assert rule is not None
    assert len(program_factors(graph.first, rule, program_of(graph.first, rule))) == expected


def test_two_results_that_one_device_holds_alike(tmp_path: Path) -> None:
    """Of 10 and of 11 elements the last of two devices has the same five, which are two results all the same."""
    text = """<ir_version: 10, opset_import: ["" : 21]>
    g (float[2] a, float[3] b, float[8] x) => (float[10] y, float[11] z) {
      y = Concat <axis = 0> (a, x)
      z = Concat <axis = 0> (b, x)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    for name in ("y", "z"):
        module.shard(name, ["p"])
    partition = irpar.partition(module, {"p": 2})
    operands = {name: np.arange(size, dtype=np.float32) for name, size in (("a", 2), ("b", 3), ("x", 8))}
    check(partition, operands, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "(bfloat16[64, 4] x) => (bfloat16[2, 4] y) <int64[1] s = {40}, int64[1] e = {42}> { y = Slice(x, s, e) }",
        "(bfloat16[64, 4] x) => (bfloat16[65, 4] y) <int64[4] p = {1, 0, 0, 0}> { y = Pad(x, p) }",
        "(bfloat16[64, 4] x) => (bfloat16[3, 4] y) <int64[3] i = {40, 3, 63}> { y = Gather(x, i) }",
        "(bfloat16[1, 64, 4] x, bfloat16[1, 2, 4] u) => (bfloat16[1, 64, 4] y) <int64[1] at = {31}> "
        "{ y = TensorScatter(x, u, at) }",
    ],
    ids=["Slice", "Pad", "Gather", "TensorScatter"],
)
def test_operators_that_onnx_runtime_has_not_for_bfloat16_are_left_out(text: str, tmp_path: Path) -> None:
    """It has no Expand and no Where of it."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 24]> g {text}')
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input]
    module.shard("x", [None, "p", None] if len(shapes[0]) == 3 else ["p", None])
    partition = irpar.partition(module, {"p": 3})
    numbers = [np.random.default_rng(0).standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in shapes]
    inputs = dict(zip((value.name for value in model.graph.input), numbers, strict=True))
    whole = irpar.partition(irpar.load(tmp_path / "model.onnx"), {"p": 1}).run(inputs, engine="numpy")["y"]
    for engine in ("ort", "numpy"):
        np.testing.assert_array_equal(partition.run(inputs, engine=engine)["y"].view(np.uint16), whole.view(np.uint16))


@pytest.mark.parametrize(
    "text",
    [
        "(float[68] x) => (float[2] y) <int64[1] s = {5}, int64[1] e = {7}> { y = Slice(x, s, e) }",
        "(float[68] x) => (float[2] z, float[66] y) <int64[2] n = {2, 66}> { z, y = Split <axis = 0> (x, n) }",
        "(float[16, 68] x) => (float[1, 4] y) <int64[2] s = {3, 60}, int64[2] e = {4, 64}> { y = Slice(x, s, e) }",
    ],
    ids=["Slice", "Split", "both dims"],
)
def test_few_of_more_than_an_exchange_is_planned_for(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No local program works there: the dim is brought together, and no device takes its part for all."""
    monkeypatch.setattr(exchange, "MOST_PLACES", 64)
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> g {text}')
    onnx.save(model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    module.shard("x", ["p", *[None] * (len(shape) - 1)])
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    check(irpar.partition(module, {"p": 2}), {"x": data}, tmp_path)
