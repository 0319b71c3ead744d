"""Training by irpar against PyTorch: losses and parameters of 20 steps.

    python benchmarks/training_curves.py [--only GLOB]... [--optimizer NAME]... [--steps N] [--write]

A step is made by irpar.train_step and run on one rank: in float64 by irpar's own kernels, in float32 by stock ONNX
Runtime, state going in and out. PyTorch trains an interpreter of the same ONNX file (torch_reference.py) with
torch.optim, in float64 and in float32. Figures: the largest difference of a parameter after the last step over the
largest element of that parameter, of float64 and of float32 in ONNX Runtime from PyTorch's float64; the largest
difference of a loss of float32 from that, relative, and the same of PyTorch's own float32. --write puts the table into
benchmarks/results/training_curves.md.

Adam divides gradients by their size, so that those that are zero but for rounding (biases of keys) become steps of the
learning rate in either direction: parameters whose gradients are all below 1e-12 of the largest are left out of its
rows.

Exit code 1 where float64 differs by more than 1e-9 (1e-6 where ONNX has an operator of the model without float64, so
that the step is made in float32 and computed in float64), or the losses of float32 by more than 1e-4 and by more than
ten times what PyTorch's own differ by. Without PyTorch nothing is compared, and it says so.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import irpar
from irpar import models
from irpar.ir import DType, Module
from irpar.onnx_io import to_proto
from irpar.output.writer import first_tensors

sys.path.insert(0, str(Path(__file__).resolve().parent))

from gradients import Case, as_float64, bound, cases, is_parameter

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "training_curves.md"
RATES = {"sgd": 0.05, "momentum": 0.02, "adam": 1e-3, "adamw": 1e-3, "lamb": 1e-3}
CLASSES = ("gpt", "llama", "resnet")
"""Families whose outputs are scores of classes."""
Array = np.ndarray[Any, Any]


@dataclass
class Curve:
    """What a training run gave: the loss of each step, and the parameters after the last one."""

    losses: list[float]
    parameters: dict[str, Array]


def batches(module: Module, given: Mapping[str, Array], steps: int) -> list[dict[str, Array]]:
    """Inputs of each step, the target included."""
    random = np.random.default_rng(1)
    found = []
    for _ in range(steps):
        batch = {}
        for value in module.graph.inputs:
            name, type_ = value.source_name, value.tensor_type
            if value in module.graph.states or name == "learning_rate":
                continue
            if name in given:
                batch[name] = given[name]
            elif type_.dtype.is_float:
                batch[name] = random.standard_normal(type_.static_shape).astype(type_.dtype.numpy)
            elif type_.dtype.numpy == np.bool_:
                batch[name] = np.ones(type_.static_shape, bool)
            else:
                batch[name] = random.integers(0, 2, type_.static_shape).astype(type_.dtype.numpy)
        found.append(batch)
    return found


def by_irpar(step: Module, data: Sequence[Mapping[str, Array]], rate: float) -> Curve:
    """On one rank, by irpar's kernels."""
    with irpar.partition(step, "d=1").session(engine="numpy") as session:
        losses = [float(session.run({**batch, "learning_rate": np.asarray(rate)})["loss"]) for batch in data]
        state = session.read_all()
    names = [value.source_name for value, known in step.graph.states.items() if known.kind == "parameter"]
    return Curve(losses, {name: state[name] for name in names})


def by_onnx_runtime(step: Module, data: Sequence[Mapping[str, Array]], rate: float) -> Curve:
    """In stock ONNX Runtime."""
    model = to_proto(step)
    onnx.checker.check_model(model, full_check=True)
    assert not {node.domain for node in model.graph.node} - {""}, "operators of other domains"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    graph = step.graph
    replaced = {graph.output_names[known.output]: value for value, known in graph.states.items() if known.output}
    first = first_tensors(graph)
    state = {
        value.source_name: first[value.source_name].numpy()
        if value.source_name in first
        else np.zeros(value.shape, value.dtype.numpy)
        for value in graph.states
    }
    names = [value.name for value in session.get_outputs()]
    losses = []
    for batch in data:
        feeds = {**batch, **state, "learning_rate": np.asarray(rate, np.float32)}
        results = dict(zip(names, session.run(None, feeds), strict=True))
        losses.append(float(results["loss"]))
        state |= {value.source_name: results[name] for name, value in replaced.items()}
    return Curve(
        losses, {v.source_name: state[v.source_name] for v, s in graph.states.items() if s.kind == "parameter"}
    )


def by_pytorch(
    case: Case, data: Sequence[Mapping[str, Array]], optimizer: str, rate: float, names: Sequence[str], dtype: str
) -> tuple[Curve, dict[str, float]]:
    """With torch.optim; and the largest gradient of each parameter."""
    import torch
    from torch.nn import functional
    from torch_reference import Interpreter

    interpreter = Interpreter(getattr(torch, dtype), trains=True)
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in case.model.graph.initializer}
    leaves = {name: interpreter.tensor(arrays[name]).requires_grad_() for name in names}
    makers = {
        "sgd": lambda given: torch.optim.SGD(given, rate),
        "momentum": lambda given: torch.optim.SGD(given, rate, momentum=0.9),
        "adam": lambda given: torch.optim.Adam(given, rate),
        "adamw": lambda given: torch.optim.AdamW(given, rate),
    }
    update = makers[optimizer](list(leaves.values()))
    losses: list[float] = []
    largest = dict.fromkeys(names, 0.0)
    output = case.model.graph.output[0].name
    for batch in data:
        given = dict(batch)
        target = interpreter.tensor(given.pop("target"))
        scores = interpreter.run(case.model, given, leaves)[output]
        if target.dtype == torch.int64:
            loss = functional.cross_entropy(scores.reshape(-1, scores.shape[-1]), target.reshape(-1))
        else:
            loss = functional.mse_loss(scores, target)
        update.zero_grad()
        loss.backward()
        for name, leaf in leaves.items():
            if leaf.grad is None:  # In a branch that was not taken: torch.optim would leave it out of the update.
                leaf.grad = torch.zeros_like(leaf)
            largest[name] = max(largest[name], float(leaf.grad.abs().max()))
        update.step()
        losses.append(float(loss.detach()))
    return Curve(losses, {name: leaf.detach().numpy() for name, leaf in leaves.items()}), largest


def largest_difference(found: Curve, expected: Curve, names: Sequence[str]) -> tuple[float, str]:
    """Of a parameter, over the largest element of it."""
    worst, which = 0.0, ""
    for name in names:
        wanted = expected.parameters[name]
        share = float(np.abs(found.parameters[name] - wanted).max(initial=0.0)) / max(
            np.abs(wanted).max(initial=0), 1e-3
        )
        if not share <= worst:
            worst, which = share, name
    return worst, which


def difference_of_losses(found: Curve, expected: Curve) -> float:
    """The largest, relative."""
    pairs = zip(found.losses, expected.losses, strict=True)
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)


def measure(case: Case, optimizer: str, steps: int) -> tuple[str, bool]:
    """A line of the table, and whether it is within the limits."""
    module = bound(case)
    loss = "cross_entropy" if case.name.split("_")[0] in CLASSES else "mse"
    rate = RATES[optimizer]
    trained = [initializer.name for initializer in case.model.graph.initializer if is_parameter(initializer)]
    options: dict[str, Any] = {"loss": loss, "optimizer": optimizer}
    start = time.perf_counter()
    options["trainable"] = _floats_only(module, trained)
    try:
        step, limit = irpar.train_step(module, **options), 1e-9
        try:
            wide = irpar.train_step(as_float64(module), **options)
        except irpar.IrparError:  # ONNX has some operators without float64, of which a step takes others.
            wide, limit = as_float64(step), 1e-6  # Its constants have been float32.
    except irpar.IrparError as error:
        return f"| {case.name} | {optimizer} | refused: {error.what} | | | | |", False
    seconds = time.perf_counter() - start
    data = batches(step, case.inputs, steps)
    wide_data = [{k: a.astype(np.float64) if a.dtype.kind == "f" else a for k, a in batch.items()} for batch in data]
    names = [v.source_name for v, s in step.graph.states.items() if s.kind == "parameter" and s.output is not None]
    expected, largest = by_pytorch(case, data, optimizer, rate, names, "float64")
    theirs, _ = by_pytorch(case, data, optimizer, rate, names, "float32")
    ours = by_irpar(wide, wide_data, rate)
    stock = by_onnx_runtime(step, data, rate)
    least = 1e-12 * max(largest.values()) if optimizer.startswith("adam") else -1.0
    compared = [name for name in names if largest[name] > least]
    worst, which = largest_difference(ours, expected, compared)
    narrow, _ = largest_difference(stock, expected, compared)
    narrow_loss, their_loss = difference_of_losses(stock, expected), difference_of_losses(theirs, expected)
    is_half = any(value.dtype is DType.F16 for value in step.graph.inputs)
    fine = worst <= limit, narrow_loss <= (1e-2 if is_half else max(1e-4, 10 * their_loss))
    columns = (
        case.name,
        optimizer,
        f"{len(compared)} of {len(names)}",
        f"{worst:.1e}" + ("" if fine[0] else f" ({which})"),
        f"{narrow:.1e}",
        f"{narrow_loss:.1e}",
        f"{their_loss:.1e}",
        f"{expected.losses[0]:.4f} to {expected.losses[-1]:.4f}",
        f"{seconds:.2f}",
    )
    return f"| {' | '.join(map(str, columns))} |", all(fine)


def _floats_only(module: Module, names: Sequence[str]) -> tuple[str, ...]:
    """The parameters of a model without running statistics."""
    from irpar.passes.training_mode import running_statistics

    statistics = {value.source_name for value in running_statistics(module)}
    return tuple(name for name in names if name not in statistics)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="GLOB", help="names of models (default: builders)")
    parser.add_argument("--optimizer", action="append", choices=["sgd", "momentum", "adam", "adamw"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: nothing is compared")
        return 0
    lines = [
        "| model | optimizer | parameters | float64 | float32 | loss, float32 | of PyTorch | loss | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    bad = 0
    for case in cases():
        named = any(fnmatchcase(case.name, pattern) for pattern in options.only or ())
        if not (named or (not options.only and case.name.split("-")[0] in models.FAMILIES)):
            continue
        for optimizer in options.optimizer or ("sgd", "adamw"):
            line, ok = measure(case, optimizer, options.steps)
            print(line, "" if ok else "<-", flush=True)
            lines.append(line)
            bad += not ok
    if options.write:
        RESULT.write_text(
            "# Training against PyTorch\n\n`python benchmarks/training_curves.py --write`: 20 steps; see the script "
            "for what the columns are.\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
