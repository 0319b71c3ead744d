"""One rank's step of training through ONNX Runtime, against PyTorch eager doing the same, in one run.

    python benchmarks/training.py [--layers N] [--threads N]... [--repeat N] [--write]

Models: a GPT of GPT-2 small's width (hidden 768, 12 heads, a vocabulary of 8,192; --layers blocks of its 12, so that
a run takes a minute) on 64 and on 256 tokens, and a ResNet of basic blocks in training mode on 8 images of 64 x 64.
irpar's step is that of irpar.train_step with AdamW in stock ONNX Runtime, state staying in its memory (I/O binding);
PyTorch's is an nn.Module written by hand with its fused operators, torch.optim.AdamW and cross_entropy. Both have the
same number of threads; steps of the two take turns, and the medians are compared. --write puts the table into
benchmarks/results/training.md. `--profile` lists the operators that ONNX Runtime spends its time in.

Without PyTorch nothing is compared, and it says so.
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

import irpar
from irpar import models
from irpar.ir import Module
from irpar.onnx_io import to_proto

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "training.md"
HIDDEN, HEADS, VOCABULARY = 768, 12, 8192
IMAGES, SIZE, CLASSES, WIDTH, BLOCKS = 8, 64, 16, 64, (2, 2)
Array = np.ndarray[Any, Any]


def by_irpar(model: onnx.ModelProto, batch: dict[str, Array], threads: int, profile: bool) -> Callable[[], float]:
    """A step in stock ONNX Runtime, whose state goes round in its own memory."""
    step = irpar.train_step(model, optimizer="adamw", learning_rate=1e-4)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.enable_profiling = profile
    session = onnxruntime.InferenceSession(
        to_proto(step).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    binding = session.io_binding()
    given = {**batch, "learning_rate": np.asarray(1e-4, np.float32)}
    for name, array in given.items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    for name, array in first_state(step).items():
        binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(array))
    names = [value.name for value in session.get_outputs()]
    for name in names:
        binding.bind_output(name)

    def run() -> float:
        session.run_with_iobinding(binding)
        found = dict(zip(names, binding.get_outputs(), strict=True))
        for name, value in found.items():
            if name.endswith(".next"):
                binding.bind_ortvalue_input(name.removesuffix(".next"), value)
                binding.bind_output(name)  # A new buffer: this one is read in the next step.
        return float(found["loss"].numpy())

    if profile:
        profiles.append(session)
    return run


profiles: list[onnxruntime.InferenceSession] = []


def first_state(step: Module) -> dict[str, Array]:
    """What state begins with."""
    return {
        value.source_name: np.zeros(value.shape, value.dtype.numpy) if state.data is None else state.data.numpy()
        for value, state in step.graph.states.items()
    }


def gpt_by_pytorch(layers: int, batch: dict[str, Array]) -> Callable[[], float]:
    """The same GPT as an nn.Module."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            n = self.first(x)
            q, k, v = (
                each(n).unflatten(-1, (HEADS, HIDDEN // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)
            )
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(attended.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.second(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tokens = batch["input_ids"].shape[1]
            self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(tokens, HIDDEN)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            return self.head(self.norm(self.blocks(self.tokens(ids) + self.places.weight)))

    ids, target = torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["target"])
    return _pytorch_step(Gpt(), lambda net: functional.cross_entropy(net(ids).flatten(0, 1), target.flatten()))


def resnet_by_pytorch(batch: dict[str, Array]) -> Callable[[], float]:
    """The same ResNet as an nn.Module, in training mode."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Basic(nn.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
                nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outputs),
            )
            self.short = (
                nn.Identity()
                if stride == 1 and inputs == outputs
                else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            )

        def forward(self, x: Any) -> Any:
            return functional.relu(self.body(x) + self.short(x))

    parts: list[Any] = [nn.Conv2d(3, WIDTH, 7, 2, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
    parts.append(nn.MaxPool2d(3, 2, 1))
    width = WIDTH
    for stage, count in enumerate(BLOCKS):
        for block in range(count):
            outputs = WIDTH * 2**stage
            parts.append(Basic(width, outputs, 2 if stage and not block else 1))
            width = outputs
    net = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)).train()
    pixels, target = torch.from_numpy(batch["pixels"]), torch.from_numpy(batch["target"])
    return _pytorch_step(net, lambda made: functional.cross_entropy(made(pixels), target))


def _pytorch_step(net: Any, loss_of: Callable[[Any], Any]) -> Callable[[], float]:
    import torch

    update = torch.optim.AdamW(net.parameters(), 1e-4)

    def run() -> float:
        update.zero_grad()
        loss = loss_of(net)
        loss.backward()
        update.step()
        return float(loss.detach())

    return run


def medians(first: Callable[[], float], second: Callable[[], float], repeat: int) -> tuple[float, float]:
    """Seconds of a step of each, which take turns."""
    found: tuple[list[float], list[float]] = [], []
    for turn in range(repeat + 2):
        for seconds, run in zip(found, (first, second), strict=True):
            start = time.perf_counter()
            run()
            if turn > 1:  # The first ones find memory.
                seconds.append(time.perf_counter() - start)
    return statistics.median(found[0]), statistics.median(found[1])


def cases(layers: int) -> list[tuple[str, onnx.ModelProto, dict[str, Array], Callable[[dict[str, Array]], Any]]]:
    """Name, model, batch, and what makes PyTorch's step."""
    random = np.random.default_rng(0)
    found: list[Any] = []
    for tokens in (64, 256):
        sizes = {"hidden": HIDDEN, "heads": HEADS, "vocab": VOCABULARY, "layers": layers, "batch": 1, "seq": tokens}
        batch = {name: random.integers(0, VOCABULARY, (1, tokens)) for name in ("input_ids", "target")}
        made = models.build("gpt", **sizes)
        found.append((f"gpt, {layers} layers, {tokens} tokens", made, batch, lambda b: gpt_by_pytorch(layers, b)))
    images = random.standard_normal((IMAGES, 3, SIZE, SIZE)).astype(np.float32)
    batch = {"pixels": images, "target": random.integers(0, CLASSES, IMAGES)}
    made = models.build("resnet", image=SIZE, classes=CLASSES, width=WIDTH, blocks=BLOCKS, batch=IMAGES)
    found.append((f"resnet, {IMAGES} images of {SIZE} x {SIZE}", made, batch, resnet_by_pytorch))
    return found


def print_profile(session: onnxruntime.InferenceSession) -> None:
    """The operators that take most of the time."""
    path = Path(session.end_profiling())
    spent: Counter[str] = Counter()
    for event in json.loads(path.read_text(encoding="utf-8")):
        if event.get("cat") == "Node" and event["name"].endswith("kernel_time"):
            spent[event["args"]["op_name"]] += event["dur"]
    path.unlink()
    total = sum(spent.values())
    print("    " + ", ".join(f"{name} {100 * amount / total:.0f}%" for name, amount in spent.most_common(12)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="blocks of the GPT (default 4)")
    parser.add_argument("--threads", type=int, action="append", help="default: 1 and 2")
    parser.add_argument("--repeat", type=int, default=7, help="steps of each that count (default 7)")
    parser.add_argument("--profile", action="store_true", help="where ONNX Runtime spends its time")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed: nothing is compared")
        return 0
    import torch

    load = os.getloadavg()[0]
    lines = ["| model | threads | irpar, ONNX Runtime, ms | PyTorch eager, ms | ratio |", "|---|---|---|---|---|"]
    print("\n".join(lines))
    for threads in options.threads or (1, 2):
        torch.set_num_threads(threads)
        for name, model, batch, peer in cases(options.layers):
            ours = by_irpar(model, batch, threads, options.profile)
            mine, theirs = medians(ours, peer(batch), options.repeat)
            lines.append(f"| {name} | {threads} | {mine * 1e3:.0f} | {theirs * 1e3:.0f} | {mine / theirs:.2f} |")
            print(lines[-1], flush=True)
            if options.profile:
                print_profile(profiles.pop())
    if options.write:
        RESULT.write_text(
            "# A step of training against PyTorch eager\n\n`python benchmarks/training.py --write`, on "
            f"{os.cpu_count()} cores, load of others before {load:.1f}: with as many busy, more threads tell "
            "little.\n\n" + "\n".join(lines) + "\n",
            encoding="utf-8",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
