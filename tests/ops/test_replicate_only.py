"""Every operator of ONNX, and of com.microsoft, has a rule or a reason why it is whole; none has both."""

import onnx.defs
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.ops import OPEN_BODIES, definitions
from irpar.ops.replicate_only import REPLICATE_ONLY, why_replicated

RULED = {(found.domain, found.name) for found in definitions() if found.rule is not None} | OPEN_BODIES
ONNX = sorted(
    {
        (schema.domain, schema.name, schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain != "irpar"  # which irpar registers there itself
    }
)
MICROSOFT = sorted({schema.name for schema in runtime.get_all_operator_schema() if schema.domain == "com.microsoft"})


def test_every_schema_of_onnx_has_a_rule_or_a_reason() -> None:
    assert len(ONNX) > 400
    neither_or_both = [
        schema for schema in ONNX if (schema[:2] in RULED) == (why_replicated(schema[0], schema[1]) is not None)
    ]
    assert neither_or_both == []


def test_every_operator_of_com_microsoft_has_a_rule_or_a_reason() -> None:
    assert len(MICROSOFT) > 100
    found = [
        name
        for name in MICROSOFT
        if (("com.microsoft", name) in RULED) == (why_replicated("com.microsoft", name) is not None)
    ]
    assert found == []


def test_no_reason_is_for_an_operator_that_is_not_there() -> None:
    known = {schema[:2] for schema in ONNX} | {("com.microsoft", name) for name in MICROSOFT}
    assert set(REPLICATE_ONLY) <= known


@pytest.mark.parametrize(
    ("domain", "op", "why"),
    [
        ("", "NonZero", "the size of its result depends on data"),
        ("com.microsoft", "BeamSearch", "it belongs to a search over words that runs on one device"),
        ("", "MatMul", None),
        ("my.domain", "Mine", None),
    ],
)
def test_why(domain: str, op: str, why: str | None) -> None:
    assert why_replicated(domain, op) == why
