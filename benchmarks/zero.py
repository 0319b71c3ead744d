"""ZeRO's memory and volume from plans, against the paper's formulas; and a step beside PyTorch's FSDP2, in one run.

    python benchmarks/zero.py [--write]

The first table is of plans alone: a gpt in bfloat16 with AdamW over dp=64, in bytes a parameter, and what that is for
7.5 billion parameters (Rajbhandari et al., 2020, figure 1), in units of 10^9 bytes. What a rank sends is counted in
elements of 16 bits, over the number of parameters.

The second runs an MLP over two ranks: irpar's step in threads, and PyTorch's `fully_shard` of each layer in two
processes over gloo, both with AdamW in float32 on the same batches: losses, and the bytes that a rank sends in a step.
Without PyTorch it says so. --write puts both into benchmarks/results/zero.md.
"""

import argparse
import importlib.util
import json
import math
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import irpar
from irpar import models
from irpar.ir import Module, clone_module
from irpar.pass_manager.default_pipeline import with_zero
from irpar.passes.zero import Zero

RESULT = Path(__file__).resolve().parent / "results" / "zero.md"
RANKS, K, BILLIONS = 64, 12, 7.5
GPT = {"layers": 6, "hidden": 512, "heads": 8, "seq": 512, "vocab": 512, "batch": RANKS}
WAYS: dict[str, Zero | None] = {
    "none": None,
    "stage 1": Zero(1, threshold_kb=0),
    "stage 2": Zero(2, threshold_kb=0),
    "stage 3": Zero(3, threshold_kb=0),
    "stage 3, gathered once": Zero(3, threshold_kb=0, regather=False),
}
PAPER = {"none": (4 + K, 2), "stage 1": (4 + K / RANKS, 2), "stage 2": (2 + (2 + K) / RANKS, 2)}
PAPER |= {"stage 3": ((4 + K) / RANKS, 3)}
WIDTH, HIDDEN, LAYERS, BATCH, STEPS, RATE = 256, 512, 4, 2048, 6, 1e-3
MOST_APART = 1e-4
"""Losses of float32, as parts of themselves."""
Array = np.ndarray[Any, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where a plan is above the paper, or a step sends more than FSDP2 or learns otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/zero.md")
    asked = parser.parse_args(arguments)
    missed: list[str] = []
    text = "\n\n".join([HEAD, from_plans(missed), beside_fsdp(missed)]) + "\n"
    print(text)
    if asked.write:
        RESULT.write_text(text)
    for each in missed:
        print(f"missed: {each}", file=sys.stderr)
    return 1 if missed else 0


HEAD = "# ZeRO\n\nWritten by `python benchmarks/zero.py --write`."


# -- plans --------------------------------------------------------------------------------------------------------


def from_plans(missed: list[str]) -> str:
    """The table of memory and volume; what is above the paper goes into `missed`."""
    step = irpar.train_step(models.build("gpt", **GPT), precision="bf16", optimizer="adamw")
    for name in ("input_ids", "target"):
        step.shard(name, ["dp", None])
    count = parameters(step)
    rows = [
        f"| gpt, bfloat16, AdamW, dp={RANKS}: bytes a parameter | parameters | gradients | optimizer | together "
        f"| paper | of {BILLIONS:g} 10^9 parameters | paper | sent / parameters | paper |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, zero in WAYS.items():
        made = planned(step, f"dp={RANKS}", zero)
        memory = made.plan.ranks[0]["memory"]
        tables = sum(value.tensor_type.nbytes for value in made.parts[0].graph.constants)
        kinds = [memory["parameters"] - tables, memory["gradients"], memory["optimizer"]]
        each = [size / count for size in kinds]
        sent = made.plan.totals["sent_bytes"] / 2 / count
        paper, volume = PAPER.get(name, (math.nan, math.nan))
        if sum(each) > 1.01 * paper or sent > 1.01 * volume:
            missed.append(
                f"{name}: {sum(each):.2f} bytes and {sent:.2f} elements a parameter, not {paper} and {volume}"
            )
        cells = [*(f"{size:.3f}" for size in each), f"{sum(each):.2f}", _or_none(paper)]
        cells += [f"{BILLIONS * sum(each):.1f} GB", _or_none(BILLIONS * paper, " GB"), f"{sent:.2f}", _or_none(volume)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    rows.append("")
    rows.append(
        "irpar's stage 1 reduce-scatters gradients as stage 2 does: it sends no more, and holds a share of them."
    )
    return "\n".join(rows)


def _or_none(number: float, unit: str = "") -> str:
    return "" if math.isnan(number) else f"{number:.1f}{unit}" if unit else f"{number:.2f}"


def planned(step: Module, mesh: str, zero: Zero | None) -> irpar.Partition:
    """A step over a mesh, with ZeRO."""
    return irpar.partition(clone_module(step), mesh, pipeline=None if zero is None else with_zero(zero))


def parameters(step: Module) -> int:
    """How many numbers are trained."""
    return sum(math.prod(value.shape) for value, state in step.graph.states.items() if state.is_trained)


# -- beside PyTorch -----------------------------------------------------------------------------------------------


def beside_fsdp(missed: list[str]) -> str:
    """The table of a step over two ranks; what is worse than FSDP2 goes into `missed`."""
    if importlib.util.find_spec("torch") is None:
        return "PyTorch is not installed: no FSDP2 beside it."
    model = models.build("mlp", width=WIDTH, hidden=HIDDEN, layers=LAYERS, batch=BATCH)
    rows = [
        f"| MLP of {LAYERS} layers, AdamW, dp=2, {STEPS} steps | loss, first and last "
        "| all-gather, bytes a step | reduce-scatter | all-reduce |",
        "|---|---|---|---|---|",
    ]
    losses, sent = by_irpar(model)
    others, theirs = by_torch(model)
    for name, curve, kinds in (("irpar, stage 3", losses, sent), ("PyTorch FSDP2", others, theirs)):
        cells = [f"{kinds[kind]:,}" for kind in ("all_gather", "reduce_scatter", "all_reduce")]
        rows.append(f"| {name} | {curve[0]:.6f}, {curve[-1]:.6f} | {' | '.join(cells)} |")
    if sent.total() > theirs.total() + 64:  # Scalars are reduced outside of what is counted there.
        missed.append(f"{sent.total()} bytes a step, and {theirs.total()} of FSDP2")
    worst = max(abs(a - b) / b for a, b in zip(losses, others, strict=True))
    if worst > MOST_APART:
        missed.append(f"losses differ by {worst:.1e}")
    rows += ["", "irpar's bytes are those of its plan, which its log repeats; FSDP2's are counted as it sends them."]
    rows += [f"Losses differ by at most {worst:.1e} of themselves."]
    return "\n".join(rows)


def batches() -> list[tuple[Array, Array]]:
    """The same for both."""
    random = np.random.default_rng(0)
    size = (BATCH, HIDDEN if LAYERS % 2 else WIDTH)
    return [
        (random.standard_normal((BATCH, WIDTH), np.float32), random.standard_normal(size, np.float32))
        for _ in range(STEPS)
    ]


def by_irpar(model: onnx.ModelProto) -> tuple[list[float], Counter[str]]:
    """Losses, and the bytes that a rank sends in a step, by kind."""
    step = irpar.train_step(model, loss="mse", optimizer="adamw", learning_rate=RATE)
    for name in ("x", "target"):
        step.shard(name, ["dp", None])
    made = planned(step, "dp=2", WAYS["stage 3"])
    sent = Counter({kind: entry["sent_bytes"] for kind, entry in made.plan.totals["by_kind"].items()})
    with made.trainer() as trainer:
        return [float(trainer.step({"x": x, "target": target})) for x, target in batches()], sent


def by_torch(model: onnx.ModelProto) -> tuple[list[float], Counter[str]]:
    """The same of FSDP2, in processes of its own."""
    import torch.multiprocessing

    weights = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = Path(name) / "found.json"
        torch.multiprocessing.spawn(_rank, args=(weights, port, str(out)), nprocs=2)
        found = json.loads(out.read_text())
    return found["losses"], Counter(found["sent"])


def _rank(rank: int, weights: dict[str, Array], port: int, out: str) -> None:
    """One process of FSDP2."""
    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    modules: list[nn.Module] = []
    for layer in range(1, LAYERS + 1):
        weight, bias = weights[f"fc{layer}.weight"], weights[f"fc{layer}.bias"]
        linear = nn.Linear(*weight.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weight.T.copy()))
            linear.bias.copy_(torch.from_numpy(bias.copy()))
        modules += [linear, nn.GELU()] if layer < LAYERS else [linear]
    net = nn.Sequential(*modules)
    for module in modules[::2]:
        fully_shard(module)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    losses, counting = [], _counting_mode()
    for number, (x, target) in enumerate(batches()):
        half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
        with counting if number == STEPS - 1 else nullcontext():
            loss = nn.functional.mse_loss(net(torch.from_numpy(x[half])), torch.from_numpy(target[half]))
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append(float(total) / 2)
    if rank == 0:
        Path(out).write_text(json.dumps({"losses": losses, "sent": counting.sent}))
    distributed.destroy_process_group()


def _counting_mode() -> Any:
    """A dispatch mode that counts what a rank of two sends in rings."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Counting(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.sent: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kinds = {
                "_allgather_base_": "all_gather",
                "_reduce_scatter_base_": "reduce_scatter",
                "allreduce_": "all_reduce",
            }
            kind = kinds.get(str(func).removeprefix("c10d.").split(".")[0])
            if kind is not None:
                tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
                whole = max(each.numel() * each.element_size() for each in tensors)
                self.sent[kind] += whole if kind == "all_reduce" else whole // 2
            return func(*args, **(kwargs or {}))

    return Counting()


if __name__ == "__main__":
    sys.exit(main())
