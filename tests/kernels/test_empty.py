"""Operands without elements, against ONNX Runtime."""

from typing import Any

import numpy as np
import pytest

from .reference import assert_same


def empty(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.empty(shape, dtype)


LABELS = empty(5, 0, dtype=np.int64)
CASES: list[tuple[str, tuple[np.ndarray, ...], int, int, dict[str, Any]]] = [
    ("LogSoftmax", (empty(2, 3, 0),), 13, 1, {"axis": 1}),
    ("LogSoftmax", (empty(2, 0, 3),), 13, 1, {"axis": 1}),
    ("Softmax", (empty(0, 3, 2),), 13, 1, {"axis": 1}),
    ("SoftmaxCrossEntropyLoss", (empty(5, 1, 0), LABELS), 13, 2, {"reduction": "none"}),
    ("SoftmaxCrossEntropyLoss", (empty(5, 3, 0), LABELS), 13, 2, {"reduction": "sum"}),
]


@pytest.mark.parametrize(("op_type", "inputs", "version", "n_outputs", "attributes"), CASES)
def test_nothing_comes_of_nothing(
    op_type: str, inputs: tuple[np.ndarray, ...], version: int, n_outputs: int, attributes: dict[str, Any]
) -> None:
    assert_same(op_type, inputs, version, n_outputs, **attributes)
