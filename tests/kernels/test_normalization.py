"""Normalisations on a processor."""

from typing import Any

import numpy as np
import pytest

from irpar.kernels import lookup


@pytest.mark.parametrize(("operator", "operands"), [("LayerNormalization", 2), ("RMSNormalization", 1)])
@pytest.mark.parametrize("axis", [-1, 2])
def test_how_a_tensor_lies_changes_no_bit(operator: str, operands: int, axis: int) -> None:
    kernel = lookup("", operator, 23)
    assert kernel is not None
    random = np.random.default_rng(0)
    x = random.standard_normal((3, 16, 5, 32), np.float32)
    more = [random.standard_normal(x.shape[axis:], np.float32) for _ in range(operands)]
    lies: dict[str, Any] = {"in order": x, "channels first": x.transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)}
    lies["every other"] = np.repeat(x, 2, axis=-1)[..., ::2]
    results = [kernel(np, [each, *more], {"axis": axis}, 1)[0] for each in lies.values()]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0], strict=True)
