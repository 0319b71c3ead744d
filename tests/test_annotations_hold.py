"""Annotations hold: readers of an annotated value meet it as annotated, and operators run as `ops` says; where that
cannot be, irpar refuses or tells."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import irpar
from irpar.annotations.named import infer_undeclared_types
from irpar.annotations.shardings_file import read_shardings
from irpar.ir import Value
from irpar.pass_manager import PassFailure

from .budget import budget
from .command_line import Capture, call
from .random_annotations import Annotated, Cuts, annotated_programs, of_kinds, partitioned
from .random_programs import Program, Spec, UnsteadyError, check_run, expected_of
from .test_random_programs import parsed

ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
EVERY = 5
"""Of so many programs the numbers of one are compared."""
MOST_REFUSED = 0.1
REFUSALS = ("cannot run by the cuts of op", "its size depends on data")
"""What may be refused of these programs."""


def draw_programs(count: int) -> None:
    """No annotation is lost, whatever it is of, and few are refused."""
    ends: Counter[str] = Counter()
    made: list[Annotated] = []
    with tempfile.TemporaryDirectory() as folder:

        @settings(
            max_examples=count,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=ANY_TIME,
            phases=[Phase.generate],
        )
        @given(annotated_programs(Path(folder)))
        def draw(drawn: Annotated) -> None:
            made.append(drawn)
            ends[outcome(drawn, Path(folder), runs=len(made) % EVERY == 0)] += 1

        draw()
    kinds = of_kinds(made)
    print(ends, kinds)
    assert ends["held"] >= (1 - MOST_REFUSED) * ends.total(), ends
    assert {"input", "weight", "result", "output", "body", "operator"} <= kinds.keys()


def outcome(drawn: Annotated, folder: Path, *, runs: bool) -> str:
    """What became of a program: held, or refused and why.

    Raises:
        AssertionError: an annotation was lost, or the numbers are others.
    """
    try:
        partition, lost = partitioned(drawn, folder)
    except PassFailure:
        raise
    except irpar.IrparError as error:
        if not any(known in error.what for known in REFUSALS):
            raise
        return "refused"
    assert lost == [], drawn
    if runs:
        try:
            check_run(partition, drawn.program.engines[0], drawn.program, expected_of(drawn.program))
        except UnsteadyError:
            return "held"
    return "held"


def test_random_annotations_hold() -> None:
    draw_programs(budget(500))


# -- one by one -----------------------------------------------------------------------------------------------------


def held(text: str, mesh: dict[str, int], annotations: dict[str, Spec], folder: Path, **ops: Cuts) -> irpar.Partition:
    """The partition of a program of which nothing is lost and all numbers are right."""
    program = parsed(text, mesh, annotations)
    for number, node in enumerate(program.model.graph.node):
        node.name = node.name or f"n{number}"
    made = Annotated(program, dict(ops))
    partition, lost = partitioned(made, folder)
    assert lost == []
    check_run(partition, "ort", program, expected_of(program))
    return partition


def lying(partition: irpar.Partition, source: str) -> list[tuple[Any, Any]]:
    """How the values of a name lie on their way, and which axes they are still to be reduced over."""
    return [(entry["sharding"], entry["partial"]) for entry in partition.plan.values if entry["source"] == source]


MLP = """g (float[16, 32] x, float[32, 64] w1, float[64, 8] w2) => (float[16, 8] y)
{ h = MatMul(x, w1) a = Relu(h) y = MatMul(a, w2) }"""


@pytest.mark.parametrize("spec", [[None, ["p", "q"]], [["p"], ["q"]], [["q", "p"], None], [None, None], [["q"], ["?"]]])
def test_a_result_is_brought_to_how_it_is_annotated_before_it_is_read(spec: Spec, tmp_path: Path) -> None:
    cuts: dict[str, Spec] = {"x": [["p"], ["q"]], "w1": [["q"], None], "h": spec, "y": [["p"], None]}
    partition = held(MLP, {"p": 2, "q": 2}, cuts, tmp_path)
    named = [entry for entry in partition.plan.values if entry["name"] == "h"]
    assert named[0]["why"][0]["why"] == 'annotated "h"'
    assert all(reason["follows"] is not None for entry in partition.plan.values if entry["name"].startswith("h_")
               for reason in entry["why"])  # fmt: skip


@pytest.mark.parametrize("body", ["Squeeze(x, axes)", "Unsqueeze(x, axes)", "ReduceSum <keepdims = 0> (x, axes)"])
def test_axes_of_an_operator_may_be_annotated(body: str, tmp_path: Path) -> None:
    """Which dims they are stays known, though a rank holds but one of them."""
    sizes, result = {"S": ("5,2,1,1", "5,2"), "U": ("5,2", "5,2,1,1"), "R": ("5,2,3,4", "5,2")}[body[0]]
    text = f"""g (float[{sizes}] x) => (float[{result}] y) <int64[2] axes = {{2, 3}}>
    {{ y = {body} }}"""
    partition = held(text, {"p": 2}, {"x": [["p"], *[None] * sizes.count(",")], "axes": [["p"]]}, tmp_path)
    assert lying(partition, "axes")[0] == ([["p"]], [])


def test_the_reader_is_served_from_there(tmp_path: Path) -> None:
    """Straight from how it is given to how it is read, a reduce-scatter would be enough."""
    text = "g (float[8, 64] x, float[64, 8] w) => (float[8, 8] y) { h = MatMul(x, w) y = Relu(h) }"
    cuts: dict[str, Spec] = {"x": [None, ["p"]], "w": [["p"], None], "y": [["p"], None]}
    assert [entry["kind"] for entry in held(text, {"p": 2}, cuts, tmp_path).plan.collectives] == ["reduce_scatter"]
    partition = held(text, {"p": 2}, {**cuts, "h": [None, ["p"]]}, tmp_path)
    assert [entry["kind"] for entry in partition.plan.collectives] == ["reduce_scatter", "all_to_all"]
    whole = held(text, {"p": 2}, {**cuts, "h": [None, None]}, tmp_path)
    assert [entry["kind"] for entry in whole.plan.collectives] == ["all_reduce"]


def test_a_sum_of_sums_that_is_annotated_is_reduced_for_itself(tmp_path: Path) -> None:
    text = """g (float[8, 4] x, float[4, 8] w, float[4, 8] v) => (float[8, 8] y)
    { a = MatMul(x, w) b = MatMul(x, v) y = Add(a, b) }"""
    cuts: dict[str, Spec] = {"x": [None, ["p"]], "w": [["p"], None], "v": [["p"], None], "y": [None, None]}
    once = held(text, {"p": 2}, cuts, tmp_path)
    assert [entry["kind"] for entry in once.plan.collectives] == ["all_reduce"]
    assert lying(once, "y") == [([None, None], ["p"]), ([None, None], [])]
    twice = held(text, {"p": 2}, {**cuts, "a": [None, None]}, tmp_path)
    assert [entry["kind"] for entry in twice.plan.collectives] == ["all_reduce", "all_reduce"]


LOOP = """g (float[4, 6] x, float[6, 6] w) => (float[4, 6] z) <int64 n = {3}> {
z = Loop(n, "", x) <body = b (int64 i, bool go, float[4, 6] in) => (bool on, float[4, 6] out)
{ on = Identity(go) m = MatMul(in, w) r = Tanh(m) out = Sub(r, in) }> }"""


@pytest.mark.parametrize("name", ["in", "m", "r", "out", "z"])
def test_values_of_bodies_hold(name: str, tmp_path: Path) -> None:
    for spec in ([["p"], None], [None, ["q"]], [["q"], ["p"]], [None, None]):
        held(LOOP, {"p": 2, "q": 3}, {"x": [["p"], None], "w": [["q"], None], name: spec}, tmp_path)


# -- operators ------------------------------------------------------------------------------------------------------

CHAIN = "g (float[8, 8] x) => (float[8, 8] y) { a = Relu(x) b = Neg(a) y = Tanh(b) }"


def operands_of(partition: irpar.Partition, source: str) -> list[Any]:
    assert partition.module is not None
    (node,) = [node for node in partition.module.graph if node.source == source and not node.domain]
    return [value.sharding.spec() for value in node.inputs if value.sharding is not None]


def test_an_elementwise_node_runs_as_it_is_cut_between_others_that_are_cut_otherwise(tmp_path: Path) -> None:
    cuts: dict[str, Spec] = {"x": [["p"], ["q"]], "y": [["p"], ["q"]]}
    partition = held(CHAIN, {"p": 2, "q": 2}, cuts, tmp_path, n1={"in": [[None, ["p", "q"]]]})
    assert operands_of(partition, "n1") == [[None, ["p", "q"]]]
    assert operands_of(partition, "n2") == [[["p"], ["q"]]]


def test_counts_say_how_a_node_runs(tmp_path: Path) -> None:
    program = parsed(CHAIN, {"p": 2, "q": 2}, {"x": [["p"], ["q"]], "b": [["p"], ["q"]]})
    for number, node in enumerate(program.model.graph.node):
        node.name = f"n{number}"
    onnx.save(program.model, tmp_path / "model.onnx")
    module = irpar.load(tmp_path / "model.onnx")
    infer_undeclared_types(module)
    irpar.annotate(module, {"x": ["p", "q"], "b": ["p", "q"]})
    module.set_mesh(program.mesh)
    (tmp_path / "ops.json").write_text(json.dumps({"ops": {"n1": {"in": [[1, 4]]}}}))
    read_shardings(tmp_path / "ops.json").annotate(module)
    partition = irpar.partition(module)
    assert operands_of(partition, "n1") == [[None, ["p", "q"]]]
    assert lying(partition, "b")[-1] == ([["p"], ["q"]], [])
    reasons = {entry["reason"] for entry in partition.plan.collectives if entry["value"] == "b"}
    assert all('produces %b as [_, @(p,q)]: it is to run by the cuts of op "n1"' in reason for reason in reasons)
    assert reasons


def test_without_operands_a_node_gives_its_results_so(tmp_path: Path) -> None:
    cuts: dict[str, Spec] = {"x": [["p"], None]}
    partition = held(CHAIN, {"p": 2}, cuts, tmp_path, n1={"out": [[None, ["p"]]]})
    assert operands_of(partition, "n1") == [[None, ["p"]]]


def test_a_node_that_cannot_run_so_is_refused(tmp_path: Path) -> None:
    text = "g (float[8, 8] x) => (float y) { y = Det(x) }"
    with pytest.raises(irpar.IrparError, match='cannot run by the cuts of op "n0"') as told:
        held(text, {"p": 3}, {}, tmp_path, n0={"in": [[None, ["p"]]]})
    assert "%x f32[8, 8] as [_, @p]: Det n0 needs dim 1 of it whole" in str(told.value)
    assert 'annotate its tensors under "tensors"' in str(told.value)
    held(text, {"p": 3}, {"x": [None, ["p"]]}, tmp_path)


# -- what passes take out -------------------------------------------------------------------------------------------

GONE: dict[str, tuple[str, str, Spec, str]] = {
    "what nothing reads": (
        "g (float[8, 8] x) => (float[8, 8] y) { y = Relu(x) u = Neg(x) }",
        "u",
        [["p"], None],
        "dce took it out: no result of the model needs it",
    ),
    "a branch that is never taken": (
        "g (float[4, 6] x) => (float[4, 6] z) <bool p = {1}> { z = If(p) <"
        "then_branch = a () => (float[4, 6] a) { a = Neg(x) }, else_branch = b () => (float[4, 6] b) { b = Abs(x) }> }",
        "b",
        [["p"], None],
        "fold-constants took it out",
    ),
    "what is computed twice": (
        "g (float[4, 6] x) => (float[4, 6] z) { a = Neg(x) b = Neg(x) z = Add(a, b) }",
        "[ab]",
        [["p"], None],
        "%a is equal, and is sharded so",
    ),
    "what is moved there and back": (
        "g (float[4, 6] x) => (float[4, 6] z) { a = Transpose(x) b = Transpose(a) z = Neg(b) }",
        "b",
        [["p"], None],
        "it is %x, moved there and back",
    ),
}


@pytest.mark.parametrize("name", GONE)
def test_what_a_pass_takes_out_is_told(name: str, tmp_path: Path, capsys: Capture) -> None:
    text, pattern, spec, why = GONE[name]
    program = parsed(text, {"p": 2}, {})
    onnx.save(program.model, tmp_path / "model.onnx")
    (tmp_path / "cuts.json").write_text(json.dumps({"tensors": {pattern: spec}}))
    model, out, cuts = (tmp_path / each for each in ("model.onnx", "out", "cuts.json"))
    code, told, _ = call(capsys, "partition", model, "-o", out, "--mesh", "p=2", "--shardings", cuts)
    assert code == 0
    (entry,) = irpar.Partition.open(tmp_path / "out").plan.not_as_annotated
    assert entry["lies"] is None
    assert why in entry["why"]
    assert f"annotation without effect: {entry['name']}: " in told
    code, _, told = call(capsys, "explain", out, entry["name"])
    assert code == 2
    assert "annotation without effect: " in told


def test_an_annotated_result_of_a_function_that_is_its_operand_is_a_value_of_its_own(tmp_path: Path) -> None:
    text = """g (float[4, 6] x) => (float[4, 6] z) { a = local.Same(x) z = Relu(a) }
    <domain: "local", opset_import: ["" : 21]> Same (i) => (i) {}"""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 21, "local": 1]> {text}')
    program = Program(model, irpar.Mesh({"p": 2}), {"x": [None, ["p"]], "a": [["p"], None]}, {})
    partition, lost = partitioned(Annotated(program), tmp_path)
    assert lost == []
    assert lying(partition, "a")[-1] == ([["p"], None], [])


# -- weights --------------------------------------------------------------------------------------------------------


def weight_bytes(annotations: dict[str, Spec], folder: Path) -> tuple[int, irpar.Partition]:
    """One weight that is read in two ways, cut by columns and by rows."""
    text = """g (float[8, 16] x, float[16, 16] w) => (float[8, 16] y, float[16, 16] z)
    { y = MatMul(x, w) z = Neg(w) }"""
    program = parsed(text, {"p": 4}, {**annotations, "y": [None, ["p"]], "z": [["p"], None], "x": [None, None]})
    weight = onnx.numpy_helper.from_array(program.inputs.pop("w"), "w")
    program.model.graph.initializer.append(weight)
    del program.model.graph.input[1]
    partition, lost = partitioned(Annotated(program), folder)
    assert lost == []
    return partition.plan.parts[0]["weight_bytes"], partition


def test_a_rank_holds_no_more_of_a_weight_than_is_annotated(tmp_path: Path) -> None:
    held_bytes, partition = weight_bytes({"w": [["p"], None]}, tmp_path)
    assert held_bytes == 16 * 16 * 4 // 4
    assert [entry["value"] for entry in partition.plan.collectives] == ["w"]


def test_a_weight_may_be_stored_as_it_is_read(tmp_path: Path) -> None:
    held_bytes, partition = weight_bytes({"w": [None, None]}, tmp_path)
    assert held_bytes <= 16 * 16 * 4
    assert partition.plan.collectives == []
    assert {entry["name"] for entry in partition.plan.not_as_annotated} == {"w"}
    for entry in partition.plan.values:
        if entry["source"] == "w":
            assert "annotated" not in entry["why"][0]["why"]


def test_what_is_stored_otherwise_is_not_called_annotated(tmp_path: Path) -> None:
    text = "g (float[5, 4] a, float[5, 4] b, bool[5, 4] w) => (float[5, 4] y) { y = Where(w, a, b) }"
    program = parsed(text, {"x": 4}, {"w": [None, ["x:(2)2"]], "y": [["x:(1)2", "?"], None]})
    program.model.graph.initializer.append(onnx.numpy_helper.from_array(program.inputs.pop("w"), "w"))
    del program.model.graph.input[2]
    partition, lost = partitioned(Annotated(program), tmp_path)
    assert lost == []
    (why,) = [reason["why"] for entry in partition.plan.values if entry["source"] == "w" for reason in entry["why"]]
    assert why.startswith("stored so, not as [_, @x:(2)2]")


def named(partition: irpar.Partition, name: str) -> Value:
    assert partition.module is not None
    return partition.module.graph.value(name)


def test_a_pipeline_that_leaves_a_value_otherwise_is_refused(tmp_path: Path) -> None:
    """What a pass of somebody else's may do."""
    from irpar.analysis.redistribution.held import settled_annotations

    partition = held(CHAIN, {"p": 2}, {"a": [["p"], None]}, tmp_path)
    module = partition.module
    assert module is not None
    assert settled_annotations(module) == []
    value = named(partition, "a")
    assert value.sharding is not None
    value.sharding = irpar.Sharding.replicated(value.sharding.mesh, 2)
    with pytest.raises(
        irpar.IrparError, match=r"%a is annotated \[_?@p, _\], but would be sharded as \[_, _\] replicated"
    ):
        settled_annotations(module)


def test_a_gemm_runs_as_it_is_cut_when_its_bias_is_added_for_itself(tmp_path: Path) -> None:
    text = "g (float[6, 8] x, float[8, 4] w, float[4] c) => (float[6, 4] y) { y = Gemm(x, w, c) }"
    partition = held(text, {"p": 2}, {}, tmp_path, n0={"in": [[None, ["p"]], [["p"], None], None]})
    assert partition.module is not None
    (product,) = [node for node in partition.module.graph if node.op_type == "Gemm"]
    assert [value.sharding and value.sharding.spec() for value in product.inputs] == [[None, ["p"]], [["p"], None]]
    other = held(text, {"p": 2}, {}, tmp_path, n0={"in": [[["p"], None], None, None]})
    assert other.plan.collectives == []


def test_products_of_sections_run_as_the_product_of_all_was_to(tmp_path: Path) -> None:
    text = """g (float[4, 8] x, float[8, 24] w) => (float[4, 8] q, float[4, 8] k, float[4, 8] v)
    { h = MatMul(x, w) q, k, v = Split<axis = 1, num_outputs = 3>(h) }"""
    program = parsed(text, {"p": 2, "q": 2}, {"x": [["p", "q"], None]})
    weight = onnx.numpy_helper.from_array(program.inputs.pop("w"), "w")
    program.model.graph.initializer.append(weight)
    del program.model.graph.input[1]
    program.model.graph.node[0].name = "n0"
    for spec in ([["p"], None], [None, None]):
        made = Annotated(program, {"n0": {"in": [None, [None, ["q"]]]}})
        program.annotations["x"] = spec
        partition, lost = partitioned(made, tmp_path)
        assert lost == []
        (entry,) = [entry for entry in partition.plan.values if entry["source"] == "w"]
        assert (entry["sharding"], entry["sections"]["of"]) == ([None, ["q"]], [[0, 8], [8, 16], [16, 24]])
        check_run(partition, "ort", program, expected_of(program))
