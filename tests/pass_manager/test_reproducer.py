"""Reproducers: what is replayed gives the same program for the same reasons."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import pytest

import irpar
from irpar import models
from irpar.annotations.shardings_file import read_shardings
from irpar.ir import Module, TextError, parse_module
from irpar.ir.text.logs import logs_text
from irpar.output.parts import parts_of
from irpar.output.plan import make_plan
from irpar.pass_manager import Instrumentation, Pass, PassFailure, PassManager, PassResult
from irpar.pass_manager.default_pipeline import NORMALISE, PROGRAM
from irpar.pass_manager.reproducer import read_reproducer

LOGS = ("annotations", "annotated", "decisions", "conflicts", "whole", "dim_names")


@dataclass(frozen=True)
class Crash(Pass):
    """A pass with a bug."""

    name: ClassVar[str] = "crash-test"

    def run(self, module: Module) -> PassResult:
        """Fail."""
        raise ZeroDivisionError


def annotated(folder: Path) -> Module:
    """A gpt whose annotations, from a file, are in conflict."""
    models.save(folder / "gpt.onnx", "gpt", layers=1)
    text = '{mesh: {tp: 2}, tensors: {"h.*.mlp.c_fc.weight": [tp, null], h.0.attn.q.weight: [null, tp], logits: [null, null, tp]}}'
    (folder / "gpt.yaml").write_text(text)
    module = irpar.load(folder / "gpt.onnx")
    module.set_mesh("tp=2")
    read_shardings(folder / "gpt.yaml").annotate(module)
    return module


def reasons(module: Module) -> list[tuple[object, object, object]]:
    """What the plan says of each collective, and of what stays replicated."""
    PassManager.parse(PROGRAM).run(module)
    plan = make_plan(module, module.mesh, parts_of(module, module.mesh), pipeline="", source={}, original={})
    return [(entry["kind"], entry["value"], entry["reason"]) for entry in plan.collectives] + [
        (entry.get("value"), entry.get("op"), entry["why"]) for entry in plan.replicated
    ]


@pytest.mark.parametrize("before", ["", ",complete-sharding", ",complete-sharding,insert-redistribution"])
def test_a_replay_keeps_the_reasons(before: str, tmp_path: Path) -> None:
    module = annotated(tmp_path)
    passes = PassManager.parse(NORMALISE + before).passes
    with pytest.raises(PassFailure):
        PassManager([*passes, Crash()], Instrumentation(reproducer=tmp_path)).run(module)
    again, _ = read_reproducer(tmp_path / "crash-test.irpar")
    for log in LOGS:
        assert str(getattr(again, log)) == str(getattr(module, log)), log
    rest = "complete-sharding,insert-redistribution"[len(before) - 1 if before else 0 :].strip(",")
    for each in (module, again):
        PassManager.parse(rest).run(each)
    found = reasons(again)
    assert found == reasons(module)
    assert any("gpt.yaml, line 1" in str(why) for _, _, why in found)


def test_what_fails_in_a_partition_is_made_again_from_what_was_given(tmp_path: Path) -> None:
    module = annotated(tmp_path)
    given = str(module)
    passes = PassManager.parse(NORMALISE).passes
    with pytest.raises(PassFailure) as failure:
        irpar.partition(
            module,
            network="a100-pcie",
            pipeline=PassManager([*passes, Crash()], Instrumentation(reproducer=tmp_path)),
        )
    assert "reproducer: " in str(failure.value)
    again, text = read_reproducer(tmp_path / "crash-test.irpar")
    assert text == "crash-test"
    assert again.network == "a100-pcie"
    assert str(module) == given
    PassManager.parse(NORMALISE).run(module)
    assert [node.title for node in again.graph] == [node.title for node in module.graph]
    assert again.annotated == module.annotated


def test_annotations_that_wait_keep_their_titles(tmp_path: Path) -> None:
    from irpar.ir import Annotation

    module = annotated(tmp_path)
    bare = irpar.load(tmp_path / "gpt.onnx")
    behind = Annotation("w", (None,), "rules.yaml, line 2", "rule hidden", True)
    bare.annotations = [Annotation("wte.weight", ("tp", None), "a.yaml, line 3", 'ops "x"', True, behind)]
    again = parse_module(str(bare) + logs_text(bare), resources=bare.printed().resources)
    assert [asdict(known) for known in again.annotations] == [asdict(known) for known in bare.annotations]
    assert again.annotations[0].title == bare.annotations[0].title
    assert len(module.annotated) == 3


@pytest.mark.parametrize(
    "line",
    [
        *(
            'log whole "x" "1"',
            'log whole "x" "{"',
            'log waiting "0" "{}"',
            'log waiting "x" "{}"',
            'log nothing "x" "1"',
        ),
        *('log decisions "x" "[1]"', 'log decisions "x" "1"', 'log conflict "x" "{}"', 'log conflict "x" "[]"'),
        *('log dims "x" "[1]"', 'log annotated "x" "[]"', 'log "x" "1"', "log whole x 1", "log"),
    ],
)
def test_a_log_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(TextError):
        parse_module(f"graph @g(%x: f32[2]) -> (%x) opset 21 {{\n}}\n{line}\n")
