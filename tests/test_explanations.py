"""Why every value is sharded as it is: chains of steps that end at annotations, without circles and dead ends."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given, settings

import irpar
from irpar import models
from irpar.output.plan_record import Plan
from irpar.sharding import Axis
from tests.budget import budget, every

from .command_line import Capture, call
from .random_programs import Program, programs
from .test_conflicts import torn, written
from .test_random_programs import ANY_TIME
from .written import Specs, model_of_text

Entry = dict[str, Any]


def check_explained(plan: Plan) -> None:
    """Walk every chain of a plan, as docs/plan.md describes them."""
    known = {entry["name"]: entry for entry in plan.values}
    assert {entry["name"] for entry in (*plan.inputs, *plan.outputs) if entry["sharding"]} <= {
        name for entry in plan.values for name in (entry["name"], entry["source"])
    }
    for entry in plan.values:
        axes = cutting(plan, entry)
        for axis in axes:
            end = walk(known, plan, entry, axis)
            assert end.startswith(("annotated", "stored so")) or ", annotated" in end or "on the way to" in end, (
                entry,
                axis,
                end,
            )
        if not axes:
            assert entry["why"], f"nothing says why {entry['name']} is whole"
            for reason in entry["why"]:
                check_ends(known, entry, reason, ())


def cutting(plan: Plan, entry: Entry) -> set[str]:
    """The axes of several devices that cut a value, or over which it is partial."""
    axes = [*(axis for dim in entry["sharding"] for axis in dim or ()), *entry["partial"]]
    return {name for name in (Axis.parse(axis).name for axis in axes) if plan.mesh["axes"][name] > 1}


def walk(known: dict[str, Entry], plan: Plan, entry: Entry, axis: str) -> str:
    """Follow an axis by values that it cuts; returns the reason at the end."""
    met = []
    while True:
        assert entry["name"] not in met, f"a circle: {met}"
        is_annotated = any(reason["why"].startswith("annotated") for reason in entry["why"])
        # What was annotated may be sharded otherwise in the end, where all that read it do.
        assert axis in cutting(plan, entry) or is_annotated, f"{entry['name']} is not sharded over {axis}: {met}"
        met.append(entry["name"])
        reasons = [reason for reason in entry["why"] if axis in reason["axes"]]
        reasons = reasons or [reason for reason in entry["why"] if not reason["axes"]]
        assert reasons, f"nothing says why {entry['name']} is sharded over {axis}: {met}"
        if reasons[0]["follows"] is None:
            return str(reasons[0]["why"])
        entry = known[reasons[0]["follows"]]


def check_ends(known: dict[str, Entry], entry: Entry, reason: Entry, met: tuple[str, ...]) -> None:
    """A reason of a full value comes to an end; what it follows, where that is sharded, is checked by itself."""
    assert entry["name"] not in met, f"a circle: {met}"
    if reason["follows"] is not None:
        source = known[reason["follows"]]
        if not any(inner["axes"] for inner in source["why"]):
            assert source["why"]
            check_ends(known, source, source["why"][0], (*met, entry["name"]))


MODELS: list[tuple[str, dict[str, int], Specs]] = [
    *((family, {"dp": 2, "tp": 2}, {}) for family in models.FAMILIES),
    ("gpt", {"tp": 4}, {"input_ids": [None, ["tp"]], "logits": [None, ["tp"], None]}),
]


@pytest.mark.parametrize(("family", "mesh", "more"), every(2, MODELS), ids=str)
def test_every_value_of_a_model(family: str, mesh: dict[str, int], more: Specs, tmp_path: Path) -> None:
    models.save(tmp_path / "model.onnx", family, weights="none")
    module = irpar.load(tmp_path / "model.onnx")
    irpar.annotate(module, {**models.annotations(family, "dp" if "dp" in mesh else None, "tp"), **more})
    check_explained(irpar.partition(module, mesh).plan)


def test_the_command_explains_every_value(tmp_path: Path, capsys: Capture) -> None:
    models.save(tmp_path / "gpt.onnx", "gpt", weights="none")
    (tmp_path / "s.json").write_text(json.dumps({"tensors": models.annotations("gpt")}))
    words = ["--mesh", "dp=2,tp=2", "--shardings", tmp_path / "s.json", "--weights", "none"]
    assert call(capsys, "partition", tmp_path / "gpt.onnx", "-o", tmp_path / "out", *words)[0] == 0
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "*", "--json")
    assert code == 0
    values = json.loads(printed)["values"]
    assert len(values) > 100
    for entry in values:
        assert entry["chains"], entry
        for chain in entry["chains"]:
            is_cut = bool(chain[0]["axes"])
            assert not is_cut or chain[-1]["why"].startswith("annotated"), chain
    code, printed, _ = call(capsys, "explain", tmp_path / "out", "*")
    assert code == 0
    assert "None" not in printed


def test_every_value_of_small_programs() -> None:
    @settings(max_examples=budget(100), deadline=None, derandomize=True, database=None, suppress_health_check=ANY_TIME)
    @given(torn())
    def draws(case: tuple[str, irpar.Mesh, Specs]) -> None:
        name, mesh, specs = case
        module = irpar.ir.clone_module(written(name))
        irpar.annotate(module, specs)
        check_explained(irpar.partition(module, mesh).plan)

    draws()


@pytest.mark.slow
def test_every_value_of_programs_of_all_operators(tmp_path: Path) -> None:
    @settings(max_examples=budget(400), deadline=None, derandomize=True, database=None, suppress_health_check=ANY_TIME)
    @given(programs())
    def draws(program: Program) -> None:
        onnx.save(program.model, tmp_path / "model.onnx")
        module = irpar.load(tmp_path / "model.onnx")
        irpar.annotate(module, program.annotations)
        check_explained(irpar.partition(module, program.mesh).plan)

    draws()


@pytest.mark.parametrize("name", ["y", "v"])
def test_reasons_pass_over_values_that_are_gone(name: str) -> None:
    """EyeLike reads the shape of v, no more: x is sharded as y is, which the program still has, or as v was annotated."""
    text = """g (bool[4,4] c, float[4,4] x) => (float[4,4] y, float[4,4] z) {
      v = Where(c, x, x)  y = EyeLike(v)  z = Neg(x)
    }"""
    module = irpar.load(model_of_text(text))
    irpar.annotate(module, {name: [None, ["tp"]]})
    plan = irpar.partition(module, {"tp": 2}).plan
    check_explained(plan)
    assert "v" not in {entry["name"] for entry in plan.values}
    (reason,) = next(entry["why"] for entry in plan.values if entry["name"] == "x")
    assert reason["follows"] in {entry["name"] for entry in plan.values} or reason["why"].endswith(
        f'annotated "{name}"'
    )


def test_what_stands_for_an_annotated_value_has_its_reason() -> None:
    """x follows u and n follows x; n is equal to u, and stands for it: it is annotated, and follows nothing."""
    text = """g (float[5] x) => (float v, float[5] u) {
      n = LpNormalization<axis=0,p=1>(x)  v = MatMul(n, n)  u = LpNormalization<axis=-1,p=1>(x)
    }"""
    module = irpar.load(model_of_text(text))
    irpar.annotate(module, {"u": ["x"]})
    plan = irpar.partition(module, {"x": 2}).plan
    check_explained(plan)
    (reason,) = next(entry["why"] for entry in plan.values if entry["name"] == "n")
    assert reason == {"why": 'annotated "u"', "follows": None, "axes": []}


def test_exchanges_for_what_nothing_reads_have_reasons() -> None:
    """EyeLike reads the shape of v, no more, and what devices exchange for v goes back to x."""
    text = """g (float[4,4] x, float[4,4] c) => (float[8,4] y, float[4,4] z) {
      v = Concat<axis=0>(x, c)  y = EyeLike(v)  z = Neg(x)
    }"""
    module = irpar.load(model_of_text(text))
    irpar.annotate(module, {"x": [["tp"], None], "c": [["tp"], None], "v": [["tp"], None]})
    plan = irpar.partition(module, {"tp": 2}).plan
    check_explained(plan)
    assert any(
        reason["why"] == "a step of computing what nothing reads" for entry in plan.values for reason in entry["why"]
    )


LONG = "/decoder/layers.0/self_attention/projection_of_the_values/MatMul"


def test_what_was_told_is_not_told_again(tmp_path: Path, capsys: Capture) -> None:
    """Of a tensor that moves twice the second chain says so, and so do collectives of one reason; long names are cut."""
    text = """g (float[8,16] x) => (int64[2,n] y) {
      a = Neg(x)  b = Exp(a)  c = Neg(b)  long = Exp(c)
      y = NonZero(long) }"""
    model = model_of_text(text)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [LONG if name == "long" else name for name in names]
    onnx.save(model, tmp_path / "m.onnx")
    module = irpar.load(tmp_path / "m.onnx")
    irpar.annotate(module, {"x": [["p"], ["q"]]})
    irpar.partition(module, "p=2,q=2").save(tmp_path / "out")
    code, told, _ = call(capsys, "explain", tmp_path / "out", LONG)
    assert code == 0
    assert "more steps, as above ..." in told
    assert told.count("%x annotated") == 1
    assert "for the same reason as 0" in told
    assert f"of {LONG}: " in told
    _, told, _ = call(capsys, "explain", tmp_path / "out")
    assert LONG not in told
    assert "of /decoder/layers.0" in told
