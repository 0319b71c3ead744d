"""Factor rules: what may be sharded in an operator, as data.

A rule gives every dim of every operand and result a list of factors, major first, like an einsum: MatMul is
`([b,i,k],[b,k,j])->([b,i,j])`, a Reshape that merges two dims `([i,j],[])->([(ij)])`. A dim without factors is whole.
Compare Shardy's sharding rules (OpenXLA RFC, 2024) and GSPMD, section 3.4 (Xu et al., 2021).
"""

from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from math import gcd

from irpar.sharding import Reduction

DimFactors = tuple[int, ...]
TensorFactors = tuple[DimFactors, ...]


class Kind(Enum):
    """What it means to shard a factor."""

    PASS = "pass"
    """Each device computes its block; nothing is sent."""
    REDUCE = "reduce"
    """Each device has a partial result, to be reduced."""
    REPLICATE = "replicate"
    """The op needs the whole factor."""
    PERMUTE = "permute"
    """The op needs a halo or a shift from its neighbours."""


@dataclass(frozen=True)
class FactorRule:
    """The rule of one node.

    Attributes:
        operands: per operand its factors; a left-out operand has ().
        results: per result its factors.
        sizes: size of each factor.
        kinds: what cutting each factor means.
        reduce: the reduction of the REDUCE factors.
        runs_empty: factors of which engines take blocks without elements, though some result has elements then.
        moves: (from, to): axes that cut the one may shard the other instead, after an all-to-all. Attention with places
            of the sequence cut may as well have its heads cut (DeepSpeed Ulysses, Jacobs et al., 2023).
        meets: what must come together where factors that `moves` names are cut, in words: "all keys for every query".
    """

    operands: tuple[TensorFactors, ...]
    results: tuple[TensorFactors, ...]
    sizes: tuple[int, ...]
    kinds: tuple[Kind, ...]
    reduce: Reduction = "sum"
    runs_empty: frozenset[int] = frozenset()
    moves: tuple[tuple[int, int], ...] = ()
    meets: str = ""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Placements are asked for by rule many times over; equal rules have equal factors.
        return hash((self.operands, self.results, self.sizes))

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """Per factor, where it stands: (tensor, dim, index in the dim); tensors count operands first, then results."""
        found: list[list[tuple[int, int, int]]] = [[] for _ in self.sizes]
        for tensor, factors in enumerate((*self.operands, *self.results)):
            for dim, parts in enumerate(factors):
                for index, factor in enumerate(parts):
                    found[factor].append((tensor, dim, index))
        return tuple(map(tuple, found))

    @cached_property
    def accepts_empty(self) -> tuple[bool, ...]:
        """Per factor, whether it may be sharded so that a device is left without elements of it.

        5 over 4 is 2, 2, 1, 0. The last device then computes nothing: where the factor stands in all results these are
        empty, and where it is reduced they are what is neutral in the reduction (`irpar.ops.local_node`). A factor that
        stands in some results only would need an engine that runs the op without elements.
        """
        first = len(self.operands)
        found = []
        for factor, kind in enumerate(self.kinds):
            stands_in = {tensor for tensor, _, _ in self.places[factor] if tensor >= first}
            passes = kind is Kind.PASS and (factor in self.runs_empty or len(stands_in) == len(self.results))
            found.append(passes or kind is Kind.REDUCE)
        return tuple(found)

    def merged(self, kept: int, other: int, kind: Kind) -> "FactorRule":
        """The rule of a node of which the same axes cut two factors: both are one, of a kind of its own.

        Axes that cut it move to no others.

        ([i],[j])->([i]) reduce(j) sum, j merged into i: ([i],[i])->([i])

        Raises:
            ValueError: they stand in one tensor, of which an axis cannot shard both.
        """
        left = [factor for factor in range(len(self.sizes)) if factor != other]
        number = {factor: place for place, factor in enumerate(left)}
        number[other] = number[kept]

        def tensor(dims: TensorFactors) -> TensorFactors:
            if {kept, other}.issubset(factor for parts in dims for factor in parts):
                raise ValueError(f"factors {kept} and {other} stand in one tensor")
            return tuple(tuple(number[factor] for factor in parts) for parts in dims)

        return FactorRule(
            tuple(map(tensor, self.operands)),
            tuple(map(tensor, self.results)),
            tuple(self.sizes[factor] for factor in left),
            tuple(kind if factor == kept else self.kinds[factor] for factor in left),
            self.reduce,
            frozenset(number[factor] for factor in self.runs_empty - {other}),
        )

    def __str__(self) -> str:
        names = _names(len(self.sizes))

        def tensor(factors: TensorFactors) -> str:
            dims = (
                f"({''.join(names[f] for f in dim)})" if len(dim) > 1 else "".join(names[f] for f in dim) or "1"
                for dim in factors
            )
            return f"[{','.join(dims)}]"

        text = f"({','.join(map(tensor, self.operands))})->({','.join(map(tensor, self.results))})"
        for kind in (Kind.REDUCE, Kind.REPLICATE, Kind.PERMUTE):
            listed = [names[f] for f, k in enumerate(self.kinds) if k is kind]
            if listed:
                reduction = f" {self.reduce}" if kind is Kind.REDUCE else ""
                text += f" {kind.value}({','.join(listed)}){reduction}"
        return text


def _names(count: int) -> list[str]:
    letters = "ijklmnopqrstuvwxyzabcdefgh"
    return [letters[n] if count <= len(letters) else f"z{n}_" for n in range(count)]


class RuleBuilder:
    """Makes a rule factor by factor.

    rule = RuleBuilder()
    b, k = rule.factor(8), rule.factor(64, Kind.REDUCE)
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kinds: list[Kind] = []

    def factor(self, size: int, kind: Kind = Kind.PASS) -> int:
        """A new factor."""
        self.sizes.append(size)
        self.kinds.append(kind)
        return len(self.sizes) - 1

    def dims(self, shape: Sequence[int], kind: Kind = Kind.PASS) -> list[DimFactors]:
        """One new factor for each dim of a shape; dims of size 1 stay replicated."""
        return [(self.factor(size, kind),) if size != 1 else () for size in shape]

    def done(
        self,
        operands: Sequence[Sequence[DimFactors]],
        results: Sequence[Sequence[DimFactors]],
        reduce: Reduction = "sum",
        runs_empty: Iterable[int] = (),
        moves: Iterable[tuple[DimFactors, DimFactors]] = (),
        meets: str = "",
    ) -> FactorRule:
        """The rule; moves from or to dims that have no factor are left out."""
        made = FactorRule(
            tuple(map(tuple, operands)),
            tuple(map(tuple, results)),
            tuple(self.sizes),
            tuple(self.kinds),
            reduce,
            frozenset(runs_empty),
            tuple((source, target) for before, after in moves for source in before for target in after),
            meets,
        )
        return _one_of_equal(made)


@lru_cache(maxsize=4096)
def _one_of_equal(rule: FactorRule) -> FactorRule:
    """The rule, or an equal one that was made before: what is found out of one is known of all."""
    return rule


def whole(rank: int) -> TensorFactors:
    """A tensor of which no dim may be sharded."""
    return ((),) * rank


def broadcast_rule(shapes: Sequence[tuple[int, ...] | None], result: tuple[int, ...], results: int = 1) -> FactorRule:
    """The rule of an elementwise op: numpy broadcasting of operands (None: left out) to the result shape."""
    return _broadcast_rule(tuple(shapes), result, results)


@lru_cache(maxsize=4096)
def _broadcast_rule(shapes: tuple[tuple[int, ...] | None, ...], result: tuple[int, ...], results: int) -> FactorRule:
    rule = RuleBuilder()
    factors = rule.dims(result)
    operands = [
        ()
        if shape is None
        else [
            factor if size == whole_size else ()
            for size, whole_size, factor in zip(
                shape, result[len(result) - len(shape) :], factors[len(result) - len(shape) :], strict=True
            )
        ]
        for shape in shapes
    ]
    return rule.done(operands, [factors] * results)


def moving_rule(
    shapes: Sequence[Sequence[int] | None],
    result: Sequence[int],
    changed: Container[int],
    few: Collection[int] = (),
    reduce: Reduction = "sum",
    elsewhere: Collection[int] = (),
) -> FactorRule:
    """The rule of an op that keeps the dims of its first operand but for some, along which elements move.

    Args:
        shapes: of the operands; all but the first are whole.
        result: its shape.
        changed: the dims along which elements of a block may come from other blocks.
        few: those of these that the result has in full, each device giving what it has of them.
        reduce: how such parts combine.
        elsewhere: the dims whose axes may shard a dim beside them instead, as those of the few: it may be less to send.
    """
    rule = RuleBuilder()
    (data, *others) = shapes
    assert data is not None
    dims = [
        rule.dims([max(size, after)], _kind_of_moving(dim, changed, few))[0]
        for dim, (size, after) in enumerate(zip(data, result, strict=True))
    ]
    results = [() if dim in few else factors for dim, factors in enumerate(dims)]
    kept = [factors for dim, factors in enumerate(dims) if dim not in changed]
    moves = [(factors, to) for dim, factors in enumerate(dims) if dim in (*few, *elsewhere) for to in kept]
    operands = [dims, *(() if other is None else whole(len(other)) for other in others)]
    return rule.done(operands, [results], reduce, moves=moves)


def _kind_of_moving(dim: int, changed: Container[int], few: Container[int]) -> Kind:
    if dim in few:
        return Kind.REDUCE
    return Kind.PERMUTE if dim in changed else Kind.PASS


def reshape_factors(
    before: Sequence[int], after: Sequence[int]
) -> tuple[RuleBuilder, list[DimFactors], list[DimFactors]]:
    """Compound factors that relate the dims of two shapes of equal size: `[6,4]` to `[2,3,4]` is `((ij),k)->(i,j,k)`.

    Walks both shapes from the major end; where the dims of a group do not factor into each other (`[6,4]` to `[4,6]`) a
    common divisor at the major end is kept and the rest is whole.
    """
    rule = RuleBuilder()
    left: list[list[int]] = [[] for _ in before]
    right: list[list[int]] = [[] for _ in after]
    for left_dims, right_dims in _groups(before, after):
        _match_group(rule, left, left_dims, list(before), right, right_dims, list(after))
    return rule, [tuple(dim) for dim in left], [tuple(dim) for dim in right]


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """The smallest runs of dims of equal product on both sides; dims of size 1 are left out."""
    rows = [(dim, size) for dim, size in enumerate(before) if size != 1]
    columns = [(dim, size) for dim, size in enumerate(after) if size != 1]
    i = j = 0
    while i < len(rows) and j < len(columns):
        left, right = [rows[i][0]], [columns[j][0]]
        a, b = rows[i][1], columns[j][1]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(rows):
                left.append(rows[i][0])
                a, i = a * rows[i][1], i + 1
            elif b < a and j < len(columns):
                right.append(columns[j][0])
                b, j = b * columns[j][1], j + 1
            else:
                return
        yield left, right


def _match_group(
    rule: RuleBuilder,
    left: list[list[int]],
    left_dims: list[int],
    before: list[int],
    right: list[list[int]],
    right_dims: list[int],
    after: list[int],
) -> None:
    """Walk one group from the major end, splitting off the smaller of the two current dims as a factor."""
    i = j = 0
    a, b = before[left_dims[0]], after[right_dims[0]]
    while i < len(left_dims) and j < len(right_dims):
        small = min(a, b)
        if a % small or b % small:
            common = gcd(a, b)
            if common > 1:
                # The major part of both dims lines up; what is inside does not.
                factor = rule.factor(common)
                left[left_dims[i]].append(factor)
                right[right_dims[j]].append(factor)
            return
        factor = rule.factor(small)
        left[left_dims[i]].append(factor)
        right[right_dims[j]].append(factor)
        a, b = a // small, b // small
        if a == 1:
            i += 1
            a = before[left_dims[i]] if i < len(left_dims) else 1
        if b == 1:
            j += 1
            b = after[right_dims[j]] if j < len(right_dims) else 1
