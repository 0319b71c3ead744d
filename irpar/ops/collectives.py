"""irpar's collectives: types in both views, and what they send.

They have no factor rule: they are where sharding changes, made by insert-redistribution, not what a sharding flows
through.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import DOMAIN, Graph, InflightType, Node, Shape, Type, Value
from irpar.ir.attributes import Strings
from irpar.sharding import Axis, Mesh, ceil_div, ceil_shape

from .coords import root_of
from .facts import CannotTellError, int_attribute, ints_attribute, needed, tensor_of
from .op_def import OpDef, traits
from .registry import define


def collective_axes(node: Node) -> tuple[Axis, ...]:
    """The mesh axes over which a collective runs, major first.

    Raises:
        CannotTellError: the node has none.
        ShardingError: one is no axis.
    """
    texts = node.attributes.get("axes")
    if not isinstance(texts, Strings):
        raise CannotTellError("axes")
    names = (text if isinstance(text, str) else text.decode(errors="backslashreplace") for text in texts)
    return tuple(map(Axis.parse, names))


def _is_local(node: Node) -> bool:
    return node.graph is not None and root_of(node.graph).view == "local"


def _mesh(value: Value) -> Mesh:
    if value.sharding is None:
        raise CannotTellError("the mesh")
    return value.sharding.mesh


@dataclass(frozen=True)
class _Group:
    """The members of a local collective: how many there are, and which of them the graph's ranks are."""

    size: int
    position: int


def _group(node: Node) -> _Group:
    mesh = _mesh(needed(node, 0))
    axes = collective_axes(node)
    assert node.graph is not None
    ranks = root_of(node.graph).ranks
    return _Group(mesh.group_size(axes), mesh.position(mesh.coords(ranks[0] if ranks else 0), axes))


def _with_dim(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _local_shape(node: Node) -> tuple[int, ...]:
    found = tensor_of(node, 0)
    if not found.is_static:
        raise CannotTellError("a local shape that is not static")
    return found.static_shape


def _part(total: int, sizes: tuple[int, ...] | None, group: _Group) -> int:
    """The size of this member's block of a dim of `total`."""
    return total // group.size if sizes is None else sizes[group.position]


def _gathered(size: int, sizes: tuple[int, ...] | None, group: _Group) -> int:
    """The size of all members' blocks together."""
    return size * group.size if sizes is None else sum(sizes)


def _shape_kept(node: Node) -> Shape:
    return _local_shape(node)


def _shape_all_gather(node: Node) -> Shape:
    shape, dim = _local_shape(node), int_attribute(node, "dim")
    return _with_dim(shape, dim, _gathered(shape[dim], ints_attribute(node, "sizes"), _group(node)))


def _shape_reduce_scatter(node: Node) -> Shape:
    shape, dim = _local_shape(node), int_attribute(node, "dim")
    return _with_dim(shape, dim, _part(shape[dim], ints_attribute(node, "sizes"), _group(node)))


def _shape_all_to_all(node: Node) -> Shape:
    shape = _local_shape(node)
    split, concat = int_attribute(node, "split_dim"), int_attribute(node, "concat_dim")
    group = _group(node)
    divided = _with_dim(shape, split, _part(shape[split], ints_attribute(node, "split_sizes"), group))
    return _with_dim(divided, concat, _gathered(shape[concat], ints_attribute(node, "concat_sizes"), group))


def _shape_permute(node: Node) -> Shape:
    """The shape of the member whose block this one gets, where `shapes` tells those of all; else the operand's."""
    shape, shapes = _local_shape(node), ints_attribute(node, "shapes")
    if shapes is None:
        return shape
    group, pairs = _group(node), ints_attribute(node, "pairs") or ()
    source = dict(zip(pairs[1::2], pairs[::2], strict=True)).get(group.position)
    if source is None:
        return shape
    return shapes[source * len(shape) : (source + 1) * len(shape)]


def _infer(local: Callable[[Node], Shape]) -> Callable[[Node], Sequence[Type]]:
    """Whole types stay as they are; local ones follow from the attributes."""

    def infer(node: Node) -> Sequence[Type]:
        found = tensor_of(node, 0)
        return [found.with_shape(local(node)) if _is_local(node) else found]

    return infer


# -- what is sent, by the ring model ----------------------------------------------------------------------------------


def _block(node: Node, value: Value) -> tuple[int, ...]:
    """The largest block of a value that any device holds; in a local graph the one that this program holds."""
    if _is_local(node):
        return value.shape
    if value.sharding is None:
        raise CannotTellError("the sharding")
    return ceil_shape(value.sharding, value.shape)


def _operand_block(node: Node) -> tuple[int, ...]:
    return _block(node, needed(node, 0))


def _padded(shape: Sequence[int], dim: int, sizes: tuple[int, ...] | None) -> int:
    """Elements of a block with `dim` padded to the largest of `sizes`."""
    return prod(shape) if sizes is None else prod(_with_dim(tuple(shape), dim, max(sizes)))  # type: ignore[arg-type]


def _elements_all_reduce(node: Node, size: int) -> tuple[int, int]:
    return 2 * (size - 1) * prod(_operand_block(node)), size


def _elements_all_gather(node: Node, size: int) -> tuple[int, int]:
    dim, sizes = int_attribute(node, "dim"), ints_attribute(node, "sizes")
    return (size - 1) * _padded(_operand_block(node), dim, sizes), 1


def _elements_reduce_scatter(node: Node, size: int) -> tuple[int, int]:
    dim, sizes = int_attribute(node, "dim"), ints_attribute(node, "sizes")
    return (size - 1) * _padded(_block(node, node.result), dim, sizes), 1


def _elements_all_to_all(node: Node, size: int) -> tuple[int, int]:
    """All blocks but one of the local buffer, both dims padded."""
    split, concat = int_attribute(node, "split_dim"), int_attribute(node, "concat_dim")
    shape = _operand_block(node)
    parts = ints_attribute(node, "split_sizes")
    block = max(parts) if parts else ceil_div(shape[split], size)
    shape = tuple(block if dim == split else count for dim, count in enumerate(shape))
    return (size - 1) * _padded(shape, concat, ints_attribute(node, "concat_sizes")), 1


def _elements_all(node: Node, size: int) -> tuple[int, int]:
    return (prod(_operand_block(node)) if size > 1 else 0), 1


def _elements_none(node: Node, size: int) -> tuple[int, int]:
    return 0, 1


@dataclass(frozen=True)
class CollectiveOp:
    """One of irpar's operators between devices.

    Attributes:
        kind: what plan.json calls it; None: it sends nothing, has no id, and stands in global view only.
        does: what it does.
        shape: the local shape of the result.
        elements: how many elements a member sends, as a fraction (numerator, denominator).
        dims: the attributes that name dims of its operand; of one that sends, their sizes change in local view.
        others: the attributes that it must have besides, and beside `axes` and `id`.
        uneven: the attributes that it has where the members' blocks differ.
    """

    kind: str | None
    does: str
    shape: Callable[[Node], Shape]
    elements: Callable[[Node, int], tuple[int, int]]
    dims: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    uneven: tuple[str, ...] = ()


COLLECTIVES = {
    "AllReduce": CollectiveOp(
        "all_reduce",
        "Reduces over the group; all get the result.",
        _shape_kept,
        _elements_all_reduce,
        others=("reduce",),
    ),
    "AllGather": CollectiveOp(
        "all_gather",
        "Concatenates the members' blocks along dim.",
        _shape_all_gather,
        _elements_all_gather,
        dims=("dim",),
        uneven=("sizes",),
    ),
    "ReduceScatter": CollectiveOp(
        "reduce_scatter",
        "Reduces over the group, then member i keeps block i along dim.",
        _shape_reduce_scatter,
        _elements_reduce_scatter,
        dims=("dim",),
        others=("reduce",),
        uneven=("sizes",),
    ),
    "AllToAll": CollectiveOp(
        "all_to_all",
        "Member i sends block j of split_dim to member j and joins what it receives along concat_dim.",
        _shape_all_to_all,
        _elements_all_to_all,
        dims=("split_dim", "concat_dim"),
        uneven=("split_sizes", "concat_sizes"),
    ),
    "CollectivePermute": CollectiveOp(
        "permute",
        "Sends whole tensors between positions; who receives nothing gets zeros.",
        _shape_permute,
        _elements_all,
        others=("pairs",),
        uneven=("shapes",),
    ),
    "Broadcast": CollectiveOp(
        "broadcast", "All get the tensor of the root.", _shape_kept, _elements_all, others=("root",)
    ),
    # localize turns these into ONNX operators.
    "AllSlice": CollectiveOp(
        None,
        "Each keeps its own block along dim; exists in global view only.",
        _shape_reduce_scatter,
        _elements_none,
        dims=("dim",),
    ),
    "MakePartial": CollectiveOp(
        None,
        "The first keeps what all hold, so that reducing gives it again; exists in global view only.",
        _shape_kept,
        _elements_none,
        others=("reduce",),
    ),
}
"""By operator."""

KINDS = {name: op.kind for name, op in COLLECTIVES.items() if op.kind is not None}
"""What plan.json calls the collectives that send."""

STARTED = {f"{name}Start": name for name in KINDS}
"""The started forms, whose result is in flight until an irpar.Wait, and the collectives that they begin."""

WAIT = "Wait"

FREE = frozenset(COLLECTIVES.keys() - KINDS.keys())
"""The operators that send nothing, have no id, and stand in global view only."""


def sends(node: Node) -> bool:
    """True for a collective that sends, which has a kind and an id; those in `FREE` do not."""
    known = traits(node)
    return known.collective and known.communicates


def number_collectives(graph: Graph) -> None:
    """Give the collectives of a graph, and of those nested in it, their ids in program order.

    All ranks run programs made from one graph, whose collectives follow in one order, so that the ids agree.
    """
    number = 0
    for node in graph.walk():
        if traits(node).communicates:
            node.set_attribute("id", number)
            number += 1


def sent_bytes(node: Node, mesh: Mesh) -> int:
    """The most bytes that a device sends in a collective, by the ring model, uneven blocks padded, rounded up.

    With n members and S bytes: all-reduce 2(n-1)/n of the operand, all-gather (n-1)/n of the gathered result,
    reduce-scatter (n-1)/n of the operand, all-to-all (n-1)/n of the local buffer, permute and broadcast the operand.

    Raises:
        KeyError: the node is no collective.
        CannotTellError: in a global graph the operand or result has no sharding.
    """
    count, divisor = COLLECTIVES[node.op_type].elements(node, mesh.group_size(collective_axes(node)))
    found = tensor_of(node, 0)
    return ceil_div(count * found.dtype.bits, 8 * divisor)


def _infer_started(local: Callable[[Node], Shape]) -> Callable[[Node], Sequence[Type]]:
    infer = _infer(local)
    return lambda node: [InflightType(type_) for type_ in infer(node)]


def _infer_wait(node: Node) -> Sequence[Type]:
    found = needed(node, 0).type
    if not isinstance(found, InflightType):
        raise CannotTellError("what it waits for")
    return [found.elem]


for _name, _collective in COLLECTIVES.items():
    define(OpDef(DOMAIN, _name, _infer(_collective.shape), collective=True, communicates=_name in KINDS))
for _name, _begun in STARTED.items():
    define(OpDef(DOMAIN, _name, _infer_started(COLLECTIVES[_begun].shape), communicates=True, starts=True))
define(OpDef(DOMAIN, WAIT, _infer_wait, communicates=True, waits=True))
