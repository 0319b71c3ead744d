"""Products with a weight of which Split, Slice or Gather take sections apart: q, k and v, or gate and up, in one.

y = MatMul(x, w : [64, 192])    z = Add(y, b : [192])    q, k, v = Split(z)        sections of w: 0:64, 64:128, 128:192

Contiguous blocks of such a matrix are no blocks of its sections. Followed are biases and other elementwise operators
between the product and its readers, quantisation among them, and Reshape and Transpose: [17, 192] to [17, 3, 4, 16], of
which the 3 is taken apart. The matrix may be quantized: scales and zero points are taken apart with it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from irpar.ir import Graph, Ints, Node, Value
from irpar.ops.elementwise import BINARY, COMPARISONS, TESTS, UNARY
from irpar.ops.facts import CannotTellError, axis_attribute, axis_of, int_attribute, needed_ints, result_shape
from irpar.ops.local_programs.shape import slices

from .atoms import Atom, Atoms, joined

MOST_SECTIONS = 16
"""Of one weight."""
_LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
_QUANTISERS = frozenset(
    (domain, op_type) for domain in ("", "com.microsoft") for op_type in ("QuantizeLinear", "DequantizeLinear")
)
_PASSAGES = _QUANTISERS | {("", "Transpose"), ("", "Gather"), ("", "GatherND")}
"""What a weight goes through before a product: it is quantized, and rows of experts are looked up by index."""
_ALONE = frozenset({*UNARY, *TESTS, "Cast"})
_BESIDE = frozenset({*BINARY, *COMPARISONS, "Where"})
_T = TypeVar("_T")
Columns = dict[int, int]
"""Operand number to the dim of it that runs along the columns of the result."""


@dataclass(frozen=True)
class Picked:
    """One result of a Split, Slice or Gather: which columns of the weight it has."""

    node: Node
    index: int
    start: int
    stop: int

    @property
    def value(self) -> Value:
        """The result."""
        return self.node.results[self.index]


@dataclass(frozen=True)
class Passage:
    """A node that a weight goes through before a product.

    Attributes:
        node: gives the weight on, from its first operand.
        dim: of its result, that the columns are.
        columns: the operands that have them.
    """

    node: Node
    dim: int
    columns: Columns

    @property
    def beside(self) -> list[tuple[Value, int]]:
        """What has the columns too, scales and zero points, and the dim of it that they are."""
        pairs = ((self.node.operands[index], dim) for index, dim in self.columns.items() if index)
        return [(value, dim) for value, dim in pairs if value is not None]


@dataclass(frozen=True)
class FusedWeight:
    """A weight of which sections are taken apart.

    Attributes:
        weight: the constant.
        dim: of the weight, that runs along the columns.
        start: what the weight goes through before the product, first to last.
        steps: the product and the elementwise nodes behind it, in order; each reads the one before. None where the
            weight itself is taken apart.
        path: these, and the Reshape and Transpose nodes behind and between them, each reading the one before.
        picked: what is taken of the last, in order of columns; parts of the same columns are equal.
        dims: the pieces of each dim of what is taken apart, as `Atoms` names them, neighbours joined.
        place: the dim along which it is taken apart; it is one piece.
    """

    weight: Value
    dim: int
    start: tuple[Passage, ...]
    steps: tuple[Node, ...]
    path: tuple[Node, ...]
    picked: tuple[Picked, ...]
    dims: tuple[tuple[Atom, ...], ...]
    place: int

    @property
    def read(self) -> Value:
        """What the product reads: the weight, or what is made of it before."""
        return self.start[-1].node.result if self.start else self.weight

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """The columns of each section, in order."""
        return tuple(dict.fromkeys((picked.start, picked.stop) for picked in self.picked))


def columns_of(node: Node, own: int) -> tuple[int, Columns] | None:
    """Of a product with a weight: the dim of the result that the columns are, and the operands that have them.

    Args:
        node: any node, of static operands.
        own: which operand the weight is.

    Returns:
        None for what is no such product, or one whose weight has no columns.
    """
    found = _PRODUCTS.get(node.identity)
    return None if found is None else found(node, own)


def with_columns(node: Node, count: int) -> Mapping[str, object]:
    """The attributes of a node where it is given so many columns of its weight."""
    return {**node.attributes, "N": count} if node.identity in _COUNTING else node.attributes


def _of_matmul(node: Node, own: int) -> tuple[int, Columns] | None:
    """The columns of the right operand, the rows of the left one."""
    ranks = [len(value.shape) for value in node.inputs]
    rank = len(node.result.shape)
    if ranks[own] < 2:
        return None
    return (rank - 1, {1: ranks[1] - 1}) if own else (rank - min(ranks[1], 2), {0: ranks[0] - 2})


def _of_gemm(node: Node, own: int) -> tuple[int, Columns] | None:
    bias = node.operands[2] if len(node.operands) > 2 else None
    if own != 1:
        return None
    columns: Columns = {1: 0 if node.attributes.get("transB") else 1}
    if bias is not None and bias.shape and bias.shape[-1] == node.result.shape[1]:
        columns[2] = len(bias.shape) - 1
    return 1, columns


def _of_conv(node: Node, own: int) -> tuple[int, Columns] | None:
    if own != 1 or node.attributes.get("group", 1) != 1:
        return None
    return 1, {1: 0} | ({2: 0} if len(node.operands) > 2 and node.operands[2] is not None else {})


def _of_packed(node: Node, own: int) -> tuple[int, Columns] | None:
    """The rows of packed weights, of their scales and zero points in two dims, and of the bias."""
    if own != 1 or node.attributes.get("weight_prepacked", 0):
        return None
    columns: Columns = {1: 0}
    for index, rank in ((2, 2), (3, 2), (5, 1)):
        value = node.operands[index] if index < len(node.operands) else None
        if value is not None:
            if len(value.shape) != rank:
                return None
            columns[index] = 0
    return len(node.result.shape) - 1, columns


def _of_integers(node: Node, own: int, *vectors: int) -> tuple[int, Columns] | None:
    """The columns of the right operand, and of what has one number for each."""
    weight = node.operands[1]
    if own != 1 or weight is None or len(weight.shape) != 2:
        return None
    columns: Columns = {1: 1}
    for index in vectors:
        value = node.operands[index] if index < len(node.operands) else None
        if value is not None and value.shape not in ((), (1,)):
            if value.shape != weight.shape[1:]:
                return None
            columns[index] = 0
    return len(node.result.shape) - 1, columns


def _of_matmul_integer(node: Node, own: int) -> tuple[int, Columns] | None:
    return _of_integers(node, own, 3)


def _of_integer_to_float(node: Node, own: int) -> tuple[int, Columns] | None:
    return _of_integers(node, own, 3, 5, 6)


_PACKED = ("com.microsoft", "MatMulNBits")
_PRODUCTS = {
    ("", "MatMul"): _of_matmul,
    ("", "Gemm"): _of_gemm,
    ("", "Conv"): _of_conv,
    ("", "MatMulInteger"): _of_matmul_integer,
    ("com.microsoft", "MatMulIntegerToFloat"): _of_integer_to_float,
    _PACKED: _of_packed,
}
_COUNTING = {_PACKED}
"""Products that say in an attribute how many columns there are."""


def is_product(node: Node) -> bool:
    """Whether a node may be the product with a weight of which sections are taken apart."""
    return node.identity in _PRODUCTS


def passage(node: Node, dim: int) -> Passage | None:
    """A node as one that passes a dim of its first operand on; None where it does more than that.

    Args:
        node: any node.
        dim: of the first operand.
    """
    if node.identity not in _PASSAGES or not all(value.is_static for value in (*node.inputs, node.result)):
        return None
    if node.identity in _QUANTISERS:
        columns = _scaled(node, len(node.inputs[0].shape), dim)
        return None if columns is None else Passage(node, dim, columns)
    after = _after(node, dim)
    return None if after is None else Passage(node, after, {0: dim})


def _after(node: Node, dim: int) -> int | None:
    """The dim of the result that a dim of the first operand becomes."""
    rank = len(node.inputs[0].shape)
    match node.op_type:
        case "Transpose":
            perm = node.attributes.get("perm")
            return (perm if isinstance(perm, Ints) else tuple(reversed(range(rank)))).index(dim)
        case "Gather":
            axis = axis_of(int_attribute(node, "axis", 0), rank)
            return None if axis == dim else dim + (len(node.inputs[1].shape) - 1 if axis < dim else 0)
        case "GatherND" if not int_attribute(node, "batch_dims", 0):
            indices = node.inputs[1].shape
            return None if dim < indices[-1] else dim - indices[-1] + len(indices) - 1
    return None


def _scaled(node: Node, rank: int, dim: int) -> Columns | None:
    """The operands of a quantiser that have a dim of its data; None where blocks of several elements lie along it."""
    columns, block, axis = {0: dim}, int_attribute(node, "block_size", 0), int_attribute(node, "axis", 1)
    is_along = -rank <= axis < rank and axis % rank == dim
    for index, scale in enumerate(node.operands[1:], 1):
        if scale is None or (not block and scale.shape in ((), (1,))):
            continue
        if len(scale.shape) != (rank if block else 1) or (block and is_along):
            return None
        if block or is_along:
            columns[index] = dim if block else 0
    return columns


def beside(node: Node, value: Value, dim: int) -> Columns | None:
    """The operands of an elementwise node that have the columns, `value` among them; None for other nodes.

    Args:
        node: reads the value.
        value: static.
        dim: of the value, that the columns are.
    """
    is_quantiser = node.identity in _QUANTISERS
    if not is_quantiser and (node.domain or not (node.op_type in _ALONE or node.op_type in _BESIDE)):
        return None
    values = node.inputs
    if len(values) < len(node.operands) or not all(other.is_static for other in (*values, node.result)):
        return None
    if node.result.shape != value.shape:
        return None
    if is_quantiser:
        return _scaled(node, len(value.shape), dim) if node.operands[0] is value else None
    back = len(value.shape) - dim
    return {
        index: len(other.shape) - back
        for index, other in enumerate(values)
        if len(other.shape) >= back and other.shape[-back] != 1
    }


def weights_taken_apart(graph: Graph) -> list[FusedWeight]:
    """The constants of a graph of which sections are read by themselves."""
    return [found for value in graph.constants if (found := _told(_of_itself, value)) is not None]


def fused_weights(graph: Graph) -> list[FusedWeight]:
    """The weights of the products of a graph of which sections are taken apart; not those in nested graphs.

    One that several products read, as layers that share it, is there once for each: where all take the same sections.
    """
    found = [one for node in graph if len(node.results) == 1 and (one := _told(_of_product, node)) is not None]
    beside: dict[Value, list[FusedWeight]] = {}
    for one in found:
        beside.setdefault(one.read, []).append(one)
    alike = {value for value, ones in beside.items() if _are_alike(value, ones)}
    return [one for one in found if one.read in alike]


def _are_alike(value: Value, found: list[FusedWeight]) -> bool:
    """Whether all that reads a weight takes the same sections."""
    return len(found) == len(value.uses) and len({(one.dim, one.sections) for one in found}) == 1


def _told(find: Callable[[_T], FusedWeight | None], where: _T) -> FusedWeight | None:
    try:
        return find(where)
    except CannotTellError:
        return None


def _is_free(value: Value) -> bool:
    """Whether a value may go: static, with elements, not annotated."""
    return value.is_static and 0 not in value.shape and value.sharding is None


def _of_itself(weight: Value) -> FusedWeight | None:
    users = weight.users
    if not users or not all(user.op_type in _PICKERS for user in users) or not weight.is_static:
        return None
    atoms = Atoms(weight.shape)
    for dim, size in enumerate(weight.shape):
        picked = _all_picked(weight, dim, 1) if size > 1 else None
        if picked:
            return FusedWeight(weight, dim, (), (), (), picked, _joined_dims(atoms), dim)
    return None


def _of_product(node: Node) -> FusedWeight | None:
    if not is_product(node) or not _is_free(node.result):
        return None
    if not all(value.is_static for value in node.inputs):
        return None
    for own in (1, 0):
        found = columns_of(node, own)
        behind = None if found is None else constant_behind(node.operands[own], found[1][own])
        if found is None or behind is None:
            continue
        place, columns = found
        weight, dim, start = behind
        others = {index: at for index, at in columns.items() if index != own}
        is_alone = not start or len(weight.uses) == 1
        if (
            is_alone
            and all(constant_behind(node.operands[index], at) is not None for index, at in others.items())
            and weight.shape[dim] == node.result.shape[place] > 1
        ):
            steps, value = _elementwise(node, place)
            return _taken_apart(weight, dim, start, steps, value, place)
    return None


def constant_behind(value: Value | None, dim: int) -> tuple[Value, int, tuple[Passage, ...]] | None:
    """The constant that a value is made of, the dim of it that `dim` is, and the nodes between, first to last.

    Returns:
        None where there is none, or another value has the columns that is no constant.
    """
    nodes: list[Node] = []
    while value is not None and not value.is_constant:
        node = value.node
        if node is None or not node.inputs or not _is_free(value) or (nodes and len(value.uses) > 1):
            return None
        if node.identity not in _PASSAGES or node.operands[0] in node.operands[1:]:
            return None
        nodes.insert(0, node)
        value = node.operands[0]
    if value is None or not value.is_static:
        return None
    for first in range(len(value.shape)):
        passages = _passages(nodes, first)
        if passages is not None and (passages[-1].dim if passages else first) == dim:
            return value, first, passages
    return None


def _passages(nodes: Sequence[Node], dim: int) -> tuple[Passage, ...] | None:
    """Nodes one behind the other that carry a dim of the first one's operand; None where one does not."""
    found: list[Passage] = []
    for node in nodes:
        made = passage(node, found[-1].dim if found else dim)
        if made is None or not all(value.is_constant for value, _ in made.beside):
            return None
        found.append(made)
    return tuple(found)


def _elementwise(product: Node, place: int) -> tuple[list[Node], Value]:
    """The product and the elementwise nodes behind it, and what the last gives."""
    steps, value = [product], product.result
    while (reader := _only_reader(value)) is not None and _is_step(reader, value, place):
        steps.append(reader)
        value = reader.result
    return steps, value


def _only_reader(value: Value) -> Node | None:
    """The node that alone reads a value, in the graph of the value, with one result that may go too."""
    if len(value.uses) != 1:
        return None
    (user,) = value.users
    fits = not user.is_return and user.graph is value.owner and len(user.results) == 1
    return user if fits and _is_free(user.result) else None


def _is_step(node: Node, value: Value, place: int) -> bool:
    columns = beside(node, value, place)
    if columns is None:
        return False
    own = node.operands.index(value)
    # One number is beside all columns, whatever makes it. Where `beside` fits, all sizes are known.
    return all(
        is_single_number(other)
        or (other is not None and other.is_constant)
        or (index in columns and constant_behind(other, columns[index]) is not None)
        for index, other in enumerate(node.operands)
        if index != own
    )


def is_single_number(value: Value | None) -> bool:
    """Whether an operand is one number for all, or left out."""
    return value is None or value.shape in ((), (1,))


def _taken_apart(
    weight: Value, dim: int, start: tuple[Passage, ...], steps: list[Node], value: Value, place: int
) -> FusedWeight | None:
    """Follow Reshape and Transpose to where the major piece of the columns is taken apart."""
    size = value.shape[place]
    atoms = Atoms(value.shape)
    path = list(steps)
    while True:
        at, unit = _major(atoms, place, size)
        picked = None if at is None else _all_picked(value, at, unit)
        if picked:
            return FusedWeight(weight, dim, start, tuple(steps), tuple(path), picked, _joined_dims(atoms), at or 0)
        reader = _only_reader(value)
        if reader is None:
            return None
        if not reader.domain and reader.op_type in _LAYOUT:
            if not atoms.apply(reader):
                return None
        elif len(path) > len(steps) and _is_alone(reader, value):
            # Of each element by itself, so that it may as well stand before.
            steps.append(reader)
        else:
            return None
        path.append(reader)
        value = reader.result


def _is_alone(node: Node, value: Value) -> bool:
    """Whether a node does the same to each element of a value, whatever dims it has."""
    others = [other for other in node.operands if other is not value]
    if node.identity in _QUANTISERS:
        return node.operands[0] is value and len(others) < len(node.operands) and all(map(is_single_number, others))
    return not node.domain and node.op_type in _ALONE


def _major(atoms: Atoms, place: int, size: int) -> tuple[int | None, int]:
    """The dim that is the major piece of the columns and nothing else, and how many columns a step of it has."""
    for at, found in enumerate(atoms.dims):
        pieces = joined(found)
        if len(pieces) == 1 and pieces[0][0] == place and pieces[0][1] * pieces[0][2] == size:
            return at, pieces[0][1]
    return None, 0


def _joined_dims(atoms: Atoms) -> tuple[tuple[Atom, ...], ...]:
    return tuple(tuple(joined(dim)) for dim in atoms.dims)


# -- what takes sections ------------------------------------------------------------------------------------------


def _of_split(node: Node, dim: int) -> list[tuple[int, int]]:
    if axis_attribute(node, len(result_shape(node)), 0) != dim:
        raise CannotTellError("another axis")
    sizes = [value.shape[dim] for value in node.results]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _of_slice(node: Node, dim: int) -> list[tuple[int, int]]:
    (value,) = node.inputs[:1]
    found = slices(node, len(value.shape))
    size = value.shape[dim]
    for axis, (start, end, step) in found.items():
        taken = range(value.shape[axis])[start:end:step]
        if axis != dim and len(taken) != value.shape[axis]:
            raise CannotTellError("another axis")
        if step != 1 or not len(taken):
            raise CannotTellError("steps")
    if dim not in found:
        raise CannotTellError("another axis")
    taken = range(size)[found[dim][0] : found[dim][1]]
    return [(taken.start, taken.stop)]


def _of_gather(node: Node, dim: int) -> list[tuple[int, int]]:
    size = node.inputs[0].shape[dim]
    if axis_of(int_attribute(node, "axis", 0), len(node.inputs[0].shape)) != dim:
        raise CannotTellError("another axis")
    if len(node.inputs[1].shape) > 1:
        raise CannotTellError("indices of several dims")
    places = [at + size if at < 0 else at for at in needed_ints(node, 1)]
    if (
        not places
        or places != list(range(places[0], places[0] + len(places)))
        or not 0 <= places[0] <= places[-1] < size
    ):
        raise CannotTellError("elements that do not stand side by side")
    return [(places[0], places[-1] + 1)]


_PICKERS = {"Split": _of_split, "Slice": _of_slice, "Gather": _of_gather}


def _all_picked(value: Value, dim: int, unit: int) -> tuple[Picked, ...] | None:
    """What all readers take of a value along a dim; None where one reads it otherwise, or they do not take it apart."""
    found: list[Picked] = []
    for user in value.users:
        if user.domain or user.is_return or user.op_type not in _PICKERS or user.graph is not value.owner:
            return None
        if user.operands.count(value) > 1 or user.operands[0] is not value:
            return None
        if not all(result.is_static for result in user.results):
            return None
        try:
            ranges = _PICKERS[user.op_type](user, dim)
        except CannotTellError:
            return None
        found += [Picked(user, index, start * unit, stop * unit) for index, (start, stop) in enumerate(ranges)]
    ranges = sorted({(picked.start, picked.stop) for picked in found})
    apart = all(first[1] <= second[0] for first, second in pairwise(ranges))
    if not 2 <= len(ranges) <= MOST_SECTIONS or not apart or any(start == stop for start, stop in ranges):
        return None
    return tuple(sorted(found, key=lambda picked: picked.start))
