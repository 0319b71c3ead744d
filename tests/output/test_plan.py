import copy
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import irpar
from irpar import models
from irpar.analysis.memory.arena import arena_bytes
from irpar.analysis.memory.liveness import peak
from irpar.onnx_io import to_module
from irpar.output.plan_reading import PlanError, read_plan
from irpar.output.plan_record import Plan
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.runtime.pieces import open_parts
from irpar.sharding import IrparError
from tests.budget import SHARE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan")
    onnx.save(models.build("gpt"), path / "gpt.onnx")
    module = irpar.load(path / "gpt.onnx")
    irpar.annotate(module, models.annotations("gpt"))
    irpar.partition(module, irpar.Mesh({"dp": 2, "tp": 2})).save(path / "out")
    return path / "out"


def test_fields_of_the_contract(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    assert plan["format"] == "irpar-plan/1"
    assert plan["source"]["model"].endswith("gpt.onnx")
    assert len(plan["source"]["sha256"]) == 64
    assert plan["source"]["external"] == []
    assert plan["mesh"] == {"axes": {"dp": 2, "tp": 2}, "devices": [0, 1, 2, 3]}
    assert [rank["coords"] for rank in plan["ranks"]] == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert all(rank["peak_bytes"] < plan["original"]["peak_bytes"] for rank in plan["ranks"])
    assert [part["model"] for part in plan["parts"]] == ["part0/model.onnx", "part1/model.onnx"]
    cut = [["dp"], None]
    assert plan["inputs"] == [{"name": "input_ids", "dtype": "i64", "shape": [4, 32], "sharding": cut, "value": None}]
    assert plan["outputs"][0]["sharding"] == [["dp"], None, ["tp"]]
    assert (plan["network"], plan["predicted"]) == ("bytes", None)


def test_a_collective_by_hand(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    first = plan["collectives"][0]
    local = 2 * 32 * 64 * 4  # batch 4 over dp=2, 32 tokens, hidden 64, f32
    reason = first.pop("reason")
    assert first == {
        "id": 0,
        "kind": "all_reduce",
        "reduce": "sum",
        "axes": ["tp"],
        "group_size": 2,
        "dtype": "f32",
        "bytes": local,
        "sent_bytes": local,  # 2 (n - 1) / n with n = 2
        "times": 1,
        "value": "/h.0/attn/proj/MatMul_output_0",
        "phase": None,
        "conflict": None,
    }
    assert 'annotated "h.*.attn.proj.weight"' in reason
    assert plan["totals"]["collectives"] == len(plan["collectives"]) == 4
    assert plan["totals"]["sent_bytes"] == 4 * local
    assert plan["totals"]["by_kind"] == {"all_reduce": {"collectives": 4, "sent_bytes": 4 * local}}


def test_it_reads_back(folder: Path) -> None:
    plan = read_plan(folder)
    assert Plan(**json.loads(plan.to_json())) == plan
    assert plan.mesh_of_ranks == irpar.Mesh({"dp": 2, "tp": 2})


def test_fields_that_a_later_version_adds_are_ignored(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, "schedule": []}))
    assert read_plan(tmp_path) == read_plan(folder)


def part(model: str) -> dict:
    return {"model": model, "weight_bytes": 0, "flops": 0, "weights": None}


def spec(**facts: object) -> dict:
    return {"name": "x", "dtype": "f32", "shape": [4], "sharding": None} | facts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "irpar-plan/9"}, "has format 'irpar-plan/9'"),
        ({"parts": None}, "parts is null, expected a list"),
        ({"parts": [part("../secret.onnx"), part("part1/model.onnx")]}, "outside its folder"),
        ({"mesh": {"axes": {"dp": 0}, "devices": None}}, "cannot be"),
        ({"mesh": {"axes": {"dp": 2, "tp": 4}, "devices": None}}, "joins another number of ranks"),
        ({"collectives": [], "mesh": {"axes": {"tp": 2}, "devices": None}}, 'no axis "dp"'),
        ({"collectives": [], "mesh": {"axes": {"dp": 2, "tp": 4}, "devices": None}}, "not those of mesh dp=2,tp=4"),
        ({"ranks": []}, "the ranks are not those"),
        ({"inputs": [spec(shape=[4], sharding=[["mp"]])]}, 'no axis "mp"'),
        ({"inputs": [spec(shape=[4, 4], sharding=[["dp"]])]}, "another number of dims"),
        ({"inputs": [spec(dtype="f31")]}, "has the dtype f31, which is none"),
    ],
)
def test_plans_edited_by_hand_are_refused(folder: Path, tmp_path: Path, change: dict, message: str) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps({**plan, **change}))
    with pytest.raises(IrparError, match=message):
        read_plan(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"format": 3}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(IrparError, match=r"plan\.json"):
        read_plan(tmp_path)


def places(value: object, place: tuple = ()) -> Iterator[tuple]:
    """The path of each field and of the first entry of each list."""
    entries = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    )
    for key, inner in entries:
        yield (*place, key)
        yield from places(inner, (*place, key))


def changed(plan: dict, place: tuple, *value: object) -> dict:
    """A copy with another value at a path, or without it."""
    made = copy.deepcopy(plan)
    holder = functools.reduce(operator.getitem, place[:-1], made)
    if value:
        holder[place[-1]] = value[0]
    else:
        del holder[place[-1]]
    return made


OPTIONAL = {
    "functions",
    "training",
    "dialect",
    "program",
    "segments",
    "values",
    "network",
    "memory_limit",
    "predicted",
    "sections",
    "not_as_annotated",
    "state",
    "memory",
} | {
    "arena_bytes",
    "copied_bytes",
    "copies",
    "memories",
}
FREE = {("mesh", "axes"), ("totals", "by_kind")}
"""Tables whose keys are names of their own; what is in lists may be left out too, and `original` may be empty."""


def is_refused(folder: Path) -> bool:
    try:
        read_plan(folder)
    except PlanError:
        return True
    return False


def test_every_field_is_checked(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    found = list(places(plan))
    assert ("collectives", 0, "sent_bytes") in found
    assert ("source", "sha256") in found
    found.remove(("inputs", 0, "value"))  # What an input is fixed to may be any of these.
    for number, place in enumerate(found):
        is_free = place[:-1] in FREE or place[0] == "original" or isinstance(place[-1], int)
        wrong = (True, -1, 1.5, [True])
        tried = wrong if SHARE >= 1 else (wrong[number % len(wrong)],)
        cases = [changed(plan, place, each) for each in tried]
        if not (is_free or place[-1] in OPTIONAL or place[0] == "replicated"):
            cases.append(changed(plan, place))
        for case in cases:
            (tmp_path / "plan.json").write_text(json.dumps(case))
            assert is_refused(tmp_path), (place, case)


def test_null_stands_only_where_nothing_may_be_known(folder: Path, tmp_path: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    for place in (("source",), ("totals", "sent_bytes"), ("collectives", 0, "kind"), ("ranks", 0, "part"), ("inputs",)):
        (tmp_path / "plan.json").write_text(json.dumps(changed(plan, place, None)))
        with pytest.raises(PlanError, match=r"is null, expected"):
            read_plan(tmp_path)
    for place in (
        ("source", "sha256"),
        ("collectives", 0, "phase"),
        ("parts", 0, "program"),
        ("parts", 0, "weights"),
        ("mesh", "devices"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(changed(plan, place, None)))
        read_plan(tmp_path)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": ' + "[" * 200_000, "1" * 10_000, '{"format": NaN}'])
def test_text_that_json_readers_choke_on(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        read_plan(tmp_path)


def test_a_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(IrparError, match="cannot read the plan: No such file"):
        read_plan(tmp_path)


def test_an_output_whose_size_depends_on_data(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (float[8, 64] x) => (int64[2, n] y) { y = NonZero(x) }'
    )
    onnx.save(model, tmp_path / "nonzero.onnx")
    module = irpar.load(tmp_path / "nonzero.onnx")
    irpar.annotate(module, {"x": [None, "tp"]})
    made = irpar.partition(module, irpar.Mesh({"tp": 2}))
    assert made.plan.outputs == [{"name": "y", "dtype": "i64", "shape": [2, None], "sharding": None}]
    made.save(tmp_path / "out")
    irpar.Partition.open(tmp_path / "out").verify().check()


def test_what_is_written_is_counted(tmp_path: Path) -> None:
    """Of fused kernels the operators are written, which hold more: the plan counts these."""
    module = to_module(models.build("gpt", layers=1))
    irpar.annotate(module, models.annotations("gpt", "dp", "tp"))
    made = irpar.partition(module, "dp=1,tp=2", pipeline=f"{DEFAULT_PIPELINE},fuse-kernels")
    assert made.module is not None
    made.save(tmp_path / "out")
    plan, _, parts, _ = open_parts(tmp_path / "out")
    assert [rank["arena_bytes"] for rank in plan.ranks] == [
        arena_bytes(part.graph) for part in parts for _ in part.ranks
    ]
    assert [rank["peak_bytes"] for rank in plan.ranks] == [
        peak(part.graph).total_bytes for part in parts for _ in part.ranks
    ]
    assert all(rank["peak_bytes"] > peak(made.module.graph).total_bytes for rank in plan.ranks)
