"""How long the gradients of unrolled models take, and how that grows.

    python benchmarks/autodiff_scale.py                gpts of 12 to 768 layers, up to 29,000 forward nodes
    python benchmarks/autodiff_scale.py --most 6000    smaller ones only

By all weights: the pass `autodiff` by itself, all of `irpar.gradients` (the passes before and after it too), and the
nodes of the model that comes out. Beside it onnx.shape_inference on the forward model.

All run in one thread; the seconds are those of the processor, which other programs do not lengthen.

Exit code 1 where 5,000 forward nodes take `autodiff` 3 seconds or more, or the slope of its seconds over nodes, both
logarithmic, is above 1.1.
"""

import argparse
import gc
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

import irpar
from irpar.ir import clone_module

sys.path.insert(0, str(Path(__file__).resolve().parent))

from completion_scale import MOST_SLOPE, NODES_PER_LAYER, gpt, peer_seconds

LAYERS = (12, 48, 132, 384, 768)
MOST_SECONDS, AT_NODES = 3.0, 5_000


def autodiff_seconds(path: Path, repeat: int) -> tuple[int, float]:
    """The nodes that the pass sees, and its best time."""
    module = irpar.load(path)
    irpar.PassManager.parse("inline-functions,raise-opset,infer-types").run(module)
    best = math.inf
    for _ in range(repeat):
        work = clone_module(module)
        manager = irpar.PassManager.parse("autodiff")
        gc.collect()
        start = time.process_time()
        manager.run(work)
        best = min(best, time.process_time() - start)
    return len(module.graph), best


def gradients_seconds(path: Path, repeat: int) -> tuple[int, float]:
    """The nodes of the gradient model, and the best time of making it."""
    module = irpar.load(path)
    best = math.inf
    for _ in range(repeat):
        gc.collect()
        start = time.process_time()
        made = irpar.gradients(module)
        best = min(best, time.process_time() - start)
    return len(made.graph), best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=10**9, metavar="NODES", help="leave out larger models")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="the best of N (default 3)")
    options = parser.parse_args(arguments)
    print(f"gpt, best of {options.repeat}")
    print(
        f"{'forward nodes':>15}{'autodiff s':>12}{'gradients s':>13}{'nodes then':>12}{'shape inference s':>19}{'x':>7}"
    )
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for layers in LAYERS:
            if layers * NODES_PER_LAYER > options.most:
                continue
            path = gpt(Path(folder), layers)
            nodes, seconds = autodiff_seconds(path, options.repeat)
            made, whole = gradients_seconds(path, options.repeat)
            peer = peer_seconds(onnx.load(path, load_external_data=False), options.repeat)
            print(f"{nodes:15,}{seconds:12.2f}{whole:13.2f}{made:12,}{peer:19.3f}{seconds / peer:7.1f}")
            points.append((nodes, seconds, whole))
    is_met = all(seconds < MOST_SECONDS for nodes, seconds, _ in points if nodes < 1.1 * AT_NODES)
    if len(points) > 2:
        nodes, *both = np.log(points).T
        slopes = [float(np.polyfit(nodes, seconds, 1)[0]) for seconds in both]
        print(f"slopes {slopes[0]:.3f} and {slopes[1]:.3f}     (target: at most {MOST_SLOPE} for autodiff)")
        is_met = is_met and slopes[0] <= MOST_SLOPE
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
