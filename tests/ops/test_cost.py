"""FLOPs against formulas by hand, and in both views."""

import numpy as np
import pytest

from irpar.ops import flops

from .rule_proof import Sample
from .samples import SAMPLES, bools, const, floats, ints


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (Sample("Add", (floats(6, 1, 4), floats(5, 1))), 6 * 5 * 4),
        (Sample("Where", (bools(5, 1), floats(5, 4), floats(4))), 5 * 4),
        (Sample("Sum", (floats(5, 4), floats(4), floats(5, 4))), 2 * 5 * 4),
        (Sample("Mean", (floats(5, 4), floats(4), floats(5, 4))), 3 * 5 * 4),
        (Sample("Cast", (floats(5, 4),), {"to": 7}), 0),
        (Sample("Transpose", (floats(5, 4),)), 0),
        (Sample("Gather", (floats(7, 4), ints(5, low=0, high=7))), 0),
        (Sample("ReduceSum", (floats(5, 4, 6), const(1))), 5 * 4 * 6),
        (Sample("ReduceMean", (floats(5, 4, 6), const(1))), 5 * 4 * 6 + 5 * 6),
        (Sample("Softmax", (floats(5, 4),)), 5 * 5 * 4),
        (Sample("LayerNormalization", (floats(5, 4), floats(4))), 8 * 5 * 4),
        # a bias adds one for each element of the result
        (Sample("Conv", (floats(3, 4, 6, 5), floats(7, 4, 3, 2), floats(7))), 3 * 7 * 4 * 4 * (2 * 4 * 3 * 2 + 1)),
        (Sample("Conv", (floats(3, 6, 8), floats(6, 1, 3)), {"group": 6}), 3 * 6 * 6 * 2 * 3),
        (Sample("AveragePool", (floats(3, 4, 6, 5),), {"kernel_shape": [3, 2]}), 3 * 4 * 4 * 4 * 3 * 2),
        # a window wider than the image meets all of it, and padding
        (
            Sample("AveragePool", (floats(3, 4, 2, 5),), {"kernel_shape": [7, 2], "pads": [3, 0, 2, 0]}, version=11),
            3 * 4 * 1 * 4 * 2 * 2,
        ),
        # scores: two products, the scale and the softmax
        (
            Sample("Attention", (floats(2, 6, 5, 4), floats(2, 3, 7, 4), floats(2, 3, 7, 8)), version=23),
            2 * 6 * 5 * 7 * (2 * 4 + 1 + 5 + 2 * 8),
        ),
        (
            Sample(
                "Attention",
                (floats(2, 5, 24), floats(2, 7, 12), floats(2, 7, 24)),
                {"q_num_heads": 6, "kv_num_heads": 3},
                version=23,
            ),
            2 * 6 * 5 * 7 * (2 * 4 + 1 + 5 + 2 * 8),
        ),
    ],
    ids=str,
)
def test_cost(sample: Sample, expected: int) -> None:
    assert flops(sample.node) == expected


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_costs_are_whole_numbers_that_fit_the_data(sample: Sample) -> None:
    found = flops(sample.node)
    elements = sum(array.size for array in sample.arrays if array is not None) + sum(map(np.size, sample.whole))
    assert type(found) is int
    assert 0 <= found <= 100 * elements
