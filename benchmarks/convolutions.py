"""Convolutions and ResNets through the engine `numpy` beside ONNX Runtime, one thread each: medians in turn, ratios.

    python benchmarks/convolutions.py                      all convolutions, and ResNets of three sizes
    python benchmarks/convolutions.py --only depthwise     one kind: depthwise, dense, grouped or resnet

Without a target: it shows what NumPy's passes over memory cost.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# BLAS reads this when NumPy is loaded.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import onnx
import onnxruntime

from irpar import models
from irpar.onnx_io import to_module
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs

KINDS = ("depthwise", "dense", "grouped", "resnet")
MAPS = ((32, 112), (96, 56), (192, 28), (576, 14), (960, 7))
"""Channels, and height and width."""

RESNETS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "image 64, width 32": {"image": 64, "width": 32},
    "small, batch 1": {"preset": "small", "batch": 1},
}


class Case(NamedTuple):
    """One convolution of square images."""

    batch: int
    channels: int
    size: int
    features: int
    kernel: int
    stride: int
    group: int

    def __str__(self) -> str:
        shape = f"{self.batch}x{self.channels}x{self.size}x{self.size}"
        return f"{shape} to {self.features}, {self.kernel}x{self.kernel}, stride {self.stride}, group {self.group}"


def cases(kind: str) -> Iterator[Case]:
    """The convolutions of one kind."""
    if kind == "depthwise":
        for batch in (1, 4):
            for channels, size in MAPS:
                for kernel, stride in ((3, 1), (3, 2), (5, 1), (5, 2)):
                    yield Case(batch, channels, size, channels, kernel, stride, channels)
    elif kind == "dense":
        yield from (Case(1, 64 << n, 56 >> n, 64 << n, 3, 1, 1) for n in range(4))
        yield from (Case(1, 64, 56, 256, 1, 1, 1), Case(1, 256, 56, 512, 1, 2, 1), Case(1, 3, 224, 64, 7, 2, 1))
    elif kind == "grouped":
        yield from (Case(1, 128 << n, 56 >> n, 128 << n, 3, 1, 32) for n in range(3))


def model_of(case: Case) -> onnx.ModelProto:
    """A model of one node."""
    shape = (case.features, case.channels // case.group, case.kernel, case.kernel)
    weight = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    pads, strides = [case.kernel // 2] * 4, [case.stride] * 2
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], pads=pads, strides=strides, group=case.group)
    size = (case.size + 2 * pads[0] - case.kernel) // case.stride + 1
    x, y = (
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims)
        for name, dims in (
            ("x", [case.batch, case.channels, case.size, case.size]),
            ("y", [case.batch, case.features, size, size]),
        )
    )
    graph = onnx.helper.make_graph([node], "conv", [x], [y], [onnx.numpy_helper.from_array(weight, "w")])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)


def medians(runs: tuple[Callable[[], Any], Callable[[], Any]], seconds: float) -> list[float]:
    """Median seconds of two functions that must give equal arrays, in turn for so long, or 5 times."""
    for left, right in zip(runs[0](), runs[1](), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-3, atol=1e-3)
    taken: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while len(taken[0]) < 5 or time.perf_counter() < end:
        for which, run in enumerate(runs):
            start = time.perf_counter()
            run()
            taken[which].append(time.perf_counter() - start)
    return [statistics.median(figures[1:]) for figures in taken]


def compare(name: str, model: onnx.ModelProto, seconds: float) -> float:
    """Measure one model both ways, and print; gives the ratio."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    module = to_module(model)
    with Executor(module, Mesh({"x": 1}), engine="numpy") as executor:
        inputs = random_inputs(executor.inputs, module.graph)
        names = [spec.name for spec in executor.outputs]
        plain, irpar = medians(
            (lambda: session.run(names, inputs), lambda: list(executor.run(inputs).values())), seconds
        )
    print(f"  {name:56s} {plain * 1e3:9.3f} ms {irpar * 1e3:9.3f} ms {irpar / plain:7.2f}", flush=True)
    return irpar / plain


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--seconds", type=float, default=0.2, help="of each case, both ways together (default 0.2)")
    options = parser.parse_args()
    print(f"  {'':56s} {'ONNX Runtime':>12s} {'numpy':>12s} {'ratio':>7s}")
    for kind in KINDS if options.only is None else (options.only,):
        print(kind)
        ratios = [compare(str(case), model_of(case), options.seconds) for case in cases(kind)]
        if kind == "resnet":
            for name, sizes in RESNETS.items():
                ratios.append(compare(name, models.build("resnet", **sizes), options.seconds))
        print(f"  geometric mean of the ratios {statistics.geometric_mean(ratios):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
