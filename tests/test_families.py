"""Every family of irpar.models: partitioned, verified against ONNX Runtime, and its work divided among the ranks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import pytest

import irpar
from irpar import models
from irpar.api import Engine
from irpar.verification.inputs import random_inputs
from tests.budget import SHARE, pairs
from tests.runtime.groups.ring import check_rings
from tests.shares import MESHES, Exceptions, check_exceptions, check_share

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """A family with settings.

    Attributes:
        family: a key of `irpar.models.FAMILIES`.
        settings: fields of its configuration.
        tolerance: largest |a - b| / (1 + |b|).
    """

    family: str
    settings: tuple[tuple[str, Any], ...] = ()
    tolerance: float = TOLERANCE

    def __str__(self) -> str:
        return "-".join([self.family, *(f"{name}={value}" for name, value in self.settings)])


CASES = (
    Case("bert"),
    Case("bert", (("opset", 23),)),
    Case("bert", (("dynamic", True),)),
    Case("vit"),
    Case("vit", (("dynamic", True),)),
    Case("t5"),
    Case("t5", (("dynamic", True),)),
    Case("moe"),
    Case("moe", (("routing", "gather"),)),
    Case("moe", (("routing", "gather"), ("dynamic", True))),
    Case("resnet"),
    Case("resnet", (("preset", "bottleneck"),)),
    Case("dlrm"),
    Case("unet"),
    Case("unet", (("opset", 21),)),
    Case("unet", (("dynamic", True),)),
    Case("recurrent"),
    Case("recurrent", (("cell", "gru"), ("bidirectional", True), ("dynamic", True))),
    Case("control", (("kind", "if"),)),
    Case("control", (("kind", "loop"),)),
    Case("control", (("kind", "scan"),)),
    Case("llama", (("preset", "fused"),)),
    Case("gpt", (("dtype", "float16"),), tolerance=3e-2),
    Case("llama", (("preset", "fused"), ("dtype", "float16")), tolerance=3e-2),
)

PLANNED = (
    *map(Case, sorted(models.FAMILIES)),
    *(Case("control", (("kind", kind),)) for kind in ("if", "loop", "scan")),
)
"""Cases of which every collective is counted."""

_STEPS = "a step of a recurrent layer needs the whole state of the one before: tp shards nothing"
_DIRECTIONS = "annotated over dp alone, though tp could shard its two directions, as `irpar inspect --suggest` does"
_FIRST = "the first convolution of a bottleneck and the shortcut are whole: their results are needed whole"
MORE_THAN_ITS_SHARE: Exceptions = {
    ("resnet-preset=bottleneck", "tp"): (1.2, _FIRST),
    ("resnet-preset=bottleneck", "dp,tp"): (1.2, _FIRST),
    ("recurrent", "tp"): (2.0, _STEPS),
    ("recurrent", "dp,tp"): (2.0, _STEPS),
    ("recurrent-cell=gru-bidirectional=True-dynamic=True", "tp"): (2.0, _DIRECTIONS),
    ("recurrent-cell=gru-bidirectional=True-dynamic=True", "dp,tp"): (2.0, _DIRECTIONS),
}


def partitioned(case: Case, mesh: dict[str, int], folder: Path) -> irpar.Partition:
    settings = dict(case.settings)
    path = folder / "model.onnx"
    model = models.build(case.family, **settings)
    onnx.save(model, path)
    symbols = {dim.dim_param for value in model.graph.input for dim in value.type.tensor_type.shape.dim} - {""}
    sizes = models.config_of(case.family, **settings)
    module = irpar.load(path, bind={symbol: getattr(sizes, symbol) for symbol in sorted(symbols)})
    axes = (axis if axis in mesh else None for axis in ("dp", "tp"))
    irpar.annotate(module, models.annotations(case.family, *axes, **settings))
    return irpar.partition(module, irpar.Mesh(mesh))


LARGE = ("t5", "unet", "vit")


def is_tried(case: Case) -> bool:
    """Dynamic models of large families become what their static ones are: of a smaller share these are enough."""
    return SHARE >= 1 or case.family not in LARGE or not case.settings


@pytest.mark.parametrize(("case", "mesh"), [each for each in pairs(CASES, MESHES) if is_tried(each[0])], ids=str)
def test_families(case: Case, mesh: dict[str, int], tmp_path: Path) -> None:
    partition = partitioned(case, mesh, tmp_path)
    partition.verify(tolerance=case.tolerance).check()
    check_share(partition, str(case), MORE_THAN_ITS_SHARE)


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (family in LARGE))
        for family in sorted({case.family for case in CASES} - {"gpt", "llama"})
    ],
)
def test_sizes_that_do_not_divide(family: str, tmp_path: Path) -> None:
    """5 rows over 2, and 4 heads, experts or 16 channels over 3; through irpar's own kernels too."""
    case = Case(family, (("batch", 5),))
    partition = partitioned(case, {"dp": 2, "tp": 3}, tmp_path)
    partition.verify(tolerance=TOLERANCE).check()
    partition.verify(tolerance=TOLERANCE, engine="numpy").check()


WAYS: tuple[tuple[tuple[tuple[str, int], ...], Engine], ...] = (
    ((), "ort"),
    ((("batch", 5),), "numpy"),
    ((), "numpy"),
    ((("batch", 5),), "ort"),
)
"""Sizes that divide evenly and that do not, and the engine."""


@pytest.mark.parametrize(
    ("case", "way"),
    [pytest.param(case, way, marks=[pytest.mark.slow] * (case.family in LARGE)) for case, way in pairs(PLANNED, WAYS)],
    ids=str,
)
def test_collectives_are_those_of_the_plan_call_by_call(
    case: Case, way: tuple[tuple[tuple[str, int], ...], Engine], tmp_path: Path
) -> None:
    """And send what it says: counted in rings of sends and receives."""
    sizes, engine = way
    mesh = {"dp": 2, "tp": 3 if sizes else 2}
    partition = partitioned(Case(case.family, (*case.settings, *sizes)), mesh, tmp_path)
    module = partition.module
    assert module is not None
    executor = partition.executor(engine)
    check_rings(partition, random_inputs(executor.inputs, module.graph), engine)


def test_exceptions_are_of_cases_that_exist() -> None:
    check_exceptions(MORE_THAN_ITS_SHARE, [str(case) for case in CASES])


def test_every_family_is_here_or_in_test_partition() -> None:
    assert {case.family for case in CASES} | {"mlp"} == set(models.FAMILIES)
