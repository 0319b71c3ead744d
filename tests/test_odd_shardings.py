"""Odd shardings of small programs: in both engines, the numbers are those of ONNX Runtime on the original.

Uneven blocks, dims of size 1, parts of axes, one axis over two dims, two axes over one dim, many axes, device orders.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import irpar

from .budget import every, pairs
from .command_line import Capture, call
from .random_programs import Outcome, check, partitioned
from .written import PROGRAMS, Specs


def run(name: str, mesh: irpar.Mesh, specs: Specs, folder: Path) -> Outcome:
    """Check one program in both engines; annotations may not be refused."""
    outcome = check(PROGRAMS[name].program(mesh, specs), folder)
    assert not outcome.refusal
    return outcome


def ids(case: object) -> str | None:
    """Mesh and annotations as they are written."""
    if isinstance(case, tuple):
        name, specs = case
        return f"{name}-{ids(specs)}"
    return str(case).replace("'", "") if isinstance(case, dict) else None


UNEVEN: list[tuple[str, dict[str, int], Specs]] = [
    ("matmul", {"x": 4}, {"x": [["x"], None]}),
    ("matmul", {"x": 4}, {"w1": [None, ["x"]]}),
    ("matmul", {"x": 5}, {"x": [None, ["x"]]}),
    ("matmul", {"x": 4, "y": 3}, {"x": [["x"], None], "b": [["y"]]}),
    ("attention", {"x": 4}, {"x": [None, ["x"], None]}),
    ("attention", {"x": 2}, {"x": [["x"], None, None]}),
    ("attention", {"x": 4}, {"wq": [None, ["x"]]}),  # 6 heads over 4
    ("attention", {"x": 2, "y": 4}, {"x": [["x"], None, None], "s": [None, ["y"], None, None]}),
    ("conv", {"x": 4}, {"w": [["x"], None, None, None]}),
    ("conv", {"x": 4}, {"x": [None, ["x"], None, None]}),
    ("conv", {"x": 4}, {"x": [None, None, ["x"], None]}),
    ("conv", {"x": 4, "y": 2}, {"w": [["x"], None, None, None], "x": [["y"], None, None, None]}),
    ("reduce", {"x": 4}, {"x": [None, None, ["x"]]}),
    ("reduce", {"x": 4}, {"n": [None, ["x"], None]}),
    ("reduce", {"x": 3, "y": 4}, {"x": [["x"], ["y"], None]}),
    ("reshape", {"x": 4}, {"x": [["x"], None]}),
    ("reshape", {"x": 4}, {"x": [None, ["x"]]}),
    ("reshape", {"x": 3}, {"y": [None, ["x"]]}),
    ("reshape", {"x": 3}, {"a": [None, ["x"], None]}),
    ("gather", {"x": 4}, {"table": [["x"], None]}),
    ("gather", {"x": 4}, {"table": [None, ["x"]]}),
    ("gather", {"x": 2, "y": 3}, {"ids": [["x"], ["y"]]}),
]


@pytest.mark.parametrize(("name", "mesh", "specs"), every(2, UNEVEN), ids=ids)
def test_dims_that_do_not_divide(name: str, mesh: dict[str, int], specs: Specs, tmp_path: Path) -> None:
    run(name, irpar.Mesh(mesh), specs, tmp_path)


BROADCAST: list[tuple[str, Specs, str]] = [
    ("reduce", {"x": [None, ["x"], None]}, "scale"),  # [1, 7, 1] follows in its dim of 7
    ("reduce", {"x": [["x"], None, None]}, "scale"),
    ("reduce", {"x": [None, None, ["x"]]}, "m"),  # [5, 7, 1] of a cut dim
    ("conv", {"x": [None, None, ["x"], None]}, "y"),  # [3, 10, 1, 1] of a cut dim
    ("reshape", {"t": [["x"], None, None]}, "gate"),
    ("reshape", {"t": [None, ["x"], None]}, "gate"),
    ("gather", {"y": [["x"], None, None]}, "position"),
    ("gather", {"y": [None, ["x"], None]}, "position"),
]


@pytest.mark.parametrize(("name", "specs", "small"), BROADCAST, ids=ids)
def test_dims_of_size_1_are_never_cut(name: str, specs: Specs, small: str, tmp_path: Path) -> None:
    """Not by completion; the other operand, whose dim is sharded, needs nothing moved for it."""
    program = PROGRAMS[name].program(irpar.Mesh({"x": 2}), specs)
    check(program, tmp_path)
    entries = [entry for entry in partitioned(program, tmp_path).plan.values if entry["source"] == small]
    assert entries
    for entry in entries:
        assert all(size > 1 or not axes for size, axes in zip(entry["shape"], entry["sharding"], strict=True))


PARTS: list[tuple[str, dict[str, int], Specs]] = [
    ("matmul", {"x": 4}, {"x": [["x:(1)2"], None], "w1": [None, ["x:(2)2"]]}),
    ("matmul", {"x": 4}, {"x": [["x:(2)2"], ["x:(1)2"]]}),
    ("matmul", {"x": 6}, {"x": [["x:(2)3"], None], "w2": [["x:(1)2"], None]}),
    ("matmul", {"x": 8}, {"x": [["x:(2)2"], None], "w2": [["x:(4)2", "x:(1)2"], None]}),
    ("attention", {"x": 4}, {"x": [["x:(1)2"], None, None], "wq": [None, ["x:(2)2"]]}),
    ("attention", {"x": 4}, {"wq": [None, ["x:(2)2", "x:(1)2"]]}),  # the parts of an axis the other way round
    ("conv", {"x": 4}, {"x": [["x:(2)2"], None, None, None], "w": [["x:(1)2"], None, None, None]}),
    ("reduce", {"x": 4}, {"x": [None, ["x:(2)2"], ["x:(1)2"]]}),
    ("reshape", {"x": 4}, {"a": [["x:(2)2"], None, ["x:(1)2"]]}),
    ("reshape", {"x": 6}, {"x": [["x:(1)3"], ["x:(3)2"]]}),
    ("gather", {"x": 4}, {"table": [["x:(2)2"], ["x:(1)2"]]}),
    ("gather", {"x": 6}, {"ids": [["x:(1)3"], ["x:(3)2"]], "table": [["x:(1)2"], ["x:(2)3"]]}),  # by 2 and by 3
]


@pytest.mark.parametrize(("name", "mesh", "specs"), PARTS, ids=ids)
def test_parts_of_axes(name: str, mesh: dict[str, int], specs: Specs, tmp_path: Path) -> None:
    run(name, irpar.Mesh(mesh), specs, tmp_path)


TORN: list[tuple[str, Specs]] = [
    ("matmul", {"x": [["x"], None], "w1": [None, ["x"]]}),
    ("matmul", {"x": [["x"], None], "y": [None, ["x"]]}),
    ("attention", {"x": [None, ["x"], None], "wq": [None, ["x"]]}),
    ("conv", {"x": [["x"], None, None, None], "z": [None, ["x"], None, None]}),
    ("reduce", {"x": [["x"], None, None], "n": [None, None, ["x"]]}),
    ("reshape", {"x": [["x"], None], "y": [["x"], None]}),
    ("gather", {"ids": [["x"], None], "y": [None, None, ["x"]]}),
]


@pytest.mark.parametrize(("name", "specs"), TORN, ids=ids)
def test_one_axis_over_two_dims_is_told(name: str, specs: Specs, tmp_path: Path) -> None:
    program = PROGRAMS[name].program(irpar.Mesh({"x": 2}), specs)
    check(program, tmp_path)
    told = [entry["conflict"] for entry in partitioned(program, tmp_path).plan.collectives if entry["conflict"]]
    assert told
    for conflict in told:
        assert "annotated" in conflict["because"]
        assert "annotate" in conflict["avoid"]


BOTH, OTHER = ["both"], ["other"]
"""Stand for two axes over one dim, and the same in the other order."""
ORDERS = [["x", "y"], ["y", "x"]]
TWO_AXES: list[tuple[str, Specs]] = [
    ("matmul", {"x": [BOTH, None]}),
    ("matmul", {"w1": [None, BOTH]}),
    ("matmul", {"x": [None, BOTH]}),
    ("attention", {"wq": [None, BOTH]}),
    ("conv", {"w": [BOTH, None, None, None]}),
    ("conv", {"x": [None, None, BOTH, None]}),
    ("reduce", {"x": [None, BOTH, None]}),
    ("reshape", {"x": [None, BOTH]}),
    ("gather", {"table": [BOTH, None]}),
    # A reader wants the other order.
    ("matmul", {"x": [BOTH, None], "y": [OTHER, None]}),
    ("matmul", {"x": [None, BOTH], "w1": [OTHER, None]}),
    ("attention", {"x": [None, None, BOTH], "y": [None, None, OTHER]}),
    ("conv", {"x": [None, None, BOTH, None], "z": [None, None, OTHER, None]}),
    ("reduce", {"x": [None, None, BOTH], "shift": [OTHER]}),
    ("reshape", {"x": [None, BOTH], "y": [OTHER, None]}),
    ("gather", {"table": [None, BOTH], "y": [None, None, OTHER]}),
]


@pytest.mark.parametrize(("case", "order"), every(2, pairs(TWO_AXES, ORDERS)), ids=ids)
def test_two_axes_over_one_dim(case: tuple[str, Specs], order: list[str], tmp_path: Path) -> None:
    name, specs = case
    meant = {"both": order, "other": order[::-1]}
    ordered: Specs = {value: [dim and meant[dim[0]] for dim in spec] for value, spec in specs.items()}
    for sizes in ((2, 2), (2, 3)):
        run(name, irpar.Mesh(dict(zip("xy", sizes, strict=True))), ordered, tmp_path)


MANY_AXES = [
    {"a": 2, "b": 2, "c": 2},
    {"a": 3, "b": 2, "c": 2},
    {"a": 2, "b": 1, "c": 3, "d": 2},
    {"b": 1, "a": 2, "one": 1, "c": 2},
]
MANY_SPECS: list[tuple[str, Specs]] = [
    ("matmul", {"x": [["a"], ["c"]], "w1": [None, ["b"]]}),
    ("matmul", {"x": [["c", "b", "a"], None]}),
    ("matmul", {"x": [["a", "c"], None], "w2": [["b"], ["c"]]}),
    ("attention", {"x": [["a"], ["b"], None], "wq": [None, ["c"]]}),
    ("conv", {"x": [["a"], ["b"], None, None], "w": [["c"], None, None, None]}),
    ("reduce", {"x": [["a"], ["c"], ["b"]]}),
    ("reshape", {"x": [["b"], ["c", "a"]]}),
    ("gather", {"ids": [["a"], ["b"]], "table": [["c"], None]}),
    ("gather", {"ids": [["a"], None], "table": [["a", "b"], ["c"]]}),
]


@pytest.mark.parametrize(("case", "mesh"), pairs(MANY_SPECS, MANY_AXES), ids=ids)
def test_three_axes_and_more(case: tuple[str, Specs], mesh: dict[str, int], tmp_path: Path) -> None:
    name, specs = case
    run(name, irpar.Mesh(mesh), specs, tmp_path)


ORDERED: list[tuple[str, Specs]] = [
    ("matmul", {"x": [["a"], None], "w1": [None, ["c", "b"]]}),
    ("attention", {"x": [["a"], None, None], "wq": [None, ["b", "c"]]}),
    ("conv", {"x": [["a"], None, ["b"], None]}),
    ("reduce", {"x": [["a"], ["b"], ["c"]]}),
    ("reshape", {"x": [["a"], ["b"]], "y": [["c"], ["a"]]}),
    ("gather", {"ids": [["a"], None], "table": [["b"], ["c"]]}),
]


@pytest.mark.parametrize(("name", "specs"), every(2, ORDERED), ids=ids)
def test_orders_of_devices(name: str, specs: Specs, tmp_path: Path, capsys: Capture) -> None:
    """Device ids are reported with the plan; ranks, blocks and numbers are those of the mesh."""
    devices = (5, 0, 11, 3, 1, 8, 2, 10, 4, 7, 9, 6)
    sizes = {"a": 2, "b": 3, "c": 2}
    program = PROGRAMS[name].program(irpar.Mesh(sizes, devices), specs)
    check(program, tmp_path, saved=True)
    partition = partitioned(program, tmp_path)
    plain = partitioned(PROGRAMS[name].program(irpar.Mesh(sizes), specs), tmp_path)
    assert partition.plan.mesh == {"axes": sizes, "devices": list(devices)}
    assert [tuple(entry["coords"]) for entry in partition.plan.ranks] == list(np.ndindex(2, 3, 2))
    assert partition.plan.ranks == plain.plan.ranks
    assert partition.plan.collectives == plain.plan.collectives

    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["mesh"] == partition.plan.mesh
    np.savez(tmp_path / "in.npz", **program.inputs)
    out = tmp_path / "out"
    command = ["run", out, "--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"]
    assert call(capsys, *command)[0] == 0
    with np.load(tmp_path / "out.npz") as found:
        assert set(found) == {output.name for output in program.model.graph.output}
    assert call(capsys, "verify", out, "--inputs", tmp_path / "in.npz")[0] == 0
