"""Random programs: a random graph, a mesh, annotations on some values; and what must hold of their partition."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import onnx
import onnx.printer
from hypothesis import strategies as st
from onnx import helper

import irpar
from irpar.pass_manager import Instrumentation, PassFailure, PassManager
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.sharding import Axis, join_axes
from irpar.verification.comparison import compare

from .random_graphs import Array, GraphMaker, Tensor, model_of, onnx_type, run_model
from .random_operators import COMMON, OPERATORS
from .random_samples import CLASSIC, MICROSOFT, TRAINING, Group, groups

TOLERANCE = 1e-4
STRATEGIES: tuple[Literal["cost", "propagate"], ...] = ("cost", "cost", "propagate")
NETWORKS = ("bytes", "bytes", "h100-nvlink-ib", "a100-pcie", "cpu-ethernet")
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
    ({"x": 2, "y": 3}, (5, 3, 1, 0, 2, 4)),
    ({"x": 2, "y": 2, "z": 2}, (1, 0, 3, 2, 5, 4, 7, 6)),
    ({"x": 4}, (2, 0, 3, 1)),
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
"""What may be refused of these programs; anything else is a fault."""

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
        engines: what can run it.
        strategy: of complete-sharding.
        network: what communication costs.
        tolerance: largest |a - b| / (1 + |b|).
    """

    model: onnx.ModelProto
    mesh: irpar.Mesh
    annotations: dict[str, Spec]
    inputs: dict[str, Array]
    drawn: Counter[str] = field(default_factory=Counter)
    steady: dict[str, Array] = field(default_factory=dict)
    engines: tuple[str, ...] = ("ort", "numpy")
    strategy: Literal["cost", "propagate"] = "cost"
    network: str = "bytes"
    tolerance: float = TOLERANCE

    def __repr__(self) -> str:
        text = onnx.printer.to_text(self.model)
        how = f"strategy {self.strategy}, network {self.network}, engines {', '.join(self.engines)}"
        return f"{text}\nmesh {self.mesh} devices {self.mesh.devices}\nannotations {self.annotations}\n{how}"

    @property
    def pipeline(self) -> str:
        """The passes."""
        name = "complete-sharding"
        return DEFAULT_PIPELINE.replace(name, f"{name}{{strategy={self.strategy}}}")


Draw = Callable[[st.SearchStrategy[Any]], Any]
SEEDS = st.integers(0, 2**24 - 1)
"""Small enough for hypothesis to draw them evenly."""


@st.composite
def programs(
    draw: Draw, group: Group | None = None, count: int = 5, also: Sequence[Callable[[GraphMaker], None]] = ()
) -> Program:
    """A program of `count` operators of a group among others, of which hypothesis draws the seeds; None: of any group.

    At times there are nodes of `also`, one of each.
    """
    group = group or draw(st.sampled_from(groups(25, "any")))

    def random() -> Random:
        return Random(f"{group.salt}/{draw(SEEDS)}")

    start = random()
    opset, classic = start.choice(group.opsets)
    opsets = {"": opset, CLASSIC: classic, MICROSOFT: 1, TRAINING: 1}
    maker = GraphMaker(start, opsets, group.engine)
    grows = [planted.grow for planted in start.sample(group.planted, min(count, len(group.planted)))]
    for _ in range(draw(st.integers(0, 6))):
        grows.insert(start.randint(0, len(grows)), _grow)
    for grow in also:
        if start.random() < 1 / (1 + len(also)):
            grows.insert(0, partial(GraphMaker.attempt, grow=grow))
    for grow in grows:
        maker.random = random()
        grow(maker)
    if not maker.nodes:
        maker.node("Relu", [maker.fresh([4])])
    maker.random = random()
    return program_of(maker)


def program_of(maker: GraphMaker) -> Program:
    """The graph with a mesh and annotations."""
    outputs = _outputs(maker)
    random = maker.random
    axes, devices = random.choice(MESHES)
    mesh = irpar.Mesh(axes, devices)
    inputs = [found for found in maker.tensors if found.kind == "input"]
    graph = helper.make_graph(
        maker.nodes,
        "random",
        [_info(found) for found in inputs],
        [_info(found) for found in outputs],
        _read(maker, outputs),
    )
    domains = {node.domain for node in maker.nodes} | {""}
    engines = (
        ("numpy",)
        if maker.engine == "numpy"
        else ("ort", "numpy")
        if maker.has_kernels and not maker.rounds
        else ("ort",)
    )
    return Program(
        model_of(graph, {domain: version for domain, version in maker.opsets.items() if domain in domains}),
        mesh,
        _annotations(maker, mesh),
        {found.name: found.array for found in inputs},
        maker.counts,
        {found.name: found.array for found in maker.tensors if found.kind == "node"},
        engines,
        random.choice(STRATEGIES),
        random.choice(NETWORKS),
        max((_tolerance(found.array) for found in maker.tensors), default=TOLERANCE),
    )


def _tolerance(array: Array) -> float:
    """Numbers of 16 bits anywhere make all that follow them as coarse."""
    return 1e-2 if array.dtype == np.float16 else TOLERANCE


def _grow(maker: GraphMaker) -> None:
    """Add one node of any operator, or none where three in a row do not fit."""
    for _ in range(3):
        if maker.attempt(OPERATORS[maker.one_of((*COMMON, *OPERATORS))]):
            return


def _info(found: Tensor) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(found.name, onnx_type(found.dtype), found.shape)


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


def _annotations(maker: GraphMaker, mesh: irpar.Mesh) -> dict[str, Spec]:
    """Shardings for values of a few nodes or of many; each axis of the mesh, or its parts, cuts at most one dim of a
    value."""
    random = maker.random
    known = {found.name: found for found in maker.tensors}
    share = random.choice((0.1, 0.3, 0.6))
    chosen: list[Tensor] = []
    for node in maker.nodes:
        values = [known[name] for name in (*node.input, *node.output) if name in known]
        cut = [found for found in values if found.shape] or values
        if random.random() < share or not chosen:
            chosen.append(random.choice(cut))
    return {found.name: random_spec(random, len(found.shape), mesh) for found in chosen}


def draw_spec(draw: Draw, rank: int, mesh: irpar.Mesh) -> Spec:
    """How a tensor of a rank lies; each axis of the mesh, or its parts, cuts at most one dim."""
    return random_spec(Random(draw(SEEDS)), rank, mesh)


def random_spec(random: Random, rank: int, mesh: irpar.Mesh) -> Spec:
    """How a tensor of a rank lies."""
    dims: list[list[str]] = [[] for _ in range(rank)]
    pieces = [piece.format(name) for name, size in mesh.axes.items() for piece in random.choice(_PIECES[size])]
    for piece in random.sample(pieces, len(pieces)):
        if rank and random.randint(0, 3):
            dims[random.randint(0, rank - 1)].append(piece)
    return [[*dim, "?"] if random.randint(0, 3) == 0 else dim or None for dim in dims]


# -- what must hold -------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one program: refused, and why; or partitioned and right."""

    refusal: str = ""
    collectives: Counter[str] = field(default_factory=Counter)


class UnsteadyError(Exception):
    """The original gives other numbers node by node than as a whole: nothing can be compared with it."""


def check(program: Program, folder: Path, *, inside: bool = True, saved: bool = False) -> Outcome:
    """Partition a program and run it on all ranks; every output must be what ONNX Runtime computes on the original.

    Args:
        program: the program.
        folder: for files.
        inside: look at intermediate values too.
        saved: save the partition, open and run it.

    Raises:
        AssertionError: it is not, ranks differ, or the plan is not what was executed.
        UnsteadyError: the program has no reliable answer.
    """
    expected = expected_of(program)
    try:
        partition = partitioned(program, folder)
    except PassFailure:
        raise
    except irpar.IrparError as error:
        if not any(re.search(pattern, str(error)) for pattern in REFUSALS):
            raise
        return Outcome(str(error))
    _check_annotations(partition, program)
    for engine in program.engines:
        check_run(partition, engine, program, expected)
    if inside:
        _check_inside(partition, program)
    if saved:
        partition.save(folder / "out", force=True)
        check_run(irpar.Partition.open(folder / "out"), program.engines[0], program, expected)
    return Outcome("", Counter(entry["kind"] for entry in partition.plan.collectives))


def loaded(program: Program, folder: Path) -> irpar.Module:
    """The annotated module, written to a folder and read."""
    path = folder / "model.onnx"
    onnx.save(program.model, path)
    module = irpar.load(path)
    for name, spec in program.annotations.items():
        module.shard(name, spec)
    return module


def partitioned(program: Program, folder: Path) -> irpar.Partition:
    """The partition, the verifier run after every pass."""
    watch = Instrumentation(verify_each=True, reproducer=None)
    passes = PassManager.parse(program.pipeline, watch)
    return irpar.partition(loaded(program, folder), program.mesh, pipeline=passes, network=program.network)


def expected_of(program: Program) -> dict[str, Array]:
    names = [output.name for output in program.model.graph.output]
    if "ort" not in program.engines:
        given = {entry.name: onnx.numpy_helper.to_array(entry) for entry in program.model.graph.initializer}
        known = {**program.inputs, **given, **program.steady}
        return {name: known[name] for name in names}
    try:
        found = dict(zip(names, run_model(program.model, program.inputs), strict=True))
    except Exception as error:
        raise UnsteadyError(str(error)) from error
    for name in sorted(set(program.steady) & set(names)):
        array = program.steady[name]
        if not compare(name, found[name], array, program.tolerance).is_equal:
            raise UnsteadyError(name)
    return found


def _check_annotations(partition: irpar.Partition, program: Program) -> None:
    """Inputs and outputs are sharded as they were annotated; open dims may be sharded further."""
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


def check_run(partition: irpar.Partition, engine: Any, program: Program, expected: dict[str, Array]) -> None:
    executor = partition.executor(engine)
    got = executor.run(program.inputs, check_replicas=True)
    assert list(got) == list(expected)
    for name, array in expected.items():
        found = compare(name, got[name], np.asarray(array), program.tolerance)
        assert found.is_equal, f"{engine}: {found}\ngot {got[name]}\nexpected {array}"
    assert executor.log.differences(partition.plan.collectives) == []


def _check_inside(partition: irpar.Partition, program: Program) -> None:
    """Every result of the model that the program still has is what the model has."""
    executor = partition.executor(program.engines[0])  # type: ignore[arg-type]
    graph = executor.parts[0].graph
    held = {value.source or value.name for value in graph.values() if value.has_uses}
    names = [name for name in program.steady if name in held]
    got = executor.run(program.inputs, fetch=names)
    for name in names:
        found = compare(name, got[name], program.steady[name], program.tolerance)
        assert found.is_equal, f"inside: {found}\ngot {got[name]}\nexpected {program.steady[name]}"
