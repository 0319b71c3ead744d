"""Operators on images of which several dims are sharded at once: height and width, channels and groups."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

from tests.budget import budget

from .nodes import check, nodes, partitioned, partitioned_node

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
MESHES = ({"p": 2, "q": 2}, {"p": 2, "q": 3}, {"p": 3, "q": 2})
ON_PLANES = ("Conv", "MaxPool", "AveragePool", "LpPool", "ConvTranspose", "Resize", "GlobalLpPool")


@pytest.mark.parametrize("name", ON_PLANES)
@settings(
    max_examples=budget(12, least=2), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS
)
@given(data=st.data())
def test_height_and_width_are_cut_at_once(name: str, data: st.DataObject, tmp_path: Path) -> None:
    """Corners too come to those whose windows cover them."""
    node, operands, _ = data.draw(nodes(name))
    mesh = data.draw(st.sampled_from(MESHES))
    axes: list[list[str] | None] = [["p"], ["q"]]
    places = operands["x"].ndim - 2
    partition = partitioned_node(node, operands, {"x": [None, None, *axes[:places]]}, mesh, tmp_path)
    check(partition, operands, tmp_path)


def test_corners_take_no_rounds_of_their_own(tmp_path: Path) -> None:
    """Rows with a neighbour, then columns, the corners among them: 2 permutations each way."""
    rng = np.random.default_rng(0)
    operands = {
        "x": rng.standard_normal((1, 2, 12, 12)).astype(np.float32),
        "w": rng.standard_normal((2, 2, 3, 3)).astype(np.float32),
    }
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])
    partition = partitioned(node, operands, {"x": [None, None, ["p"], ["q"]]}, {"p": 3, "q": 3}, tmp_path)
    check(partition, operands, tmp_path)
    sent = [(entry["kind"], entry["axes"], entry["bytes"]) for entry in partition.plan.collectives]
    # A row of 4 places, then a column of 4 rows and the 2 that came; 2 channels of 4 bytes.
    assert sent == [("permute", ["p"], 32)] * 2 + [("permute", ["q"], 48)] * 2


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
@settings(max_examples=budget(30), deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
@given(data=st.data())
def test_channels_and_groups(name: str, data: st.DataObject, tmp_path: Path) -> None:
    """Groups that the devices divide, and those that they do not; each group of one channel (depthwise)."""
    groups = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    inside, outputs = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 3]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))

    def normals(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    weight = (groups * outputs, inside) if name == "Conv" else (groups * inside, outputs)
    operands = {"x": normals(2, groups * inside, 8, 5), "other_w": normals(*weight, 3, 2)}
    if data.draw(st.booleans()):
        operands["b"] = normals(groups * outputs)
    node = helper.make_node(name, list(operands), ["y"], group=groups, pads=[1, 0, 1, 1])
    mesh = data.draw(st.sampled_from(MESHES))
    axes = data.draw(st.permutations(["p", "q"]))
    cuts = {
        "x": [None, *(data.draw(st.permutations([[axes[0]], None, None])))],
        "other_w": [*(data.draw(st.permutations([[axes[1]], None]))), None, None],
    }
    if data.draw(st.booleans()):
        cuts["x"] = [None, ["p", "q"], None, None]
    partition = partitioned(node, operands, cuts, mesh, tmp_path)
    check(partition, operands, tmp_path)


def test_nearest_elements_that_are_halfway_are_left_to_engines(tmp_path: Path) -> None:
    """Which of two they take depends on how they round: ONNX Runtime sees place 7.4999997 behind the half."""
    operands = {
        "x": np.arange(12, dtype=np.float32).reshape(1, 1, 12, 1),
        "scales": np.array([1, 1, 1.2, 1], np.float32),
    }
    attributes = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "round_prefer_ceil"}
    node = helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="nearest", **attributes)
    partition = partitioned_node(node, operands, 2, {"p": 4}, tmp_path)
    assert [entry["kind"] for entry in partition.plan.collectives] == ["all_gather"]
    partition.verify(tolerance=0).check()
