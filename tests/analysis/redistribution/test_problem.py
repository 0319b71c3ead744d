"""Problems without names: what is the same problem, and what each is planned for only once."""

import pytest

from irpar.analysis.cost.network import BYTES, Network
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.redistribution import redistribution, solution
from irpar.analysis.redistribution.problem import Problem, common_axes, problem_of, refined
from irpar.sharding import Axis, Mesh, Sharding


def problem(
    mesh: Mesh, source: list[object], target: list[object], shape: tuple[int, ...], network: Network
) -> Problem:
    old, new = (Sharding.of_spec(mesh, spec) for spec in (source, target))  # type: ignore[arg-type]
    runs = common_axes(old, new)
    assert runs is not None
    return problem_of(old, new, runs, shape, 32, network)[0]


def test_names_and_the_order_of_dims_play_no_role() -> None:
    first = problem(Mesh({"dp": 2, "tp": 4}), [["dp"], None, ["tp"]], [["tp"], None, ["dp"]], (64, 1, 32), BYTES)
    second = problem(Mesh({"y": 4, "x": 2}), [["y"], ["x"]], [["x"], ["y"]], (32, 64), BYTES)
    assert first == second
    third = problem(Mesh({"y": 4, "x": 2}), [["y"], ["x"]], [["x"], ["y"]], (64, 32), BYTES)
    assert first != third


def test_links_tell_axes_apart() -> None:
    network = network_of("h100-nvlink-ib")
    mesh = Mesh({"across": 2, "inside": 8, "two": 2})
    far = problem(mesh, [["across"]], [None], (64,), network)
    near = problem(mesh, [["two"]], [None], (64,), network)
    assert far != near
    assert problem(mesh, [["across"]], [None], (64,), BYTES) != far


def test_atoms_of_prime_size_and_of_unused_axes() -> None:
    mesh = Mesh({"x": 12, "y": 2, "z": 4})
    old, new = Sharding.of_spec(mesh, [["x:(2)2"]]), Sharding.of_spec(mesh, [["y"]])
    runs = common_axes(old, new)
    assert runs is not None
    found, names = problem_of(old, new, runs, (64,), 32, BYTES)
    assert [str(axis) for axis in names.axes] == ["x:(2)2", "y", "x:(1)2", "x:(4)3", "z"]
    assert found.used == 2
    _, finer = refined(found, names, with_unused=True)
    assert [str(axis) for axis in finer.axes] == ["x:(2)2", "y", "x:(1)2", "x:(4)3", "z:(1)2", "z:(2)2"]
    _, finer = refined(found, names, with_unused=False)
    assert [str(axis) for axis in finer.axes] == ["x:(2)2", "y"]


def test_layers_that_are_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    real = solution._solved

    def counting(*given: object) -> solution.Solution:
        planned.append(given)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(solution, "_solved", counting)
    solution.forget()
    mesh = Mesh({"a": 2, "b": 2, "c": 2})
    shape = (17 * 8, 64)
    for first, second in (("a", "b"), ("b", "a"), ("c", "b")):
        source = Sharding.of_axes(mesh, [[Axis(first)], [Axis(second)]])
        target = Sharding.of_axes(mesh, [[Axis(second)], [Axis(first)]])
        steps = redistribution(source, target, shape, 32).steps
        assert [step.op for step in steps] == ["CollectivePermute"]
        assert {axis.name for axis in steps[0].axes} == {first, second}
        assert steps[-1].after == target
    assert len(planned) == 1
