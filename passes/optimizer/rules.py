"""The update rules: what each optimizer makes of a parameter, its gradient and its moments, as PyTorch computes it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from irpar.ir import DOMAIN, DType, Value
from irpar.ops.gradients.writer import GradientWriter
from irpar.ops.updates import running_means

if TYPE_CHECKING:
    from . import Optimizer


@dataclass
class Parameter:
    """A parameter in an update.

    Attributes:
        name: of the source model.
        value: the parameter.
        wide: what is updated: the parameter, or its float32 master.
        gradient: as the graph has it; `Prepared.write_gradient` is what the update reads.
        moments: suffix to state.
        scale: what its learning rate is multiplied by.
        decay: its weight decay.
    """

    name: str
    value: Value
    wide: Value
    gradient: Value
    moments: Mapping[str, Value]
    scale: float
    decay: float


@dataclass
class Numbers:
    """The single numbers of an update, each computed once, in float64, and given as a parameter's dtype.

    Attributes:
        options: of the optimizer.
        rate: the learning rate.
        count: which update it is, from 1; None where no rule needs it.
        w: writes.
    """

    options: "Optimizer"
    rate: Value
    count: Value | None
    w: GradientWriter
    _made: dict[tuple[object, ...], Value] = field(default_factory=dict)

    def _once(self, key: tuple[object, ...], make: Callable[[], Value]) -> Value:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def of(self, dtype: DType, name: str, make: Callable[[], Value]) -> Value:
        """A number as a dtype; `make` computes it in float64."""
        wide = self._once((name,), make)
        return self._once((name, dtype), lambda: self.w.cast(wide, dtype))

    def step_size(self, parameter: Parameter) -> Value:
        """The parameter's own learning rate, in float64."""
        wide = self._once(("rate",), lambda: self.w.cast(self.rate, DType.F64))
        if parameter.scale == 1:
            return wide
        return self._once(("rate", parameter.scale), lambda: self.w.mul(wide, parameter.scale))

    def correction(self, beta: float) -> Value:
        """1 - beta^count, in float64: what a mean that began with zeros is divided by."""

        def make() -> Value:
            assert self.count is not None
            exponent = self._once(("count",), lambda: self.w.cast(self.count, DType.F64))  # type: ignore[arg-type]
            power = self.w.op("Pow", [self.w.constant(np.float64(beta), "beta"), exponent])
            return self.w.sub(1.0, power)

        return self._once(("correction", beta), make)

    def root(self, beta: float) -> Value:
        """Its square root, in float64."""
        return self._once(("square root", beta), lambda: self.w.op("Sqrt", [self.correction(beta)]))

    def number(self, number: float, dtype: DType) -> Value:
        """A constant of the update."""
        return self._once((number, dtype), lambda: self.w.constant(np.asarray(number, dtype.numpy), "number"))

    def rate_of(self, parameter: Parameter) -> Value:
        """The parameter's own learning rate, in its dtype."""
        return self.of(parameter.wide.dtype, f"rate {parameter.scale}", lambda: self.step_size(parameter))

    def shares(self, dtype: DType) -> list[Value]:
        """How much goes into the means: of a gradient, of the squares before, and of a square."""
        first, second = self.options.betas
        return [self.number(share, dtype) for share in (1 - first, second, 1 - second)]


_Updated = Mapping[str, Value]
"""The new parameter as "w", and each moment by its suffix."""
_Update = Callable[[Parameter, Value, Sequence[Value], "Optimizer", GradientWriter], _Updated]
"""Of a parameter, its gradient, and the numbers of a rule."""


@dataclass(frozen=True)
class Rule:
    """An optimizer.

    Attributes:
        moments: suffixes of what it keeps of each parameter.
        counts: whether it needs the number of updates.
        numbers: gives the single numbers that the update of a parameter reads; all are written before the first
            update, so that updates follow each other with nothing between.
        update: gives what there is after the update of a parameter by these numbers.
        reads: options of the pass that are not of all optimizers.
    """

    moments: tuple[str, ...]
    counts: bool
    numbers: Callable[[Parameter, Numbers], Sequence[Value]]
    update: _Update
    reads: tuple[str, ...] = ()


def _written(name: str, *flags: str) -> _Update:
    """An update that is one node of `irpar.ops.updates`, whose types are those of what it replaces.

    Args:
        name: of the operator.
        flags: options of the optimizer that are attributes of it.
    """

    def update(
        p: Parameter, gradient: Value, numbers: Sequence[Value], options: "Optimizer", w: GradientWriter
    ) -> _Updated:
        attributes = {each: 1 for each in flags if getattr(options, each)}
        operands = [p.wide, gradient, *p.moments.values(), *numbers]
        made = w.node(name, operands, attributes, domain=DOMAIN, results=1 + len(p.moments))
        return dict(zip(("w", *p.moments), made.results, strict=True))

    return update


def _decay(p: Parameter, n: Numbers) -> list[Value]:
    return [n.number(p.decay, p.wide.dtype)] if p.decay else []


def _sgd_numbers(p: Parameter, n: Numbers) -> Sequence[Value]:
    """The numbers of w - lr (g + decay w)."""
    return [n.rate_of(p), *_decay(p, n)]


def _momentum_numbers(p: Parameter, n: Numbers) -> Sequence[Value]:
    """The numbers of m = mu m + g; w - lr m, or looking ahead w - lr (g + mu m)."""
    return [n.rate_of(p), n.number(n.options.momentum, p.wide.dtype), *_decay(p, n)]


def _adaptive(p: Parameter, n: Numbers) -> list[Value]:
    """The numbers of w - rate mhat / (sqrt(vhat) + eps), in which those of both corrections are.

    rate m / (1 - beta1^t) / (sqrt(v) / r + eps) = (rate r / (1 - beta1^t)) m / (sqrt(v) + r eps), r = sqrt(1 - beta2^t)
    """
    w, dtype, (first, second) = n.w, p.wide.dtype, n.options.betas

    def size() -> Value:
        return w.div(w.mul(n.step_size(p), n.root(second)), n.correction(first))

    floor = n.of(dtype, "floor", lambda: w.mul(n.root(second), n.options.epsilon))
    return [n.of(dtype, f"size {p.scale}", size), floor, *n.shares(dtype)]


def _adam_numbers(p: Parameter, n: Numbers) -> Sequence[Value]:
    """The numbers of w - lr mhat / (sqrt(vhat) + eps), the decay in the gradient."""
    return [*_adaptive(p, n), *_decay(p, n)]


def _adamw_numbers(p: Parameter, n: Numbers) -> Sequence[Value]:
    """The numbers of the same of w (1 - lr decay), the decay beside the gradient."""
    numbers = _adaptive(p, n)
    if p.decay:
        left = n.of(p.wide.dtype, f"left {p.scale} {p.decay}", lambda: n.w.sub(1.0, n.w.mul(n.step_size(p), p.decay)))
        numbers.append(left)
    return numbers


def _lamb_numbers(p: Parameter, n: Numbers) -> Sequence[Value]:
    """The numbers that `_lamb` reads."""
    dtype, (first, second) = p.wide.dtype, n.options.betas
    corrections = [
        n.of(dtype, "unbiased", lambda: n.correction(first)),
        n.of(dtype, "root", lambda: n.root(second)),
    ]
    return [n.rate_of(p), *corrections, *n.shares(dtype)]


def _lamb(p: Parameter, gradient: Value, numbers: Sequence[Value], options: "Optimizer", w: GradientWriter) -> _Updated:
    """w - lr (|w| / |u|) u with u = mhat / (sqrt(vhat) + eps) + decay w; a ratio of 1 where a norm is 0."""
    rate, correction, root, *shares = numbers
    mean, square = running_means(w, gradient, p.moments["m"], p.moments["v"], *shares)
    deviation = w.add(w.div(w.op("Sqrt", [square]), root), options.epsilon)
    update = w.div(w.div(mean, correction), deviation)
    if p.decay:
        update = w.add(update, w.mul(p.wide, p.decay))
    norms = [w.op("Sqrt", [w.op("ReduceSumSquare", [each], {"keepdims": 0})]) for each in (p.wide, update)]
    is_zero = w.op("Or", [w.compare("Equal", norm, 0) for norm in norms])
    ratio = w.where(is_zero, 1.0, w.div(norms[0], w.where(is_zero, 1.0, norms[1])))
    return {"w": w.sub(p.wide, w.mul(rate, w.mul(update, ratio))), "m": mean, "v": square}


_OF_ADAM = ("betas", "eps")
RULES: Mapping[str, Rule] = {
    "sgd": Rule((), False, _sgd_numbers, _written("Sgd")),
    "momentum": Rule(("m",), False, _momentum_numbers, _written("Momentum", "nesterov"), ("momentum", "nesterov")),
    "adam": Rule(("m", "v"), True, _adam_numbers, _written("Adam"), _OF_ADAM),
    "adamw": Rule(("m", "v"), True, _adamw_numbers, _written("AdamW"), _OF_ADAM),
    "lamb": Rule(("m", "v"), True, _lamb_numbers, _lamb, _OF_ADAM),
}
SOME_READ = ("momentum", "nesterov", *_OF_ADAM)
"""Options that are not of all optimizers."""
