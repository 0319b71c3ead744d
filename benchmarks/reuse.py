"""What extract-communication saves on a GPT of 96 layers over dp x tp, in inference and in a training step.

    python benchmarks/reuse.py [--layers N] [--mesh dp=2,tp=2] [--repeat N]

The pipeline without the pass, with it (`packing`), and with collectives alone. Collectives are merged as the network
h100-nvlink-ib says. Counts are exact; seconds are the least of several runs: writing the partition, reading all parts
and preparing a run with ONNX Runtime, and one run of all ranks in threads. A communicator is made for each group of
axes, with functions or without.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

import irpar
from irpar import models
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.runtime.executor import Executor

NETWORK = "h100-nvlink-ib"
WAYS = ("", "packing", "collectives")
SIZES = {"hidden": 64, "heads": 4, "seq": 16, "vocab": 64}
T = TypeVar("T")


def least(repeat: int, do: Callable[[], T]) -> tuple[float, T]:
    """The least seconds of several runs, and what the last one gave."""
    found = []
    for _ in range(repeat):
        start = time.perf_counter()
        made = do()
        found.append(time.perf_counter() - start)
    return min(found), made


def partitioned(folder: Path, kind: str, layers: int, mesh: str, take: str) -> irpar.Partition:
    """A partition of the model, or of its training step."""
    path = folder / "gpt.onnx"
    module = irpar.load(path) if kind == "inference" else irpar.train_step(path, optimizer="momentum")
    known = {value.source_name for value in module.graph.values()}
    for name, spec in models.annotations("gpt", layers=layers).items():
        if "*" in name or name in known:
            module.shard(name, spec)
    added = f"extract-communication{{take={take}}},group-segments" if take else "group-segments"
    return irpar.partition(module, mesh, pipeline=DEFAULT_PIPELINE.replace("group-segments", added), network=NETWORK)


def inputs_of(partition: irpar.Partition) -> dict[str, np.ndarray]:
    """Seeded inputs of a run, state left out."""
    drawn = np.random.default_rng(0)
    state = {entry["input"] for entry in partition.plan.state}
    found = {}
    for entry in partition.plan.inputs:
        if entry["name"] not in state:
            shape = entry["shape"]
            floats = entry["dtype"].startswith("f")
            found[entry["name"]] = np.full(shape, 0.01, np.float32) if floats else drawn.integers(0, 32, shape)
    return found


def row(partition: irpar.Partition, folder: Path, repeat: int) -> list[str]:
    """What is measured of one partition."""
    out = folder / "out"
    write, _ = least(repeat, lambda: partition.save(out, force=True, weights="copy"))
    program = out / "part0" / "model.onnx"

    def opened() -> Executor:
        return Executor.open(out)

    prepare, executor = least(repeat, opened)
    inputs = inputs_of(partition)
    step, _ = least(5 * repeat, lambda: executor.run(inputs))
    plan, prepared = partition.plan, executor._prepared.parts[0]
    compiled = len({key for key in executor._preparer._base if key[0] == 0})
    calls = {number for entry in plan.functions for number in entry["collectives"]}
    operators = len(plan.collectives) - len(calls) + len(plan.functions)
    return [
        f"{len(plan.collectives):,}",
        f"{operators:,}",
        f"{len(plan.functions):,}",
        f"{len({tuple(entry['axes']) for entry in plan.collectives}):,}",
        f"{len(prepared.tape.places):,}",
        f"{compiled:,}",
        f"{program.stat().st_size / 1e3:,.0f} KB",
        f"{write:.2f} s",
        f"{prepare:.2f} s",
        f"{step * 1e3:.1f} ms",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--repeat", type=int, default=2, help="the least of this many runs (default 2)")
    parser.add_argument("--kind", choices=["inference", "training"], help="only one")
    options = parser.parse_args(arguments)
    print(
        "| gpt | functions of | collectives | distinct operators | functions | communicators | buffers "
        "| compiled segments | model.onnx | write | load and prepare | run |\n"
        f"{'|---' * 12}|"
    )
    for kind in (options.kind,) if options.kind else ("inference", "training"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            models.save(folder / "gpt.onnx", "gpt", layers=options.layers, **SIZES)
            for take in WAYS:
                made = partitioned(folder, kind, options.layers, options.mesh, take)
                print(f"| {kind} | {take or 'none'} | {' | '.join(row(made, folder, options.repeat))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
