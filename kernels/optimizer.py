"""Optimizer steps of the domain ai.onnx.preview.training.

Operands: learning rate, update count, then all tensors, all their gradients, and all of each state in turn.
Results: all new tensors, then all of each new state.
"""

import math
from collections.abc import Sequence

from .operands import one_of
from .registry import Array, ArrayModule, HostArray, kernel
from .temporaries import arrays_like

DOMAIN = "ai.onnx.preview.training"


def _by_tensor(operands: Sequence[Array], fields: int) -> list[tuple[Array, ...]]:
    """For each optimized tensor: itself, its gradient and its states."""
    count, rest = divmod(len(operands), fields)
    if rest or not count:
        raise ValueError(f"{len(operands)} operands after the update count are no multiple of {fields}")
    return [tuple(operands[field * count + index] for field in range(fields)) for index in range(count)]


def _by_field(results: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    return tuple(value for field in zip(*results, strict=True) for value in field)


@kernel("Adam", since=1, domain=DOMAIN, temporaries=arrays_like(0, results=2))
def adam(
    xp: ArrayModule,
    rate: Array,
    step: HostArray,
    *operands: Array,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Array, ...]:
    """One step of Adam for any number of tensors."""
    count = int(step.reshape(()))
    correction = math.sqrt(1 - beta**count) / (1 - alpha**count) if count > 0 else 1.0
    results = []
    for x, gradient, velocity, square in _by_tensor(operands, 4):
        regularized = norm_coefficient * x + gradient
        velocity = alpha * velocity + (1 - alpha) * regularized
        square = beta * square + (1 - beta) * regularized * regularized
        moved = x - (rate.astype(x.dtype) * correction) * velocity / (xp.sqrt(square) + epsilon)
        results.append(((1 - norm_coefficient_post) * moved, velocity, square))
    return _by_field(results)


@kernel("Adagrad", since=1, domain=DOMAIN, temporaries=arrays_like(0, results=2))
def adagrad(
    xp: ArrayModule,
    rate: Array,
    step: HostArray,
    *operands: Array,
    decay_factor: float = 0.0,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
) -> tuple[Array, ...]:
    """One step of Adagrad for any number of tensors."""
    decay = 1 + int(step.reshape(())) * decay_factor
    results = []
    for x, gradient, square in _by_tensor(operands, 3):
        regularized = norm_coefficient * x + gradient
        square = square + regularized * regularized
        moved = x - rate.astype(x.dtype) / decay * regularized / (xp.sqrt(square) + epsilon)
        results.append((moved, square))
    return _by_field(results)


@kernel("Momentum", since=1, domain=DOMAIN, temporaries=arrays_like(0, results=2))
def momentum(
    xp: ArrayModule,
    rate: Array,
    step: HostArray,
    *operands: Array,
    alpha: float,
    beta: float,
    mode: str,
    norm_coefficient: float,
) -> tuple[Array, ...]:
    """One step of gradient descent with standard or Nesterov momentum for any number of tensors."""
    one_of("mode", mode, ("standard", "nesterov"))
    share = beta if int(step.reshape(())) > 0 else 1.0
    results = []
    for x, gradient, velocity in _by_tensor(operands, 3):
        regularized = norm_coefficient * x + gradient
        velocity = alpha * velocity + share * regularized
        direction = velocity if mode == "standard" else regularized + alpha * velocity
        results.append((x - rate.astype(x.dtype) * direction, velocity))
    return _by_field(results)
