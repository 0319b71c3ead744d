"""A training step of GPT-2 small's size at half its memory: what recompute costs, as predicted and as it runs.

    python benchmarks/recompute_step.py
    python benchmarks/recompute_step.py --plan FOLDER [--network FILE] [--tokens N] [--layers N] [--budget SHARE]
    python benchmarks/recompute_step.py --run FOLDER [--method NAME ...] [--steps N] [--engine NAME]
    python benchmarks/recompute_step.py --report FOLDER [--write]

A gpt of 12 layers, hidden 768, 12 heads, 50,257 tokens (one matrix for both ends), float32, SGD, one sequence. --plan
makes its step without recompute and, for one budget of the peak of the whole step, with

    auto      what `--memory-budget` does
    sqrt      Chen's segments
    min-cut   what PyTorch's partitioner saves: results of the forward pass so that the fewest FLOPs of products run
              again, the largest such set whose peak fits; CP-SAT solves it in PyTorch's place

Predictions are those of the network, which is this machine's (`irpar calibrate`) if none is given. --run measures:
steps without and with recompute take turns in one process, so that other load meets both; medians of wall time, and of
the processor's, which counts what this process did alone; the first step of each does not count. Losses must be the
same bits. The three can be done apart, because a run takes minutes; each adds to FOLDER, --run to what ran before.
There is no target: the exit code is 1 where numbers differ.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import irpar
from irpar import models
from irpar.analysis.cost.node import node_flops
from irpar.analysis.memory.liveness import peak
from irpar.analysis.recompute.of_program import of_program
from irpar.analysis.recompute.rewriting import write
from irpar.analysis.recompute.saved_sets import on_demand, sweep
from irpar.ir import Module, Node
from irpar.ir.clone import clone_graph
from irpar.pass_manager import Pass, PassManager, PassResult
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, with_recompute

RESULT = Path(__file__).parent / "results" / "recompute_step.md"
PLAIN, METHODS = "none", ("auto", "sqrt", "min-cut")
HIDDEN, HEADS, VOCABULARY = 768, 12, 50257
SECONDS = 120
"""Of search by auto."""
PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv"})
"""What PyTorch counts the FLOPs of."""
KINDS = ("processor", "wall")
"""Seconds that a run is measured in."""
SETS = 20
"""Saved sets that are tried."""


@dataclass(frozen=True)
class MinCut(Pass):
    """Save the largest set of results that fits, each the best for FLOPs of products.

    Attributes:
        bytes_held: what the program may hold.
    """

    name: ClassVar[str] = "min-cut"
    bytes_held: int = 0

    def run(self, module: Module) -> PassResult:
        """Rewrite the only program."""
        graph = module.graph
        program = of_program(graph, product_flops, lambda node: False)
        for saved in sweep(program.graph, count=SETS):
            schedule = on_demand(program.graph, saved)
            trial = clone_graph(graph)
            write(of_program(trial, product_flops, lambda node: False), [schedule], 0)
            if peak(trial).total_bytes <= self.bytes_held:
                return PassResult(True, (f"{write(program, [schedule], 0)} nodes computed again",))
        raise SystemExit(f"min-cut: no saved set fits {self.bytes_held:,} bytes")


def product_flops(node: Node) -> int:
    """FLOPs of products; of other nodes none."""
    return node_flops(node) if node.op_type in PRODUCTS else 0


def plan(folder: Path, network: str | None, tokens: int, layers: int, budget: float) -> None:
    """Write the model and its partitions, with what is predicted of each."""
    folder.mkdir(parents=True, exist_ok=True)
    network = network or _calibrated(folder)
    sizes = {"layers": layers, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCABULARY, "seq": tokens, "batch": 1}
    models.save(folder / "gpt.onnx", "gpt", weights="external", tied=True, **sizes)
    step = irpar.train_step(folder / "gpt.onnx", optimizer="sgd", learning_rate=1e-3)
    found: dict[str, Any] = {"tokens": tokens, "layers": layers, "budget": budget, "network": Path(network).stem}
    whole = 0
    for method in (PLAIN, *METHODS):
        begin = time.perf_counter()
        made = irpar.partition(step, "one=1", network=network, pipeline=_pipeline(method, budget, whole))
        seconds = time.perf_counter() - begin
        (rank,), predicted = made.plan.ranks, made.plan.predicted
        assert predicted is not None
        assert made.passes is not None
        whole = whole or rank["peak_bytes"]
        made.save(folder / method, force=True)
        notes = [note for note in made.passes.notes if "again" in note or "by " in note]
        facts = {"peak": rank["peak_bytes"], "arena": rank["arena_bytes"], "predicted": predicted["step_seconds"]}
        found[method] = {**facts, "planned_in": seconds, "notes": notes}
        print(method, found[method], flush=True)
    (folder / "planned.json").write_text(json.dumps(found, indent=1))


def _calibrated(folder: Path) -> str:
    """The network file of this machine."""
    path = folder / "this machine.yaml"
    command = (sys.executable, "-m", "irpar", "calibrate", "--ranks", "2", "--engine", "numpy", "-o", str(path))
    subprocess.run(command, check=True, capture_output=True)
    return str(path)


def _pipeline(method: str, budget: float, whole: int) -> "str | PassManager":
    if method == PLAIN:
        return DEFAULT_PIPELINE
    if method == "min-cut":
        passes = PassManager.parse(DEFAULT_PIPELINE).passes
        place = next(place for place, each in enumerate(passes) if each.name == "fuse-communication")
        return PassManager([*passes[:place], MinCut(int(budget * whole)), *passes[place:]])
    return with_recompute(f"recompute{{budget={budget}, method={method}, seconds={SECONDS}}}")


def run(folder: Path, method: str, steps: int, engine: Any) -> bool:
    """Let steps without and with recompute take turns, and add their times to a file; whether losses are the same."""
    planned = json.loads((folder / "planned.json").read_text())
    random = np.random.default_rng(0)
    tokens = random.integers(0, VOCABULARY, (1, planned["tokens"] + 1))
    batch = {"input_ids": tokens[:, :-1], "target": tokens[:, 1:]}
    path = folder / f"run-{method}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"load": [], "wall": {}, "processor": {}}
    losses: dict[str, list[float]] = {PLAIN: [], method: []}
    trainers = {name: irpar.Partition.open(folder / name).trainer(engine=engine) for name in losses}
    for number in range(steps + 1):
        if number:
            found["load"].append(os.getloadavg()[0])
        for name, trainer in trainers.items():
            begin, began = time.perf_counter(), time.process_time()
            losses[name].append(trainer.step(batch))
            seconds = {"wall": time.perf_counter() - begin, "processor": time.process_time() - began}
            if number:  # The first touches its memory.
                for kind, took in seconds.items():
                    found[kind].setdefault(name, []).append(took)
            print(f"{name}: {seconds['wall']:.1f} s, processor {seconds['processor']:.1f} s", flush=True)
    for trainer in trainers.values():
        trainer.close()
    is_same = losses[PLAIN] == losses[method]
    found |= {
        "engine": engine,
        "same": found.get("same", True) and is_same,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}",
        "threads": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    path.write_text(json.dumps(found, indent=1))
    return is_same


def report(folder: Path) -> str:
    """The figures as Markdown."""
    planned = json.loads((folder / "planned.json").read_text())
    plain = planned[PLAIN]
    lines = [
        "# A step of GPT-2 small's size at half its memory",
        "",
        f"`python benchmarks/recompute_step.py`: {planned['layers']} layers, hidden {HIDDEN}, a vocabulary of "
        f"{VOCABULARY:,}, {planned['tokens']:,} tokens, float32, SGD, one rank. Without recompute the whole step holds "
        f"{plain['peak'] / 1e9:.2f} GB at its peak and takes {plain['predicted']:.1f} s, as predicted by the network "
        f"`{planned['network']}`. The budget is {planned['budget']} of that memory.",
        "",
        "| method | peak, GB | of no recompute | predicted time | executed: processor | executed: wall "
        "| processor, s, without and with | planned in, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ran: dict[str, Any] = {}
    for method in METHODS:
        path = folder / f"run-{method}.json"
        ran[method] = json.loads(path.read_text()) if path.exists() else None
        each, run = planned[method], ran[method]
        cells = [method, f"{each['peak'] / 1e9:.2f}", f"{each['peak'] / plain['peak']:.3f}"]
        cells.append(f"{each['predicted'] / plain['predicted'] - 1:+.1%}")
        if run is None:
            cells += ["", "", ""]
        else:
            medians = {kind: [statistics.median(run[kind][name]) for name in (PLAIN, method)] for kind in KINDS}
            cells += [f"{again / once - 1:+.1%}" for once, again in medians.values()]
            cells.append(" and ".join(f"{seconds:.1f}" for seconds in medians["processor"]))
        cells.append(f"{each['planned_in']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {method}: {note.split(': ', 1)[1]}" for method in METHODS for note in planned[method]["notes"])]
    for method, run in ran.items():
        if run is not None:
            same = "the same losses, to the bit" if run["same"] else "OTHER LOSSES"
            loads = ", ".join(f"{load:.1f}" for load in run["load"])
            lines.append(
                f"- {method} ran by the engine {run['engine']}, {len(run['load'])} steps of each in turn, "
                f"{run['threads'] or 'all'} thread(s), {run['versions']}; load before each {loads}; {same}"
            )
    return "\n".join([*lines, ""])


def main(words: Sequence[str] | None = None) -> int:
    """Do one of the three, or all; 1 where numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--plan", type=Path, metavar="FOLDER")
    what.add_argument("--run", type=Path, metavar="FOLDER")
    what.add_argument("--report", type=Path, metavar="FOLDER")
    parser.add_argument("--network", help="a preset or a file; by default this machine is calibrated")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--method", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--engine", default="numpy")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(words)
    asked = options.plan or options.run or options.report
    with tempfile.TemporaryDirectory() as made:
        folder = asked or Path(made)
        if asked is None or options.plan is not None:
            plan(folder, options.network, options.tokens, options.layers, options.budget)
        same = [True]
        if asked is None or options.run is not None:
            same = [run(folder, name, options.steps, options.engine) for name in options.method]
        if asked is None or options.report is not None:
            text = report(folder)
            print(text)
            if options.write:
                RESULT.write_text(text)
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
