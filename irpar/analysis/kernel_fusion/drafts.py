"""Steps of an expression whose operands have no names yet, and a node as a list of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from irpar.ir import DType, Node, Value
from irpar.kernels.expression import OPERATORS, Attribute, Number
from irpar.ops.facts import needed


@dataclass(frozen=True)
class Ref:
    """The result of a step, by its place."""

    place: int


Given = Value | Ref | Number


@dataclass(frozen=True)
class DraftStep:
    """A step whose operands have no names yet."""

    op_type: str
    operands: tuple[Given, ...]
    attributes: tuple[tuple[str, Attribute], ...]


@dataclass
class Lowered:
    """A node as steps.

    Attributes:
        node: it.
        wanted: the results that something reads.
        steps: in order.
        results: the step of each of these.
        space: the shape over which the node computes.
        reduced: how many dims at the end of it are reduced.
        outer: how many dims at its beginning are summed up.
    """

    node: Node
    wanted: frozenset[Value]
    steps: list[DraftStep] = field(default_factory=list)
    results: dict[Value, Ref] = field(default_factory=dict)
    space: tuple[int, ...] = ()
    reduced: int = 0
    outer: int = 0

    def step(self, op_type: str, *operands: Given, **attributes: Attribute) -> Ref:
        """Add a step."""
        kept = {name: value for name, value in attributes.items() if value != dict(OPERATORS[op_type].defaults)[name]}
        self.steps.append(DraftStep(op_type, operands, tuple(sorted(kept.items()))))
        return Ref(len(self.steps) - 1)

    def reduce(self, op_type: str, value: Given) -> Ref:
        """Add a reduction of the dims that the node reduces."""
        return self.step(op_type, value, axes=tuple(range(-self.reduced, 0)))

    def number(self, number: float) -> Number:
        """A number beside values of the first operand's dtype."""
        return Number.of(number, needed(self.node, 0).dtype.numpy)

    def cast(self, value: Given, dtype: DType, to: DType) -> Given:
        """A value of a dtype in another one."""
        return value if dtype is to else self.step("Cast", value, to=to.text)

    def values(self) -> tuple[Value, ...]:
        """The values that steps read, each once."""
        found = (given for step in self.steps for given in step.operands if isinstance(given, Value))
        return tuple(dict.fromkeys(found))


Lower = Callable[[Node, Lowered], Sequence[Given | None]]
"""Writes a node's steps; gives what stands for each result."""
