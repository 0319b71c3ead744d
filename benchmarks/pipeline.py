"""How long `irpar partition` takes on a model of 48 layers, as a process, and where the time goes.

    python benchmarks/pipeline.py                          gpt of 48 layers (1,829 nodes), dp=2 x tp=4, --weights none
    python benchmarks/pipeline.py --layers 12 --repeat 3   a smaller one, best of 3

Seconds are those of the processor, the least of several runs: other programs hardly lengthen them, and everything runs
in one thread. The steps are timed in further processes that do the same; what the process takes beyond them is the
command line and its tables. XLA's two partitioners take 0.5 (GSPMD) and 0.7 s (Shardy) for 48 layers, trace, lowering
and partitioning together: C++ that is loaded already, on a machine like this one.

Exit code 1 where the process takes 3 s or more, or its passes more than 2 s.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from irpar import models

MOST_SECONDS = 3.0
MOST_PASSES = 2.0
MESH = "dp=2,tp=4"
COMMAND = "from irpar.cli import main; main()"
STEPS = """
import gc, json, sys, time
gc.disable()  # As in the command.
marks = [("", time.process_time())]
def mark(name):
    marks.append((name, time.process_time()))
from pathlib import Path
import irpar.commands.app, irpar.commands.partition, irpar.commands.loading, irpar.api, irpar.output.writer
from irpar.commands.loading import annotate_by, load_model, shardings_of
from irpar.pass_manager.instrumentation import Instrumentation
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
passes = []
def progress(event):
    if event.event == "end":
        passes.append((event.name, event.seconds))
manager = PassManager.parse(DEFAULT_PIPELINE, Instrumentation(progress=progress))
mark("imports")
folder = Path(sys.argv[1])
file, agreed = shardings_of(sys.argv[2], folder / "gpt.json")
module = load_model(folder / "gpt.onnx", None)
annotate_by(module, file, agreed)
mark("load and annotate")
made = irpar.api.partition(module, pipeline=manager)
mark("passes and plan")
made.save(folder / "out", weights="none", force=True)
mark("write")
seconds = {name: end - start for (_, start), (name, end) in zip(marks, marks[1:])}
print(json.dumps({"steps": seconds, "passes": passes, "nodes": made.passes.records[0].nodes}))
"""


def best(repeat: int, *command: str) -> tuple[float, float, str]:
    """The least seconds of a command, of the processor and of the clock, and what it printed then.

    Raises:
        SystemExit: it failed.
    """
    found: list[tuple[float, float, str]] = []
    for _ in range(repeat):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed: {done.stderr}")
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        found.append((used, seconds, done.stdout))
    return min(found)


def steps(repeat: int, folder: Path) -> dict[str, float]:
    """The least seconds of each step over several processes, passes by `pass NAME`, and `nodes`."""
    least: dict[str, float] = {}
    for _ in range(repeat):
        told = json.loads(best(1, sys.executable, "-c", STEPS, str(folder), MESH)[-1])
        now: dict[str, float] = dict(told["steps"])
        for text, seconds in told["passes"]:
            now[f"pass {text}"] = now.get(f"pass {text}", 0.0) + seconds
        now["nodes"] = told["nodes"]
        least = {name: min(seconds, least.get(name, seconds)) for name, seconds in now.items()}
    return least


def measure(layers: int, repeat: int) -> int:
    """Print the times; see the module for the exit code."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.save(folder / "gpt.onnx", "gpt", weights="none", layers=layers)
        tensors = {"tensors": models.annotations("gpt", layers=layers)}
        (folder / "gpt.json").write_text(json.dumps(tensors), encoding="utf-8")
        start = best(repeat, sys.executable, "-c", "pass")[0]
        process, clock, _ = best(
            repeat,
            *(
                sys.executable,
                "-c",
                COMMAND,
                "partition",
                "--no-cache",
                str(folder / "gpt.onnx"),
                "-o",
                str(folder / "out"),
            ),
            *("--mesh", MESH, "--shardings", str(folder / "gpt.json"), "--weights", "none", "--force"),
        )
        found = steps(repeat, folder)
    passes = {name.removeprefix("pass "): seconds for name, seconds in found.items() if name.startswith("pass ")}
    total = sum(passes.values())
    parts = {
        "start of Python": start,
        "imports": found["imports"],
        "load and annotate": found["load and annotate"],
        "passes": total,
        "plan, and layers put in": found["passes and plan"] - total,
        "write (4 parts and plan.json)": found["write"],
    }
    print(f"gpt of {layers} layers, {found['nodes']:,} nodes, {MESH}, --weights none; the least of {repeat} runs")
    for name, seconds in parts.items():
        print(f"  {name:32}{seconds:7.3f} s")
    print(f"  {'command line and tables':32}{max(0.0, process - sum(parts.values())):7.3f} s")
    targets = f"under {MOST_SECONDS:.0f} s, of which passes at most {MOST_PASSES:.0f} s"
    print(f"  {'the process':32}{process:7.3f} s, by the clock {clock:.3f} s     (target: {targets})")
    print("passes")
    for name, seconds in passes.items():
        print(f"  {name:32}{seconds:7.3f} s")
    return 0 if process < MOST_SECONDS and total <= MOST_PASSES else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeat", type=int, default=5, help="the least of this many runs (default 5)")
    options = parser.parse_args(arguments)
    return measure(options.layers, options.repeat)


if __name__ == "__main__":
    sys.exit(main())
