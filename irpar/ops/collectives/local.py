"""What a collective's node says of its group: axes, members, shapes of blocks, what a member sends."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from irpar.ir import Node, Shape, Value, with_dim
from irpar.ir.attributes import Strings
from irpar.ops.coords import root_of
from irpar.ops.facts import CannotTellError, needed, tensor_of
from irpar.sharding import Axis, Mesh, ceil_shape

from .record import Share


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


def is_local(node: Node) -> bool:
    """Whether a node stands in a local graph, or in a body of one."""
    return node.graph is not None and root_of(node.graph).view == "local"


def _mesh(value: Value) -> Mesh:
    if value.sharding is None:
        raise CannotTellError("the mesh")
    return value.sharding.mesh


@dataclass(frozen=True)
class Members:
    """The members of a local collective: how many there are, and which of them the graph's ranks are."""

    size: int
    position: int


def members_of(node: Node) -> Members:
    """The members of a local collective.

    Raises:
        CannotTellError: its operand has no sharding, or it has no axes.
    """
    mesh = _mesh(needed(node, 0))
    axes = collective_axes(node)
    assert node.graph is not None
    ranks = root_of(node.graph).ranks
    return Members(mesh.group_size(axes), mesh.position(mesh.coords(ranks[0] if ranks else 0), axes))


def local_shape(node: Node) -> tuple[int, ...]:
    """The static shape of a local operand.

    Raises:
        CannotTellError: it is not static.
    """
    found = tensor_of(node, 0)
    if not found.is_static:
        raise CannotTellError("a local shape that is not static")
    return found.static_shape


def part(total: int, sizes: tuple[int, ...] | None, members: Members) -> int:
    """The size of this member's block of a dim of `total`."""
    return total // members.size if sizes is None else sizes[members.position]


def gathered(size: int, sizes: tuple[int, ...] | None, members: Members) -> int:
    """The size of all members' blocks together."""
    return size * members.size if sizes is None else sum(sizes)


def shape_kept(node: Node) -> Shape:
    """The operand's shape."""
    return local_shape(node)


def block_of(node: Node, value: Value) -> tuple[int, ...]:
    """The largest block of a value that any device holds; in a local graph the one that this program holds.

    Raises:
        CannotTellError: in a global graph the value has no sharding.
    """
    if is_local(node):
        return value.shape
    if value.sharding is None:
        raise CannotTellError("the sharding")
    return ceil_shape(value.sharding, value.shape)


def operand_block(node: Node) -> tuple[int, ...]:
    """The same of its operand."""
    return block_of(node, needed(node, 0))


def padded(shape: Sequence[int], dim: int, sizes: tuple[int, ...] | None) -> int:
    """Elements of a block with `dim` padded to the largest of `sizes`."""
    return prod(shape) if sizes is None else prod(with_dim(shape, dim, max(sizes)))


def elements_of_operand(node: Node, size: int) -> Share:
    """The operand, to whomever."""
    return Share(prod(operand_block(node)) if size > 1 else 0, 1)


def no_elements(node: Node, size: int) -> Share:
    """Nothing."""
    return Share(0, 1)
