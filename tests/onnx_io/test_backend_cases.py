"""Round trips of ONNX's own models: checker-clean, stable, through text, and the same results in ONNX Runtime."""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from onnx.reference.ops.op_pool_common import pool

from irpar.onnx_io import to_module
from tests.conformance import families
from tests.conformance.cases import all_cases, pooled, within_range
from tests.conformance.round_trips import After, Before, RoundTrip, round_trip, through_text

SAMPLE_STEP = 30
FEWEST_RIGHT = 1790


@pytest.mark.parametrize(("how", "more"), [("AVG", {}), ("MAX", {}), ("LPPOOL", {"p": 3})])
def test_pools_of_many_windows_are_those_of_onnx(how: str, more: dict[str, int]) -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 6, 7)).astype(np.float32)
    asked = (pool, x, x.shape, [2, 3, 2], [1, 1, 1], [4, 4, 6], how)
    found, expected = pooled(*asked, least=0, **more), pooled(*asked, **more)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@functools.cache
def found() -> tuple[RoundTrip, ...]:
    return tuple(map(round_trip, all_cases()))


def test_round_trips_of_some(subtests: pytest.Subtests) -> None:
    for case in itertools.islice(all_cases(), 0, None, SAMPLE_STEP):
        with subtests.test(str(case)):
            result = round_trip(case)
            if result.after is After.REFUSED:
                assert result.before is Before.FAILS
                assert "newer than irpar reads" in result.note
            else:
                assert result.after is After.SAME, result.note


@pytest.mark.slow
def test_what_onnx_runtime_runs_is_the_same_after_the_round_trip() -> None:
    right = {str(one.case) for one in found() if one.before is Before.RIGHT}
    same = {str(one.case) for one in found() if one.before is Before.RIGHT and one.after is After.SAME}
    assert same == right
    assert len(right) >= FEWEST_RIGHT


@pytest.mark.slow
def test_what_onnx_runtime_computes_otherwise_stays_as_it_is() -> None:
    assert [f"{one.case}: {one.note}" for one in found() if one.after is After.DIFFERS] == []


@pytest.mark.slow
def test_only_newer_opsets_are_refused() -> None:
    refused = {str(one.case): one.note for one in found() if one.after is After.REFUSED}
    assert {name: note for name, note in refused.items() if "newer than irpar reads" not in note} == {}


@pytest.mark.slow
def test_operators_stay_as_they_are() -> None:
    for one in found():
        model = within_range(one.case.model)
        if one.after is not After.REFUSED and model.opset_import[0].version >= 13:
            written = through_text(to_module(model))
            assert operators(written) == operators(model), str(one.case)


def operators(model: Any) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Constant"]


def test_the_families_lack_no_kernel() -> None:
    assert families.lacking(families.operators()) == {}
