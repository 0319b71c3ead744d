"""What stands between a value and its readers in global view: a tree of collectives."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from irpar.analysis.cost.model import Key
from irpar.analysis.cost.network import Network
from irpar.ir import DOMAIN, Builder, Graph, Module, Node, Value
from irpar.ops.collectives import COLLECTIVES, FREE, collective_axes
from irpar.ops.effects import is_collective, redistributes
from irpar.ops.facts import int_attribute, ints_attribute
from irpar.sharding import Sharding

from . import Step, steps_key


def is_move(node: Node) -> bool:
    """True for a collective in global view that brings a value of its own graph to another sharding."""
    if not redistributes(node):
        return False
    value = node.inputs[0]
    return value.owner is node.graph and value.sharding is not None and node.result.sharding is not None


def standing_in(graph: Graph, node: Node) -> Node:
    """The node, or of those that hold it the one that stands in a graph around it."""
    while node.graph is not graph:
        assert node.graph is not None
        assert node.graph.parent is not None
        node = node.graph.parent
    return node


def behind_parts(value: Value, read: Collection[Sharding]) -> Node | None:
    """What follows the maker of a sum in parts that is read in none of some ways as it lies; None for any other value.

    A step of it stands there, rather than where it is read: parts are larger than blocks of the sum, and a gradient is
    read long after it is made.
    """
    maker, lies = value.node, value.sharding
    if maker is None or maker.graph is None or lies is None or not lies.partial or lies.canonical in read:
        return None
    return maker.next or maker.graph.return_node


def step_of(node: Node) -> Step:
    """What a move does."""
    after = node.result.sharding
    assert after is not None
    dims = tuple(int_attribute(node, name) for name in COLLECTIVES[node.op_type].dims)
    return Step(node.op_type, collective_axes(node), dims, after, 0, ints_attribute(node, "pairs") or ())


def attributes_of(step: Step, before: Sharding) -> dict[str, object]:
    """The attributes of the node that does a step, less its id."""
    attributes: dict[str, object] = {"axes": [str(axis) for axis in step.axes]}
    attributes |= dict(zip(COLLECTIVES[step.op].dims, step.dims, strict=True))
    match step.op:
        case "CollectivePermute":
            attributes["pairs"] = list(step.pairs)
        case "MakePartial":
            attributes["reduce"] = step.after.reduce
        case "AllReduce" | "ReduceScatter":
            attributes["reduce"] = before.reduce
    return attributes


def insert_step(builder: Builder, value: Value, step: Step, doc: str) -> Value:
    """Insert the node that does a step; `doc` says why. Returns its result."""
    assert value.sharding is not None
    attributes = attributes_of(step, value.sharding)
    if step.op not in FREE:
        attributes["id"] = 0
    result = builder.op(step.op, [value], attributes, type=value.type, domain=DOMAIN, name=value.name)
    result.sharding, result.source = step.after, value.source
    assert result.node is not None
    result.node.doc = doc
    return result


def mark_rematerialized(module: Module, nodes: Iterable[Node]) -> None:
    """Mark the conflicts for which a value is gathered and then, by one of these nodes, cut.

    By the same axes, or by any where nobody but moves reads what is gathered.
    """
    for node in nodes:
        if node.identity != (DOMAIN, "AllSlice"):
            continue
        cut = {axis.name for axis in collective_axes(node)}
        maker = node.inputs[0].node
        while maker is not None and is_collective(maker):
            name = maker.results[0].name
            conflict = module.conflicts.get(name)
            if (
                conflict is not None
                and maker.op_type == "AllGather"
                and (cut & {axis.name for axis in collective_axes(maker)} or all(map(is_move, maker.result.users)))
            ):
                module.conflicts[name] = replace(conflict, rematerialized=True)
            maker = maker.inputs[0].node


@dataclass
class Tree:
    """A value, and the moves that follow from it.

    Attributes:
        root: the value.
        moves: each before those that follow it. What is made of a value that readers must meet as it lies is none: it
            is read, whoever reads it, and stands at the root of a tree of its own.
        read: per sharding, in the canonical spelling, the values of the tree that others than moves read.
    """

    root: Value
    moves: list[Node] = field(default_factory=list)
    read: dict[Sharding, list[Value]] = field(default_factory=dict)

    @property
    def lies(self) -> Sharding:
        """How the root lies, in the canonical spelling."""
        assert self.root.sharding is not None
        return self.root.sharding.canonical

    def key(self, network: Network) -> Key:
        """What the moves cost."""
        steps = [(before, step_of(node)) for node in self.moves if (before := node.inputs[0].sharding) is not None]
        return steps_key(steps, self.lies.mesh, self.root.shape, self.root.dtype.bits, network)


def tree_of(root: Value, is_held: Callable[[Value], bool] = lambda _: False) -> Tree:
    """The tree of a value that no move gives, or one that is held: that readers must meet as it is sharded."""
    tree = Tree(root)
    waiting = [root]
    while waiting:
        value = waiting.pop()
        assert value.sharding is not None
        users = value.users
        is_end = value is not root and is_held(value)
        moves = [user for user in users if not is_end and is_move(user) and user.graph is root.owner]
        if len(moves) < len(users):
            tree.read.setdefault(value.sharding.canonical, []).append(value)
        tree.moves.extend(moves)
        waiting.extend(node.result for node in reversed(moves))
    return tree


def trees(graph: Graph, is_held: Callable[[Value], bool] = lambda _: False) -> Iterator[Tree]:
    """The trees of a graph that have moves; not of the graphs nested in it.

    Args:
        graph: global view.
        is_held: which values readers must meet as they are sharded.
    """
    seen: set[Value] = set()
    for node in [node for node in graph if is_move(node)]:
        if node.graph is graph and node.inputs[0] not in seen:  # What a move gives is met behind it.
            tree = tree_of(node.inputs[0], is_held)
            seen.update((tree.root, *(move.result for move in tree.moves if not is_held(move.result))))
            yield tree
