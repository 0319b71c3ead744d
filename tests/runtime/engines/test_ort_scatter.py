"""ScatterND that adds, under ONNX Runtime with several threads: repeated indices lose nothing."""

import random
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import irpar
from irpar.kernels import lookup
from irpar.onnx_io import to_module
from irpar.runtime.errors import RunError
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from irpar.verification.original import Original

ONE = Mesh({"x": 1})


def scatter(data: Any, indices: Any, updates: Any, reduction: str, *, is_counted: bool = True) -> onnx.ModelProto:
    """A model of one ScatterND and a Neg behind it; without `is_counted` nobody knows how many updates there are."""
    given = {"data": data, "indices": indices, "updates": updates}
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for name, x in given.items()
    ]
    ends = ["indices", "updates"]
    nodes = []
    if not is_counted:
        inputs.append(helper.make_tensor_value_info("mask", TensorProto.BOOL, indices.shape[:1]))
        nodes = [helper.make_node("Compress", [name, "mask"], [f"some {name}"], axis=0) for name in ends]
        ends = [f"some {name}" for name in ends]
    nodes.append(helper.make_node("ScatterND", ["data", *ends], ["sum"], reduction=reduction))
    nodes.append(helper.make_node("Neg", ["sum"], ["y"]))
    outputs = [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(data.dtype), data.shape)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def expected(data: Any, indices: Any, updates: Any, reduction: str) -> Any:
    kernel = lookup("", "ScatterND", 18)
    assert kernel is not None
    (found,) = kernel(np, [data, indices, updates], {"reduction": reduction}, 1)
    return -found


def draw(rng: random.Random, numbers: np.random.Generator) -> tuple[Any, Any, Any, str]:
    rank = rng.randint(1, 4)
    shape = [rng.randint(1, 6) for _ in range(rank)]
    depth = rng.randint(1, rank)
    counts = [rng.choice([1, 7, 60]) for _ in range(rng.randint(0, 2))]
    kind = rng.choice("fdiq")
    data = (numbers.standard_normal(shape) * 8).astype(kind)
    indices = np.stack([numbers.integers(-size, size, counts) for size in shape[:depth]], -1)
    updates = (numbers.standard_normal([*counts, *shape[depth:]]) * 8).astype(kind)
    return data, indices, updates, rng.choice(["add", "mul", "min", "max"])


def check(case: tuple[Any, Any, Any, str]) -> None:
    with Executor(to_module(scatter(*case)), ONE, engine="ort") as executor:
        found = executor.run(dict(zip(("data", "indices", "updates"), case, strict=False)))
    np.testing.assert_allclose(found["y"], expected(*case), rtol=1e-5, atol=1e-4)


def test_random_calls() -> None:
    rng, numbers = random.Random(18), np.random.default_rng(18)
    for _ in range(60):
        case = draw(rng, numbers)
        with np.errstate(all="ignore"):
            check(case)


def many(depth: int) -> tuple[Any, Any, Any, str]:
    """So many updates of so few rows that threads meet."""
    numbers = np.random.default_rng(depth)
    shape = (50, 256) if depth == 1 else (5, 10, 256)
    indices = np.stack([numbers.integers(-size, size, 2048) for size in shape[:depth]], -1)
    return np.zeros(shape, np.float32), indices, numbers.standard_normal((2048, 256)).astype(np.float32), "add"


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("is_counted", [True, False])
def test_no_update_is_lost(depth: int, is_counted: bool) -> None:
    case = many(depth)
    given = dict(zip(("data", "indices", "updates"), case, strict=False))
    if not is_counted:
        given["mask"] = np.ones(2048, bool)
    with Executor(to_module(scatter(*case, is_counted=is_counted)), ONE, engine="ort") as executor:
        for _ in range(20):
            np.testing.assert_allclose(executor.run(given)["y"], expected(*case), rtol=1e-4, atol=1e-3)


def test_the_original_loses_none() -> None:
    case = many(1)
    original = Original.of_module(to_module(scatter(*case)))
    for _ in range(20):
        found = original.run(dict(zip(("data", "indices", "updates"), case, strict=False)))
        np.testing.assert_allclose(found["y"], expected(*case), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("wrong", [4, -5, 2**40])
def test_an_index_out_of_range_is_told(wrong: int) -> None:
    for indices in (np.array([[0], [wrong]]), np.array([[0, 1], [1, wrong]])):
        shape = (4, 3) if indices.shape[-1] == 1 else (3, 4, 3)
        case = (np.zeros(shape, np.float32), indices, np.ones((2, 3), np.float32), "add")
        with pytest.raises(RunError, match="ScatterND"):
            check(case)


def test_gradients_of_a_lookup_are_the_same_in_each_run() -> None:
    numbers = np.random.default_rng(0)
    table = numbers.standard_normal((4, 64, 96)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["w", "i"], ["e"]), helper.make_node("MatMul", ["x", "e"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [96, 1, 64]),
            helper.make_tensor_value_info("i", TensorProto.INT64, [96]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [96, 1, 96])],
        [onnx.numpy_helper.from_array(table, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    given = {
        "x": numbers.standard_normal((96, 1, 64)).astype(np.float32),
        "i": numbers.integers(0, 4, 96),
        "target": numbers.standard_normal((96, 1, 96)).astype(np.float32),
    }
    part = irpar.partition(irpar.train_step(model, loss="mse", optimizer="sgd", learning_rate=1.0), "one=1")
    weights = []
    for engine in ("numpy", *["ort"] * 20):
        with part.trainer(engine=engine) as trainer:
            trainer.step(given)
            weights.append(trainer.read("w"))
    for weight in weights[1:]:
        np.testing.assert_allclose(weight, weights[0], rtol=0, atol=1e-6)
