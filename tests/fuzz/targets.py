"""What is changed, and which command it is handed to."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import onnx

from irpar import models
from irpar.cli import main
from irpar.ir.text.files import print_module
from irpar.onnx_io import load, to_module
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE, NORMALISE
from irpar.sharding import IrparError
from tests.conformance.cases import cases, within_range
from tests.hostile.models import MODELS
from tests.hostile.shardings import SHARDINGS

from ..older_plans import forget_programs
from .mutations import change_bytes, change_data, change_message, change_text

MOST_BYTES = 20_000
"""Of a model that is changed."""
MESH = "dp=2,tp=2"


@dataclass(frozen=True)
class Target:
    """One way to damage something.

    Attributes:
        name: what the command line calls it.
        change: writes a damaged file into a folder that holds what `prepare_folder` put there.
        commands: the command lines that read it; {here} is the folder.
    """

    name: str
    change: Callable[[Random, Path], None]
    commands: tuple[tuple[str, ...], ...]

    def choose(self, random: Random, here: Path) -> list[str]:
        """One of the command lines."""
        return [word.format(here=here) for word in random.choice(self.commands)]


def prepare_folder(here: Path) -> None:
    """What the damaged files stand beside: a model, its shardings, and a partition of it with inputs."""
    config = {"layers": 1, "width": 32, "heads": 4, "vocab": 32, "seq": 8, "hidden": 64}
    known = {name: size for name, size in config.items() if name in models.config_of("gpt").__dataclass_fields__}
    models.save(here / "gpt.onnx", "gpt", **known)
    shardings = {"mesh": {"dp": 2, "tp": 2}, "tensors": models.annotations("gpt", None, **known)}
    (here / "gpt.json").write_text(json.dumps(shardings))
    words = ["partition", here / "gpt.onnx", "-o", here / "good", "--shardings", here / "gpt.json", "--json"]
    assert main(list(map(str, words))) == 0
    given = load(here / "gpt.onnx").graph.inputs[0]
    np.savez(here / "in.npz", **{given.name: np.zeros(given.type.static_shape, np.int64)})  # type: ignore[union-attr]
    shutil.copytree(here / "good", here / "out")
    (here / "w.bin").write_bytes(bytes(256))


# -- models -----------------------------------------------------------------------------------------------------------


@cache
def model_seeds() -> tuple[onnx.ModelProto, ...]:
    """Small models of many operators, good and bad."""
    seeds = [within_range(case.model) for case in cases("node")[::9]]
    seeds += [make() for make in MODELS.values()]
    seeds += [models.build(name) for name in ("mlp", "control", "recurrent", "moe", "dlrm")]
    seeds += [onnx.load(case) for case in sorted(Path(models.__file__).parents[1].glob("tests/fixtures/*.onnx"))]
    return tuple(seed for seed in seeds if seed.ByteSize() <= MOST_BYTES)


def change_model(random: Random, here: Path) -> None:
    """A model with some fields changed."""
    made = onnx.ModelProto()
    made.CopyFrom(random.choice(model_seeds()))
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        change_message(random, made, random.choice((made, made, random.choice(model_seeds()))))
    (here / "m.onnx").write_bytes(made.SerializePartialToString())


def change_model_bytes(random: Random, here: Path) -> None:
    """A model with some bytes changed."""
    content = random.choice(model_seeds()).SerializePartialToString()
    (here / "m.onnx").write_bytes(change_bytes(random, content))


OF_MODELS: tuple[tuple[str, ...], ...] = (
    ("partition", "{here}/m.onnx", "--mesh", "tp=2", "-o", "{here}/made", "--json"),
    ("partition", "{here}/m.onnx", "--mesh", "tp=3", "-o", "{here}/made", "--json", "--bind", "batch=2"),
    ("inspect", "{here}/m.onnx", "--json"),
    ("opt", "{here}/m.onnx", "--pipeline", NORMALISE, "-o", "{here}/made.irpar"),
)


# -- text -------------------------------------------------------------------------------------------------------------


@cache
def text_seeds() -> tuple[str, ...]:
    """Modules as text: models, and what the passes make of one."""
    texts = []
    for model in model_seeds()[::4]:
        try:
            texts.append(print_module(to_module(model)).text)
        except IrparError:
            continue
    golden = Path(models.__file__).parents[1] / "tests" / "ir" / "text" / "golden"
    texts += [path.read_text() for path in sorted(golden.rglob("*")) if path.is_file()]
    return tuple(text for text in texts if len(text) <= MOST_BYTES)


def change_ir(random: Random, here: Path) -> None:
    """A text with some words changed."""
    text = random.choice(text_seeds())
    for _ in range(random.choice((1, 1, 2))):
        text = change_text(random, text)
    (here / "m.irpar").write_bytes(text.encode("utf-8", "surrogatepass"))


OF_TEXT: tuple[tuple[str, ...], ...] = (
    ("opt", "{here}/m.irpar", "-o", "{here}/made.irpar"),
    ("opt", "{here}/m.irpar", "--pipeline", "infer-types", "-o", "{here}/made.irpar", "--verify-each"),
    ("opt", "{here}/m.irpar", "--pipeline", DEFAULT_PIPELINE, "-o", "{here}/made.irpar"),
)


# -- shardings --------------------------------------------------------------------------------------------------------


def change_shardings(random: Random, here: Path) -> None:
    """A shardings file, changed as data, as text or as bytes; JSON or YAML."""
    data = json.loads((here / "gpt.json").read_text())
    data["ops"] = {"*MatMul": {"in": [[1, 1, 1], [1, 1]]}}
    texts = list(SHARDINGS.values())
    match random.randrange(4):
        case 0:
            content = random.choice(texts).encode("latin-1")
            content = change_text(random, content.decode("utf-8", "replace")).encode()
        case 1:
            content = change_bytes(random, json.dumps(data).encode())
        case 2:
            content = change_text(random, json.dumps(data, indent=1)).encode()
        case _:
            for _ in range(random.choice((1, 2, 4))):
                data = change_data(random, data)
            content = json.dumps(data, indent=random.choice((None, 1))).encode()
    (here / "s.yaml").write_bytes(content)


OF_SHARDINGS: tuple[tuple[str, ...], ...] = (
    ("partition", "{here}/gpt.onnx", "--mesh", MESH, "--shardings", "{here}/s.yaml", "-o", "{here}/made", "--json"),
    (
        "partition",
        "{here}/gpt.onnx",
        "--shardings",
        "{here}/s.yaml",
        "-o",
        "{here}/made",
        "--json",
        "--weights",
        "none",
    ),
)


# -- partitions -------------------------------------------------------------------------------------------------------


def change_plan(random: Random, here: Path) -> None:
    """A plan.json, changed as data, as text or as bytes."""
    text = (here / "good" / "plan.json").read_text()
    match random.randrange(6):
        case 0:
            content = change_text(random, text).encode("utf-8", "surrogatepass")
        case 1:
            content = change_bytes(random, text.encode())
        case _:
            data = json.loads(text)
            for _ in range(random.choice((1, 1, 2, 4))):
                data = change_data(random, data)
            content = json.dumps(data).encode()
    _restore(here)
    (here / "out" / "plan.json").write_bytes(content)


def change_part(random: Random, here: Path) -> None:
    """The model of a part with some fields changed."""
    _restore(here)
    path = here / "out" / f"part{random.randrange(2)}" / "model.onnx"
    made = onnx.load(path, load_external_data=False)
    for _ in range(random.choice((1, 1, 2, 3))):
        change_message(random, made, made)
    path.write_bytes(made.SerializePartialToString())
    forget_programs(here / "out")


def _restore(here: Path) -> None:
    for path in (here / "good").rglob("*"):
        if path.is_file():
            place = here / "out" / path.relative_to(here / "good")
            place.write_bytes(path.read_bytes())


OF_PARTITIONS: tuple[tuple[str, ...], ...] = (
    ("run", "{here}/out", "--inputs", "{here}/in.npz", "--engine", "numpy", "--outputs", "{here}/o.npz"),
    ("verify", "{here}/out", "--inputs", "{here}/in.npz", "--engine", "numpy"),
    ("explain", "{here}/out"),
)

TARGETS: Sequence[Target] = (
    Target("model", change_model, OF_MODELS),
    Target("model-bytes", change_model_bytes, OF_MODELS),
    Target("text", change_ir, OF_TEXT),
    Target("shardings", change_shardings, OF_SHARDINGS),
    Target("plan", change_plan, OF_PARTITIONS),
    Target("part", change_part, OF_PARTITIONS),
)
