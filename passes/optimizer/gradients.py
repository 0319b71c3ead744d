"""What happens to gradients before the update: the loss's scale is taken out, their norm is bounded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from irpar.ir import ArrayTensor, DType, Graph, TensorType, Value
from irpar.ops.gradients.writer import GradientWriter

from .names import GOOD, NORM, SCALE, SKIPPED
from .states import States

if TYPE_CHECKING:
    from . import Optimizer
    from .rules import Parameter

FIRST_SCALE, GROWTH, BACKOFF = 2.0**16, 2.0, 0.5
"""What the scale of the loss begins as, and what it is multiplied by: after enough updates, and instead of one."""
_TINY = 1e-6
"""What keeps the norm from 0 as a divisor, as PyTorch has it."""


@dataclass
class Prepared:
    """What was found out about all gradients together.

    Attributes:
        gradients: of each parameter by its name, where finding that out took more than the gradient as it was.
        is_finite: whether all are; None where that is not asked.
        factors: by dtype, what gradients are multiplied by before an update; none where they stay as they are.
        results: further results of the graph, by name.
    """

    gradients: dict[str, Value] = field(default_factory=dict)
    is_finite: Value | None = None
    factors: dict[DType, Value] = field(default_factory=dict)
    results: list[tuple[str, Value]] = field(default_factory=list)

    def write_gradient(self, parameter: "Parameter", w: GradientWriter) -> Value:
        """Write what the update of a parameter reads, of the dtype of `wide`.

        This stands beside the update: before the first one, all gradients would be held as wide as this.
        """
        gradient = w.cast(self.gradients.get(parameter.name, parameter.gradient), parameter.wide.dtype)
        return w.mul(gradient, self.factors[gradient.dtype]) if self.factors else gradient

    def kept(self, after: Value, before: Value, w: GradientWriter) -> Value:
        """What is there after the update; where a gradient was not finite, what was there before."""
        return after if self.is_finite is None else w.where(self.is_finite, after, before)


def prepare(
    graph: Graph, parameters: Sequence["Parameter"], options: "Optimizer", states: States, w: GradientWriter
) -> Prepared:
    """Write what takes the gradients of all parameters: whether each is finite without the loss's scale, their norm."""
    prepared = Prepared()
    if options.loss_scale == "dynamic":
        _unscale(graph, parameters, options, states, prepared, w)
    if options.clip_norm is not None:
        _clip(parameters, options.clip_norm, prepared, w)
    return prepared


def _by_dtype(number: Value, parameters: Sequence["Parameter"], w: GradientWriter) -> dict[DType, Value]:
    return {dtype: w.cast(number, dtype) for dtype in dict.fromkeys(each.wide.dtype for each in parameters)}


def _clip(parameters: Sequence["Parameter"], most: float, prepared: Prepared, w: GradientWriter) -> None:
    """Pascanu et al., 2013: gradients times most / norm, where the norm of all of them is more."""
    dtype = DType.F64 if any(each.wide.dtype is DType.F64 for each in parameters) else DType.F32
    squares = []
    for each in parameters:
        gradient = prepared.gradients[each.name] = prepared.write_gradient(each, w)
        squares.append(w.cast(w.op("ReduceSumSquare", [gradient], {"keepdims": 0}), dtype))
    norm = w.op("Sqrt", [squares[0] if len(squares) == 1 else w.op("Sum", squares)])
    factor = w.op("Min", [w.div(most, w.add(norm, _TINY)), w.number(1, norm)])
    prepared.factors = _by_dtype(factor, parameters, w)
    prepared.results.append((NORM, norm))


def _unscale(
    graph: Graph,
    parameters: Sequence["Parameter"],
    options: "Optimizer",
    states: States,
    prepared: Prepared,
    w: GradientWriter,
) -> None:
    """Micikevicius et al., 2018, section 3.2: divide by the scale, see whether all is finite, and adapt the scale."""
    scale = next(value for value in graph.inputs if value.source_name == SCALE)
    states.kinds[scale] = ("scale", ArrayTensor(np.float32(FIRST_SCALE)), None)
    good = states.add(GOOD, "counter", TensorType(DType.I64, ()), None)
    inverses = _by_dtype(w.div(1.0, scale), parameters, w)
    sums = []
    for each in parameters:
        wide = w.cast(each.gradient, each.wide.dtype)
        gradient = prepared.gradients[each.name] = w.mul(wide, inverses[wide.dtype])
        # 0 of what is finite, NaN of all else.
        nothing = w.op("ReduceSum", [w.mul(gradient, 0.0)], {"keepdims": 0})
        sums.append(w.cast(nothing, DType.F32))
    total = sums[0] if len(sums) == 1 else w.op("Sum", sums)
    is_finite = w.compare("Equal", total, 0.0)
    count = w.add(good, w.constant(1))
    is_due = w.op("GreaterOrEqual", [count, w.constant(options.growth_interval)])
    grown = w.where(is_due, w.mul(scale, GROWTH), scale)
    states.replace(scale, w.where(is_finite, grown, w.mul(scale, BACKOFF)))
    zero = w.constant(0)
    states.replace(good, w.where(is_finite, w.where(is_due, zero, count), zero))
    prepared.is_finite = is_finite
    prepared.results.append((SKIPPED, w.op("Not", [is_finite])))
