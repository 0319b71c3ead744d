"""The Python interface as a notebook meets it: what is shown, what is asked, and what is told of wrong arguments."""

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import irpar
from irpar import models
from irpar.sharding import ArgumentError
from irpar.verification import Bisection, Difference


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("notebook") / "gpt.onnx"
    models.save(made, "gpt", layers=1)
    return made


@pytest.fixture
def module(path: Path) -> irpar.Module:
    return irpar.load(path)


# -- a session ----------------------------------------------------------------------------------------------------


def test_a_session(path: Path, tmp_path: Path) -> None:
    module = irpar.load(path)
    assert re.fullmatch(r"<module: gpt, \d+ nodes, inputs %input_ids : i64\[4, 32\]>", repr(module))
    facts = irpar.inspect(module)
    assert repr(facts).startswith(f"<inspection of {path}: ")
    assert (facts.nodes_in_file, facts.symbols) == (len(module.graph), {})
    assert "every operator has a sharding rule" in str(facts)
    found = irpar.suggest(module, "dp=2,tp=2")
    assert repr(found).startswith("<suggestion for gpt.onnx over dp=2,tp=2: ")
    assert "h.0.attn.q.weight" in str(found)
    assert not module.annotated
    assert found.apply(module) == len(found.lines)
    assert "over dp=2,tp=2" in repr(module)
    with pytest.raises(irpar.IrparError, match="annotated for the mesh dp=2,tp=2 already"):
        irpar.suggest(module, "tp=2")
    partition = irpar.partition(module)
    assert partition.plan.totals["sent_bytes"] == found.prediction.sent_bytes
    assert repr(partition.plan).startswith("<plan over dp=2,tp=2: 4 ranks")
    assert partition.verify().is_equal
    partition.save(tmp_path / "out")
    opened = irpar.Partition.open(tmp_path / "out")
    assert repr(opened) == repr(partition)
    assert opened._repr_html_() == partition._repr_html_()


def test_a_suggestion_is_saved_as_a_shardings_file(module: irpar.Module, tmp_path: Path) -> None:
    from irpar.annotations.shardings_file import read_shardings

    found = irpar.suggest(module, {"tp": 2})
    found.apply(module)
    for name in ("gpt.yaml", "gpt.json"):
        found.save(tmp_path / name)
        with pytest.raises(irpar.IrparError, match="force=True"):
            found.save(tmp_path / name)
        found.save(tmp_path / name, force=True)
        again = irpar.load(module.source)  # type: ignore[arg-type]
        again.set_mesh("tp=2")
        read_shardings(tmp_path / name).annotate(again)
        assert {name: str(value.spec) for name, value in again.annotated.items()} == {
            name: str(value.spec) for name, value in module.annotated.items()
        }


def test_a_model_is_a_path_bytes_or_parsed(path: Path) -> None:
    proto = onnx.load(path)
    data = path.read_bytes()
    given: list[Any] = [str(path), path, data, bytearray(data), memoryview(data), proto]
    texts = {str(irpar.load(model)) for model in given}
    assert len(texts) == 1
    plans = [irpar.partition(model, "tp=2").plan for model in given]
    assert len({str(plan.values) for plan in plans}) == 1
    assert [plan.source["model"] is None for plan in plans] == [False, False, True, True, True, True]
    assert {irpar.inspect(model).parameter_bytes for model in given} == {irpar.inspect(path).parameter_bytes}
    assert len({str(irpar.suggest(model, "tp=2").lines) for model in given}) == 1


def test_a_parsed_model_may_be_changed_afterwards(path: Path) -> None:
    proto = onnx.load(path)
    module = irpar.load(proto)
    for tensor in proto.graph.initializer:
        tensor.raw_data = bytes(len(tensor.raw_data))
    assert str(module) == str(irpar.load(path))
    made = irpar.partition(module, "tp=2")
    ids = np.arange(128).reshape(4, 32) % 50
    expected = irpar.partition(path, "tp=2").run({"input_ids": ids})
    np.testing.assert_array_equal(made.run({"input_ids": ids})["logits"], expected["logits"])
    assert made.verify().is_equal


def test_sizes_are_given_where_the_model_is(tmp_path: Path) -> None:
    path = tmp_path / "mlp.onnx"
    models.save(path, "mlp", dynamic=True)
    module = irpar.load(path)
    with pytest.raises(irpar.IrparError, match=r'bind=\{"batch": \.\.\.\}'):
        irpar.partition(module, "tp=2")
    for model in (path, module):
        sizes = irpar.partition(model, "tp=2", bind={"batch": np.int64(8)}).plan.inputs[0]["shape"]
        assert sizes[0] == 8
        assert irpar.inspect(model, bind={"batch": 8}).flops
        assert irpar.suggest(model, "tp=2", bind={"batch": 8}).lines
    assert irpar.inspect(module).flops is None


def test_a_mesh_of_one_device_cuts_nothing(module: irpar.Module) -> None:
    with pytest.raises(irpar.IrparError, match="shards nothing"):
        irpar.suggest(module, "tp=1")


# -- what is shown ------------------------------------------------------------------------------------------------


def cells(page: str) -> list[str]:
    return [html.unescape(cell.replace("<br>", "\n")) for cell in re.findall(r"<t[dh] [^>]*>(.*?)</t[dh]>", page)]


def test_a_plan_is_shown_with_collectives_and_bytes(module: irpar.Module) -> None:
    module.shard("h.*.mlp.c_fc.weight", [None, "tp"])
    partition = irpar.partition(module, "tp=2")
    shown = cells(partition._repr_html_())
    (entry,) = partition.plan.collectives
    assert {"collective", "over", "times", "operand", "sent a device", "why", entry["kind"], "tp"} <= set(shown)
    assert irpar.units.bytes_text(entry["sent_bytes"]) in shown
    assert entry["reason"] in shown
    assert "i64" in shown
    assert "input_ids" in shown


def test_answers_of_verify_are_shown_in_a_line_and_as_a_page(module: irpar.Module) -> None:
    module.shard("h.*.mlp.c_fc.weight", [None, "tp"])
    partition = irpar.partition(module, "tp=2")
    verified, bisected = partition.verify(), partition.bisect()
    assert re.fullmatch(r"<verification: equal, 1 output, largest difference \S+>", repr(verified))
    assert re.fullmatch(r"<bisection: no tensor differs, \d+ tensors compared>", repr(bisected))
    assert html.escape(verified.verdict) in verified._repr_html_()
    assert html.escape(str(bisected)) in bisected._repr_html_()
    found = Bisection(Difference("<b>", 1.0, 1.0, 1.0, 0.5), 2, "MatMul n")
    assert repr(found) == "<bisection: <b> differs, after 2 tensors that agree>"
    assert "<b>" not in found._repr_html_()
    assert "made by MatMul n" in found._repr_html_()


def test_names_are_escaped(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 21]> g (float[4, 4] x) => (float[4, 4] y) { y = MatMul(x, w) }'
    model = onnx.parser.parse_model(text.replace("MatMul(x, w)", "MatMul(x, x)"))
    name = '<img src=x onerror="alert(1)">&'
    model.graph.input[0].name = model.graph.node[0].input[0] = model.graph.node[0].input[1] = name
    model.graph.name = "<b>g</b>"
    module = irpar.load(model)
    module.shard(name, ["tp", None])
    made = irpar.partition(module, "tp=2")
    shown = [
        *(module._repr_html_(), made._repr_html_(), made.plan._repr_html_()),
        *(irpar.inspect(module)._repr_html_(), irpar.suggest(irpar.load(model), "tp=2")._repr_html_()),
    ]
    for page in shown:
        assert "<img" not in page
        assert "<b>g" not in page
    assert all(html.escape(name) in page for page in shown[:3])


def test_a_module_is_shown_with_its_annotations(module: irpar.Module) -> None:
    module.shard("wte.weight", [None, "tp"])
    for _ in range(2):
        shown = cells(module._repr_html_())
        assert shown[shown.index("wte.weight") + 1] == '[null, "tp"]'
        assert {"input", "output", "operator", "MatMul", "logits"} <= set(shown)
        module.set_mesh("tp=2")


def test_many_inputs_are_cut_short() -> None:
    from irpar.ir import Graph

    graph = Graph("wide")
    for number in range(9):
        graph.add_input(f"x{number}")
    assert repr(irpar.Module(graph)).endswith("and 5 more>")


# -- what is reported -------------------------------------------------------------------------------------------------

WRONG: list[tuple[str, Callable[[Path, irpar.Module, irpar.Partition], object]]] = [
    ("the model is the number 3", lambda path, module, made: irpar.load(3)),  # type: ignore[arg-type]
    ("the model is None", lambda path, module, made: irpar.partition(None, "tp=2")),  # type: ignore[arg-type]
    ("the model is a Partition", lambda path, module, made: irpar.partition(made, "tp=2")),  # type: ignore[arg-type]
    ('the size of "batch" in bind is the text "8"', lambda path, module, made: irpar.load(path, bind={"batch": "8"})),  # type: ignore[dict-item]
    ("bind is a list", lambda path, module, made: irpar.load(path, bind=["batch"])),  # type: ignore[arg-type]
    ('the size of "b" in bind is True', lambda path, module, made: irpar.load(path, bind={"b": True})),
    ("configuration is the number 3", lambda path, module, made: irpar.load(path, configuration=3)),  # type: ignore[arg-type]
    ("mesh is the number 3", lambda path, module, made: irpar.partition(module, 3)),  # type: ignore[arg-type]
    ("mesh is a list", lambda path, module, made: irpar.suggest(module, ["tp"])),  # type: ignore[arg-type]
    ("mesh is None", lambda path, module, made: module.set_mesh(None)),  # type: ignore[arg-type]
    ('the size of mesh axis tp is the text "2"', lambda path, module, made: irpar.Mesh({"tp": "2"})),  # type: ignore[dict-item]
    ("the name of a mesh axis is the number 3", lambda path, module, made: irpar.Mesh({3: 2})),  # type: ignore[dict-item]
    ("pipeline is a list", lambda path, module, made: irpar.partition(module, "tp=2", pipeline=["cse"])),  # type: ignore[arg-type]
    ("network is the number 3", lambda path, module, made: irpar.partition(module, "tp=2", network=3)),  # type: ignore[arg-type]
    (
        'max_redistribution_mb is the text "3"',
        lambda path, module, made: irpar.partition(module, "tp=2", max_redistribution_mb="3"),  # type: ignore[arg-type]
    ),
    ("the name of what is annotated is the number 3", lambda path, module, made: module.shard(3, ["tp"])),  # type: ignore[arg-type]
    ('the sharding of "x" is the text "tp"', lambda path, module, made: module.shard("x", "tp")),
    ('the sharding of "x" is a dict', lambda path, module, made: module.shard("x", {"tp": 1})),  # type: ignore[arg-type]
    ('an axis in the sharding of "x" is the number 3', lambda path, module, made: module.shard("x", [["tp", 3]])),  # type: ignore[list-item]
    ("module is None", lambda path, module, made: irpar.annotate(None, {})),  # type: ignore[arg-type]
    ("annotations is a list", lambda path, module, made: irpar.annotate(module, [])),  # type: ignore[arg-type]
    ("inputs is a list", lambda path, module, made: made.run([np.zeros(3)])),  # type: ignore[arg-type]
    ("inputs is an array", lambda path, module, made: made.verify(np.zeros(3))),  # type: ignore[arg-type]
    ("the name of an input is the number 3", lambda path, module, made: made.run({3: np.zeros(3)})),  # type: ignore[dict-item]
    ("engine is the number 3", lambda path, module, made: made.run({}, engine=3)),  # type: ignore[arg-type]
    ("group is None", lambda path, module, made: made.run({}, group=None)),  # type: ignore[arg-type]
    ('timeout is the text "x"', lambda path, module, made: made.executor(timeout="x")),  # type: ignore[arg-type]
    ('tolerance is the text "x"', lambda path, module, made: made.verify(tolerance="x")),  # type: ignore[arg-type]
    ('seed is the text "x"', lambda path, module, made: made.bisect(seed="x")),  # type: ignore[arg-type]
    ("model is the number 3", lambda path, module, made: made.verify(model=3)),  # type: ignore[arg-type]
    ("folder is the number 3", lambda path, module, made: made.save(3)),  # type: ignore[arg-type]
    ("folder is None", lambda path, module, made: irpar.Partition.open(None)),  # type: ignore[arg-type]
    ("pipeline is the number 3", lambda path, module, made: irpar.PassManager.parse(3)),  # type: ignore[arg-type]
    ("module is the text", lambda path, module, made: irpar.PassManager.parse("cse").run(str(path))),  # type: ignore[arg-type]
]


@pytest.fixture(scope="module")
def made(path: Path) -> irpar.Partition:
    return irpar.partition(path, "tp=2")


@pytest.mark.parametrize(("told", "call"), WRONG, ids=[told for told, _ in WRONG])
def test_a_wrong_type_is_told_in_words(
    told: str,
    call: Callable[[Path, irpar.Module, irpar.Partition], object],
    path: Path,
    module: irpar.Module,
    made: irpar.Partition,
) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(path, module, made)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, irpar.IrparError)
    assert caught.value.what.startswith(told)
    assert caught.value.do
    assert not module.annotated
    assert not module.annotations


def test_other_weights_are_refused(made: irpar.Partition, tmp_path: Path) -> None:
    with pytest.raises(irpar.IrparError, match='weights="copy"'):
        made.save(tmp_path / "out", weights="all")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_advice_has_the_spelling_of_whoever_asks(
    tmp_path: Path, made: irpar.Partition, capsys: pytest.CaptureFixture[str]
) -> None:
    from irpar.cli import main

    path, out = tmp_path / "mlp.onnx", tmp_path / "out"
    models.save(path, "mlp", dynamic=True)
    with pytest.raises(irpar.IrparError, match=r'do: give each a size: bind=\{"batch": \.\.\.\}'):
        irpar.partition(path, "tp=2")
    assert main(["partition", str(path), "-o", str(out), "--mesh", "tp=2"]) == 2
    assert "do: give each a size: --bind batch=...\n" in capsys.readouterr().err
    made.save(out)
    with pytest.raises(irpar.IrparError, match=r"another folder, or force=True to replace"):
        made.save(out)
    assert main(["partition", str(path), "-o", str(out), "--mesh", "tp=2"]) == 2
    assert "another folder, or --force to replace" in capsys.readouterr().err
    with pytest.raises(irpar.IrparError, match=r'irpar\.partition\(module, "dp=2,tp=4"\)'):
        irpar.partition(path)
    with pytest.raises(irpar.IrparError, match=r"sizes: bind=\{\.\.\.\}"):
        made.run({"input_ids": np.zeros((1, 1), np.int64)})
