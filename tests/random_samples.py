"""Planting operators in random graphs: the nodes that prove the rules (tests/ops/samples.py), their operands drawn from
what the graph has, given anew, or moved there by another node."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from random import Random
from typing import Literal

import numpy as np
import onnx
from onnx import helper

from irpar.ir import Tensor as NodeTensor
from irpar.ir.attributes import Floats, Ints, Strings
from irpar.onnx_io.versions import OLDEST_OPSET

from .ops.rule_proof import NEWEST, Array, Constant, Sample
from .ops.samples import IN_FILES
from .random_graphs import GraphMaker, Tensor, UnfitError
from .random_operators import OPERATORS

Operator = tuple[str, str]
Opsets = tuple[int, int]
"""The versions of ONNX's own operators and of ai.onnx.ml."""

OPSETS = (21, 13, 17, 18, 20, 23, 24, 12, 26, 11, 9, 27, 28)
CLASSIC_OPSETS = (3, 5)
CLASSIC, MICROSOFT, TRAINING = "ai.onnx.ml", "com.microsoft", "ai.onnx.preview.training"
KERNELS_ONLY = frozenset(
    {
        *((MICROSOFT, name) for name in ("BiasAdd", "BiasSplitGelu", "ComplexMul", "ComplexMulConj", "GroupNorm")),
        *((MICROSOFT, name) for name in ("SkipGroupNorm", "Rfft", "Irfft", "SwiGLU", "RouterGateUpProj")),
        *((TRAINING, name) for name in ("Adagrad", "Adam", "Momentum")),
        *(("", name) for name in ("SwiGLU", "LinearAttention", "CausalConvWithState")),
    }
)
"""What ONNX Runtime does not run on a CPU: the original is computed node by node, these by irpar's own kernels."""

ROUNDING = ("QLinear", "QuantizeLinear")
"""What rounds sums times scales: irpar's kernels may round a half to another side than ONNX Runtime's."""
WITHOUT_A_KERNEL = {("Swish", 26)}
"""Operators of opsets in which ONNX Runtime lacks them."""


@dataclass(frozen=True)
class Planted:
    """An operator, and where it can stand.

    Attributes:
        operator: domain and name.
        samples: its nodes by the opsets in which they are what they are.
    """

    operator: Operator
    samples: Mapping[Opsets, Sequence[Sample]] = field(repr=False)

    @property
    def engine(self) -> Literal["ort", "numpy"]:
        """What runs it."""
        return "numpy" if self.operator in KERNELS_ONLY else "ort"

    def grow(self, m: GraphMaker) -> None:
        """Add one node: half of the operators of ONNX as models have them, else one that proves the rule."""
        domain, name = self.operator
        drawn = OPERATORS.get(name) if domain == "" else None

        def anew(maker: GraphMaker) -> None:
            assert drawn is not None
            count = len(maker.nodes)
            drawn(maker)
            if not any(node.op_type == name for node in maker.nodes[count:]):
                raise UnfitError

        if drawn is not None and m.coin() and m.attempt(anew):
            return
        sample = m.one_of(self.samples[m.opset, m.opsets[CLASSIC]])
        if not m.attempt(lambda maker: plant(maker, sample)):
            raise AssertionError(f"{sample} cannot be planted: {dict(m.unrun)}")


@cache
def plantable() -> tuple[Planted, ...]:
    """Every operator that has a rule, and that files have."""
    found: dict[Operator, dict[Opsets, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in IN_FILES:
        for opsets in _opsets_of(sample):
            found[sample.domain, sample.op][opsets].append(sample)
    return tuple(Planted(operator, samples) for operator, samples in sorted(found.items()))


def _opsets_of(sample: Sample) -> Iterator[Opsets]:
    """Where a node means what it means in its own version."""
    newest = max(OPSETS) if (sample.domain, sample.op) in KERNELS_ONLY else NEWEST
    for opset in OPSETS:
        for classic in CLASSIC_OPSETS:
            version = {"": opset, CLASSIC: classic}.get(sample.domain, 1)
            if (sample.op, opset) in WITHOUT_A_KERNEL:
                continue
            if opset < OLDEST_OPSET and not onnx.defs.has(sample.op, sample.domain):
                continue  # ONNX's version converter does not know it.
            if opset <= newest and _since(sample, version) == _since(sample, sample.version):
                yield opset, classic


def _since(sample: Sample, version: int) -> int | None:
    """The version since which an operator is as it is in one, or None where that lacks it."""
    if not onnx.defs.has(sample.op, sample.domain):
        return 1
    try:
        schema = onnx.defs.get_schema(sample.op, version, sample.domain)
    except onnx.defs.SchemaError:
        return None
    return -1 if schema.deprecated else int(schema.since_version)


# -- which operators stand in one program ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Operators that fit into one program.

    Attributes:
        planted: the operators.
        salt: makes draws of different groups different.
    """

    planted: tuple[Planted, ...]
    salt: str

    @cached_property
    def opsets(self) -> tuple[Opsets, ...]:
        """The opsets that have them all."""
        every = [set(planted.samples) for planted in self.planted]
        return tuple(sorted(set.intersection(*every)))

    @property
    def engine(self) -> Literal["ort", "numpy"]:
        """What runs them all."""
        return self.planted[0].engine

    def __str__(self) -> str:
        return f"{self.salt}: {', '.join('.'.join(planted.operator) for planted in self.planted)}"


@cache
def groups(size: int, salt: str) -> tuple[Group, ...]:
    """Every operator with a rule in one of the groups, at most `size` in each."""
    operators = list(plantable())
    Random(salt).shuffle(operators)
    made: list[list[Planted]] = []
    for planted in operators:
        for others in made:
            together = Group((*others, planted), salt)
            if len(others) < size and others[0].engine == planted.engine and together.opsets:
                others.append(planted)
                break
        else:
            made.append([planted])
    return tuple(Group(tuple(found), f"{salt}/{number}") for number, found in enumerate(made))


# -- planting -------------------------------------------------------------------------------------------------------


def plant(m: GraphMaker, sample: Sample) -> None:
    """Append the node of a sample."""
    operands: list[Tensor | None] = []
    for operand in sample.operands:
        if isinstance(operand, Constant):
            operands.append(m.const(operand.array, operand.array.dtype))
        else:
            is_first = all(found is None or found.name.startswith("c") for found in operands)
            operands.append(None if operand is None else _operand(m, operand, may_be_weight=not is_first))
    names = ["" if found is None else found.name for found in operands]
    while not names[-1]:
        names.pop()
    m.rounds |= sample.op.startswith(ROUNDING) or _keeps_places(sample)
    attributes = plain_attributes(sample)
    proto = helper.make_node(sample.op, names, m.new_names(sample.results), domain=sample.domain, **attributes)
    m.append(proto, [found for found in operands if found is not None], is_limited=False)


def _keeps_places(sample: Sample) -> bool:
    """A Resize to as many places as before, which ONNX Runtime leaves out whatever the scales are."""
    return sample.op == "Resize" and sample.node.results[0].shape == sample.node.inputs[0].shape


def plain_attributes(sample: Sample) -> dict[str, object]:
    """The attributes of a sample's node, as onnx's helper takes them."""
    return {name: _attribute(value) for name, value in sample.node.attributes.items()}


def _attribute(value: object) -> object:
    if isinstance(value, NodeTensor):
        return onnx.numpy_helper.from_array(np.array(value.numpy()))
    return list(value) if isinstance(value, (Ints, Floats, Strings)) else value


def _operand(m: GraphMaker, array: Array, *, may_be_weight: bool) -> Tensor:
    """What the graph has of this shape and in the range of these numbers; or these, as they are or moved."""
    way = m.number(0, 9)
    if way < 4:
        known = [found for found in m.tensors if _can_stand_for(found, array)]
        if known:
            return m.one_of([found for found in known if found.kind == "node"] or known)  # type: ignore[no-any-return]
    if way < 8 and array.size:
        moves = list(MOVES)
        m.random.shuffle(moves)
        for move in moves:
            if m.attempt(lambda maker, move=move: move(maker, array)):  # type: ignore[misc]
                return m.tensors[-1]
    return m.given(array, may_be_weight and m.coin())


def _can_stand_for(found: Tensor, array: Array) -> bool:
    """True for exact numbers of the same shape and dtype, none beyond those of the array."""
    if found.array.dtype != array.dtype or found.shape != array.shape or array.dtype.kind not in "biuf":
        return False
    if array.dtype.kind == "b" or not array.size:
        return True
    # Places and lengths may have to be apart, or in order.
    return (
        array.dtype.kind == "f"
        and found.is_exact
        and bool(found.array.min() >= array.min() and found.array.max() <= array.max())
    )


def _transposed(m: GraphMaker, array: Array) -> None:
    order = m.random.sample(range(array.ndim), array.ndim)
    if array.ndim < 2:
        raise UnfitError
    m.node("Transpose", [m.given(array.transpose(np.argsort(order)).copy(), False)], perm=order)


def _reshaped(m: GraphMaker, array: Array) -> None:
    if array.ndim < 2:
        raise UnfitError
    place = m.number(0, array.ndim - 2)
    merged = [*array.shape[:place], array.shape[place] * array.shape[place + 1], *array.shape[place + 2 :]]
    m.node("Reshape", [m.given(array.reshape(merged), False), m.const(array.shape)])


def _joined(m: GraphMaker, array: Array) -> None:
    axis = m.axis(array.ndim) % array.ndim
    place = m.number(1, array.shape[axis] - 1)
    halves = np.split(array, [place], axis)
    m.node(
        "Concat", [m.given(half.copy(), m.number(0, 3) == 0 and bool(n)) for n, half in enumerate(halves)], axis=axis
    )


def _sliced(m: GraphMaker, array: Array) -> None:
    axis = m.axis(array.ndim) % array.ndim
    start = m.number(0, 2)
    longer = np.concatenate([array.take([0] * start, axis), array, array.take([-1], axis)], axis)
    stop = start + array.shape[axis]
    m.node("Slice", [m.given(longer, False), m.const([start]), m.const([stop]), m.const([axis])])


def _gathered(m: GraphMaker, array: Array) -> None:
    if array.dtype.kind == "O":  # ONNX Runtime's Gather gives the first string of each row and empty ones after it.
        raise UnfitError
    axis = m.axis(array.ndim) % array.ndim
    order = np.asarray(m.random.sample(range(array.shape[axis]), array.shape[axis]))
    back = m.given(np.argsort(order), m.coin())
    m.node("Gather", [m.given(array.take(order, axis), False), back], axis=axis)


def _chosen(m: GraphMaker, array: Array) -> None:
    mask = np.asarray(np.random.default_rng(m.number(0, 99)).integers(0, 2, array.shape), bool)
    other = np.roll(array, 1)
    sides = [np.where(mask, array, other), np.where(mask, other, array)]
    m.node("Where", [m.given(mask, m.coin()), *(m.given(side.astype(array.dtype), False) for side in sides)])


MOVES: Sequence[Callable[[GraphMaker, Array], None]] = (_transposed, _reshaped, _joined, _sliced, _gathered, _chosen)
"""Nodes that give the numbers of an array without a rounding error."""
