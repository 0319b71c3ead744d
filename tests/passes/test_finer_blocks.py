"""Blocks of quantized weights that do not divide over ranks: they become smaller ones, with the same numbers."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import irpar
from irpar.ir import Node

Array = np.ndarray[Any, Any]
RANDOM = np.random.default_rng(5)
COLUMNS = 8


def packed(name: str, inner: int, columns: int, block: int, bits: int = 4, points: str = "") -> tuple[Any, list[Any]]:
    """A product of packed weights, and its constants."""
    count = inner // block
    arrays = {
        "q": RANDOM.integers(0, 256, (columns, count, block * bits // 8), dtype=np.uint8),
        "s": RANDOM.random((columns, count)).astype(np.float32) / 16,
    }
    if points == "packed":
        arrays["z"] = RANDOM.integers(0, 256, (columns, -(-count * bits // 8)), dtype=np.uint8)
    elif points == "float":
        arrays["z"] = RANDOM.random((columns, count)).astype(np.float32) * 8
    operands = [f"v.{name}", *(f"{name}.{key}" for key in arrays)]
    sizes = {"K": inner, "N": columns, "bits": bits, "block_size": block}
    node = helper.make_node("MatMulNBits", operands, [f"r.{name}"], name=name, domain="com.microsoft", **sizes)
    return node, [numpy_helper.from_array(array, f"{name}.{key}") for key, array in arrays.items()]


def saved(path: Path, nodes: list[Any], constants: list[Any], size: int) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3, size])],
        [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
        constants,
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def mlp(path: Path, inner: int, block: int, **how: Any) -> Path:
    """Two products with a Relu between them."""
    up, of_up = packed("up", 32, inner, 16)
    down, of_down = packed("down", inner, COLUMNS, block, **how)
    up.input[0], down.input[0] = "x", "h"
    nodes = [up, helper.make_node("Relu", ["r.up"], ["h"]), down]
    return saved(path, nodes, [*of_up, *of_down], 32)


def check(path: Path, annotations: dict[str, Any], mesh: str, engine: Any = "ort") -> irpar.Partition:
    """It computes what ONNX Runtime computes of the original."""
    module = irpar.load(path)
    irpar.annotate(module, annotations)
    partition = irpar.partition(module, mesh)
    size = onnx.load(path).graph.input[0].type.tensor_type.shape.dim[2].dim_value
    x = RANDOM.standard_normal((2, 3, size)).astype(np.float32)
    options = onnxruntime.SessionOptions()
    # It makes products of dequantized weights such that quantize their data.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (expected,) = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, {"x": x})
    (found,) = partition.executor(engine).run({"x": x}).values()
    np.testing.assert_allclose(found, expected, 1e-4, 1e-4)
    return partition


def products(partition: irpar.Partition) -> dict[str, Node]:
    return {node.label: node for node in partition.module.graphs[0] if node.op_type == "MatMulNBits"}


@pytest.mark.parametrize("points", ["", "packed", "float"])
@pytest.mark.parametrize("annotations", [{"up.q": ["tp", None, None]}, {"down.q": [None, "tp", None]}], ids=str)
@pytest.mark.parametrize(("inner", "block", "ranks", "made"), [(192, 64, 2, 32), (640, 128, 4, 32), (896, 128, 4, 32)])
def test_each_rank_has_whole_blocks(
    inner: int, block: int, ranks: int, made: int, annotations: dict[str, Any], points: str, tmp_path: Path
) -> None:
    """Three blocks over two ranks, five and seven over four; zero points of an odd number of blocks fill a byte."""
    partition = check(mlp(tmp_path / "m.onnx", inner, block, points=points), annotations, f"tp={ranks}")
    assert [entry["kind"] for entry in partition.plan.collectives] in (["all_reduce"], ["reduce_scatter"])
    sizes = {name: (node.attributes["K"], node.attributes["block_size"]) for name, node in products(partition).items()}
    # Two zero points share a byte, and stay together.
    smaller = made // 2 if points == "packed" else made
    assert sizes == {"up": (32, 16), "down": (inner // ranks, smaller)}


def test_weights_of_8_and_2_bits(tmp_path: Path) -> None:
    for bits in (8, 2):
        path = mlp(tmp_path / f"{bits}.onnx", 192, 64, bits=bits, points="packed")
        assert len(check(path, {"up.q": ["tp", None, None]}, "tp=2").plan.collectives) == 1


@pytest.mark.parametrize(
    ("inner", "block", "mesh", "why"),
    [
        (256, 64, "tp=2", "they divide"),
        (192, 64, "tp=5", "no size divides"),
        (48, 16, "tp=2", "ONNX Runtime has no smaller blocks"),
    ],
)
def test_blocks_that_stay(inner: int, block: int, mesh: str, why: str, tmp_path: Path) -> None:
    partition = check(mlp(tmp_path / "m.onnx", inner, block), {"up.q": ["tp", None, None]}, mesh)
    assert products(partition)["down"].attributes["block_size"] == block, why


def test_blocks_stay_where_the_data_is_not_sharded_along_them(tmp_path: Path) -> None:
    partition = check(mlp(tmp_path / "m.onnx", 192, 64), {"down.q": ["tp", None, None]}, "tp=2")
    assert products(partition)["down"].attributes["block_size"] == 64


def test_blocks_stay_by_which_the_data_is_quantized_too(tmp_path: Path) -> None:
    path = mlp(tmp_path / "m.onnx", 192, 64)
    model = onnx.load(path)
    model.graph.node[2].attribute.append(helper.make_attribute("accuracy_level", 4))
    onnx.save(model, path)
    module = irpar.load(path)
    irpar.annotate(module, {"up.q": ["tp", None, None]})
    assert products(irpar.partition(module, "tp=2"))["down"].attributes["block_size"] == 64


@pytest.mark.parametrize("has_points", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_that_are_dequantized(axis: int, has_points: bool, tmp_path: Path) -> None:
    """Of int4 by blocks of 64, of which there are 3: each of two ranks has three of 32."""
    shape = (192, COLUMNS) if axis == 0 else (COLUMNS, 192)
    scales = tuple(3 if dim == axis else size for dim, size in enumerate(shape))
    numbers = RANDOM.integers(-8, 8, shape).astype(np.int8)
    constants = [
        helper.make_tensor("q", TensorProto.INT4, shape, numbers.ravel().tolist()),
        numpy_helper.from_array(RANDOM.random(scales).astype(np.float32), "s"),
    ]
    if has_points:
        points = RANDOM.integers(-8, 8, scales).ravel().tolist()
        constants.append(helper.make_tensor("z", TensorProto.INT4, scales, points))
    names = [constant.name for constant in constants]
    nodes = [helper.make_node("DequantizeLinear", names, ["w"], axis=axis, block_size=64)]
    nodes += [helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0])] if axis else []
    nodes.append(helper.make_node("MatMul", ["x", "t" if axis else "w"], ["y"]))
    path = saved(tmp_path / "m.onnx", nodes, constants, 192)
    partition = check(path, {"x": [None, None, "tp"]}, "tp=2", "numpy")
    assert len(partition.plan.collectives) == 1
    (node,) = (node for node in partition.module.graphs[0] if node.op_type == "DequantizeLinear")
    assert node.attributes["block_size"] == 32
    partition = check(path, {"q": ["tp" if dim == axis else None for dim in range(2)]}, "tp=2", "numpy")
    assert partition.plan.totals["collectives"] == 1


def test_layers_that_are_planned_as_a_few(tmp_path: Path) -> None:
    nodes, constants, before = [], [], "x"
    for layer in range(9):
        up, of_up = packed(f"up{layer}", COLUMNS * 4, 192, 16)
        down, of_down = packed(f"down{layer}", 192, COLUMNS * 4, 64, points="packed")
        up.input[0], down.input[0] = before, f"h{layer}"
        add = helper.make_node("Add", [f"r.down{layer}", before], [f"x{layer}"])
        nodes += [up, helper.make_node("Tanh", [f"r.up{layer}"], [f"h{layer}"]), down, add]
        constants += [*of_up, *of_down]
        before = f"x{layer}"
    path = saved(tmp_path / "m.onnx", nodes, constants, COLUMNS * 4)
    partition = check(path, {"up*.q": ["tp", None, None]}, "tp=2")
    assert partition.plan.totals["collectives"] == 9
    assert all(entry["weight_bytes"] < 0.6 * path.stat().st_size for entry in partition.plan.parts)
