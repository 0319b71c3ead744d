"""GRADS.onnx of every family over devices: equal to ONNX Runtime on the whole, and no work twice that is not in the model."""

import re
from math import prod
from pathlib import Path
from typing import Any

import pytest

import irpar
from irpar.models import FAMILIES, annotations, build
from irpar.onnx_io import save

MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})
EXCESS = 1.05
"""Of its share of the FLOPs a rank has at most so much."""
MORE = 1.01
"""Where the forward model does not have that: so much of what it has."""


def annotated(module: irpar.Module, family: str, mesh: dict[str, int]) -> irpar.Module:
    """The module with the family's own annotations, as far as it has these tensors and the mesh these axes."""
    names = {value.source_name for value in module.graph.values()}
    found: dict[str, Any] = {}
    for name, spec in annotations(family).items():
        if any(re.fullmatch(re.escape(name).replace(r"\*", ".*"), known) for known in names):
            dims = [[dim] if isinstance(dim, str) else dim or [] for dim in spec]
            found[name] = [dim if dim and set(dim) <= set(mesh) else None for dim in dims]
    irpar.annotate(module, found)
    return module


def excess(partition: irpar.Partition, mesh: dict[str, int]) -> float:
    """What a rank does, of its share."""
    return float(partition.plan.totals["flops_per_rank"] * prod(mesh.values()) / partition.plan.original["flops"])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_over_devices(family: str, mesh: dict[str, int], tmp_path: Path) -> None:
    model = build(family, preset="tiny")
    save(irpar.gradients(model), tmp_path / "GRADS.onnx")
    made = irpar.partition(annotated(irpar.load(tmp_path / "GRADS.onnx"), family, mesh), mesh)
    forward = irpar.partition(annotated(irpar.load(model), family, mesh), mesh)
    assert made.verify().is_equal
    assert excess(made, mesh) <= max(EXCESS, MORE * excess(forward, mesh))


@pytest.mark.parametrize(
    "mesh", [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[:-1]), MESHES[-1]], ids=str
)
def test_wide_convolutions_have_their_share_of_flops(mesh: dict[str, int]) -> None:
    made = irpar.gradients(build("resnet", preset="tiny", width=64))
    assert excess(irpar.partition(annotated(made, "resnet", mesh), mesh), mesh) <= EXCESS
