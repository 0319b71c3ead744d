"""Every operator of ONNX, and of com.microsoft, has a rule or a reason why it is whole; none has both.

Those of releases that were looked through, that is; what newer ones bring has no rule yet.
"""

import onnx.defs
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as runtime

from irpar.analysis.completion.node_placement import why_whole
from irpar.ir import Graph, Node
from irpar.ops import OPEN_BODIES, definitions
from irpar.ops.replicate_only import REPLICATE_ONLY, why_replicated

RULED = {(found.domain, found.name) for found in definitions() if found.rule is not None} | OPEN_BODIES
LOOKED_THROUGH = {"onnx": (1, 23), "onnxruntime": (1, 32)}
"""The newest releases whose operators were looked through."""
ONNX = {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas_with_history()}
MICROSOFT = {
    (schema.domain, schema.name) for schema in runtime.get_all_operator_schema() if schema.domain == "com.microsoft"
}
KNOWN = {found for found in ONNX | MICROSOFT if found[0] != "irpar"}  # which irpar registers there itself


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def _is_newer(package: str, version: str) -> bool:
    return _release(version) > LOOKED_THROUGH[package]


def test_every_operator_has_a_rule_or_a_reason() -> None:
    assert len(ONNX) > 200
    assert len(MICROSOFT) > 100
    without = sorted(found for found in KNOWN if found not in RULED and why_replicated(*found) is None)
    if _is_newer("onnx", onnx.__version__) or _is_newer("onnxruntime", onnxruntime.__version__):
        pytest.skip(f"not looked through yet; no rule yet: {without}")
    assert without == []


def test_no_operator_has_a_rule_and_a_reason() -> None:
    assert sorted(found for found in RULED if why_replicated(*found) is not None) == []


def test_no_reason_is_for_an_operator_that_is_not_there() -> None:
    """Of releases before the newest that was looked through, later operators are not there yet."""
    if _release(onnxruntime.__version__) < LOOKED_THROUGH["onnxruntime"]:
        pytest.skip(f"ONNX Runtime {onnxruntime.__version__} lacks operators of later ones")
    assert sorted(set(REPLICATE_ONLY) - KNOWN) == []


def test_what_a_release_brings_has_no_rule_yet() -> None:
    graph = Graph("g")
    node = graph.append(Node("BroughtByALaterRelease", [graph.add_input("x")], domain="com.microsoft", version=1))
    assert why_whole(node) == "com.microsoft.BroughtByALaterRelease has no sharding rule yet, and no engine knows it"


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
