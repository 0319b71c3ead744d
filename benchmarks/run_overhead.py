"""One rank through the `ort` engine against plain ONNX Runtime: medians of runs in turn, and their ratio.

    python benchmarks/run_overhead.py                          a gpt whose step takes a few milliseconds
    python benchmarks/run_overhead.py --layers 2 --hidden 64   a step of 0.3 ms, where fixed costs show

Exit code 1 where the ratio is above 1.1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime

from irpar import models
from irpar.onnx_io import to_module
from irpar.runtime.executor import Executor
from irpar.sharding import Mesh
from irpar.verification.inputs import random_inputs

TARGET = 1.1


def main() -> int:
    """Measure and print; exit code 1 where the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="gpt", choices=("gpt", "llama"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--runs", type=int, default=200, help="runs of each (default 200)")
    options = parser.parse_args()
    model = models.build(options.family, layers=options.layers, hidden=options.hidden)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    module = to_module(model)
    with Executor(module, Mesh({"x": 1}), engine="ort") as executor:
        inputs = random_inputs(executor.inputs, module.graph)
        names = [spec.name for spec in executor.outputs]
        plain, irpar = measure(
            (lambda: session.run(names, inputs), lambda: list(executor.run(inputs).values())), options.runs
        )
    ratio = irpar / plain
    print(f"{options.family}, {options.layers} layers, hidden {options.hidden}; medians of {options.runs} runs in turn")
    print(f"  ONNX Runtime {plain * 1e3:9.3f} ms")
    print(f"  irpar, ort   {irpar * 1e3:9.3f} ms")
    print(f"  ratio        {ratio:9.3f}    target {TARGET}")
    return 0 if ratio <= TARGET else 1


def measure(runs: tuple[Callable[[], Any], Callable[[], Any]], count: int) -> tuple[float, float]:
    """Median seconds of two functions that must give equal arrays; which goes first changes every time."""
    for left, right in zip(runs[0](), runs[1](), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(count + 10):
        for which in ((0, 1), (1, 0))[number % 2]:
            start = time.perf_counter()
            runs[which]()
            elapsed = time.perf_counter() - start
            if number >= 10:  # The first ones warm up.
                seconds[which].append(elapsed)
    return statistics.median(seconds[0]), statistics.median(seconds[1])


if __name__ == "__main__":
    sys.exit(main())
