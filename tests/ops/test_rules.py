"""Every rule is proven both ways: what it allows gives the right numbers, what it forbids does not."""

from dataclasses import replace
from itertools import product

import onnx.defs
import onnxruntime
import pytest

from irpar.ops import FactorRule, Kind, definitions, factor_rule, program_factors, program_of
from tests.budget import of_each, pairs

from .rule_proof import (
    NoKernelError,
    Sample,
    cut,
    cut_with_empty_block,
    relaxed,
    run,
    run_cut,
    run_kernels,
    same,
    taking_empty_blocks,
    with_factor,
    works_by,
)
from .samples import NOT_RUN, SAMPLES

PARTS = (2, 3)

Place = tuple[str, int, int]

CONSERVATIVE: dict[Place, str] = {
    ("Attention", 2, 2): "a cut head of V would repeat the scores on every device",
    ("Attention", 2, 3): "a cut head of V would repeat the scores on every device",
}
"""Bans that the numbers do not need, by operator, tensor and dim of the factor's first place; and why they are kept."""


def test_every_ruled_operator_has_samples() -> None:
    ruled = {(found.domain, found.name) for found in definitions() if found.rule is not None}
    assert ruled - NOT_RUN == {(sample.domain, sample.op) for sample in SAMPLES}
    assert onnxruntime.__version__.split(".") < ["1", "32"] or set() == NOT_RUN


def test_every_factor_can_be_tried() -> None:
    for sample in SAMPLES:
        rule = factor_rule(sample.node)
        assert rule is not None
        for factor, kind in enumerate(rule.kinds):
            if kind is Kind.PERMUTE or (kind is Kind.REDUCE and factor not in _on_blocks(sample, rule)):
                continue  # Of blocks of any sizes: tests/ops/local_programs.
            forms = [found for _, found in relaxed(rule, factor)] if kind is Kind.REPLICATE else [rule]
            assert any(cut(form, sample.node, factor, parts) for form in forms for parts in PARTS), f"{sample} {rule}"


def _on_blocks(sample: Sample, rule: FactorRule) -> list[int]:
    """The factors along which no local program works; of those that have one see tests/ops/local_programs."""
    return sorted(set(range(len(rule.kinds))) - program_factors(sample.node, rule, program_of(sample.node, rule)))


@pytest.mark.parametrize(("sample", "parts"), pairs(SAMPLES, PARTS), ids=str)
def test_allowed_cuts_are_right(sample: Sample, parts: int) -> None:
    rule = factor_rule(sample.node)
    assert rule is not None
    for factor in _on_blocks(sample, rule):
        if rule.kinds[factor] in (Kind.PASS, Kind.REDUCE):
            how = cut(rule, sample.node, factor, parts)
            if how is not None:
                assert same(sample, run_cut(sample, how)), f"{rule}: factor {factor} over {parts}"


ENGINES = (run, run_kernels)


def empty_blocks_are_right(sample: Sample, rule: FactorRule, factor: int) -> bool | None:
    """Whether a cut that leaves a device without elements gives the right numbers in all engines; None: no such cut."""
    how = cut_with_empty_block(rule, sample.node, factor)
    if how is None:
        return None
    for engine in ENGINES:
        try:
            if not same(sample, run_cut(sample, how, engine), engine):
                return False
        except NoKernelError:
            continue
    return True


@pytest.mark.parametrize("sample", of_each(lambda sample: sample.operator, SAMPLES), ids=str)
def test_empty_blocks_are_right_where_a_rule_accepts_them(sample: Sample) -> None:
    rule = factor_rule(sample.node)
    assert rule is not None
    for factor in _on_blocks(sample, rule):
        if rule.accepts_empty[factor]:
            assert empty_blocks_are_right(sample, rule, factor) is not False, f"{rule}: factor {factor}"


def test_empty_blocks_are_wrong_where_a_rule_does_not_accept_them() -> None:
    tried = set()
    for sample in SAMPLES:
        rule = factor_rule(sample.node)
        assert rule is not None
        for factor, accepts in enumerate(rule.accepts_empty):
            if rule.kinds[factor] is Kind.PASS and not accepts:
                found: bool | None
                try:
                    found = empty_blocks_are_right(sample, taking_empty_blocks(rule, factor), factor)
                except Exception:  # an engine that refuses its block proves the ban as well as a wrong number
                    found = False
                assert not found, f"{sample} {rule}: factor {factor}"
                tried.update([sample.operator] if found is False else [])
    assert tried == {"Attention"}, "a query without elements beside keys and values that go on to the next step"


WITHOUT_AN_ENGINE = {("GlobalLpPool", 22), ("MaxRoiPool", 22)}
"""Versions that neither ONNX Runtime nor ONNX's reference runs."""


def _in_version(sample: Sample, version: int) -> Sample | None:
    """The sample as a node of another version, where that has its operands and attributes and something runs it."""
    schema = onnx.defs.get_schema(sample.op, version)
    if any(name not in schema.attributes for name in sample.attributes) or len(sample.operands) > schema.max_input:
        return None
    found = replace(sample, version=version)
    try:
        return None if factor_rule(found.node) is None else found
    except Exception:  # an operand where that version has an attribute
        return None


@pytest.mark.slow
def test_allowed_cuts_are_right_in_every_version_from_13_on() -> None:
    """One that ONNX changed in some way: rules read what changed."""
    by_operator: dict[str, list[Sample]] = {}
    for sample in SAMPLES:
        if not sample.domain:
            by_operator.setdefault(sample.op, []).append(sample)
    unproven = set()
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain or schema.deprecated or schema.since_version < 13 or schema.name not in by_operator:
            continue
        found = [_in_version(sample, schema.since_version) for sample in by_operator[schema.name]]
        samples = [sample for sample in found if sample is not None]
        for sample, parts in product(samples, PARTS):
            test_allowed_cuts_are_right(sample, parts)
        if not samples:
            unproven.add((schema.name, schema.since_version))
    assert unproven == WITHOUT_AN_ENGINE


def _useless_bans(sample: Sample) -> set[Place]:
    """Where a forbidden factor would give the right numbers."""
    rule = factor_rule(sample.node)
    assert rule is not None
    found = set()
    for factor, kind in enumerate(rule.kinds):
        if kind is Kind.REPLICATE and any(works_by(sample, rule, factor, parts) for parts in PARTS):
            tensor, dim, _ = rule.places[factor][0]
            found.add((sample.operator, tensor, dim))
    return found


def _useless_whole_dims(sample: Sample) -> set[Place]:
    """Dims of operands without a factor that could be sharded on their own."""
    rule = factor_rule(sample.node)
    assert rule is not None
    found = set()
    for index, (value, factors) in enumerate(zip(sample.node.operands, rule.operands, strict=True)):
        if value is None or value.is_constant:
            continue
        for dim, size in enumerate(value.shape):
            if not factors[dim]:
                longer = with_factor(rule, index, dim, size)
                if any(works_by(sample, longer, len(rule.sizes), parts) for parts in PARTS):
                    found.add((sample.operator, index, dim))
    return found


FEW = of_each(lambda sample: sample.operator, SAMPLES)
"""One of each operator, where not all are tried."""


def test_forbidden_cuts_are_wrong() -> None:
    found = {place: str(sample) for sample in FEW for place in _useless_bans(sample)}
    assert {place: sample for place, sample in found.items() if place not in CONSERVATIVE} == {}
    assert set(CONSERVATIVE) <= set(found) or len(FEW) < len(SAMPLES)


def test_dims_without_a_factor_are_needed_whole() -> None:
    found = {place: str(sample) for sample in FEW for place in _useless_whole_dims(sample)}
    assert found == {}
