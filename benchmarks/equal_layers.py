"""How planning grows with the number of equal layers, of which a few are planned.

    python benchmarks/equal_layers.py               gpts of 4 to 1,000 layers; training steps of up to 96
    python benchmarks/equal_layers.py --most 96     smaller ones only

Over dp=2 x tp=4, by bytes. The yardsticks, in the same run: 4 layers, which are planned each for itself; and the same
model where all layers are. Seconds are those of the processor, the least of several runs, of passes and plan together:
what `irpar partition` does between loading and writing.

Exit code 1 where 1,000 layers take 5 s or more.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Sequence
from unittest import mock

import irpar
from irpar import models
from irpar.ir import Module
from irpar.onnx_io import to_module
from irpar.training.step import train_step

MESH = "dp=2,tp=4"
LAYERS = (4, 24, 96, 1000)
MOST_OF_A_STEP = 96
FEWEST = LAYERS[0]
MOST_SECONDS = {1000: 5.0}


def built(layers: int, *, is_step: bool) -> Module:
    """A gpt with its usual annotations, or a training step of it."""
    module = to_module(models.build("gpt", layers=layers))
    if is_step:
        module = train_step(module, optimizer="adamw")
    for name, spec in models.annotations("gpt", layers=layers).items():
        module.shard(name, spec)
    return module


def seconds_of(module: Module, repeat: int) -> float:
    """The least seconds of passes and plan."""
    best = math.inf
    for _ in range(repeat):
        gc.collect()
        start = time.process_time()
        irpar.partition(module, MESH)
        best = min(best, time.process_time() - start)
    return best


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=LAYERS[-1], help="layers (default 1000)")
    parser.add_argument("--repeat", type=int, default=3, help="the least of this many runs (default 3)")
    options = parser.parse_args(arguments)
    is_met = True
    print(f"gpt over {MESH}: passes and plan, seconds of the processor")
    print(f"{'':18}{'layers':>8}{'a few planned':>16}{'all planned':>14}{f'of {FEWEST} layers':>14}")
    for name, is_step, most in (("inference", False, options.most), ("training step", True, MOST_OF_A_STEP)):
        least = math.nan
        for layers in (each for each in LAYERS if each <= min(most, options.most)):
            module = built(layers, is_step=is_step)
            few = seconds_of(module, options.repeat)
            with mock.patch("irpar.folded_layers.find_chain", return_value=None):
                every = seconds_of(module, 1)
            least = few if layers == FEWEST else least
            is_met = is_met and few < MOST_SECONDS.get(layers, math.inf)
            print(f"{name:18}{layers:8,}{few:14.3f} s{every:12.3f} s{few / least:14.1f}")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
