"""Weights that stream from disk through a device with room for a few layers; what models of ZeRO-Infinity's sizes need.

    OPENBLAS_NUM_THREADS=1 python benchmarks/storage.py [--write] [--gb 4] [--folder FOLDER] [--only TABLE]

The first table: an MLP of random weights, by default 4 GB, runs with `store{weights=disk}` and a limit of 512 MB,
straight from the model's own file of weights. What it reads a second stands beside what the disk gives to one that only
reads, in the same run, both past the system's cache; the memory of the process is that above what it had before it ran.
Results are compared with ONNX Runtime's, in a process of its own. A core is left to the disk.

The second: a step of training of the models of ZeRO-Infinity (Rajbhandari et al., 2021, table 1: layers, hidden size),
in bfloat16 with Adam over the 16 GPUs of a DGX-2, planned from shapes: ZeRO's stage 3, layers recomputed, all else
on disk, brought when it is read. What a GPU (32 GB) and the node's disk (28 TB) hold follows from two shallow ones, for
layers are alike. --write puts both into benchmarks/results/storage.md.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak
from irpar.ir import Memory
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.memory_order import MemoryOrder
from irpar.passes.recompute import Recompute
from irpar.passes.store import Store
from irpar.passes.zero import Zero
from irpar.runtime.storage.direct_file import DirectFile, aligned

RESULT = Path(__file__).resolve().parent / "results" / "storage.md"
WIDTH, BATCH, PREFETCH, LIMIT = 4096, 1, 4, 0.512
LAYER_BYTES = 4 * WIDTH * (WIDTH + 1)
MOST_ABOVE = 200_000_000
"""Bytes of a process above its limit."""
LEAST_SHARE = 0.8
"""Of the rate at which the disk is read by one that does nothing else."""
PIECE, ROUNDS = 4 << 20, 3
"""Bytes of a read; how often both are tried in turn, of which the best counts."""
SIZES = {"0.1T": (80, 10 * 1024, 128), "0.5T": (100, 20 * 1024, 160), "1T": (128, 25 * 1024, 256)}
"""Layers, hidden size and heads."""
DEPTHS = (2, 4)
"""Layers of the models that are planned, of which larger ones follow."""
NODE = {"device": 32e9, "host": 1.5e12, "disk": 28e12}
GPUS, SEQUENCE, VOCABULARY = 16, 1024, 50304
Array = np.ndarray[Any, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/storage.md")
    parser.add_argument("--gb", type=float, default=4, help="size of the weights")
    parser.add_argument("--folder", help="where the weights lie; a temporary one if not given")
    parser.add_argument("--only", choices=["streaming", "capacities"], help="one of the tables")
    asked = parser.parse_args(arguments)
    missed: list[str] = []
    parts = ["# Storage\n\nWritten by `python benchmarks/storage.py --write`."]
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        if asked.only != "capacities":
            parts.append(streaming(Path(folder), asked.gb, missed))
        if asked.only != "streaming":
            parts.append(capacities(Path(folder), missed))
    text = "\n\n".join(parts) + "\n"
    print(text)
    if asked.write:
        RESULT.write_text(text)
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if missed else 0


# -- streaming ----------------------------------------------------------------------------------------------------


def streaming(folder: Path, size_gb: float, missed: list[str]) -> str:
    """The table of a run; what is not as it should be goes into `missed`."""
    model = folder / "mlp.onnx"
    layers = round(size_gb * 1e9 / LAYER_BYTES)
    models.save(model, "mlp", weights="external", width=WIDTH, hidden=WIDTH, layers=layers, batch=BATCH)
    os.sync()
    x = np.random.default_rng(0).standard_normal((BATCH, WIDTH), np.float32)
    store = Store(weights="disk", prefetch=PREFETCH, limit_gb=LIMIT)
    made = irpar.partition(irpar.load(model), "d=1", pipeline=composed(None, [store]))
    with made.executor(engine="numpy") as executor:
        before, plain, seconds = highest_memory(), 0.0, math.inf
        for _ in range(ROUNDS):
            plain = max(plain, sequential_rate(model.with_suffix(".onnx.data")))
            begin = time.perf_counter()
            found = executor.run({"x": x})["y"]
            seconds = min(seconds, time.perf_counter() - begin)
        above = highest_memory() - before
        copied, differences = executor.log.copies.copied_bytes, executor.log.copies.differences(made.plan.copies)
        notes = executor.notes
    worst = float(np.abs(found - by_onnx_runtime(model, x)).max() / np.abs(found).max())
    weights = sum(value.tensor_type.nbytes for value in made.parts[0].graph.constants if value.memory == "disk")
    checks = {
        f"{above:,} bytes above the memory before": above <= LIMIT * 1e9 + MOST_ABOVE,
        f"{copied / seconds / plain:.2f} of the disk's rate": copied >= LEAST_SHARE * plain * seconds,
        f"results differ by {worst:.1e}": worst <= 1e-5,
        f"{copied:,} bytes copied, {weights:,} bytes of weights": copied == weights and not differences,
    }
    missed.extend(told for told, is_right in checks.items() if not is_right)
    rows = [
        "| weights | limit | peak of the plan | memory above that before | copied | read | disk alone | share "
        "| results differ by |",
        "|---|---|---|---|---|---|---|---|---|",
        f"| {weights / 1e9:.2f} GB in {layers} layers | {LIMIT * 1e3:.0f} MB "
        f"| {made.plan.ranks[0]['peak_bytes'] / 1e6:.0f} MB | {above / 1e6:.0f} MB "
        f"| {copied / 1e9:.2f} GB | {copied / seconds / 1e9:.2f} GB/s | {plain / 1e9:.2f} GB/s "
        f"| {copied / seconds / plain:.2f} | {worst:.1e} |",
    ]
    return "\n".join([*rows, *([""] if notes else []), *notes])


def highest_memory() -> int:
    """The most memory that this process has had since this was asked last, in bytes."""
    text = Path("/proc/self/status").read_text()
    found = next(line for line in text.splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(found.split()[1]) * 1024


def sequential_rate(path: Path) -> float:
    """Bytes a second that the disk gives to one that reads a file from the beginning, past the system's cache."""
    file, memory = DirectFile.of_path(path), aligned(PIECE)
    size = file.size() // PIECE * PIECE
    begin = time.perf_counter()
    for position in range(0, size, PIECE):
        file.read(memory, position, PIECE)
    seconds = time.perf_counter() - begin
    file.close()
    return size / seconds


_ORIGINAL = """
import sys, numpy, onnxruntime
model, given, found = sys.argv[1:]
(y,) = onnxruntime.InferenceSession(model).run(None, {"x": numpy.load(given)})
numpy.save(found, y)
"""


def by_onnx_runtime(model: Path, x: Array) -> Array:
    """What the original computes."""
    given, found = model.with_name("x.npy"), model.with_name("y.npy")
    np.save(given, x)
    subprocess.run([sys.executable, "-c", _ORIGINAL, str(model), str(given), str(found)], check=True)
    made: Array = np.load(found)
    return made


# -- capacities ---------------------------------------------------------------------------------------------------


def capacities(folder: Path, missed: list[str]) -> str:
    """The table of what lies where on a node; what does not fit goes into `missed`.

    Layers are alike, so two depths tell what each more takes; what a GPU holds at most must not depend on them.
    """
    rows = [
        "| parameters | layers, hidden size | on disk, bytes a parameter | a GPU of 32 GB | disk of 28 TB |",
        "|---|---|---|---|---|",
    ]
    for name, (layers, hidden, heads) in SIZES.items():
        (few, first), (more, second) = (planned(folder, depth, hidden, heads) for depth in DEPTHS)
        parameters = few + (more - few) // (DEPTHS[1] - DEPTHS[0]) * (layers - DEPTHS[0])
        held = {memory: at_depth(first[memory], second[memory], layers) for memory in first}
        disk = GPUS * held["disk"]
        for memory, size in {"device": held["device"], "host": GPUS * held["host"], "disk": disk}.items():
            if size > NODE[memory]:
                missed.append(f"{name}: {size:,} bytes in {memory}")
        rows.append(
            f"| {parameters / 1e12:.2f} 10^12 | {layers}, {hidden:,} | {disk / parameters:.2f} "
            f"| {held['device'] / 1e9:.1f} GB | {disk / 1e12:.1f} TB |"
        )
    return "\n".join(rows)


def at_depth(first: int, second: int, layers: int) -> int:
    """What so many layers hold, of what the two DEPTHS do."""
    return first + (second - first) * (layers - DEPTHS[0]) // (DEPTHS[1] - DEPTHS[0])


def planned(folder: Path, layers: int, hidden: int, heads: int) -> tuple[int, dict[Memory, int]]:
    """How many parameters a model has, and what one rank of its step holds."""
    model = folder / "gpt.onnx"
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "seq": SEQUENCE, "vocab": VOCABULARY, "batch": GPUS}
    size = models.save(model, "gpt", weights="none", **shape)
    step = irpar.train_step(irpar.load(model), precision="bf16", optimizer="adam")
    for name in ("input_ids", "target"):
        step.shard(name, ["dp", None])
    programs = [Recompute(match=("h.*/*",)), MemoryOrder(), Store("disk", "disk", "disk", prefetch=0)]
    made = irpar.partition(step, f"dp={GPUS}", pipeline=composed(Zero(3, threshold_kb=0), programs))
    memories: tuple[Memory, ...] = ("device", "host", "disk")
    return size.parameters, {
        memory: max(peak(part.graph, memory=memory).total_bytes for part in made.parts) for memory in memories
    }


if __name__ == "__main__":
    raise SystemExit(main())
