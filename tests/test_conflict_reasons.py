"""What conflicts say of operators is true: what they cannot do, and what merely costs more."""

from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest

import irpar
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

from .written import Specs

ONE_BY_ONE = DEFAULT_PIPELINE.replace("insert-redistribution", "insert-redistribution{together=false}")
"""Each node chooses for itself, whatever else is sent."""


def collectives(
    folder: Path, text: str, mesh: dict[str, int], specs: Specs, network: str = "bytes"
) -> list[dict[str, Any]]:
    """The collectives that the plan of an ONNX graph in text form has."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {text}')
    onnx.save(model, folder / "model.onnx")
    module = irpar.load(folder / "model.onnx")
    irpar.annotate(module, specs)
    return irpar.partition(module, mesh, network=network, pipeline=ONE_BY_ONE).plan.collectives


def told(folder: Path, text: str, mesh: dict[str, int], specs: Specs, network: str = "bytes") -> dict[str, Any]:
    """The conflict over each tensor."""
    entries = collectives(folder, text, mesh, specs, network)
    found = [entry["conflict"] for entry in entries if entry["conflict"]]
    return {conflict["value"]: conflict for conflict in found}


CONV = """
g (float[1, 3, 8, 8] x, float[4, 3, 3, 3] w) => (float[1, 4, 8, 8] y) {
  y = Conv<pads=[1, 1, 1, 1]>(x, w)
}
"""


def test_what_a_local_program_could_cut_is_dearer(tmp_path: Path) -> None:
    """Where only bytes count, rows at the edges of blocks are exchanged; each message has a latency elsewhere."""
    specs: Specs = {"x": [None, None, ["h"], None]}
    assert not told(tmp_path, CONV, {"h": 2}, specs)
    found = told(tmp_path, CONV, {"h": 2}, {**specs, "y": [None, None, None, None]}, "h100-nvlink-ib")
    assert found["x"]["needed_because"].endswith(
        "could work along dim 2 of it, at a greater cost than to bring it together: "
        'it produces %y as [_, _, _, _] replicated (annotated "y")'
    )


@pytest.mark.parametrize(
    ("text", "specs", "why"),
    [
        (
            "g (float[1, 8, 60] q, float[1, 8, 60] k, float[1, 8, 60] v) => (float[1, 8, 60] y) {"
            " y = Attention<q_num_heads=5, kv_num_heads=5>(q, k, v) }",
            {name: [None, None, ["tp"]] for name in "qkv"},
            "takes dim 2 of it as 5x12, and 5 do not divide over 4",
        ),
        (
            "g (float[1, 8, 48] q, float[1, 8, 48] k, float[1, 8, 48] v) => (float[1, 8, 48] y) {"
            " y = Attention<q_num_heads=2, kv_num_heads=2>(q, k, v) }",
            {name: [None, None, ["tp"]] for name in "qkv"},
            "takes dim 2 of it as 2x24, and 2 do not divide over 4",
        ),
        (
            "g (float[2, 5] x) => (float[2, 5] y) { y = Softmax<axis=1>(x) }",
            {"x": [None, ["tp"]]},
            "5 over 4 leaves a rank without elements",
        ),
    ],
)
def test_what_does_not_divide_says_so(text: str, specs: Specs, why: str, tmp_path: Path) -> None:
    found = told(tmp_path, text, {"tp": 4}, specs)
    assert found
    for conflict in found.values():
        assert why in conflict["needed_because"]


MLP = """
g (float[2, 6, 8] x, float[8, 16] w1, float[16, 256] w2) => (float[2, 6, 256] y) {
  a = MatMul(x, w1)
  h = Relu(a)
  y = MatMul(h, w2)
}
"""


def test_what_follows_a_node_is_named_with_its_cause(tmp_path: Path) -> None:
    """An annotation is in no conflict with itself: the reader takes the value whole because a sum costs more."""
    conflict = told(tmp_path, MLP, {"tp": 4}, {"w1": [None, ["tp"]], "w2": [None, None]})["h"]
    assert conflict["lies"] == "[_, _, @tp]"
    assert conflict["node"].startswith("MatMul")
    assert "and reduce over tp, at a greater cost than to bring it together" in conflict["needed_because"]


def test_a_result_that_is_gathered_names_its_reader(tmp_path: Path) -> None:
    """The head is the node that needs it; why it is sharded so names the one that gives it."""
    text = MLP.replace("h = Relu(a)", "h = CumSum(a, axis)").replace("{", "<int64 axis = {2}> {", 1)
    text = text.replace("[2, 6, 8] x", "[2, 6, 64] x").replace("[8, 16] w1", "[64, 16] w1")  # w1 has more bytes than a.
    found = told(tmp_path, text, {"tp": 4}, {"w1": [None, ["tp"]]}, "h100-nvlink-ib")
    conflict = found["a"]
    assert conflict["node"].startswith("CumSum")
    assert "w1" in conflict["because"]
    assert conflict["needed_because"].startswith("CumSum")
    assert "annotated" not in conflict["needed_because"]


ATTENTION = """
g (float[1, 64, 32] x, float[32, 32] wq, float[32, 32] wk, float[32, 32] wv) => (float[1, 64, 32] y) {
  q = MatMul(x, wq)
  k = MatMul(x, wk)
  v = MatMul(x, wv)
  y = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v)
}
"""
SEQUENCE: Specs = {"x": [None, ["sp"], None], "y": [None, ["sp"], None]}


def test_a_sequence_moves_to_heads_because_all_keys_meet_every_query(tmp_path: Path) -> None:
    """Neither q because of k nor k because of q."""
    found = told(tmp_path, ATTENTION, {"sp": 4}, SEQUENCE)
    for name in "qkv":
        why = found[name]["needed_because"]
        assert why.endswith("needs all keys for every query: as [_, _, @sp] costs least")


def test_keys_are_gathered_because_all_meet_every_query(tmp_path: Path) -> None:
    found = told(tmp_path, ATTENTION, {"sp": 4}, SEQUENCE, "h100-nvlink-ib")
    assert list(found) == ["k; v"]
    for conflict in found.values():
        assert "needs all keys for every query, and reads %q as [_, @sp, _]" in conflict["needed_because"]


SUM = "g (float[8,16] x, float[16,8] w) => (float[8,8] y) { h = MatMul(x, w)  y = Relu(h) }"


@pytest.mark.parametrize("annotated", ["h", "y"])
def test_what_moves_a_sum_on_is_told_of_its_readers(annotated: str, tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 23]> {SUM}'), tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(module, {"x": [["p"], ["q"]], "w": [["q"], None], annotated: [["q"], ["p"]]})
    plan = irpar.partition(module, {"p": 2, "q": 2}).plan
    summed, moved = ((entry["kind"], entry["reason"]) for entry in plan.collectives)
    assert summed[0] == "reduce_scatter"
    assert summed[1].startswith("MatMul of %h sums over q, which shards %x")
    assert moved[0] == "permute"
    assert moved[1].startswith("%h is sharded as [@p, _] once it is summed; its readers want [@q, @p]: ")
    assert f'annotated "{annotated}"' in moved[1]


def test_parts_that_are_reduced_a_cut_at_a_time_are_no_conflict(tmp_path: Path) -> None:
    """The blocks of an idle axis each reduce a part of the sum, and are then brought together."""
    text = "g (float[6, 5] a, float[6, 4] b) => (float[5, 4] y) { y = Gemm<transA=1>(a, b) }"
    specs: Specs = {"a": [["y"], None], "b": [["y"], None], "y": [None, None]}
    entries = collectives(tmp_path, text, {"x": 2, "y": 3}, specs)
    assert [entry["kind"] for entry in entries] == ["all_reduce", "all_gather"]
    assert not any(entry["conflict"] for entry in entries)
