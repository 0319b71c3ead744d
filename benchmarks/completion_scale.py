"""How long complete-sharding takes on unrolled models, and how that grows.

    python benchmarks/completion_scale.py                    gpts of 12 to 2,632 layers, up to 100,000 nodes
    python benchmarks/completion_scale.py --most 10000       smaller ones only
    python benchmarks/completion_scale.py --anchors FOLDER   also the case scale_L16 there, stacked to 48 layers

Each model on dp=2 x tp=2, annotated in two ways: `agreed`, its input and every weight, as Megatron cuts them; `torn`,
the sequence of input and output over the axis that also cuts the weights, so that every layer has conflicts to decide.
Each with both strategies. Beside it onnx.shape_inference on the same model: one forward sweep over types in C++, where
completion sweeps shardings both ways, and compares costs, in Python.

All run in one thread; the seconds are those of the processor, which other programs do not lengthen.

Exit code 1 where 48 layers take a second or more, 100,000 nodes 30 or more, or the slope of seconds over nodes, both
logarithmic, is above 1.1.
"""

import argparse
import gc
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import compose, shape_inference

import irpar
from irpar import models
from irpar.ir import Module, clone_module
from irpar.pass_manager.default_pipeline import NORMALISE

LAYERS = (12, 48, 192, 768, 2632)
NODES_PER_LAYER = 38
STRATEGIES = ("cost", "propagate")
DEFAULT_FOLDER = Path(__file__).parents[2] / "shared" / "anchors"
COPIES = 3
MOST_SECONDS = {48 * NODES_PER_LAYER: 1.0, 100_000: 30.0}
"""By about how many nodes: the most seconds of completion."""
MOST_SLOPE = 1.1


@dataclass(frozen=True)
class Point:
    """One model under one strategy.

    Attributes:
        nodes: of the graph that completion sees.
        seconds: of completion.
        peer: seconds of onnx.shape_inference.
    """

    nodes: int
    seconds: float
    peer: float


def annotations(kind: str, layers: int) -> dict[str, list[list[str] | None]]:
    """What is annotated in a gpt."""
    if kind == "agreed":
        return models.annotations("gpt", layers=layers)
    sequence = {"input_ids": [None, ["tp"]], "logits": [None, ["tp"], None]}
    return {**models.annotations("gpt", None, "tp", layers=layers), **sequence}


def seconds_of(module: Module, strategy: str, repeat: int) -> float:
    """The best time of completion."""
    best = math.inf
    for _ in range(repeat):
        work = clone_module(module)
        manager = irpar.PassManager.parse(f"complete-sharding{{strategy={strategy}}}")
        gc.collect()
        start = time.process_time()
        manager.run(work)
        best = min(best, time.process_time() - start)
    return best


def peer_seconds(model: onnx.ModelProto, repeat: int) -> float:
    """The best time of onnx.shape_inference."""
    best = math.inf
    for _ in range(repeat):
        start = time.process_time()
        shape_inference.infer_shapes(model)
        best = min(best, time.process_time() - start)
    return best


def gpt(folder: Path, layers: int) -> Path:
    """Write a gpt without its weights."""
    path = folder / "gpt.onnx"
    models.save(path, "gpt", weights="none", layers=layers)
    return path


def measured(path: Path, specs: dict[str, list[list[str] | None]], mesh: irpar.Mesh, repeat: int) -> dict[str, Point]:
    """A point for each strategy."""
    module = irpar.load(path)
    irpar.annotate(module, specs)
    irpar.PassManager.parse(NORMALISE).run(module)
    module.set_mesh(mesh)
    peer = peer_seconds(onnx.load(path, load_external_data=False), repeat)
    nodes = len(module.graph)
    return {name: Point(nodes, seconds_of(module, name, repeat), peer) for name in STRATEGIES}


def print_point(strategy: str, point: Point) -> None:
    """One row."""
    each = point.seconds / point.nodes * 1e6
    print(
        f"  {strategy:10} {point.nodes:8,} nodes {point.seconds:8.2f} s {each:6.0f} us a node"
        f"   shape inference {point.peer:6.3f} s   {point.seconds / point.peer:5.1f} x"
    )


def judge(points: Sequence[Point]) -> bool:
    """Print the slope; True where it and the times are as they should be."""
    is_met = True
    if len(points) > 2:
        slope = float(np.polyfit(*np.log([(point.nodes, point.seconds) for point in points]).T, 1)[0])
        print(f"  slope {slope:.3f}     (target: at most {MOST_SLOPE})")
        is_met = slope <= MOST_SLOPE
    for nodes, most in MOST_SECONDS.items():
        near = [point for point in points if 0.9 < point.nodes / nodes < 1.1]
        is_met = is_met and all(point.seconds < most for point in near)
    return is_met


def scale(kind: str, most: int, repeat: int) -> bool:
    """The gpts of one way of annotating."""
    print(f"\ngpt, {kind}, dp=2 x tp=2, best of {repeat}")
    rows: dict[str, list[Point]] = {name: [] for name in STRATEGIES}
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            if layers * NODES_PER_LAYER <= 1.02 * most:
                path = gpt(Path(folder), layers)
                often = repeat if layers < 500 else 1
                for name, point in measured(
                    path, annotations(kind, layers), irpar.Mesh({"dp": 2, "tp": 2}), often
                ).items():
                    rows[name].append(point)
                    print_point(name, point)
    results = []
    for name, points in rows.items():
        print(f"  {name}:")
        results.append(judge(points))
    return all(results)


# -- scale_L16 of the anchors -------------------------------------------------------------------------------------


def stacked_case(anchors: Path, repeat: int) -> bool:
    """The case of 16 layers three times behind itself, with the annotations of each."""
    case = json.loads((anchors / "cases" / "scale_L16.json").read_text(encoding="utf-8"))
    part = onnx.load(anchors / "cases" / case["model"])
    (output,) = case["outputs"]
    model = compose.add_prefix(part, "0.")
    for number in range(1, COPIES):
        joint = [(f"{number - 1}.{output}", f"{number}.x")]
        model = compose.merge_models(model, compose.add_prefix(part, f"{number}."), io_map=joint)
    specs = {
        f"{n}.{name}": spec
        for n in range(COPIES)
        for name, spec in case["annotations"].items()
        if n == 0 or name != "x"
    }
    mesh = irpar.Mesh(dict(zip(case["mesh"]["axes"], case["mesh"]["sizes"], strict=True)))
    print(f"\nscale_L16, {COPIES} times behind itself, {mesh}, best of {repeat}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stacked.onnx"
        onnx.save(model, path)
        points = measured(path, specs, mesh, repeat)
    for name, point in points.items():
        print_point(name, point)
    return all(point.seconds < 1 for point in points.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=100_000, metavar="NODES", help="largest model (default 100,000)")
    parser.add_argument("--repeat", type=int, default=3, help="best of this many (default 3)")
    parser.add_argument("--anchors", type=Path, default=None, metavar="FOLDER")
    options = parser.parse_args(arguments)
    results = [scale(kind, options.most, options.repeat) for kind in ("agreed", "torn")]
    given = options.anchors or (Path(os.environ["IRPAR_ANCHORS"]) if "IRPAR_ANCHORS" in os.environ else None)
    anchors = given or DEFAULT_FOLDER
    if (anchors / "cases" / "scale_L16.json").exists():
        results.append(stacked_case(anchors, options.repeat))
    elif given is not None:
        print(f"no scale_L16 in {anchors}", file=sys.stderr)
        return 2
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
