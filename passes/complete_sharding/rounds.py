"""The order in which completion carries axes on: rounds by the user's priorities, and the operators that go first.

x : [8@dp, 64], w : [64, 256@tp!1]      round 0 has dp alone; round 1 has tp too, and leaves what dp has come to
"""

from collections.abc import Iterator, Mapping, Sequence

from irpar.analysis.completion.placement import Axes, FactorAxes
from irpar.analysis.completion.rule_view import RuleView
from irpar.ir import Value
from irpar.ops import FactorRule, Kind
from irpar.sharding import Axis, DimSharding, Sharding

_CLOSED = DimSharding()


class Rounds:
    """The rounds of one completion, and what those that are over have decided.

    Attributes:
        held: per view of a node, the axes of its factors after the last round that is over.
        kept: per value, the axes of its dims that were decided before the last round in which a dim is sharded; values
            without axes are left out.
    """

    def __init__(self) -> None:
        self.held: Mapping[RuleView, FactorAxes] = {}
        self.kept: Mapping[Value, tuple[Axes, ...]] = {}
        self._later: dict[int, list[tuple[Value, int, DimSharding]]] = {}
        self._waiting: dict[Value, dict[int, Axes]] = {}
        self._last = 0
        self._now = 0

    def add(self, value: Value, sharding: Sharding) -> list[DimSharding]:
        """Take the priorities of an annotated value; gives its dims as they are before the first round.

        A dim that waits for its round is neither cut nor open before it.
        """
        now = list(sharding.dims)
        for dim, said in enumerate(sharding.dims):
            if said.axes:
                self._last = max(self._last, said.priority)
            if said.priority and (said.axes or said.is_open):
                self._later.setdefault(said.priority, []).append((value, dim, said))
                self._waiting.setdefault(value, {})[dim] = said.axes
                now[dim] = _CLOSED
        return now

    def __iter__(self) -> Iterator[int]:
        return iter(sorted({0, *self._later}))

    @property
    def is_final(self) -> bool:
        """True in the last round."""
        return self._now == max(self._later, default=0)

    def begin(self, priority: int) -> list[tuple[Value, int, DimSharding]]:
        """The dims whose round begins."""
        self._now = priority
        begun = self._later.get(priority, [])
        for value, dim, _ in begun:
            del self._waiting[value][dim]
        return begun

    def end(self, held: Mapping[RuleView, FactorAxes], axes: Mapping[Value, Sequence[Axes]]) -> None:
        """End a round before the last: what it has decided stays."""
        self.held = held
        if self._now < self._last:
            self.kept = {value: tuple(dims) for value, dims in axes.items() if any(dims)}

    def waiting_axes(self, value: Value) -> list[Axis]:
        """The axes of a value's dims that wait: no other dim may take them."""
        return [axis for axes in self._waiting.get(value, {}).values() for axis in axes]

    @property
    def title(self) -> str:
        """What reasons say of the round; nothing where there is only one."""
        return f" at priority {self._now}" if self._later else ""


def passes_all_on(rule: FactorRule) -> bool:
    """Whether a node hands every dim on as it is: nothing is summed, and one operand has all of its dims.

    True of Relu, Transpose, Reshape and Add of a bias; not of MatMul, ReduceSum and Expand.
    """
    factors = [{factor for dim in tensor for factor in dim} for tensor in (*rule.operands, *rule.results)]
    everything = set().union(*factors)
    return (
        Kind.REDUCE not in rule.kinds
        and any(everything == of_one for of_one in factors[: len(rule.operands)])
        and all(everything == of_one for of_one in factors[len(rule.operands) :])
    )
