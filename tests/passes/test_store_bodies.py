"""store in bodies of loops: each trip brings what it reads, and the numbers, the log and what is held are as planned."""

from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import constant_bytes, peak_bytes
from irpar.analysis.memory.sums import sums_of
from irpar.analysis.storage.items import items_of
from irpar.ir import Module, parse_module
from irpar.ops.memory_copies import copies_of
from irpar.pass_manager.default_pipeline import composed
from irpar.runtime.executor import Executor
from tests.runtime.test_spaces import Watch

from .golden import check, run

SCAN = """
mesh @m = ["d"=1]
graph local @g(%x: f32[3, 2, 4] of [3, 2, 4], %s: f32[2, 4] of [2, 4]) -> (%t, %r) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] data("w2", 0, 64) from "h.2.w"
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[2, 4], %i: f32[2, 4]) -> (%d) {
    %a = MatMul(%i, %w0) : f32[2, 4] scope "h.0"
    %b = MatMul(%a, %w1) : f32[2, 4] scope "h.1"
    %c = MatMul(%b, %w2) : f32[2, 4] scope "h.2"
    %d = Add(%u, %c) : f32[2, 4]
  }} : f32[2, 4]
  %r = MatMul(%t, %w1) : f32[2, 4]
}
"""


def test_what_a_sum_begins_as_stays() -> None:
    text = SCAN.replace("(%x: f32[3, 2, 4] of [3, 2, 4], %s: f32[2, 4] of [2, 4])", "(%x: f32[3, 2, 4] of [3, 2, 4])")
    spread = """%zero = constant : f32[] 0.0
  %shape = constant : i64[2] [2, 4]
  %s = Expand(%zero, %shape) : f32[2, 4]
  %t = Scan"""
    graph = parse_module(text.replace("%t = Scan", spread)).graph
    sums = [each.start for node in graph for each in sums_of(node)]
    assert [value.name for value in sums if value is not None] == ["s"]
    assert not {item.value for item in items_of(graph, 1)} & set(sums)  # It takes no memory.


def test_a_body_brings_what_it_reads_in_each_trip() -> None:
    check(
        "store{weights=disk, prefetch=1, threshold-kb=0}",
        SCAN,
        """\
mesh @m = ["d"=1]
graph local @g(%x: f32[3, 2, 4] of [3, 2, 4], %s: f32[2, 4] of [2, 4]) -> (%t, %r) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] in disk data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] in disk data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] in disk data("w2", 0, 64) from "h.2.w"
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[2, 4], %i: f32[2, 4]) -> (%d) {
    %w0_1 = irpar.Copy(%w0) {to="device", id=0} : f32[4, 4] scope "h.0" doc "read by MatMul of %a"
    %w1_1 = irpar.CopyStart(%w1) {to="device", id=1} : inflight<f32[4, 4]> scope "h.1" doc "read by MatMul of %b"
    %a = MatMul(%i, %w0_1) : f32[2, 4] scope "h.0"
    %w1_2 = irpar.Wait(%w1_1) {id=1} : f32[4, 4] scope "h.1"
    %w2_1 = irpar.CopyStart(%w2) {to="device", id=2} : inflight<f32[4, 4]> scope "h.2" doc "read by MatMul of %c"
    %b = MatMul(%a, %w1_2) : f32[2, 4] scope "h.1"
    %w2_2 = irpar.Wait(%w2_1) {id=2} : f32[4, 4] scope "h.2"
    %c = MatMul(%b, %w2_2) : f32[2, 4] scope "h.2"
    %d = Add(%u, %c) : f32[2, 4]
  }} : f32[2, 4]
  %w1_3 = irpar.Copy(%w1) {to="device", id=3} : f32[4, 4] scope "h.1" doc "read by MatMul of %r"
  %r = MatMul(%t, %w1_3) : f32[2, 4]
}
""",
    )


def copied(module: Module) -> tuple[list[str], list[str]]:
    """What is copied by the program itself, and by the bodies of its loops."""
    found: tuple[list[str], list[str]] = [], []
    for node in copies_of(module.graph):
        found[node.graph is not module.graph].append(node.inputs[0].name)
    return found


def test_what_a_body_would_have_in_each_step_comes_once() -> None:
    module = run("store{weights=host, prefetch=3, threshold-kb=0}", SCAN)
    assert copied(module) == (["w2", "w1"], ["w0", "w1"])


def test_what_a_loop_begins_with_comes_once() -> None:
    text = SCAN.replace("Scan(%s,", "Scan(%s0,").replace("Add(%u, %c)", "Sum(%u, %c, %s0)")
    text = text.replace("%t = Scan", '%s0 = constant : f32[2, 4] data("s", 0, 32)\n%t = Scan')
    module = run("store{weights=host, prefetch=0, threshold-kb=0}", text)
    assert copied(module) == (["s0", "w1"], ["w0", "w1", "w2"])


def test_pinned_is_what_trips_would_bring() -> None:
    text = SCAN.replace("MatMul(%t, %w1)", "MatMul(%t, %w3)")
    text = text.replace("%t = Scan", '%w3 = constant : f32[4, 4] data("w3", 0, 64)\n%t = Scan')
    module = run("store{weights=host, prefetch=0, threshold-kb=0, pin-gb=192e-9}", text)
    assert copied(module) == (["w3"], [])


TURNED = """
mesh @m = ["d"=1]
graph local @g(%x: f32[3, 2, 4] of [3, 2, 4], %s: f32[2, 4] of [2, 4]) -> (%t) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] data("w2", 0, 64) from "h.2.w"
  %v0 = Transpose(%w0) {perm=[1, 0]} : f32[4, 4]
  %v2 = Neg(%w2) : f32[4, 4]
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[2, 4], %i: f32[2, 4]) -> (%d) {
    %a = MatMul(%i, %v0) : f32[2, 4]
    %b = MatMul(%a, %w1) : f32[2, 4]
    %c = MatMul(%b, %v2) : f32[2, 4]
    %d = Add(%u, %c) : f32[2, 4]
  }} : f32[2, 4]
}
"""


def test_a_body_turns_by_itself_what_it_brings() -> None:
    check(
        "store{weights=host, prefetch=0, threshold-kb=0}",
        TURNED,
        """\
mesh @m = ["d"=1]
graph local @g(%x: f32[3, 2, 4] of [3, 2, 4], %s: f32[2, 4] of [2, 4]) -> (%t) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] in host data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] in host data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] in host data("w2", 0, 64) from "h.2.w"
  %w2_1 = irpar.Copy(%w2) {to="device", id=0} : f32[4, 4] doc "read by Neg of %v2"
  %v2 = Neg(%w2_1) : f32[4, 4]
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[2, 4], %i: f32[2, 4]) -> (%d) {
    %w0_1 = irpar.Copy(%w0) {to="device", id=1} : f32[4, 4] doc "read by Transpose of %v0"
    %v0 = Transpose(%w0_1) {perm=[1, 0]} : f32[4, 4]
    %a = MatMul(%i, %v0) : f32[2, 4]
    %w1_1 = irpar.Copy(%w1) {to="device", id=2} : f32[4, 4] doc "read by MatMul of %b"
    %b = MatMul(%a, %w1_1) : f32[2, 4]
    %c = MatMul(%b, %v2) : f32[2, 4]
    %d = Add(%u, %c) : f32[2, 4]
  }} : f32[2, 4]
}
""",
    )


# -- steps of micro-batches ------------------------------------------------------------------------------------------

SIZES = {"layers": 2, "hidden": 16, "heads": 1, "vocab": 32, "batch": 2, "seq": 4}
BY_HAND = "store{weights=host, state=disk, activations=host, prefetch=1, threshold-kb=0}"


@pytest.fixture(scope="module")
def step() -> Module:
    return irpar.train_step(models.build("gpt", **SIZES), optimizer="momentum", micro_batches=3)


def samples() -> dict[str, Any]:
    random = np.random.default_rng(0)
    tokens = {name: random.integers(0, 32, (3, 2, 4)) for name in ("input_ids", "target")}
    return {**tokens, "learning_rate": np.float32(1e-3)}


def losses(made: irpar.Partition) -> list[Any]:
    with made.session(engine="numpy") as session:
        found = [session.run(samples())["loss"] for _ in range(2)]
    made.executor(engine="numpy").close()
    return found


def held_in_a_run(made: irpar.Partition, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most that the device holds, as the rank that runs has it; copies are those of the plan."""
    assert made.module is not None
    graph = made.module.graph
    with monkeypatch.context() as patched:
        watch = Watch(graph, patched)
        with Executor(made.module, made.plan.mesh_of_ranks, engine="numpy") as executor:
            executor.run(samples())
            assert executor.log.copies.differences(made.plan.copies) == []
            assert executor.log.copies.copied_bytes == made.plan.totals["copied_bytes"] > 0
    return constant_bytes(graph) + max(held["device"] for held in watch.held.values())


@pytest.mark.parametrize(("way", "share"), [("by hand", 0.75), pytest.param("auto", 0.5, marks=pytest.mark.slow)])
def test_micro_batches(way: str, share: float, step: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = irpar.partition(step, "d=1")
    limit = round(share * peak_bytes(plain.module))
    options = BY_HAND if way == "by hand" else f"store{{auto=true, limit-gb={limit / 1e9}, seconds=0, threshold-kb=0}}"
    made = irpar.partition(step, "d=1", pipeline=composed(None, [options]))
    assert losses(made) == losses(plain)
    assert {entry["times"] for entry in made.plan.copies} == {1, 3}
    assert 0 < held_in_a_run(made, monkeypatch) <= peak_bytes(made.module) <= limit
