"""Every rule is proven both ways: what it allows gives the right numbers, what it forbids does not."""

import pytest

from irpar.ops import Kind, definitions, factor_rule

from .rule_proof import Sample, cut, run_cut, same, works_by
from .samples import SAMPLES

PARTS = (2, 3)

Place = tuple[str, int, int]

CONSERVATIVE: dict[Place, str] = {
    ("Gather", 0, 0): "ONNX Runtime has no Where for small ints, which the local program needs",
    ("Attention", 2, 2): "a cut head of V would repeat the scores on every device",
    ("Attention", 2, 3): "a cut head of V would repeat the scores on every device",
}
"""Bans that the numbers do not need, by operator, tensor and dim of the factor's first place; and why they are kept."""


def test_every_ruled_operator_has_samples() -> None:
    ruled = {found.name for found in definitions() if found.rule is not None and found.domain == ""}
    assert ruled == {sample.op for sample in SAMPLES}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_allowed_cuts_are_right(sample: Sample) -> None:
    rule = factor_rule(sample.node)
    assert rule is not None
    for factor, kind in enumerate(rule.kinds):
        if kind in (Kind.PASS, Kind.REDUCE):
            for parts in PARTS:
                how = cut(rule, sample.node, factor, parts)
                if how is not None:
                    assert same(sample, run_cut(sample, how)), f"{rule}: factor {factor} over {parts}"


def _useless_bans(sample: Sample) -> set[Place]:
    """Where a forbidden factor would give the right numbers."""
    rule = factor_rule(sample.node)
    assert rule is not None
    found = set()
    for factor, kind in enumerate(rule.kinds):
        if kind is Kind.REPLICATE and any(works_by(sample, rule, factor, parts) for parts in PARTS):
            tensor, dim, _ = rule.places[factor][0]
            found.add((sample.op, tensor, dim))
    return found


def test_forbidden_cuts_are_wrong() -> None:
    found = {place: str(sample) for sample in SAMPLES for place in _useless_bans(sample)}
    assert {place: sample for place, sample in found.items() if place not in CONSERVATIVE} == {}
    assert set(CONSERVATIVE) <= set(found)
