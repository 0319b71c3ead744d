"""Numbers for sample nodes: of both signs, of uneven sizes, the same in every run."""

from collections import Counter
from typing import Any

import numpy as np

from .rule_proof import Array, Constant

_drawn: Counter[str] = Counter()


def _random(*arguments: object) -> np.random.Generator:
    """A generator for the nth draw of these arguments, so that a new sample changes no other one."""
    key = repr(arguments)
    _drawn[key] += 1
    return np.random.default_rng([20, _drawn[key], *key.encode()])


def floats(*shape: int, low: float = -2.0, high: float = 2.0, dtype: Any = np.float32) -> Array:
    """Uniform numbers."""
    return _random(shape, low, high, dtype).uniform(low, high, shape).astype(dtype)


def ints(*shape: int, low: int = -9, high: int = 9, dtype: Any = np.int64) -> Array:
    """Uniform ints below `high`."""
    return _random(shape, low, high, dtype).integers(low, high, shape).astype(dtype)


def bools(*shape: int) -> Array:
    """Fair coins."""
    return _random(shape, bool).integers(0, 2, shape).astype(bool)


def const(*numbers: int) -> Constant:
    """A constant vector of int64."""
    return Constant(np.asarray(numbers, np.int64))


def scalar(number: float, dtype: Any = np.int64) -> Constant:
    """A constant scalar."""
    return Constant(np.asarray(number, dtype))


def words(*shape: int, kinds: int = 5) -> Array:
    """Strings of one letter."""
    return np.asarray([chr(ord("a") + kind) for kind in range(kinds)], object)[
        _random(shape, kinds, str).integers(0, kinds, shape)
    ]
