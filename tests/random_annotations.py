"""Random annotations of random programs, and whether they hold: looked up in the graphs and in the plan, without asking
what decides it."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import onnx
from hypothesis import strategies as st
from onnx import helper

import irpar
from irpar.analysis.completion.node_placement import rule_view
from irpar.annotations.named import infer_undeclared_types
from irpar.annotations.shardings_file import read_shardings
from irpar.ir import Graph, Module, Node, Value, tensor_type
from irpar.ir.annotate import named_values
from irpar.ops.collectives import COLLECTIVES
from irpar.pass_manager import Instrumentation, Pass, PassManager
from irpar.sharding import Axis, Mesh, Sharding, ceil_shape

from . import random_moves
from .random_programs import SEEDS, Draw, Program, Spec, loaded, programs, random_spec

BODIES = (random_moves.if_body, random_moves.loop, random_moves.scan)
Cuts = dict[str, list[Spec | None]]
"""What `ops` says of a node: `in` and `out`, a sharding or None for each."""


@dataclass
class Annotated:
    """A program with annotations of tensors in `program.annotations`, and of operators.

    Attributes:
        program: what is partitioned.
        ops: node name to its cuts.
        kinds: of each annotation, what it is of: an input, a weight, a result, an output, a body, an operator.
    """

    program: Program
    ops: dict[str, Cuts] = field(default_factory=dict)
    kinds: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.program!r}\nops {self.ops}"


@st.composite
def annotated_programs(draw: Draw, folder: Path) -> Annotated:
    """A program of a few operators, parts of it in a function, with one to three annotations."""
    program = draw(programs(count=draw(st.integers(1, 4)), also=BODIES))
    random = Random(f"annotations/{draw(SEEDS)}")
    _name_nodes(program.model.graph)
    if random.random() < 0.3:
        program = replace(program, model=_with_function(program.model, random))
    program = replace(program, annotations={})
    module = loaded(program, folder)
    infer_undeclared_types(module)
    made = Annotated(program)
    for _ in range(random.randint(1, 3)):
        if random.random() < 0.25:
            _annotate_op(made, module, random)
        else:
            _annotate_tensor(made, module, random)
    return made


def _name_nodes(graph: onnx.GraphProto) -> None:
    for number, node in enumerate(graph.node):
        node.name = f"n{number}"


def _with_function(model: onnx.ModelProto, random: Random) -> onnx.ModelProto:
    """The model with one of its nodes in a function of its own."""
    made = onnx.ModelProto()
    made.CopyFrom(model)
    plain = [node for node in made.graph.node if not any(entry.HasField("g") for entry in node.attribute)]
    version = next(entry.version for entry in made.opset_import if not entry.domain)
    if not plain or version < 13:  # Functions are not converted to newer operator sets.
        return made
    node = random.choice(plain)
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    inner.name = "inner"
    given = list(dict.fromkeys(name for name in node.input if name))
    given_back = [name for name in node.output if name]
    function = helper.make_function("local", "Held", given, given_back, [inner], list(made.opset_import))
    node.CopyFrom(helper.make_node("Held", given, given_back, name=node.name, domain="local"))
    made.functions.append(function)
    made.opset_import.append(helper.make_opsetid("local", 1))
    return made


def _annotate_tensor(made: Annotated, module: Module, random: Random) -> None:
    kinds: dict[str, list[Value]] = {}
    called: dict[str, set[Value]] = {}
    outputs = set(module.graph.outputs)
    for name, value in named_values(module):
        called.setdefault(name, set()).add(value)
        type_ = tensor_type(value.type)
        if type_ is None or type_.shape is None or not type_.is_static or not type_.shape:
            continue
        kind = "input" if value.is_input else "weight" if value.is_constant else "result"
        kind = "body" if value.owner is not module.graph else "output" if value in outputs else kind
        kinds.setdefault(kind, []).append(value)
    weighted = [kind for kind in sorted(kinds) for _ in range(4 if kind in ("result", "body") else 1)]
    if not weighted:
        return
    kind = random.choice(weighted)
    value = random.choice(kinds[kind])
    near = _beside(made, called)
    if near and random.random() < 0.7:
        known = [(kind, each) for kind in sorted(kinds) for each in kinds[kind] if each in near]
        kind, value = random.choice(known) if known else (kind, value)
    is_said = any(value in node.inputs for node in module.graph if node.source in made.ops)
    if is_said or called[value.source_name] != {value} or not _is_of_model(value, made.program):
        return
    made.program.annotations[value.source_name] = random_spec(random, len(value.shape), made.program.mesh)
    made.kinds = (*made.kinds, kind)


def _beside(made: Annotated, called: Mapping[str, set[Value]]) -> set[Value]:
    """The values that nodes read and give which read or give what is annotated already: there, cuts meet."""
    known = {value for name in made.program.annotations for value in called.get(name, ())}
    nodes = {node for value in known for node in (value.node, *value.users) if node is not None}
    return {value for node in nodes for value in (*node.inputs, *node.results)} - known


def _is_of_model(value: Value, program: Program) -> bool:
    """Whether a value is one of the model; older operator sets are converted, which makes others with such names."""
    graph = program.model.graph
    shapes = {name: array.shape for name, array in (*program.inputs.items(), *program.steady.items())}
    shapes |= {entry.name: tuple(entry.dims) for entry in graph.initializer}
    bodies = [entry.g for node in graph.node for entry in node.attribute if entry.HasField("g")]
    inside = {name for body in bodies for node in body.node for name in node.output}
    inside |= {entry.name for body in bodies for entry in body.input}
    return value.source_name in inside or shapes.get(value.source_name) == value.shape


def _annotate_op(made: Annotated, module: Module, random: Random) -> None:
    """Say of a node how it runs: at times in a way that it cannot."""
    mesh = made.program.mesh
    known = [(node, view) for node in module.graph if node.source and (view := rule_view(node, mesh)) is not None]
    known = [(node, view) for node, view in known if any(value.shape for value in node.inputs)]
    if not known:
        return
    node, view = random.choice(known)
    axes = [Axis.parse(name) for name in random.sample(list(mesh.axes), len(mesh.axes))]
    factors: list[tuple[Axis, ...]] = [() for _ in view.rule.sizes]
    for axis in axes:
        place = random.randrange(len(factors)) if factors and random.random() < 0.8 else None
        if place is not None and view.fitting(place, (*factors[place], axis)) == (*factors[place], axis):
            factors[place] = (*factors[place], axis)
    placement = view.placement(tuple(factors))
    if placement is None:
        return
    listed: list[Spec | None] = []
    for value, needed in zip(node.operands, placement.operands, strict=True):
        if value is None:
            continue
        if needed is None or random.random() < 0.3:
            listed.append(None)
        else:
            is_odd = random.random() < 0.1
            listed.append(random_spec(random, len(value.shape), mesh) if is_odd else [*needed.spec()])
    if any(listed) and not _clash(made, node, listed):
        made.ops[str(node.source)] = {"in": listed}
        made.kinds = (*made.kinds, "operator")


def _clash(made: Annotated, node: Node, listed: Sequence[Spec | None]) -> bool:
    """Whether a tensor is annotated already, or twice."""
    names = [value.source_name for value, spec in zip(node.inputs, listed, strict=True) if spec is not None]
    said = set(made.program.annotations)
    return len(set(names)) < len(names) or bool(said & set(names)) or bool(made.ops)


# -- whether they hold ----------------------------------------------------------------------------------------------


@dataclass
class Watch(Instrumentation):
    """Looks at the graph after each pass in which all communication stands, before it is made local."""

    annotated: Annotated | None = None
    lost: list[str] = field(default_factory=list)
    stands: bool = False

    def after(self, pass_: Pass, index: int, module: Module, changed: bool) -> None:
        super().after(pass_, index, module, changed)
        self.stands = self.stands or pass_.name == "insert-redistribution"
        if self.stands and not module.is_local:
            assert self.annotated is not None
            self.lost += [f"after {pass_.name}: {told}" for told in lost_in(module, self.annotated)]


def partitioned(made: Annotated, folder: Path) -> tuple[irpar.Partition, list[str]]:
    """The partition, and which annotations were lost on the way to it."""
    module = loaded(replace(made.program, annotations={}), folder)
    infer_undeclared_types(module)
    irpar.annotate(module, made.program.annotations)
    if made.ops:
        path = folder / "ops.json"
        path.write_text(json.dumps({"ops": made.ops}))
        module.set_mesh(made.program.mesh)
        read_shardings(path).annotate(module)
    watch = Watch(verify_each=True, reproducer=None, annotated=made)
    passes = PassManager.parse(made.program.pipeline, watch)
    partition = irpar.partition(module, made.program.mesh, pipeline=passes, network=made.program.network)
    told = {entry["name"] for entry in partition.plan.not_as_annotated if entry["lies"] is None}
    lost = [each for each in watch.lost if each.split("%")[1].split(" ")[0] not in told]
    return partition, [*lost, *lost_in_plan(partition, made), *lost_in_memory(partition, made)]


def lost_in(module: Module, made: Annotated) -> Iterator[str]:
    """The annotated values that readers meet otherwise, in global view."""
    mesh = made.program.mesh
    values: dict[str, list[Value]] = {}
    for graph in module.graph.graphs():
        for value in graph.values():
            values.setdefault(value.source_name, []).append(value)
    for name, spec in made.program.annotations.items():
        for value in values.get(name, ()):
            if value.is_constant or value.sharding is None:
                continue
            readers = [user for user in value.users if not _moves(user) or user.graph is not value.owner]
            if readers and not any(_lies(step, spec, mesh) for step in _way(value)):
                yield f"%{name} {spec} is read by {readers[0]!r} as {value.sharding}"
    for source, cuts in made.ops.items():
        nodes = [
            node for graph in module.graph.graphs() for node in graph if node.source == source and not _moves(node)
        ]
        for node in nodes:
            yield from _runs_otherwise(node, cuts, made)


def _runs_otherwise(node: Node, cuts: Cuts, made: Annotated) -> Iterator[str]:
    said = iter(cuts.get("in", ()))
    for value in _told_operands(node, made):
        spec = next(said, None)
        if spec is None or value.sharding is None or value.sharding.partial:
            continue
        if len(spec) == value.sharding.rank and not _lies(value, spec, made.program.mesh):
            yield f"%{node.source} is to run as {cuts}, and reads {value!r} as {value.sharding}"


def _told_operands(node: Node, made: Annotated) -> Sequence[Value]:
    """The operands that an entry speaks of: of a node that is still what it was."""
    known = next((other for other in made.program.model.graph.node if other.name == node.source), None)
    if (
        known is None
        or known.op_type != node.op_type
        or len([name for name in known.input if name]) != len(node.inputs)
    ):
        return ()
    return node.inputs


def _moves(node: Node) -> bool:
    return node.domain == "irpar" and node.op_type in COLLECTIVES


def _way(value: Value) -> Iterator[Value]:
    """A value, and what it was before it was moved."""
    yield value
    while value.node is not None and _moves(value.node):
        value = value.node.inputs[0]
        yield value


def _lies(value: Value, spec: Spec, mesh: Mesh) -> bool:
    if value.sharding is None or mesh.group_size(value.sharding.partial) > 1:
        return False
    return lies_as(value.sharding.axes, spec, mesh)


def lies_as(axes: Sequence[Sequence[Axis]], spec: Spec, mesh: Mesh) -> bool:
    """Whether each device has of each dim the block that was said, or of an open dim a part of it."""
    for cut, said in zip(axes, spec, strict=True):
        named = [Axis.parse(axis) for axis in said or () if axis != "?"]
        is_open = bool(said) and said[-1] == "?"
        more, rest = divmod(mesh.group_size(cut), mesh.group_size(named))
        if rest or (more > 1 and not is_open):
            return False
        for coords in mesh.all_coords():
            if mesh.position(coords, cut) // more != mesh.position(coords, named):
                return False
    return True


def lost_in_plan(partition: irpar.Partition, made: Annotated) -> Iterator[str]:
    """Annotations of which the plan shows no effect and lists none, and those that it calls annotated wrongly."""
    plan, mesh = partition.plan, made.program.mesh
    listed = {entry["name"] for entry in plan.not_as_annotated}
    titles = {f'annotated "{name}"': spec for name, spec in made.program.annotations.items()}
    lying: dict[str, list[list[list[Axis]]]] = {}
    for entry in (*plan.values, *plan.inputs, *plan.outputs):
        if entry["sharding"] is None:
            continue
        axes = [[Axis.parse(axis) for axis in cut or ()] for cut in entry["sharding"]]
        lying.setdefault(entry.get("source", entry["name"]), []).append(axes)
        for reason in entry.get("why", ()):
            spec = titles.get(reason["why"])
            if spec is not None and not (len(spec) == len(axes) and lies_as(axes, spec, mesh) and not entry["partial"]):
                yield f"{entry['name']} is called annotated, and is sharded as {entry['sharding']}"
    for entry in (*plan.inputs, *plan.outputs):
        spec = made.program.annotations.get(entry["name"])
        if spec is not None and entry["sharding"] is not None:
            axes = [[Axis.parse(axis) for axis in cut or ()] for cut in entry["sharding"]]
            if not lies_as(axes, spec, mesh):
                yield f"{entry['name']} {spec} comes or goes as {entry['sharding']}"
    for name, spec in made.program.annotations.items():
        if name not in listed and any(spec) and not any(lies_as(axes, spec, mesh) for axes in lying.get(name, ())):
            yield f"%{name} {spec} lies nowhere so: {lying.get(name)}"


def lost_in_memory(partition: irpar.Partition, made: Annotated) -> Iterator[str]:
    """Weights of which a rank holds more than their annotations say."""
    assert partition.module is not None
    held: dict[str, int] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for value in _constants(partition.module.graph):
        if value.sharding is not None:
            size = _elements(value.sharding, value.whole_shape)
            held[value.source_name] = held.get(value.source_name, 0) + size
            shapes[value.source_name] = value.whole_shape
    given = {entry.name: tuple(entry.dims) for entry in made.program.model.graph.initializer}
    for name, spec in made.program.annotations.items():
        if name in held and name in given:
            said = Sharding.of_spec(made.program.mesh, [[axis for axis in dim or () if axis != "?"] for dim in spec])
            if held[name] > _elements(said, given[name]):
                yield f"a rank holds {held[name]} elements of %{name}, annotated {spec}"


def _constants(graph: Graph) -> Iterator[Value]:
    for body in graph.graphs():
        yield from body.constants


def _elements(sharding: Sharding, shape: Sequence[int]) -> int:
    return math.prod(ceil_shape(sharding, shape))


def of_kinds(made: Sequence[Annotated]) -> Counter[str]:
    """How many annotations were of what."""
    return Counter(kind for each in made for kind in each.kinds)
