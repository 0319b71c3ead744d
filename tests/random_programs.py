"""Random programs: a random graph, a mesh, annotations on some values; and what must hold of their partition."""

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.printer
from hypothesis import strategies as st
from onnx import helper

import irpar
from irpar.comparison import compare
from irpar.pass_manager import Instrumentation, PassFailure, PassManager
from irpar.sharding import Axis, join_axes

from .random_graphs import Array, Draw, GraphMaker, Tensor, UnfitError, model_of, run_model
from .random_operators import COMMON, OPERATORS

TOLERANCE = 1e-4
OPSETS = (21, 13, 17, 18, 20, 23, 24, 12, 26, 11)
MESHES: tuple[tuple[dict[str, int], tuple[int, ...] | None], ...] = (
    ({"x": 2}, None),
    ({"x": 3}, None),
    ({"x": 4}, None),
    ({"x": 2, "y": 2}, None),
    ({"x": 2, "y": 3}, None),
    ({"x": 2, "y": 2, "z": 2}, None),
    ({"x": 2, "y": 2}, (3, 1, 0, 2)),
    ({"x": 4, "y": 2}, (7, 0, 6, 1, 5, 2, 4, 3)),
    ({"x": 6}, None),
    ({"x": 1, "y": 3}, None),
)
_PIECES = {
    1: (("{0}",),),
    2: (("{0}",),),
    3: (("{0}",),),
    4: (("{0}",), ("{0}:(1)2", "{0}:(2)2"), ("{0}:(2)2",), ("{0}:(1)2",)),
    6: (("{0}",), ("{0}:(1)2", "{0}:(2)3"), ("{0}:(1)3", "{0}:(3)2"), ("{0}:(2)3",), ("{0}:(1)3",)),
}
"""Ways to take an axis apart in sub-axes, by its size."""
REFUSALS = ("its size depends on data", "onnx's version converter cannot convert it")
"""What `partition` may refuse to do with these programs; anything else is a fault."""

Spec = list[list[str] | None]


@dataclass
class Program:
    """What is partitioned, and what it must compute.

    Attributes:
        model: the ONNX model.
        mesh: the devices.
        annotations: value name to its sharding, as in a `--shardings` file.
        inputs: by name.
        drawn: nodes by operator.
        steady: the numbers of the graph computed node by node, by name of the result.
    """

    model: onnx.ModelProto
    mesh: irpar.Mesh
    annotations: dict[str, Spec]
    inputs: dict[str, Array]
    drawn: Counter[str] = field(default_factory=Counter)
    steady: dict[str, Array] = field(default_factory=dict)

    def __repr__(self) -> str:
        text = onnx.printer.to_text(self.model)
        return f"{text}\nmesh {self.mesh} devices {self.mesh.devices}\nannotations {self.annotations}"


def draw_program(draw: Draw, most_nodes: int = 12) -> Program:
    """A program of up to `most_nodes` nodes."""
    maker = GraphMaker(draw, draw(st.sampled_from(OPSETS)))
    for _ in range(draw(st.integers(2, most_nodes))):
        _grow(maker)
    if not maker.nodes:
        maker.node("Relu", [maker.fresh([4])])
    outputs = _outputs(maker)
    axes, devices = draw(st.sampled_from(MESHES))
    mesh = irpar.Mesh(axes, devices)
    inputs = [found for found in maker.tensors if found.kind == "input"]
    graph = helper.make_graph(
        maker.nodes,
        "random",
        [_info(found) for found in inputs],
        [_info(found) for found in outputs],
        _read(maker, outputs),
    )
    return Program(
        model_of(graph, maker.opset),
        mesh,
        _annotations(draw, maker, mesh),
        {found.name: found.array for found in inputs},
        maker.counts,
        {found.name: found.array for found in maker.tensors if found.kind == "node"},
    )


programs = st.composite(draw_program)


def _grow(maker: GraphMaker) -> None:
    """Add one node, or none where three operators in a row do not fit."""
    for _ in range(3):
        before = len(maker.tensors), len(maker.weights), len(maker.nodes)
        try:
            OPERATORS[maker.draw(st.sampled_from((*COMMON, *OPERATORS)))](maker)
            return
        except UnfitError:
            for things, count in zip((maker.tensors, maker.weights, maker.nodes), before, strict=True):
                del things[count:]


def _info(found: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(found.name, int(helper.np_dtype_to_tensor_dtype(found.dtype)), found.shape)


def _outputs(maker: GraphMaker) -> list[Tensor]:
    """All results that nothing reads, at times a few other values."""
    read = {name for node in maker.nodes for name in node.input}
    made = [found for found in maker.tensors if found.kind == "node"]
    chosen = [found for found in made if found.name not in read] or made[-1:]
    for _ in range(maker.one_of([0, 0, 1, 2])):
        chosen.append(maker.one_of(maker.tensors))
    return list(dict.fromkeys(chosen))


def _read(maker: GraphMaker, outputs: list[Tensor]) -> list[onnx.TensorProto]:
    """The weights that something reads."""
    bodies = [attribute.g for node in maker.nodes for attribute in node.attribute if attribute.HasField("g")]
    nodes = [*maker.nodes, *(node for body in bodies for node in body.node)]
    names = {name for node in nodes for name in node.input} | {found.name for found in outputs}
    return [weight for weight in maker.weights if weight.name in names]


def _annotations(draw: Draw, maker: GraphMaker, mesh: irpar.Mesh) -> dict[str, Spec]:
    """Shardings for up to five values; each axis of the mesh, or its parts, cuts at most one dim of a value."""
    read = {name for node in maker.nodes for name in (*node.input, *node.output)}
    named = [found for found in maker.tensors if found.name in read]
    cut = [found for found in named if found.shape] or named
    chosen = [draw(st.sampled_from(cut)) for _ in range(draw(st.integers(1, 5)))]
    return {found.name: draw_spec(draw, len(found.shape), mesh) for found in chosen}


def draw_spec(draw: Draw, rank: int, mesh: irpar.Mesh) -> Spec:
    """How a tensor of a rank lies; each axis of the mesh, or its parts, cuts at most one dim."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    pieces = [piece.format(name) for name, size in mesh.axes.items() for piece in draw(st.sampled_from(_PIECES[size]))]
    for piece in draw(st.permutations(pieces)):
        if rank and draw(st.integers(0, 3)):
            dims[draw(st.integers(0, rank - 1))].append(piece)
    return [[*dim, "?"] if draw(st.integers(0, 3)) == 0 else dim or None for dim in dims]


# -- what must hold -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one program: refused, and why; or partitioned and right."""

    refusal: str = ""
    collectives: Counter[str] = field(default_factory=Counter)


class UnsteadyError(Exception):
    """The original gives other numbers node by node than as a whole: nothing can be compared with it."""


def check(
    program: Program, folder: Path, engines: tuple[str, ...] = ("ort", "numpy"), *, saved: bool = False
) -> Outcome:
    """Partition a program and run it on all ranks; every output must be what ONNX Runtime computes on the original.

    Raises:
        AssertionError: it is not, ranks differ, or the plan is not what was executed.
        UnsteadyError: the program has no reliable answer.
    """
    expected = _expected(program)
    try:
        partition = partitioned(program, folder)
    except PassFailure:
        raise
    except irpar.IrparError as error:
        found = next((pattern for pattern in REFUSALS if re.search(pattern, str(error))), None)
        if found is None:
            raise
        return Outcome(found)
    _check_annotations(partition, program)
    for engine in engines:
        _check_run(partition, engine, program, expected)
    _check_inside(partition, program)
    if saved:
        partition.save(folder / "out", force=True)
        _check_run(irpar.Partition.open(folder / "out"), engines[0], program, expected)
    return Outcome("", Counter(entry["kind"] for entry in partition.plan.collectives))


def partitioned(program: Program, folder: Path) -> irpar.Partition:
    """The partition, the verifier run after every pass."""
    path = folder / "model.onnx"
    onnx.save(program.model, path)
    module = irpar.load(path)
    for name, spec in program.annotations.items():
        module.shard(name, spec)
    watch = Instrumentation(verify_each=True, reproducer=None)
    return irpar.partition(module, program.mesh, pipeline=PassManager.parse(irpar.api.DEFAULT_PIPELINE, watch))


def _expected(program: Program) -> dict[str, Array]:
    names = [output.name for output in program.model.graph.output]
    try:
        found = dict(zip(names, run_model(program.model, program.inputs), strict=True))
    except Exception as error:
        raise UnsteadyError(str(error)) from error
    for name in sorted(set(program.steady) & set(names)):
        array = program.steady[name]
        if not compare(name, found[name], array, TOLERANCE).is_equal:
            raise UnsteadyError(name)
    return found


def _check_annotations(partition: irpar.Partition, program: Program) -> None:
    """Inputs and outputs lie as they were annotated; open dims may be cut further."""
    for entry in (*partition.plan.inputs, *partition.plan.outputs):
        spec = program.annotations.get(entry["name"])
        if spec is None:
            continue
        for wanted, found in zip(spec, entry["sharding"], strict=True):
            axes, cut = (_axes(program.mesh, dim) for dim in (wanted, found))
            is_open = bool(wanted) and wanted[-1] == "?"
            assert cut[: len(axes)] == axes if is_open else cut == axes, f"{entry} is annotated {spec}"


def _axes(mesh: irpar.Mesh, dim: list[str] | None) -> tuple[Axis, ...]:
    parsed = [Axis.parse(axis) for axis in dim or () if axis != "?"]
    return tuple(join_axes(mesh, [axis for axis in parsed if mesh.axis_size(axis) > 1]))


def _check_run(partition: irpar.Partition, engine: Any, program: Program, expected: dict[str, Array]) -> None:
    executor = partition.executor(engine)
    got = executor.run(program.inputs, check_replicas=True)
    assert list(got) == list(expected)
    for name, array in expected.items():
        found = compare(name, got[name], np.asarray(array), TOLERANCE)
        assert found.is_equal, f"{engine}: {found}\ngot {got[name]}\nexpected {array}"
    assert executor.log.differences(partition.plan.collectives) == []


def _check_inside(partition: irpar.Partition, program: Program) -> None:
    """Every result of the model that the program still has is what the model has."""
    executor = partition.executor("ort")
    graph = executor.parts[0].graph
    held = {value.source or value.name for value in graph.values() if value.has_uses}
    names = [name for name in program.steady if name in held]
    got = executor.run(program.inputs, fetch=names)
    for name in names:
        found = compare(name, got[name], program.steady[name], TOLERANCE)
        assert found.is_equal, f"inside: {found}\ngot {got[name]}\nexpected {program.steady[name]}"
