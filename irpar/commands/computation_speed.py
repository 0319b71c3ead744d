"""Measuring what the ranks of this machine compute: rates of matmuls, of memory, and what small nodes take.

All ranks run at once, as `irpar run` runs them. What is measured is the difference of two models, of which one has
more nodes.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from irpar.sharding import Mesh

_SECONDS_EACH = 0.15
"""How long one thing is measured, at the least once."""
_LONG_STEP = 0.02
"""Seconds; two matmuls this long are large enough to tell the rate."""
_MATRIX_SIZES = (128, 256, 512, 1024)
SUMMED = 16
"""Elements of the small all-reduces."""

DTYPES: Mapping[str, tuple[str, "np.dtype[Any]", int]] = {
    "f64": ("MatMul", np.dtype(np.float64), TensorProto.DOUBLE),
    "f32": ("MatMul", np.dtype(np.float32), TensorProto.FLOAT),
    "f16": ("MatMul", np.dtype(np.float16), TensorProto.FLOAT16),
    "bf16": ("MatMul", np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
    "i8": ("MatMulInteger", np.dtype(np.int8), TensorProto.INT8),
}
"""Type to the operator that multiplies it, and its dtypes in numpy and ONNX."""


def measure_matmul(dtype: str, mesh: Mesh, engine: str) -> float:
    """FLOP/s of one rank: square matrices, larger ones until a step takes long enough."""
    for size in _MATRIX_SIZES:
        seconds = _difference(partial(_matmuls, dtype, mesh.size, size), mesh, engine, 1, 3)
        if seconds > _LONG_STEP:
            break
    return 2 * 2 * size**3 / seconds


def measure_memory(mesh: Mesh, engine: str) -> float:
    """Bytes/s of one rank: additions of two tensors that no cache holds."""
    elements = (32 << 20) // 4 // mesh.size
    seconds = _difference(partial(_additions, mesh.size, elements), mesh, engine, 1, 5)
    return 4 * 3 * 4 * elements / seconds


def measure_launch(mesh: Mesh, engine: str) -> float:
    """Seconds that a node takes which has hardly anything to compute."""
    return _difference(partial(_additions, mesh.size, 16), mesh, engine, 20, 220) / 200


def measure_sums(mesh: Mesh, engine: str) -> float:
    """Seconds that a small all-reduce takes in a step, with the two small nodes that need it."""
    return _difference(partial(_sums, mesh.size), mesh, engine, 2, 22) / 20


def _difference(build: Callable[[int], onnx.ModelProto], mesh: Mesh, engine: str, few: int, many: int) -> float:
    """Seconds by which a step with many nodes is longer than one with few: what both have does not count."""
    seconds = [_step_seconds(build(count), mesh, engine) for count in (few, many)]
    return max(seconds[1] - seconds[0], 1e-9)


def _step_seconds(model: onnx.ModelProto, mesh: Mesh, engine: str) -> float:
    """Seconds of a step of a model whose input is sharded over all ranks."""
    from irpar.api import partition
    from irpar.onnx_io import to_module

    module = to_module(model)
    module.shard("x", ["x", None])
    given = model.graph.input[0].type.tensor_type
    shape = [dim.dim_value for dim in given.shape.dim]
    x = np.random.default_rng(0).integers(-3, 4, shape).astype(helper.tensor_dtype_to_np_dtype(given.elem_type))
    made = partition(module, mesh)
    executor = made.executor(engine)  # type: ignore[arg-type]
    try:
        return shortest(lambda: executor.run({"x": x}))
    finally:
        executor.close()


def _matmuls(dtype: str, ranks: int, size: int, count: int) -> onnx.ModelProto:
    """y = x w1 + x w2 + ...; each rank has `size` rows of x."""
    op, array_type, onnx_type = DTYPES[dtype]
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.integers(-3, 4, (size, size)).astype(array_type), f"w{i}") for i in range(count)
    ]
    nodes = [helper.make_node(op, ["x", f"w{i}"], [f"p{i}"]) for i in range(count)]
    total = "p0"
    for i in range(1, count):
        nodes.append(helper.make_node("Add", [total, f"p{i}"], [f"s{i}"]))
        total = f"s{i}"
    result = TensorProto.INT32 if op == "MatMulInteger" else onnx_type
    return _model(nodes, weights, (onnx_type, [ranks * size, size]), (total, result))


def _additions(ranks: int, elements: int, count: int) -> onnx.ModelProto:
    """y = x + x + x ...; each rank has `elements` of x."""
    names = ["x", *(f"s{i}" for i in range(count))]
    nodes = [helper.make_node("Add", [names[i], "x"], [names[i + 1]]) for i in range(count)]
    return _model(nodes, [], (TensorProto.FLOAT, [ranks, elements]), (names[-1], TensorProto.FLOAT))


def _sums(ranks: int, count: int) -> onnx.ModelProto:
    """Sums over the rows of x, which are on all ranks: each needs an all-reduce, and the next one its result."""
    names = ["x", *(f"a{i}" for i in range(count))]
    nodes = []
    for i in range(count):
        nodes.append(helper.make_node("ReduceSum", [names[i], "axes"], [f"s{i}"]))
        nodes.append(helper.make_node("Add", [names[i], f"s{i}"], [names[i + 1]]))
    axes = numpy_helper.from_array(np.array([0], np.int64), "axes")
    return _model(nodes, [axes], (TensorProto.FLOAT, [ranks, SUMMED]), (names[-1], TensorProto.FLOAT))


def _model(
    nodes: list[onnx.NodeProto], weights: list[onnx.TensorProto], given: tuple[int, list[int]], result: tuple[str, int]
) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", *given)
    y = helper.make_tensor_value_info(result[0], result[1], given[1])
    graph = helper.make_graph(nodes, "measured", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def shortest(run: Callable[[], object]) -> float:
    """The least of several runs: what else the machine does makes a run longer only."""
    run()
    end = time.perf_counter() + _SECONDS_EACH
    least = float("inf")
    for _ in range(1000):
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        least = min(least, now - start)
        if now > end:
            break
    return max(least, 1e-9)
