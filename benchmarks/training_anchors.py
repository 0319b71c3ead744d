"""What irpar sends in one training step, beside XLA's two partitioners and the best plans known.

    python benchmarks/training_anchors.py              all cases without recompute
    python benchmarks/training_anchors.py mlp_dp2tp4   some
    python benchmarks/training_anchors.py --no-run     plans only: nothing is computed
    python benchmarks/training_anchors.py --list       and every collective of each

The cases are a folder of ONNX models with annotations, and what a step sends: ../shared/anchors/training beside the
repository, or --anchors FOLDER. irpar.train_step makes the step, whose parameters and moments are state.

`x` is irpar's bytes over the best known. Exit code 1 where a case sends more than the better of GSPMD and Shardy, or
computes other parameters than the reference says.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irpar
from irpar.ir import Module

sys.path.insert(0, str(Path(__file__).resolve().parent))

from anchors import DEFAULT_FOLDER, inputs_of

TARGET = "target"
DECAY = 0.01


def step_of(case: dict[str, Any], folder: Path) -> Module:
    """The module of one step: the loss, and each parameter after it."""
    optimizer = case["optimizer"]
    options: dict[str, Any] = {"learning_rate": optimizer["lr"]}
    if optimizer["name"] == "adamw":
        options |= {"eps": optimizer.get("eps", 1e-8), "weight_decay": optimizer.get("weight_decay", DECAY)}
        options["betas"] = [optimizer.get("b1", 0.9), optimizer.get("b2", 0.999)]
    return irpar.train_step(
        folder / case["model"],
        loss=case["loss"],
        output=case["output"],
        optimizer=optimizer["name"],
        trainable=case["parameters"],
        freeze_statistics=True,
        micro_batches=case["micro_batches"],
        **options,
    )


def lead_of(case: dict[str, Any]) -> list[int]:
    """The sizes of the dims that samples have before those of a batch."""
    return [case["micro_batches"]] if case["micro_batches"] > 1 else []


def partition_of(case: dict[str, Any], folder: Path, network: str) -> irpar.Partition:
    """The step over the mesh of a case."""
    module = step_of(case, folder)
    lead = [None] * len(lead_of(case))
    for name, spec in case["annotations"].items():
        module.shard(name, [*lead, *spec] if name in case["inputs"] else spec)
    for name, spec in (case.get("optimizer_state") or {}).items():
        for moment in (f"{name}.m", f"{name}.v"):
            if any(value.source_name == moment for value in module.graph.inputs):
                module.shard(moment, spec)
    mesh = irpar.Mesh(dict(zip(case["mesh"]["axes"], case["mesh"]["sizes"], strict=True)))
    return irpar.partition(module, mesh, network=network)


def fault_of(partition: irpar.Partition, case: dict[str, Any]) -> str:
    """What the step computes otherwise than the reference; "" where all is equal."""
    inputs = {
        name: array.astype(np.int64) if array.dtype.kind == "i" and name == TARGET else array
        for name, array in inputs_of(case, lead_of(case)).items()
    }
    with partition.trainer() as trainer:
        loss = trainer.step(inputs)
        found = trainer.read_all()
    expected = case["expected"]
    if abs(loss - expected["loss"]) > 1e-4 * abs(expected["loss"]):
        return f"loss {loss}, not {expected['loss']}"
    tolerance = 0.05 * case["optimizer"]["lr"] if case["optimizer"]["name"] == "adamw" else 1e-5
    for name, (total, *first) in expected["params_after_1_step"].items():
        array = found[name].astype(np.float64)
        if np.abs(array.ravel()[: len(first)] - first).max() > tolerance:
            return f"{name} is {array.ravel()[: len(first)]}, not {first}"
        if abs(array.sum() - total) > tolerance * max(1.0, np.abs(array).sum()):
            return f"the sum of {name} is {array.sum()}, not {total}"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="CASE", help="only these (default: all)")
    parser.add_argument("--anchors", type=Path, default=DEFAULT_FOLDER / "training", metavar="FOLDER")
    parser.add_argument("--network", default="bytes", help="what irpar minimises (default bytes)")
    parser.add_argument("--no-run", action="store_true", help="compute nothing")
    parser.add_argument("--list", action="store_true", help="every collective")
    options = parser.parse_args(arguments)
    folder = options.anchors / "cases"
    cases = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    cases = [case for case in cases if not options.wanted or case["name"] in options.wanted]
    if not cases:
        print(f"no cases in {folder}: give --anchors FOLDER", file=sys.stderr)
        return 2 if options.wanted else 0
    print(f"{'case':20}{'irpar':>14}{'GSPMD':>14}{'Shardy':>14}{'best known':>14}{'x':>8}{'launches':>10}{'s':>7}")
    worse = 0
    for case in cases:
        worse += not report(case, folder, options)
    return 1 if worse else 0


def report(case: dict[str, Any], folder: Path, options: argparse.Namespace) -> bool:
    """Print the line of one case; whether it is at most what XLA sends, and right."""
    if case["recompute"]:
        print(f"{case['name']:20}  left out: recompute")
        return True
    start = time.perf_counter()
    try:
        made = partition_of(case, folder, options.network)
    except irpar.IrparError as error:
        print(f"{case['name']:20}  refused: {error.what}")
        return False
    seconds = time.perf_counter() - start
    totals = made.plan.totals
    best = case["best_known"]["bytes"]
    xla = [case["anchors"][name]["bytes"] for name in ("xla_gspmd", "xla_shardy")]
    fault = fault_of(made, case) if case["numerics"] and not options.no_run else ""
    sent = totals["sent_bytes"]
    columns = "".join(f"{int(value):>14,}" for value in (sent, *xla, best))
    is_ok = sent <= min(xla) and not fault
    print(
        f"{case['name']:20}{columns}{sent / best:>8.2f}{totals['collectives']:>10}{seconds:>7.2f}  "
        f"{'ok' if is_ok else 'worse'}  {fault}"
    )
    if options.list:
        for entry in made.plan.collectives:
            axes, size = ",".join(entry["axes"]), entry["sent_bytes"] * entry["times"]
            print(f"    {entry['phase'] or '-':10}{entry['kind']:16}{axes:8}{size:>12,}  {entry['value']}")
    return is_ok


if __name__ == "__main__":
    sys.exit(main())
