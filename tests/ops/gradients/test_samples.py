"""Every operator that has a gradient against central differences, on all samples of it."""

import numpy as np
import pytest

from irpar.ir import tensor_type
from irpar.kernels import lookup
from irpar.ops import definition
from irpar.ops.gradients.refused import Refused
from irpar.ops.gradients.zero import zero
from tests.budget import every
from tests.ops.gradients.proof import check_sample, feeds_of, is_float
from tests.ops.rule_proof import Sample
from tests.ops.samples import SAMPLES


def has_gradient(sample: Sample) -> bool:
    """Whether something flows from a result of the sample to an operand, at a place where there is a derivative."""
    known = definition(sample.node)
    if known is None or (known.gradient is None and known.decompose is None):
        return False
    if known.gradient is zero or isinstance(known.gradient, Refused):
        return False
    if sample.version < 13 and not sample.domain and lookup("", sample.op, sample.version) is None:
        return False  # An opset that models are brought up from.
    types = [tensor_type(value.type) for value in sample.node.results]
    arrays = [array for array in feeds_of(sample).values() if is_float(array) and array.size]
    is_smooth = all(np.isfinite(array).all() for array in arrays) and not _overwrites(sample)
    return bool(arrays) and is_smooth and any(type_ is not None and type_.dtype.is_float for type_ in types)


def _overwrites(sample: Sample) -> bool:
    """Whether elements are put where others are: only the last has a derivative, and PyTorch gives it to all."""
    index = sample.arrays[1] if sample.op == "MaxUnpool" else None
    return index is not None and len(np.unique(index)) < index.size


@pytest.mark.parametrize("sample", every(2, [*filter(has_gradient, SAMPLES)]), ids=str)
def test_gradient_equals_differences(sample: Sample) -> None:
    check_sample(sample)
