"""Gradients of reductions and of products along an axis."""

import numpy as np
import pytest

from irpar.ops.gradients.reduction import REDUCTIONS
from irpar.passes.autodiff import GradientError
from tests.ops.draws import floats
from tests.ops.gradients.proof import check_sample, gradients_of, module_of, run
from tests.ops.rule_proof import Constant, Sample


@pytest.mark.parametrize("noop", [0, 1])
@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("axes", [(), (0,), (-1, 0)], ids=str)
@pytest.mark.parametrize("op", sorted(REDUCTIONS))
def test_axes_that_are_computed(op: str, axes: tuple[int, ...], keep: int, noop: int) -> None:
    """Where there are none all dims are reduced, or none is."""
    x = floats(2, 3, low=0.5, dtype=np.float64)
    attributes = {"keepdims": keep, "noop_with_empty_axes": noop}
    check_sample(Sample(op, (x, np.array(axes, np.int64)), attributes, version=18))


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_products_along_an_axis(size: int, reverse: int, exclusive: int) -> None:
    x = floats(3, size, dtype=np.float64)
    x[0, size // 2] = x[1, 0] = x[1, -1] = 0
    attributes = {"reverse": reverse, "exclusive": exclusive}
    check_sample(Sample("CumProd", (x, Constant(np.asarray(-1))), attributes, version=26))


def test_products_of_many_elements_take_memory_for_these_alone() -> None:
    """A matrix of 200,000 rows and columns would be 160 GB."""
    count = 200_000
    x = np.random.default_rng(0).uniform(0.5, 2.0, count) ** 0.01
    made = gradients_of(module_of(Sample("CumProd", (x, Constant(np.asarray(0))), version=26)), ["x0"])
    found = run(made, {"x0": x, "grad.y0": np.ones(count)})["grad.x0"]
    np.testing.assert_allclose(found, np.cumprod(x)[::-1].cumsum()[::-1] / x, rtol=1e-9)


def test_what_stands_behind_a_zero_may_be_infinite() -> None:
    x = np.array([0, 1e200, 1e200, 1e200])
    made = gradients_of(module_of(Sample("CumProd", (x, Constant(np.asarray(0))), version=26)), ["x0"])
    found = run(made, {"x0": x, "grad.y0": np.array([1.0, 0, 0, 0])})["grad.x0"]
    assert found[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_padding_with_elements_of_a_dim_that_has_none_is_refused(mode: str) -> None:
    pads = Constant(np.array([2, 0, 2, 0]))
    module = module_of(Sample("Pad", (np.zeros((0, 4)), pads), {"mode": mode}, version=19))
    with pytest.raises(GradientError, match=f"its mode is {mode}, along a dim of no elements"):
        gradients_of(module, ["x0"])
