"""The update rules: what each optimizer makes of a parameter, its gradient and its moments, as PyTorch computes it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from irpar.ir import DType, Value
from irpar.ops.gradients.writer import GradientWriter

if TYPE_CHECKING:
    from . import Optimizer


@dataclass
class Parameter:
    """A parameter in an update.

    Attributes:
        name: of the source model.
        value: the parameter.
        wide: what is updated: the parameter, or its float32 master.
        gradient: of the dtype of `wide`.
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


@dataclass(frozen=True)
class Rule:
    """An optimizer.

    Attributes:
        moments: suffixes of what it keeps of each parameter.
        counts: whether it needs the number of updates.
        update: gives the new parameter as "w", and each moment by its suffix.
    """

    moments: tuple[str, ...]
    counts: bool
    update: Callable[[Parameter, Numbers], Mapping[str, Value]]


def _decayed(p: Parameter, n: Numbers) -> Value:
    """The gradient with the weight decay added to it."""
    return n.w.add(p.gradient, n.w.mul(p.wide, p.decay)) if p.decay else p.gradient


def _stepped(p: Parameter, n: Numbers, direction: Value) -> Value:
    rate = n.of(p.wide.dtype, f"rate {p.scale}", lambda: n.step_size(p))
    return n.w.sub(p.wide, n.w.mul(rate, direction))


def _sgd(p: Parameter, n: Numbers) -> Mapping[str, Value]:
    """w - lr (g + decay w)."""
    return {"w": _stepped(p, n, _decayed(p, n))}


def _momentum(p: Parameter, n: Numbers) -> Mapping[str, Value]:
    """m = mu m + g; w - lr m, or looking ahead w - lr (g + mu m)."""
    gradient, mu = _decayed(p, n), n.options.momentum
    moment = n.w.add(n.w.mul(p.moments["m"], mu), gradient)
    direction = n.w.add(gradient, n.w.mul(moment, mu)) if n.options.nesterov else moment
    return {"w": _stepped(p, n, direction), "m": moment}


def _means(p: Parameter, n: Numbers, gradient: Value) -> tuple[Value, Value]:
    """The running means of the gradient and of its square."""
    w, (first, second) = n.w, n.options.betas
    m, v = p.moments["m"], p.moments["v"]
    mean = w.add(m, w.mul(w.sub(gradient, m), 1 - first))
    square = w.add(w.mul(v, second), w.mul(w.mul(gradient, gradient), 1 - second))
    return mean, square


def _deviation(p: Parameter, n: Numbers, square: Value) -> Value:
    """sqrt(v / (1 - beta2^t)) + eps."""
    w, dtype, second = n.w, p.wide.dtype, n.options.betas[1]
    root = n.of(dtype, "root", lambda: n.root(second))
    return w.add(w.div(w.op("Sqrt", [square]), root), n.options.epsilon)


def _adaptive(p: Parameter, n: Numbers, before: Value, gradient: Value) -> Mapping[str, Value]:
    """before - rate mhat / (sqrt(vhat) + eps), with the corrections of both means in single numbers.

    rate m / (1 - beta1^t) / (sqrt(v) / r + eps) = (rate r / (1 - beta1^t)) m / (sqrt(v) + r eps), r = sqrt(1 - beta2^t)
    """
    w, dtype, (first, second) = n.w, p.wide.dtype, n.options.betas
    mean, square = _means(p, n, gradient)

    def size() -> Value:
        return w.div(w.mul(n.step_size(p), n.root(second)), n.correction(first))

    floor = n.of(dtype, "floor", lambda: w.mul(n.root(second), n.options.epsilon))
    change = w.div(mean, w.add(w.op("Sqrt", [square]), floor))
    return {"w": w.sub(before, w.mul(change, n.of(dtype, f"size {p.scale}", size))), "m": mean, "v": square}


def _adam(p: Parameter, n: Numbers) -> Mapping[str, Value]:
    """w - lr mhat / (sqrt(vhat) + eps), the decay in the gradient."""
    return _adaptive(p, n, p.wide, _decayed(p, n))


def _adamw(p: Parameter, n: Numbers) -> Mapping[str, Value]:
    """The same of w (1 - lr decay), the decay beside the gradient."""
    before = p.wide
    if p.decay:
        kept = n.of(p.wide.dtype, f"kept {p.scale} {p.decay}", lambda: n.w.sub(1.0, n.w.mul(n.step_size(p), p.decay)))
        before = n.w.mul(p.wide, kept)
    return _adaptive(p, n, before, p.gradient)


def _lamb(p: Parameter, n: Numbers) -> Mapping[str, Value]:
    """w - lr (|w| / |u|) u with u = mhat / (sqrt(vhat) + eps) + decay w; a ratio of 1 where a norm is 0."""
    w, dtype, first = n.w, p.wide.dtype, n.options.betas[0]
    mean, square = _means(p, n, p.gradient)
    unbiased = w.div(mean, n.of(dtype, "unbiased", lambda: n.correction(first)))
    update = w.div(unbiased, _deviation(p, n, square))
    if p.decay:
        update = w.add(update, w.mul(p.wide, p.decay))
    norms = [w.op("Sqrt", [w.op("ReduceSumSquare", [each], {"keepdims": 0})]) for each in (p.wide, update)]
    is_zero = w.op("Or", [w.compare("Equal", norm, 0) for norm in norms])
    ratio = w.where(is_zero, 1.0, w.div(norms[0], w.where(is_zero, 1.0, norms[1])))
    return {"w": _stepped(p, n, w.mul(update, ratio)), "m": mean, "v": square}


RULES: Mapping[str, Rule] = {
    "sgd": Rule((), False, _sgd),
    "momentum": Rule(("m",), False, _momentum),
    "adam": Rule(("m", "v"), True, _adam),
    "adamw": Rule(("m", "v"), True, _adamw),
    "lamb": Rule(("m", "v"), True, _lamb),
}
