"""Memory spaces: which memory nodes compute in, and the copies between the memories of one rank.

    %d = irpar.Copy(%h) {to="device"} : f32[4]                          %h : f32[4] in host

or, beside what else the rank does,

    %s = irpar.CopyStart(%h) {id=3, to="device"} : inflight<f32[4]>
    %d = irpar.Wait(%s) {id=3} : f32[4]

A node computes on the device, or on the host where it, or a node in whose body it stands, says `place=host`. It reads
values of the memory that it computes in, and its results lie there; a node that reads sizes alone (`OpDef.reads_sizes`)
reads those of any value but on a disk. Communication takes place on the device. What lies on a disk is only copied. The
bodies of an If, a Loop or a Scan begin and end with values that lie where those of the node do; conditions and the
number of trips are read wherever they lie. In a function all is where its call is.

Copies have ids of their own, beside those of communication.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from irpar.ir import (
    DOMAIN,
    IRPAR_OPSET,
    DType,
    Graph,
    InflightType,
    Memory,
    Module,
    Node,
    Place,
    RefAttribute,
    TensorType,
    Type,
    Value,
    register_check,
    register_module_check,
)
from irpar.ops.gradients.refused import PARTITIONED

from .bodies import has_open_bodies, is_numbered, reached
from .coords import root_of
from .effects import is_communication
from .facts import CannotTellError, needed, tensor_of
from .op_def import OpDef, traits
from .registry import define

COPY, START = "Copy", "CopyStart"
MEMORIES: tuple[Memory, ...] = get_args(Memory)


# -- where things are -----------------------------------------------------------------------------------------------


def node_place(node: Node) -> Place:
    """Where a node computes: where it says, else where the node does in whose body it stands, else on the device."""
    return node.place or where_around(node)


def where_around(node: Node) -> Place:
    """Where the nodes compute in whose bodies a node stands."""
    holder = None if node.graph is None else node.graph.parent
    return "device" if holder is None else node_place(holder)


def reads_sizes_alone(value: Value, nodes: Iterable[Node]) -> bool:
    """Whether nodes read nothing of a value but its sizes, whatever bodies they hold."""
    readers = (inner for node in nodes for inner in reached(node) if value in inner.inputs)
    return value.memory != "disk" and all(traits(reader).reads_sizes for reader in readers)


def put(node: Node, place: Place) -> None:
    """Let a node compute somewhere, with all that its bodies hold; its results lie there. Operands are the caller's."""
    node.place = place
    for value in node.results:
        value.memory = place
    for body in node.nested_graphs():
        for graph in body.graphs():
            for value in (*graph.inputs, *graph.constants):
                value.memory = place
            for inner in graph:
                inner.place = None
                for value in inner.results:
                    value.memory = place


# -- copies ---------------------------------------------------------------------------------------------------------


def is_copy(node: Node) -> bool:
    """True for what copies from one memory to another, or begins to."""
    return traits(node).copies


def source_memory(node: Node) -> Memory:
    """Where a copy reads."""
    return needed(node, 0).memory


def target_memory(node: Node) -> Memory:
    """Where a copy writes."""
    return node.result.memory


def copied_bytes(node: Node) -> int:
    """What a copy moves.

    Raises:
        CannotTellError: its operand is no tensor of static shape.
    """
    found = tensor_of(node, 0)
    if not found.is_static:
        raise CannotTellError("the size of what is copied")
    return found.nbytes


def copies_of(graph: Graph) -> Iterator[Node]:
    """The copies in a graph and its bodies, in order."""
    return (node for node in graph.walk() if is_copy(node))


@dataclass
class CopyWriter:
    """Writes copies into the graphs of one program.

    Attributes:
        root: the outermost graph.
    """

    root: Graph
    _number: int = field(init=False)

    def __post_init__(self) -> None:
        known = (_number(node) for node in self.root.walk() if is_copy(node) or is_numbered(node))
        self._number = 1 + max(known, default=-1)

    def copy(
        self, value: Value, to: Memory, before: Node | None = None, *, like: Node | None = None, why: str = ""
    ) -> Value:
        """Copy a value to another memory, and wait for it.

        Args:
            value: it.
            to: where.
            before: the node in front of which the copy stands; None: at the end of the value's graph.
            like: a node whose phase, stage and scope the copy has; None: those of `before`.
            why: for the plan, which says why there is this copy.

        Returns:
            The value there.
        """
        return self._node(COPY, value, to, before, like, why).result

    def start(
        self, value: Value, to: Memory, before: Node | None = None, *, like: Node | None = None, why: str = ""
    ) -> Value:
        """Begin to copy a value; arguments as for `copy`. What is returned is in flight: give it to `wait`."""
        return self._node(START, value, to, before, like, why).result

    def wait(self, inflight: Value, before: Node | None = None) -> Value:
        """Wait for what was begun; returns the value where it was copied to."""
        start = inflight.node
        if start is None or start.op_type != START or not isinstance(inflight.type, InflightType):
            raise ValueError(f"%{inflight.name} is no copy in flight")
        result = _lies_like(Value(start.inputs[0].name, inflight.type.elem), inflight)
        node = Node(
            "Wait", [inflight], {"id": start.attributes["id"]}, domain=DOMAIN, version=IRPAR_OPSET, results=[result]
        )
        _say_like(node, start)
        _insert(node, self.root, before)
        return result

    def _node(self, op_type: str, value: Value, to: Memory, before: Node | None, like: Node | None, why: str) -> Node:
        type_ = InflightType(value.type) if op_type == START else value.type
        result = _lies_like(Value(value.name, type_), value)
        result.memory = to
        attributes = {"to": to, "id": self._number}
        self._number += 1
        node = Node(op_type, [value], attributes, domain=DOMAIN, version=IRPAR_OPSET, results=[result])
        _say_like(node, like or before)
        node.doc = why
        return _insert(node, value.owner or self.root, before)


def _lies_like(made: Value, value: Value) -> Value:
    made.sharding, made.global_shape, made.memory = value.sharding, value.global_shape, value.memory
    return made


def _say_like(node: Node, other: Node | None) -> None:
    """A copy is of no place."""
    if other is not None:
        node.phase, node.stage, node.scope = other.phase, other.stage, other.scope


def _insert(node: Node, graph: Graph, before: Node | None) -> Node:
    if before is not None:
        assert before.graph is not None
        return before.graph.insert_before(before, node)
    return graph.insert_before(graph.return_node, node)


def _number(node: Node) -> int:
    number = node.attributes.get("id")
    return number if isinstance(number, int) else -1


def number_copies(graphs: Sequence[Graph]) -> bool:
    """Give copies ids in program order, alike in all programs of a module, behind those of communication.

    Returns whether an id changed. Copies of programs are the same where these copy a value of the same name from and to
    the same memories, the same time over, in the same body if in one.
    """
    first = 1 + max((_number(node) for graph in graphs for node in graph.walk() if is_numbered(node)), default=-1)
    ids: dict[tuple[str, str, str, str, int], int] = {}
    changed = False
    for graph in graphs:
        counts: dict[tuple[str, str, str, str], int] = {}
        for node in copies_of(graph):
            body = node.graph.name if node.graph is not None and node.graph is not graph else ""
            key = node.inputs[0].name, source_memory(node), target_memory(node), body
            time = counts[key] = counts.get(key, -1) + 1
            number = ids.setdefault((*key, time), first + len(ids))
            waits = node.result.users if node.op_type == START else ()
            for each in (node, *waits):
                changed |= each.attributes.get("id") != number
                each.set_attribute("id", number)
    return changed


def can_be_copied(type_: Type | None) -> bool:
    """Whether a value of a type can be copied between memories: a tensor of numbers."""
    return isinstance(type_, TensorType) and type_.dtype is not DType.STR


# -- what must hold -------------------------------------------------------------------------------------------------


def copy_problems(module: Module, node: Node) -> Iterator[str]:
    """What is wrong with a copy by itself."""
    if len(node.operands) != 1 or node.operands[0] is None or len(node.results) != 1:
        yield "has not one operand and one result"
        return
    source, result, to = node.operands[0], node.results[0], node.attributes.get("to")
    begins = node.op_type == START
    number = node.attributes.get("id")
    if to not in MEMORIES:
        yield f'has to={to!r}; copies go to "device", "host" or "disk"'
        return
    if unknown := node.attributes.keys() - {"to", "id"}:
        yield f"has the attribute {min(unknown)}; a copy has to and id"
    if not isinstance(number, int | RefAttribute) and (begins or number is not None):
        yield "has no attribute id, a number"
    if node.graph is not None and root_of(node.graph).view == "global":
        yield "copies between memories in global view; copies stand in the programs of ranks, behind localize"
    if source.memory == to:
        yield f"copies %{source.name} to the {to}, where it lies already: read it as it is"
    if result.memory != to:
        yield f"copies to the {to}, but %{result.name} lies in {result.memory}"
    if not can_be_copied(source.type):
        yield f"copies %{source.name}, which is {source.type}; only tensors of numbers are copied"
        return
    expected = InflightType(source.type) if begins else source.type
    if result.type != expected:
        yield f"gives {result.type}, where a copy of %{source.name} is {expected}"
    if (source.sharding, source.global_shape) != (result.sharding, result.global_shape):
        yield f"gives %{result.name} another sharding than %{source.name} has; a copy keeps it"


def memory_problems(module: Module) -> Iterator[str]:
    """What nodes of local programs read or give in a memory that they do not compute in."""
    for graph in module.graphs:
        if graph.view == "local":
            yield from (f"graph @{graph.name}, {problem}" for problem in space_problems(graph))
    for function in module.functions.values():
        for node in function.graph.walk():
            if is_copy(node) or node.place == "host" or any(value.memory != "device" for value in node.results):
                yield (
                    f"function @{function.name}, node {node.label} ({node.op_type}): says where it is; all that is in "
                    "a function is where its call is: run inline-functions"
                )
                break


def space_problems(graph: Graph) -> Iterator[str]:
    """The same of one program."""
    for node in graph.walk():
        for problem in _space_problems(node):
            yield f"node {node.label} ({node.op_type}): {problem}"
    replaced = {graph.output(state.output) for state in graph.states.values() if state.output is not None}
    for value in graph.outputs:
        if value.memory == "disk" and value not in replaced:
            yield f"%{value.name} is a result, and lies on the disk: copy it to the host"


def _space_problems(node: Node) -> Iterator[str]:
    if is_copy(node):
        return
    if traits(node).waits:
        inflight = node.operands[0] if node.operands else None
        if inflight is not None and node.results and node.result.memory != inflight.memory:
            yield f"waits for what comes to the {inflight.memory}, but %{node.result.name} lies in {node.result.memory}"
        return
    where = node_place(node)
    if node.place == "device" and where_around(node) == "host":
        yield "is on the device, and stands in the body of a node on the host, which is there as a whole"
    if is_communication(node) and where == "host":
        yield "communicates on the host; collectives take place on the device"
    if has_open_bodies(node) and node.place is None:
        yield from _boundary_problems(node)
        return
    for value in dict.fromkeys(node.inputs):
        if value.memory != where and not (traits(node).reads_sizes and value.memory != "disk"):
            yield (
                f"runs on the {where} and reads %{value.name}, which lies {_in(value)}: copy it first, "
                f'irpar.Copy(%{value.name}) {{to="{where}"}}'
            )
    for value in node.results:
        if value.memory != where:
            yield f"runs on the {where}, but its result %{value.name} lies {_in(value)}"
    if has_open_bodies(node):
        yield from _boundary_problems(node)


def _in(value: Value) -> str:
    return f"on the {value.memory}"


def _boundary_problems(node: Node) -> Iterator[str]:
    """What goes into a body, comes out of it and is the node's result must lie in one memory."""
    deciding = {"If": 1, "Loop": 2, "Scan": 0}[node.op_type]
    for value in node.operands[:deciding]:
        if value is not None and value.memory == "disk":
            yield f"decides by %{value.name}, which lies on the disk: copy it first"
    for body in node.nested_graphs():
        for outside, inside in _boundary(node, body):
            if outside.memory != inside.memory:
                yield f"%{outside.name} lies {_in(outside)}, and in the body @{body.name} %{inside.name} {_in(inside)}"


def _boundary(node: Node, body: Graph) -> Iterator[tuple[Value, Value]]:
    """Values around a body, and those that stand for them in it."""
    skipped, given = {"If": (0, 0), "Loop": (2, 1), "Scan": (0, 0)}[node.op_type]
    if node.op_type != "If":
        for outside, inside in zip(node.operands[skipped:], body.inputs[skipped:], strict=False):
            if outside is not None:
                yield outside, inside
        states = len(node.operands) - skipped if node.op_type == "Loop" else _states_of_scan(node)
        yield from zip(body.inputs[skipped : skipped + states], body.outputs[given : given + states], strict=False)
    yield from zip(node.results, body.outputs[given:], strict=False)


def _states_of_scan(node: Node) -> int:
    scanned = node.attributes.get("num_scan_inputs")
    return len(node.operands) - (scanned if isinstance(scanned, int) else 0)


# -- the operators --------------------------------------------------------------------------------------------------


def _infer_copy(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0)]


def _infer_start(node: Node) -> Sequence[Type]:
    return [InflightType(tensor_of(node, 0))]


define(OpDef(DOMAIN, COPY, _infer_copy, copies=True, gradient=PARTITIONED))
define(OpDef(DOMAIN, START, _infer_start, copies=True, starts=True, gradient=PARTITIONED))
register_check(DOMAIN, COPY, copy_problems)
register_check(DOMAIN, START, copy_problems)
register_module_check(memory_problems)
