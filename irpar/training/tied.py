"""What an exporter has tied, or untied, among what is trained."""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from irpar.ir import TensorError, Value
from irpar.units import count_text

_SAMPLES = 64
"""Numbers of a matrix that are compared with those of others: of what is mapped from a file no more is read."""
_MOST_READ = 1 << 20
"""Numbers of a parameter that is looked through."""


def ties_among(parameters: Iterable[Value]) -> Iterator[str]:
    """Lines about parameters that may be several, and about two that may be one.

    Exporters merge initializers that are equal, as biases of a new model are; and they write a matrix that a model
    reads both as it is and transposed, as an embedding that is the last layer too, as two.
    """
    known = [value for value in parameters if value.is_static and value.data is not None]
    for value in known:
        number = _only_number(value) if len(value.users) > 1 else None
        if number is not None:
            yield (
                f"%{value.source_name} is trained as one parameter of {count_text(len(value.users), 'node')}, and is "
                f"{number:g} throughout: if it was several that are equal, export the model so that it keeps them apart"
            )
    for name, other in _transposed(known):
        yield (
            f"%{name} has the numbers of %{other}, transposed, and each is trained by itself: if they are one, export "
            "the model without folding constants, or freeze one"
        )


def _only_number(value: Value) -> float | None:
    """The number that all of a parameter is, where that is 0 or 1: what parameters begin with."""
    numbers = _numbers(value)
    if numbers is None or not 1 < numbers.size <= _MOST_READ:
        return None
    first = float(numbers.flat[0])
    return first if first in (0.0, 1.0) and bool((numbers == numbers.flat[0]).all()) else None


def _transposed(values: Iterable[Value]) -> Iterator[tuple[str, str]]:
    """Names of matrices that are others, transposed, as far as some of their numbers tell; each once."""
    seen: dict[tuple[object, ...], str] = {}
    for value in values:
        if len(value.shape) != 2 or min(value.shape) < 2:
            continue
        numbers, (rows, columns) = _numbers(value), value.shape
        if numbers is None:
            continue
        own, turned = _sampled(numbers), _sampled(numbers.T)
        if len(set(own)) < 2 or own == turned:
            continue  # Of one that is its own transpose nothing can be told.
        other = seen.get((value.dtype, columns, rows, turned))
        if other is not None:
            yield value.source_name, other
        seen.setdefault((value.dtype, rows, columns, own), value.source_name)


def _numbers(value: Value) -> "np.ndarray[Any, Any] | None":
    """Those of a parameter; None where its file cannot be read, which whoever needs them tells."""
    assert value.data is not None
    try:
        return value.data.numpy()
    except TensorError:
        return None


def _sampled(matrix: "np.ndarray[Any, Any]") -> tuple[float, ...]:
    """Numbers from all over a matrix; the same places of one shape."""
    random = np.random.default_rng(0)
    rows, columns = matrix.shape
    places = zip(random.integers(0, rows, _SAMPLES), random.integers(0, columns, _SAMPLES), strict=True)
    return tuple(float(matrix[row, column]) for row, column in places)
