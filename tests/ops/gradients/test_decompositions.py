"""Every decomposition against the operator that it takes the place of, on all samples of it."""

import numpy as np
import pytest

from irpar.ops import definition
from tests.ops.gradients.proof import decomposed, feeds_of, is_float, module_of, run
from tests.ops.rule_proof import Sample
from tests.ops.samples import SAMPLES


def has_decomposition(sample: Sample) -> bool:
    """Whether the operator is differentiated as what it is made of."""
    known = definition(sample.node)
    return known is not None and known.decompose is not None and known.gradient is None


@pytest.mark.parametrize("sample", [*filter(has_decomposition, SAMPLES)], ids=str)
def test_decomposition_equals_operator(sample: Sample) -> None:
    module = decomposed(module_of(sample, None))
    assert module is not None
    assert not {node.domain for node in module.graph.walk()} - {""}
    found = run(module, feeds_of(sample, None)).values()
    for expected, array in zip(sample.whole, found, strict=True):
        assert array.dtype == expected.dtype
        tolerance = sample.tolerance if is_float(expected) else 0
        np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance)
