"""Plausible random inputs: floats from a normal distribution, integers that are valid where they index something."""

from collections.abc import Sequence

import numpy as np

from irpar.ir import DType, Graph, Value
from irpar.runtime.layout import Array, TensorSpec
from irpar.sharding import IrparError, spelled

from .input_bounds import Bounds, index_bounds, is_square, thresholds, words

NARROW_INTEGERS = 2
"""Integers that something unknown reads are 0 or 1: they may be sizes, or places in what is small."""
WIDE_INTEGERS = 1000
"""Integers that only arithmetic reads are between minus this and this; those of 8 bits any."""
_SCALES = (1.0, 1.0, 10.0, 0.1, 100.0, 1000.0)
_MOST_SPAN = 4096
_MOST_SIZE = 1_000_000
"""What may be a size is not drawn larger."""


def random_inputs(
    specs: Sequence[TensorSpec], graph: Graph, seed: int = 0, *, variant: int = 0, narrow: bool = False
) -> dict[str, Array]:
    """Random full inputs for a program.

    Floats are standard normal, without their sign where a root is taken of them, bools fair, strings "a", "b" or
    what the model compares strings with. Integers that reach indices of Gather and its like in
    `graph` lie in the range that these allow; those that are read as masks are 0 or 1, the first of each row 1; those
    that are compared with numbers lie around these; those that only arithmetic reads are wide; others are 0 or 1.

    Args:
        specs: what the program takes; shapes must be static.
        graph: the original graph in global view, with inputs of these names.
        seed: equal seeds give equal inputs.
        variant: 0 draws all as said; others also draw bools that are all alike, and floats of another size or sign, or
            around numbers that the model compares floats with, so as to reach what the first does not.
        narrow: integers without a known bound are 0 or 1, whatever reads them.

    Raises:
        IrparError: an input is no tensor, or has a symbolic dim.
    """
    inputs = {value.source_name: value for value in graph.inputs}
    found = thresholds(graph) if variant else ()
    texts = ("a", "b", *(words(graph) if any(spec.dtype is DType.STR for spec in specs) else ()))
    return {
        spec.name: _Drawer(
            np.random.default_rng([seed, index, *([variant] if variant else [])]), variant, found, texts
        ).draw(spec, inputs.get(spec.name), narrow)
        for index, spec in enumerate(specs)
    }


class _Drawer:
    """Draws one input."""

    def __init__(
        self, random: np.random.Generator, variant: int, found: tuple[float, ...], texts: tuple[str, ...]
    ) -> None:
        self._random = random
        self._texts = np.asarray(texts, object)
        self._variant = variant
        self._thresholds = found

    def draw(self, spec: TensorSpec, value: Value | None, narrow: bool) -> Array:
        """One input.

        Raises:
            IrparError: it is no tensor, or has a symbolic dim.
        """
        shape = _static_shape(spec)
        assert spec.dtype is not None
        if spec.dtype is DType.STR:
            return np.asarray(self._random.choice(self._texts, shape), object).reshape(shape)
        if spec.dtype is DType.BOOL:
            return self._bools(shape)
        if spec.dtype.is_integer:
            bounds = index_bounds(value) if value is not None else Bounds(is_free=False)
            return self._integers(bounds, shape, spec.dtype, narrow)
        numbers = self._floats(shape)
        if not self._variant and value is not None and is_square(value):
            numbers = np.abs(numbers)
        if spec.dtype in (DType.C64, DType.C128):
            numbers = numbers + 1j * self._random.standard_normal(shape)
        return np.asarray(numbers).astype(spec.dtype.numpy)

    def _bools(self, shape: tuple[int, ...]) -> Array:
        kind = self._random.integers(3) if self._variant else 0
        if kind:
            return np.full(shape, kind == 1)
        return np.asarray(self._random.integers(0, 2, shape)).astype(np.bool_)

    def _floats(self, shape: tuple[int, ...]) -> Array:
        numbers: Array = np.asarray(self._random.standard_normal(shape))
        if not self._variant:
            return numbers
        numbers = numbers * self._random.choice(_SCALES)
        sign = self._random.integers(4)
        numbers = (numbers, np.abs(numbers), -np.abs(numbers), numbers * 0)[sign]
        if self._thresholds and self._random.integers(2):
            # Around the number, or it alone.
            center = self._random.choice(self._thresholds)
            numbers = numbers * 0 + center if self._random.integers(2) else numbers * max(abs(center), 1e-3) + center
        return numbers

    def _integers(self, bounds: Bounds, shape: tuple[int, ...], dtype: DType, narrow: bool) -> Array:
        random = self._random
        low, high = _range(bounds, dtype, narrow)
        if bounds.points and not narrow:
            numbers = _around(bounds, low, high, shape, random)
        elif bounds.high is None and bounds.is_mask and (dtype.bits > 8 or narrow):
            numbers = np.asarray(random.integers(0, 2, shape))
            if shape and shape[-1]:
                numbers[..., 0] = 1  # A row without anything unmasked would be all NaN after Softmax.
        else:
            numbers = np.asarray(random.integers(low, high, shape))
        if bounds.is_divisor:
            numbers = np.where(numbers == 0, 1, numbers)
        return numbers.astype(dtype.numpy)


def _static_shape(spec: TensorSpec) -> tuple[int, ...]:
    if spec.dtype is None:
        raise IrparError(
            f"cannot make up input {spec}",
            do=spelled("verify it from Python: irpar.Partition.open(OUT) and then ", "give it: ")
            + f"partition.verify({{{spec.name!r}: ...}})",
        )
    if spec.shape is None or not all(isinstance(dim, int) for dim in spec.shape):
        raise IrparError(
            f"cannot make up input {spec}",
            do=spelled(
                "give it (--input NAME=VALUE, or --inputs FILE), or bind all symbols (--bind NAME=SIZE)",
                'give it (inputs={"NAME": array}), or bind all symbols (bind={"NAME": size})',
            ),
        )
    shape: tuple[int, ...] = spec.shape  # type: ignore[assignment]
    return shape


def _range(bounds: Bounds, dtype: DType, narrow: bool) -> tuple[int, int]:
    """The half-open range that is drawn from where nothing else counts."""
    unsigned = dtype.text.startswith("u")
    least, most = (0, 1 << dtype.bits) if unsigned else (-(1 << (dtype.bits - 1)), 1 << (dtype.bits - 1))
    if bounds.high is not None:
        low = max(bounds.low, 0)
        return low, max(min(bounds.high, most), low + 1)
    if narrow or not bounds.is_free:
        low = max(bounds.low, 0)
        return low, max(NARROW_INTEGERS, low + 1)
    if dtype.bits <= 8:
        return least, most
    return max(-WIDE_INTEGERS, least), min(WIDE_INTEGERS + 1, most)


def _around(bounds: Bounds, low: int, high: int, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Numbers at and beside the points, and some between and beyond them, all in the range that is known."""
    usable = [point for point in bounds.points if bounds.is_free or abs(point) <= _MOST_SIZE]
    points = {near for point in usable for near in (point - 1, point, point + 1)} or {low}
    least, most = min(points), max(points)
    if bounds.high is not None or bounds.low:
        points = {point for point in points if bounds.low <= point and (bounds.high is None or point < bounds.high)}
        least, most = low, high - 1
    elif most - least > _MOST_SPAN or not bounds.is_free:
        least, most = low, high - 1
    chosen = np.asarray(random.choice(sorted(points) or [low], shape))
    others = np.asarray(random.integers(least, most + 1, shape))
    return np.where(random.integers(0, 4, shape) == 0, others, chosen)
