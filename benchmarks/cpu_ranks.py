"""Ranks on the cores of one machine: a model cut over them, and all-reduce, for each way that ranks can be joined.

    python benchmarks/cpu_ranks.py                     a gpt of GPT-2's size over tp=2 and tp=8: medians of 15 runs
    python benchmarks/cpu_ranks.py --preset tiny       the same for a small one, in seconds
    python benchmarks/cpu_ranks.py --write             and write benchmarks/results/cpu_ranks.{json,md}

Groups: threads (all ranks in one process), processes (irpar launch), mpi (mpiexec; where mpi4py and an MPI are there).
The yardsticks, in the same run: ONNX Runtime on the whole model, with one thread and with two, on the same cores; MPI's
own all-reduce of the same arrays; and of a chain of tiny nodes with an all-reduce behind each, the same sessions and
sums in a loop by hand, of both ranks in one process. There is no target: one machine's cores and memory are the same
for all.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import irpar
from irpar import models
from irpar.ir import parse_module
from irpar.runtime.executor import Executor
from irpar.runtime.groups import Call, Collective, Group, make_group
from irpar.runtime.specs import input_specs
from irpar.sharding import Axis, Mesh
from irpar.verification.inputs import random_inputs

RANKS = 2
MANY = 8
"""Ranks that share the cores."""
HEADS = 16
"""Of the same model once more, for `MANY` ranks: the 12 of GPT-2 do not divide by them, so that their program gathers
what that of `RANKS` does not."""
SIZES = {"1 KB": 1 << 10, "64 KB": 64 << 10, "1 MB": 1 << 20, "16 MB": 16 << 20, "64 MB": 64 << 20}
CALLS = {"1 KB": 500, "64 KB": 200, "1 MB": 100, "16 MB": 25, "64 MB": 9}
"""All-reduces that a figure is the median of."""
WARM = 3
CHAIN = 200
"""Tiny nodes with an all-reduce behind each."""
BY_HAND = "by hand, one process"
MPI = "MPI's own"
RESULTS = Path(__file__).parent / "results"
Seconds = dict[str, float]


def main() -> int:
    """Measure all, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small", help="of the gpt: small (GPT-2), tiny ...")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a run (default 64)")
    parser.add_argument("--runs", type=int, default=15, help="runs of each (default 15)")
    parser.add_argument("--rounds", type=int, default=3, help="all of it so many times, the best medians count (3)")
    parser.add_argument("--write", action="store_true", help="write the results beside this script")
    parser.add_argument("--work", nargs=4, metavar=("GROUP", "RANKS", "FOLDER", "RUNS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        group, ranks, folder, runs = options.work
        return work(group, int(ranks), Path(folder), int(runs))
    with tempfile.TemporaryDirectory() as place:
        found = measure(options.preset, options.seq, options.runs, options.rounds, Path(place))
    print(report(found))
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "cpu_ranks.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "cpu_ranks.md").write_text(report(found))
    return 0


def measure(preset: str, seq: int, runs: int, rounds: int, place: Path) -> dict[str, Any]:
    """All figures: medians in seconds, the best of some rounds in turn, since other load comes and goes."""
    original = place / "gpt.onnx"
    for folder, ranks, heads in (("even", MANY, {"heads": HEADS}), (str(MANY), MANY, {}), (str(RANKS), RANKS, {})):
        models.save(original, "gpt", preset=preset, seq=seq, **heads)
        module = irpar.load(original)
        irpar.annotate(module, models.annotations("gpt", None, "tp", preset=preset, seq=seq, **heads))
        irpar.partition(module, Mesh({"tp": ranks})).save(place / folder)
    steps: Seconds = {}
    chains: Seconds = {}
    reduced: dict[str, Seconds] = {}
    for _ in range(rounds):
        for threads in (1, 2):
            name = f"ONNX Runtime, whole model, {threads} thread{'s' * (threads > 1)}"
            keep_best(steps, {name: whole(original, threads, runs)})
        keep_best(chains, {BY_HAND: by_hand(runs)})
        for group in groups():
            told = by_ranks(group, RANKS, place / str(RANKS), runs)
            many = by_ranks(group, MANY, place / str(MANY), runs)
            keep_best(steps, {f"irpar, {RANKS} ranks, {group}": told["step"]})
            keep_best(steps, {f"irpar, {MANY} ranks, {group}": many["step"]})
            even = by_ranks(group, MANY, place / "even", runs)
            keep_best(steps, {f"irpar, {MANY} ranks, {group}, {HEADS} heads": even["step"]})
            keep_best(chains, {group: told["chain"]})
            for name, found in told["all_reduce"].items():
                keep_best(reduced.setdefault(name, {}), found)
    facts = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg(), "python": platform.python_version()}
    facts |= {"onnxruntime": onnxruntime.__version__, "numpy": np.__version__}
    model = f"gpt {preset}, {seq} tokens"
    return {
        "model": model,
        "runs": runs,
        "rounds": rounds,
        "steps": steps,
        "chain": chains,
        "all_reduce": reduced,
        "facts": facts,
    }


def keep_best(best: Seconds, found: Seconds) -> None:
    """Take over what is shorter."""
    best.update({name: min(seconds, best.get(name, seconds)) for name, seconds in found.items()})


def by_ranks(group: str, ranks: int, folder: Path, runs: int) -> dict[str, Any]:
    """What rank 0 of a group measured: the step, and of `RANKS` ranks all else."""
    work_ = [sys.executable, __file__, "--work", group, str(ranks), str(folder), str(runs)]
    done = subprocess.run([*start(group, ranks), *work_], capture_output=True, text=True, env=environment())
    if done.returncode:
        raise SystemExit(f"{group} failed:\n{done.stderr}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def groups() -> list[str]:
    """What is installed."""
    has_mpi = mpiexec() is not None and importlib.util.find_spec("mpi4py") is not None
    return ["threads", "processes", *(["mpi"] if has_mpi else [])]


def mpiexec() -> str | None:
    """Where it is: that of this environment first."""
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def start(group: str, ranks: int) -> list[str]:
    """How the ranks of a group are started."""
    launch = [sys.executable, "-P", "-m", "irpar.cli", "launch", "-n", str(ranks)]
    return {"threads": [], "processes": launch, "mpi": [mpiexec() or "mpiexec", "-n", str(ranks)]}[group]


def environment() -> dict[str, str]:
    """For the ranks: no more threads than cores, whoever starts them."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def whole(original: Path, threads: int, runs: int) -> float:
    """The median of runs of the whole model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(original, options, providers=["CPUExecutionProvider"])
    module = irpar.load(original)
    inputs = random_inputs(input_specs(module.graph), module.graph)
    return median(lambda: session.run(None, inputs), runs)


def median(run: Callable[[], Any], runs: int) -> float:
    """Of so many runs, after a few to warm up."""
    seconds = []
    for number in range(runs + WARM):
        start = time.perf_counter()
        run()
        if number >= WARM:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def work(name: str, ranks: int, folder: Path, runs: int) -> int:
    """What a rank does; rank 0 prints its figures."""
    with Executor.open(folder, engine="ort", group=name) as executor:
        step = 0.0
        if executor.is_driver:
            inputs = random_inputs(executor.inputs, executor.parts[0].graph)
            step = median(lambda: executor.run(inputs), runs)
        else:
            executor.serve()
    if ranks != RANKS:
        if executor.is_driver:
            print(json.dumps({"step": step}), flush=True)
        return 0
    chain = 0.0
    module = parse_module(chain_text())
    with Executor(module, module.mesh, engine="ort", group=name) as executor:
        if executor.is_driver:
            x = np.ones(16, np.float32)
            chain = median(lambda: executor.run({"x": x}), 4 * runs)
        else:
            executor.serve()
    mesh = Mesh({"tp": RANKS})
    group = make_group(name, mesh)
    reduced = {name: {size: all_reduce(group, mesh, nbytes, CALLS[size]) for size, nbytes in SIZES.items()}}
    if name == "mpi":
        reduced[MPI] = {size: mpi_all_reduce(nbytes, CALLS[size]) for size, nbytes in SIZES.items()}
    group.close()
    if 0 in group.ranks:
        print(json.dumps({"step": step, "chain": chain, "all_reduce": reduced}), flush=True)
    return 0


def chain_text() -> str:
    """A program whose nodes take no time: what is left is the executor's."""
    value, lines = "x", []
    for number in range(CHAIN):
        lines.append(f"  %p{number} = Mul(%{value}, %half) : f32[16]")
        lines.append(f'  %r{number} = irpar.AllReduce(%p{number}) {{axes=["tp"], id={number}, reduce="sum"}} : f32[16]')
        value = f"r{number}"
    ranks = ", ".join(map(str, range(RANKS)))
    return "\n".join(
        [
            f'mesh @m = ["tp"={RANKS}]',
            f"graph local @chain(%x: f32[16]) -> (%{value}) opset 21 ranks [{ranks}] {{",
            f"  %half = constant : f32[16] [{', '.join(['0.5'] * 16)}]",
            *lines,
            "}",
        ]
    )


def by_hand(runs: int) -> float:
    """The chain in a loop: a session for each node, bound once for each rank, and NumPy's sum."""
    half = onnx.numpy_helper.from_array(np.full(16, 0.5, np.float32), "half")
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> node (float[16] x) => (float[16] y) { y = Mul (x, half) }'
    )
    model.graph.initializer.append(half)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    nodes = []
    for _ in range(CHAIN):
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        bound = []
        for _ in range(RANKS):
            binding, x, y = session.io_binding(), np.empty(16, np.float32), np.empty(16, np.float32)
            binding.bind_input("x", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
            binding.bind_output("y", "cpu", 0, y.dtype, y.shape, y.ctypes.data)
            bound.append((binding, x, y))
        nodes.append((session, bound))

    def run() -> Any:
        value = np.ones(16, np.float32)
        for session, bound in nodes:
            for binding, x, _ in bound:
                x[...] = value
                session.run_with_iobinding(binding)
            value = np.add(bound[0][2], bound[1][2])
        return value

    return median(run, 4 * runs)


def mpi_all_reduce(nbytes: int, calls: int) -> float:
    """The median of so many all-reduces of f32 by MPI itself, in the job that runs."""
    from mpi4py.MPI import COMM_WORLD

    operand, result = np.ones(nbytes // 4, np.float32), np.empty(nbytes // 4, np.float32)
    return median(lambda: COMM_WORLD.Allreduce(operand, result), calls)


def all_reduce(group: Group, mesh: Mesh, nbytes: int, calls: int) -> float:
    """The median of so many all-reduces of f32."""
    collective = Collective("AllReduce", 0, (Axis("tp"),))
    brought = {rank: (rank, mesh.coords(rank), collective, np.ones(nbytes // 4, np.float32)) for rank in group.ranks}

    def run() -> None:
        waiting = {rank: Call(*each) for rank, each in brought.items()}
        while waiting:
            for rank in group.exchange(waiting):
                del waiting[rank]

    return median(run, calls)


def report(found: dict[str, Any]) -> str:
    """The figures as Markdown."""
    facts = found["facts"]
    lines = [
        f"# Ranks on {facts['cores']} cores",
        "",
        f"Written by `python benchmarks/cpu_ranks.py --write`; load {facts['load'][0]:.1f} at the end, Python "
        f"{facts['python']}, ONNX Runtime {facts['onnxruntime']}, NumPy {facts['numpy']}.",
        "",
        f"| {found['model']}; median of {found['runs']}, best of {found['rounds']} rounds | ms |",
        "|---|---|",
        *(f"| {name} | {seconds * 1e3:.1f} |" for name, seconds in found["steps"].items()),
        "",
        f"| {CHAIN} all-reduces between tiny nodes | ms | of by hand |",
        "|---|---|---|",
        *(
            f"| {name} | {seconds * 1e3:.1f} | {seconds / found['chain'][BY_HAND]:.1f} |"
            for name, seconds in found["chain"].items()
        ),
        "",
        f"| all-reduce of f32, {RANKS} ranks | {' | '.join(SIZES)} |",
        "|---|" + "---|" * len(SIZES),
        *(
            f"| {group} | {' | '.join(figure(seconds[size], nbytes) for size, nbytes in SIZES.items())} |"
            for group, seconds in found["all_reduce"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def figure(seconds: float, nbytes: int) -> str:
    """A time, and the bytes of the operand over it."""
    time_ = f"{seconds * 1e6:,.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:,.1f} ms"
    return f"{time_}, {nbytes / seconds / 1e9:.2f} GB/s"


if __name__ == "__main__":
    sys.exit(main())
