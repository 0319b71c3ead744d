"""Which dims of a node may as well be several, and how it is written then.

m = Reshape(x : [4, 6, 8]) : [24, 8]      s' = Softmax(x) {axis=-1} : [4, 6, 8]
s = Softmax(m) {axis=1} : [24, 8]         s = Reshape(s') : [24, 8]

The factor rule says which: a factor that passes is computed for each of its elements alone, so that these may lie in
several dims. What it does not say is how the operator names its other dims, and that it takes any number of them: a
convolution passes its batch, and has one dim for it. That is the table here.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from string import ascii_letters

from irpar.ir import Ints, Node

from .facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    axis_of,
    float_attribute,
    int_attribute,
    ints_of,
    ints_operand,
    needed,
    needed_ints,
    operand,
    result_shape,
    shape_of,
    text_attribute,
)
from .op_def import traits
from .registry import factor_rule
from .rule import Kind

Split = tuple[int, ...]
"""The sizes of the parts of a dim, major first; (size,) where it stays one."""
Places = tuple[tuple[int, int], ...]
"""A dim that several operands have: (operand, dim) of each."""


class Spread:
    """The dims of a tensor, each as its parts."""

    def __init__(self, parts: Sequence[Split]) -> None:
        self.parts = tuple(parts)
        self._starts = tuple(accumulate(map(len, parts), initial=0))
        self.rank = self._starts[-1]
        """Of the tensor with its dims apart."""

    def start(self, dim: int) -> int:
        """Where the parts of a dim begin; of the rank before, the rank after."""
        return self._starts[dim]

    def all(self, dim: int) -> range:
        """Where all parts of a dim are."""
        return range(self._starts[dim], self._starts[dim + 1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of all parts."""
        return tuple(size for parts in self.parts for size in parts)


@dataclass(frozen=True)
class Renamed:
    """What names dims in a node, for its dims apart.

    Attributes:
        attributes: new values of attributes.
        ints: numbers of constant operands.
    """

    attributes: Mapping[str, object] = field(default_factory=dict)
    ints: Mapping[int, Sequence[int]] = field(default_factory=dict)


Names = Callable[[Node, Sequence[Spread]], Renamed]
"""Renames dims of a node whose operands are spread so."""


@dataclass(frozen=True)
class DimsApart:
    """An operator of tensors of any rank.

    Attributes:
        names: how it names dims.
        data: the operands whose dims may be several; those that others have too stay as they are. None: all.
        broadcasts: operands' dims are counted from the end, as numpy does, but for this many at the end; None: not.
        last: how many dims at the end of an operand stay one. Features do: of heads and their features only the heads
            are ever cut.
        kinds: of the factors that may be several dims.
        own: dims of operands that are the operator's own, though they pass.
        fits: whether that holds for a node.
    """

    names: Names = lambda node, spreads: Renamed()
    data: Collection[int] | None = (0,)
    broadcasts: int | None = None
    last: int = 1
    kinds: Collection[Kind] = (Kind.PASS,)
    own: Callable[[Node], Places] = lambda node: ()
    fits: Callable[[Node], bool] = lambda node: True

    def free(self, node: Node) -> Iterator[Places]:
        """The dims that may be several."""
        rule = factor_rule(node)
        if rule is None or not self.fits(node):
            return
        ranks = [0 if value is None else len(value.shape) for value in node.operands]
        data = range(len(ranks)) if self.data is None else [index for index in self.data if index < len(ranks)]
        own = set(self.own(node))
        tensors = (*rule.operands, *rule.results)
        for kind, places in zip(rule.kinds, rule.places, strict=True):
            if kind not in self.kinds or any(len(tensors[tensor][dim]) > 1 for tensor, dim, _ in places):
                continue
            found = tuple((tensor, dim) for tensor, dim, _ in places if tensor < len(ranks))
            if not found or any(index not in data or self._stays(dim, ranks[index]) for index, dim in found):
                continue
            if self._lines_up(found, ranks, data) and own.isdisjoint(found):
                yield found

    def _stays(self, dim: int, rank: int) -> bool:
        # A vector has no features: its one dim is what it counts.
        return dim >= rank - self.last and rank > 1

    def _lines_up(self, found: Sequence[tuple[int, int]], ranks: Sequence[int], data: Collection[int]) -> bool:
        """Whether operands still broadcast to each other: dims apart move all that are before them."""
        if self.broadcasts is None:
            return True
        ends = {ranks[index] - dim for index, dim in found}
        if len(ends) > 1:
            return False
        others = set(data) - {index for index, _ in found}
        return min(ends) > self.broadcasts or all(ranks[index] <= self.broadcasts for index in others)

    def spreads(self, node: Node, chosen: Mapping[tuple[int, int], Split]) -> list[Spread]:
        """The dims of all operands; of one of size 1 that broadcasts to a dim apart all parts have size 1."""
        from_end: dict[int, Split] = {}
        for (index, dim), split in chosen.items():
            from_end[len(needed(node, index).shape) - dim] = split
        found = []
        for index, value in enumerate(node.operands):
            shape = () if value is None else value.shape
            parts = [chosen.get((index, dim), (size,)) for dim, size in enumerate(shape)]
            if self.broadcasts is not None and (self.data is None or index in self.data):
                for dim, size in enumerate(shape):
                    end = len(shape) - dim
                    if size == 1 and end > self.broadcasts and end in from_end:
                        parts[dim] = (1,) * len(from_end[end])
            found.append(Spread(parts))
        return found


# -- how dims are named ---------------------------------------------------------------------------------------------


def _axis(default: int) -> Names:
    """By the attribute `axis`."""

    def rename(node: Node, spreads: Sequence[Spread]) -> Renamed:
        spread = spreads[0]
        axis = axis_attribute(node, len(spread.parts), default)
        return Renamed({"axis": spread.start(axis) - spread.rank})

    return rename


def _softmax_axis(node: Node, spreads: Sequence[Spread]) -> Renamed:
    return _axis(-1 if node.version >= 13 else 1)(node, spreads)


def _scale_axis(node: Node, spreads: Sequence[Spread]) -> Renamed:
    """Of one scale for all elements the axis says nothing, and may be one that the data lacks."""
    return Renamed() if prod(shape_of(node, 1)) == 1 else _axis(1)(node, spreads)


def _axis_of_result(node: Node, spreads: Sequence[Spread]) -> Renamed:
    """As OneHot does, whose result has one dim more than the indices."""
    rank = len(spreads[0].parts)
    axis = axis_attribute(node, rank + 1, -1)
    return Renamed({"axis": spreads[0].start(axis) - spreads[0].rank - 1})


def _reduced_axes(node: Node, spreads: Sequence[Spread]) -> Renamed:
    """By `axes`, all parts of each; without any all dims are meant, or none, of however many."""
    since = 13 if node.op_type == "ReduceSum" else 18
    axes = ints_of(node, "axes", 1, since)
    if not axes:
        return Renamed()
    found = [place for axis in axes_of(axes, len(spreads[0].parts)) for place in spreads[0].all(axis)]
    return Renamed({"axes": Ints(found)}) if node.version < since else Renamed(ints={1: found})


def _listed_axes(index: int) -> Names:
    """By an operand that lists axes; it may be left out for the first ones, as many as there are numbers of each."""

    def rename(node: Node, spreads: Sequence[Spread]) -> Renamed:
        axes = ints_operand(node, index)
        listed = range(len(needed_ints(node, 1))) if axes is None else axes
        rank = len(spreads[0].parts)
        return Renamed(ints={index: [spreads[0].start(axis_of(axis, rank)) for axis in listed]})

    return rename


def _for_each_dim(neutral: int) -> Names:
    """By numbers for each dim, once or several times over; parts of a dim have `neutral`, which does nothing."""

    def rename(node: Node, spreads: Sequence[Spread]) -> Renamed:
        numbers, parts = needed_ints(node, 1), spreads[0].parts
        pairs = zip(numbers, parts * (len(numbers) // len(parts)), strict=True)
        return Renamed(ints={1: [one for number, part in pairs for one in (number, *[neutral] * (len(part) - 1))]})

    return rename


def _pads(node: Node, spreads: Sequence[Spread]) -> Renamed:
    named = operand(node, 3) is not None
    return (_listed_axes(3) if named else _for_each_dim(0))(node, spreads)


def _result_sizes(node: Node, spreads: Sequence[Spread]) -> Renamed:
    """By the shape of the result, to whose last dims those of the operand broadcast."""
    sizes: list[int] = []
    spread = spreads[0]
    for dim, size in enumerate(result_shape(node), len(spread.parts) - len(node.result.shape)):
        parts = spread.parts[dim] if dim >= 0 else (size,)
        sizes.extend(parts if len(parts) > 1 else (size,))
    return Renamed(ints={1: sizes})


def _batch_dims(node: Node, spreads: Sequence[Spread]) -> Renamed:
    return Renamed({"batch_dims": spreads[0].start(int_attribute(node, "batch_dims", 0))})


def _letters(node: Node, spreads: Sequence[Spread]) -> Renamed:
    """By the letters of an equation: a dim apart has one for each of its parts."""
    equation = text_attribute(node, "equation").replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    unused = (letter for letter in ascii_letters if letter not in equation)
    several: dict[str, str] = {}
    for term, spread in zip(terms, spreads, strict=True):
        for letter, parts in zip(term, spread.parts, strict=True):
            if len(parts) > 1 and letter not in several:
                several[letter] = letter + "".join(next(unused) for _ in parts[1:])
    if not arrow:
        right = "".join(sorted(letter for letter in set(left) - {","} if left.count(letter) == 1))
    written = f"{','.join(terms)}->{right}"
    return Renamed({"equation": "".join(several.get(letter, letter) for letter in written)})


def _spells_out(node: Node) -> bool:
    """Whether an equation has a letter for each dim, and each letter one size."""
    equation = text_attribute(node, "equation").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or 2 * len(set(equation)) > len(ascii_letters) or len(terms) != len(node.operands):
        return False
    sizes: dict[str, set[int]] = {}
    for index, term in enumerate(terms):
        for letter, size in zip(term, shape_of(node, index), strict=True):
            sizes.setdefault(letter, set()).add(size)
    return all(len(found) == 1 for found in sizes.values())


# -- dims that are the operator's own -------------------------------------------------------------------------------


def _own_axis(node: Node) -> Places:
    """The axis, though a device finds out what falls into its block; that of indices counts another dim."""
    axis = axis_attribute(node, len(shape_of(node, 0)), 0)
    return tuple((index, axis) for index in range(len(node.operands)))


def _indexed(node: Node) -> Places:
    """What the last dim of the indices counts along."""
    return tuple((0, dim) for dim in range(shape_of(node, 1)[-1]))


def _is_plain_product(node: Node) -> bool:
    """A Gemm that is a MatMul and an Add: nothing scaled."""
    return all(float_attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))


# -- the operators --------------------------------------------------------------------------------------------------

_ALL = (Kind.PASS, Kind.REDUCE, Kind.REPLICATE)
_ELEMENTWISE = DimsApart(data=None, broadcasts=0)
_ALIKE = DimsApart()
_PRODUCT = DimsApart(data=(0, 1), broadcasts=2)
_REDUCTION = DimsApart(_reduced_axes, kinds=_ALL)
_SCALED = DimsApart(_scale_axis)

_ONNX: dict[str, DimsApart] = {
    **dict.fromkeys(("CastLike", "Dropout"), _ALIKE),
    **dict.fromkeys(("MatMul", "MatMulInteger"), _PRODUCT),
    "QLinearMatMul": DimsApart(data=(0, 3), broadcasts=2),
    "Gemm": DimsApart(fits=_is_plain_product),
    "Einsum": DimsApart(_letters, data=None, kinds=(Kind.PASS, Kind.REDUCE), fits=_spells_out),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), DimsApart(_softmax_axis)),
    **dict.fromkeys(
        ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "LpNormalization", "TopK"),
        DimsApart(_axis(-1)),
    ),
    # Places, which may be channels of a group too.
    "InstanceNormalization": DimsApart(kinds=(Kind.REPLICATE,), last=0),
    **dict.fromkeys(("ArgMax", "ArgMin", "Split"), DimsApart(_axis(0))),
    **{
        f"Reduce{name}": _REDUCTION
        for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
    },
    "Concat": DimsApart(_axis(0), data=None),
    "Slice": DimsApart(_listed_axes(3)),
    "Pad": DimsApart(_pads),
    "Tile": DimsApart(_for_each_dim(1)),
    "Expand": DimsApart(_result_sizes),
    "Trilu": DimsApart(last=2),
    **dict.fromkeys(("CumSum", "CumProd"), DimsApart(_listed_axes(1))),
    "Gather": DimsApart(_axis(0), data=(0, 1)),
    "GatherElements": DimsApart(_axis(0), data=(0, 1), own=_own_axis),
    "GatherND": DimsApart(_batch_dims, data=(0, 1)),
    "ScatterElements": DimsApart(_axis(0), data=(0, 1, 2), own=_own_axis),
    "ScatterND": DimsApart(data=(0, 1, 2), kinds=_ALL, own=_indexed),
    "OneHot": DimsApart(_axis_of_result),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _SCALED),
    # One scale for all elements, wherever they lie.
    "DynamicQuantizeLinear": DimsApart(kinds=(Kind.REPLICATE,)),
}
_MICROSOFT: dict[str, DimsApart] = {
    **dict.fromkeys(("BiasGelu", "FastGelu", "MatMulNBits", "MatMulBnb4"), _ALIKE),
    **dict.fromkeys(("QLinearSigmoid", "QLinearLeakyRelu"), _ALIKE),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), DimsApart(data=(0, 3), broadcasts=0)),
    "MatMulIntegerToFloat": _PRODUCT,
    "DynamicQuantizeMatMul": DimsApart(data=(0, 1), broadcasts=2, kinds=(Kind.REPLICATE,)),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), _SCALED),
    "QLinearSoftmax": DimsApart(_axis(-1)),
    "Trilu": DimsApart(last=2),
}
_TABLES = {"": _ONNX, "com.microsoft": _MICROSOFT}


def dims_apart(node: Node) -> DimsApart | None:
    """How a node works on dims that are several in place of one; None where its operator cannot, or nobody knows."""
    if node.callee is not None:
        return None
    if traits(node).is_elementwise:
        return _ELEMENTWISE
    return _TABLES.get(node.domain, {}).get(node.op_type)


def free_dims(node: Node, way: DimsApart) -> list[Places]:
    """The dims of a node that may be several."""
    try:
        return list(way.free(node))
    except CannotTellError:
        return []
