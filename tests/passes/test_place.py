"""place: what is on the host and what on the device, what is copied between them, and what is refused."""

from pathlib import Path

import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import peak_bytes, value_bytes
from irpar.analysis.placement import NoRoomError, Placement
from irpar.analysis.placement.of_program import PlaceableProgram
from irpar.ir import Module, Node
from irpar.ops.memory_copies import copied_bytes, copies_of, is_copy
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import COMPLETE, LOCAL, MOVES, NORMALISE
from irpar.sharding import IrparError
from tests.training.programs import CLASSIFIER, with_weights

from .golden import check, read, run, run_pipeline

LOOK_UP = """
mesh @m = ["one"=1]
graph local @g(%ids: i64[64] of [64], %x: f32[64, 512] of [64, 512]) -> (%y) opset 21 ranks [0] {
  %table = constant : f32[1000000, 512] of [1000000, 512] data("t.bin", 0, 2048000000) from "embedding.weight"
  %w = constant : f32[512, 4096] of [512, 4096] data("t.bin", 2048000000, 8388608) from "w"
  %shape = constant : i64[2] of [2] [64, 512]
  %rows = Gather(%table, %ids) : f32[64, 512] of [64, 512] scope "embedding"
  %same = Reshape(%rows, %shape) : f32[64, 512] of [64, 512]
  %s = Add(%same, %x) : f32[64, 512] of [64, 512] scope "body"
  %y = MatMul(%s, %w) : f32[64, 4096] of [64, 4096] scope "body"
}
"""
PLACED = """
mesh @m = ["one"=1]
graph local @g(%ids: i64[64] of [64] in host, %x: f32[64, 512] of [64, 512]) -> (%y) opset 21 ranks [0] {{
  %table = constant : f32[1000000, 512] of [1000000, 512] in host data("t.bin", 0, 2048000000) from "embedding.weight"
  %w = constant : f32[512, 4096] of [512, 4096] data("t.bin", 2048000000, 8388608) from "w"
  %shape = constant : i64[2] of [2] [64, 512]
  %rows = Gather(%table, %ids) {{| place=host}} : f32[64, 512] of [64, 512] in host scope "embedding"
  %rows_1 = irpar.Copy(%rows) {{to="device", id=0}} : f32[64, 512] of [64, 512] scope "body" doc "Add of %s runs on the device (it takes less time there), Gather of %rows runs on the host ({why})"
  %same_1 = Reshape(%rows_1, %shape) : f32[64, 512] of [64, 512]
  %s = Add(%same_1, %x) : f32[64, 512] of [64, 512] scope "body"
  %y = MatMul(%s, %w) : f32[64, 4096] of [64, 4096] scope "body"
}}
"""
STATE = """
mesh @m = ["one"=1]
graph local @g(%x: f32[4, 4] of [4, 4], state parameter %w: f32[4, 4] of [4, 4], state statistic %n: f32[4, 4] of [4, 4]) -> (%y, %w2 replaces %w, %n2 replaces %n) opset 21 ranks [0] {
  %c = constant : f32[] of [] 2.0
  %y = MatMul(%x, %w) : f32[4, 4] of [4, 4] scope "body"
  %m = Mul(%y, %c) : f32[4, 4] of [4, 4] scope "count"
  %w2 = Sub(%w, %m) : f32[4, 4] of [4, 4] scope "update"
  %z = Mul(%m, %c) : f32[4, 4] of [4, 4] scope "body"
  %n2 = Add(%n, %z) : f32[4, 4] of [4, 4] scope "count"
}
"""
TABLES, ROWS, WIDTH, BATCH = 4, 20_000, 64, 512


def _placed(module: Module, pipeline: str) -> Module:
    PassManager.parse(f"{NORMALISE},{COMPLETE},{MOVES},{LOCAL},{pipeline}").run(module)
    return module


def _refused(pipeline: str, text: str = LOOK_UP) -> str:
    with pytest.raises(IrparError) as told:
        run_pipeline(pipeline, read(text))
    return str(told.value)


# -- where things are ------------------------------------------------------------------------------------------------


def test_what_is_pinned_is_on_the_host_with_its_table() -> None:
    check("place{host=[embedding], rest=device}", LOOK_UP, PLACED.format(why="host=embedding"))


def test_a_table_that_has_no_room_is_on_the_host_by_itself() -> None:
    placed = "module {memory_limit=1000000000}" + PLACED.format(why="the device has no room for it")
    check("place{limit-gb=1}", LOOK_UP, placed)


def test_what_takes_least_time_on_the_device_stays_there() -> None:
    check("place", LOOK_UP, LOOK_UP)


def test_state_lies_where_it_is_replaced_and_is_copied_once_a_step() -> None:
    found = str(run("place{host=[count, update], rest=device, overlap=false}", STATE))
    assert "state parameter %w: f32[4, 4] of [4, 4] in host, state statistic %n: f32[4, 4] of [4, 4] in host" in found
    lines = [line.split(" : ")[0].strip() for line in found.splitlines() if " = " in line and "mesh" not in line]
    assert lines == [
        "%c = constant",
        "%c_1 = constant",  # The same numbers on the host.
        '%w_1 = irpar.Copy(%w) {to="device", id=0}',
        "%y = MatMul(%x, %w_1)",
        '%y_1 = irpar.Copy(%y) {to="host", id=1}',
        "%m = Mul(%y_1, %c_1) {| place=host}",
        "%w2 = Sub(%w, %m) {| place=host}",
        '%m_1 = irpar.Copy(%m) {to="device", id=2}',
        "%z = Mul(%m_1, %c)",
        '%z_1 = irpar.Copy(%z) {to="host", id=3}',
        "%n2 = Add(%n, %z_1) {| place=host}",
    ]


IN_TURN = """
mesh @m = ["one"=1]
graph local @g(%ids: i64[64] of [64], %x: f32[512, 512] of [512, 512]) -> (%s, %z) opset 21 ranks [0] {
  %table = constant : f32[1000000, 512] of [1000000, 512] data("t.bin", 0, 2048000000) from "embedding.weight"
  %rows = Gather(%table, %ids) : f32[64, 512] of [64, 512] scope "embedding"
  %a = MatMul(%x, %x) : f32[512, 512] of [512, 512]
  %b = MatMul(%a, %x) : f32[512, 512] of [512, 512]
  %y = MatMul(%rows, %b) : f32[64, 512] of [64, 512]
  %z = MatMul(%b, %b) : f32[512, 512] of [512, 512]
  %c = MatMul(%z, %z) : f32[512, 512] of [512, 512]
  %s = Neg(%y) : f32[64, 512] of [64, 512] scope "last"
}
"""


def test_copies_begin_early_and_are_waited_for_late() -> None:
    # A product takes longer than a copy of 64 rows.
    found = run("place{host=[embedding, last], rest=device}", IN_TURN)
    assert [line.split(" : ")[0].strip() for line in str(found).splitlines()[3:-1]] == [
        "%rows = Gather(%table, %ids) {| place=host}",
        "%a = MatMul(%x, %x)",
        '%rows_2 = irpar.CopyStart(%rows) {to="device", id=0}',
        "%b = MatMul(%a, %x)",
        "%rows_3 = irpar.Wait(%rows_2) {id=0}",
        "%y = MatMul(%rows_3, %b)",
        '%y_2 = irpar.CopyStart(%y) {to="host", id=1}',
        "%z = MatMul(%b, %b)",
        "%y_3 = irpar.Wait(%y_2) {id=1}",
        "%c = MatMul(%z, %z)",
        "%s = Neg(%y_3) {| place=host}",
    ]


def test_copies_begin_when_they_are_needed_where_there_is_no_room() -> None:
    module = run("place{host=[embedding, last], rest=device, overlap=false}", IN_TURN)
    least = peak_bytes(module)
    limited = run(f"place{{host=[embedding, last], rest=device, limit-gb={least / 1e9:.9f}}}", IN_TURN)
    assert peak_bytes(limited) == least
    # Beside %b there is no room for the rows; that %y lies on the device for longer costs nothing.
    assert [node.op_type for node in limited.graph if is_copy(node)] == ["Copy", "CopyStart"]


def test_the_optimizer_and_its_state_are_on_the_host_where_the_device_has_no_room() -> None:
    """ZeRO-Offload (Ren et al., arXiv 2101.06840): 16-bit gradients leave, 16-bit parameters come: 4 bytes each."""
    text = CLASSIFIER.replace("[8, ", "[512, ").replace("[6, 5]", "[1024, 1000]").replace("[512, 6]", "[512, 1024]")
    text = text.replace("[512, 5]", "[512, 1000]").replace("[5, 3]", "[1000, 1004]").replace("[512, 3]", "[512, 1004]")
    text = text.replace("f32[5]", "f32[1000]").replace("f32[3]", "f32[1004]")
    step = irpar.train_step(with_weights(text), optimizer="adamw", precision="bf16")
    step.set_mesh("one=1")
    module = _placed(step, "place{limit-gb=0.0103}")
    assert peak_bytes(module) <= 10_300_000
    large = {value: value_bytes(value) for value in module.graph.states if value_bytes(value) > 1_000_000}
    assert {value.memory for value in large} == {"host"}
    count = 1024 * 1000 + 1000 * 1004
    assert sum(large.values()) == count * (2 + 4 + 4 + 4)
    assert {node.place for node in _computing(module) if node.phase != "optimizer"} == {None}
    wide = [node for node in _computing(module) if node.phase == "optimizer" and value_bytes(node.result) > 1_000_000]
    assert wide
    assert {node.place for node in wide} == {"host"}
    for memory in ("host", "device"):
        moved = [copied_bytes(copy) for copy in copies_of(module.graph) if copy.result.memory == memory]
        assert sum(size for size in moved if size > 1_000_000) == 2 * count


def test_tables_are_on_the_host_and_only_rows_of_them_are_copied(tmp_path: Path) -> None:
    sizes = {"tables": TABLES, "rows": ROWS, "width": WIDTH, "hidden": 1024, "batch": BATCH}
    models.save(tmp_path / "dlrm.onnx", "dlrm", weights="none", **sizes)
    module = irpar.load(tmp_path / "dlrm.onnx")
    module.set_mesh("one=1")
    _placed(module, "place{limit-gb=0.012}")  # Less than the tables have.
    assert peak_bytes(module) <= 12_000_000
    host = [value.source_name for value in module.graph.constants if value.memory == "host" and value_bytes(value) > 8]
    assert host == [f"tables.{table}.weight" for table in range(TABLES)]
    assert {node.scope.split(".")[0] for node in _computing(module) if node.place == "host" and node.scope} == {
        "tables"
    }
    assert {node.place for node in _computing(module) if node.op_type == "MatMul"} == {None}
    copies = list(copies_of(module.graph))
    assert len(copies) == TABLES
    assert all(copy.inputs[0].node is not None for copy in copies)
    assert sum(map(copied_bytes, copies)) == 3 * TABLES * BATCH * WIDTH * 4


def _computing(module: Module) -> list[Node]:
    return [node for node in module.graph if node.op_type != "Copy"]


def test_notes_say_what_is_where_and_how_good_that_is() -> None:
    module = read(LOOK_UP)
    (record,) = run_pipeline("place{host=[embedding], rest=device}", module)
    assert record.notes == (
        "1 node of 3 on the host, where 2.05 GB of weights and state lie: the device holds 9.57 MB instead of 2.06 GB",
        "a step copies 131 kB to the device and 0 B to the host, and takes 23.3 us by h100-nvlink-ib, one thing after the other",
        "by cut: nothing is faster",
        "on the host, host=embedding: 1 node (Gather of %rows first), 2.05 GB of weights and state",
    )
    assert record.statistics == {"nodes on the host": 1, "copies": 1, "copied bytes": 64 * 512 * 4}


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_pin_that_nothing_matches() -> None:
    told = _refused("place{host=[embeding]}")
    assert 'no scope, no node, no weight and no input is "embeding"' in told
    assert "embedding" in told


def test_a_pin_to_both_sides() -> None:
    told = _refused("place{host=[w], device=[update]}", STATE)
    assert "is in host=w and in device=update" in told


def test_communication_stays_on_the_device() -> None:
    text = (
        LOOK_UP.replace('"one"=1', '"tp"=2')
        .replace("ranks [0]", "ranks [0, 1]")
        .replace(
            '%s = Add(%same, %x) : f32[64, 512] of [64, 512] scope "body"',
            '%s = irpar.AllReduce(%same) {axes=["tp"], id=0, reduce="sum"} : f32[64, 512] of [64, 512] scope "body"',
        )
    )
    told = _refused("place{host=[s]}", text)
    assert "cannot be on the host, as host=s says" in told
    assert "communicates, and its operands are on the device" in told


def test_what_a_pin_names_and_cannot_be_on_the_host_stays() -> None:
    text = (
        LOOK_UP.replace('"one"=1', '"tp"=2')
        .replace("ranks [0]", "ranks [0, 1]")
        .replace("%s = Add(%same, %x)", '%s = irpar.AllReduce(%same) {axes=["tp"], id=0, reduce="sum"}')
    )
    (record,) = run_pipeline("place{host=[body], rest=device}", module := read(text))
    assert record.notes[-1] == (
        "host=body leaves 1 node on the device; the first: AllReduce of %s communicates, and its operands are on the "
        "device"
    )
    assert [node.op_type for node in module.graph if node.place == "host"] == ["MatMul"]


SUMS = """
mesh @m = ["one"=1]
graph local @g(%x: f32[3, 64, 64] of [3, 64, 64]) -> (%t) opset 21 ranks [0] {
  %zero = constant : f32[] of [] 0.0
  %shape = constant : i64[2] of [2] [64, 64]
  %s = Expand(%zero, %shape) : f32[64, 64] of [64, 64]
  %t = Scan(%s, %x) {num_scan_inputs=1, body=graph @body(%u: f32[64, 64], %i: f32[64, 64]) -> (%d) {
    %c = RandomNormalLike(%i) : f32[64, 64]
    %d = Add(%u, %c) : f32[64, 64]
  }} : f32[64, 64] of [64, 64]
}
"""
"""Chance keeps the loop on the device."""


def test_what_a_sum_begins_as_is_where_its_loop_is() -> None:
    held = peak_bytes(read(SUMS))
    large = "f32[1024, 1024] of [1024, 1024]"
    product = f'%w = constant : {large} data("w", 0, {4 * 1024**2})\n  %m = MatMul(%w, %w) : {large}'
    text = SUMS.replace("-> (%t)", "-> (%t, %m)").replace("%t = Scan", f"{product}\n  %t = Scan")
    module = read(text)
    run_pipeline(f"place{{limit-gb={held / 1e9}}}", module)
    assert [node.place for node in module.graph] == [None, "host", None]
    assert not list(copies_of(module.graph))
    assert peak_bytes(module) == held


STRINGS = """
mesh @m = ["one"=1]
graph local @g(%x: str[4] of [4], %n: seq<f32[2]>, %a: f32[2] of [2]) -> (%y, %z) opset 21 ranks [0] {
  %y = StringNormalizer(%x) : str[4] of [4]
  %i = constant : i64[] of [] 0
  %b = SequenceAt(%n, %i) : f32[2] of [2]
  %z = Add(%a, %b) : f32[2] of [2]
}
"""


@pytest.mark.parametrize(
    ("pin", "told"), [("x", "%x is str[4]; only tensors of numbers"), ("n", "%n is seq<"), ("y", "gives strings")]
)
def test_what_no_copy_carries_stays_on_the_device(pin: str, told: str) -> None:
    assert told in _refused(f"place{{host=[{pin}]}}", STRINGS)


def test_a_limit_that_nothing_fits_says_the_least_that_does() -> None:
    with pytest.raises(NoRoomError) as told:
        run("place{device=[embedding], limit-gb=1}", LOOK_UP)
    assert told.value.least == 2048000000 + 64 * 8 + 64 * 512 * 4
    assert f"it holds {told.value.least:,} bytes" in str(told.value)
    assert "  place{device=[embedding], limit-gb=1}" in str(told.value).splitlines()
    assert "give limit-gb=2.049 or more" in str(told.value)


@pytest.mark.parametrize("least", [900_000_000, 1_200_000_000])
def test_what_holds_least_is_tried_where_nothing_fits_a_lowered_limit(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held_after(program: PlaceableProgram, found: Placement) -> int:
        return 2_100_000_000 if any(found.on_device[unit] for unit in program.unit_of.values()) else least

    monkeypatch.setattr("irpar.passes.place._held_after", held_after)
    if least <= 10**9:
        computing = _computing(run("place{limit-gb=1}", LOOK_UP))
        assert {node.place for node in computing} == {"host"}
        return
    told = _refused("place{limit-gb=1}")
    assert "the device holds more than 1,000,000,000 bytes" in told
    assert "give limit-gb=1.2 or more" in told


@pytest.mark.parametrize(
    ("options", "what", "remedy"),
    [
        ("limit-gb=inf", "place with limit-gb=inf", "give a finite number of GB above 0"),
        ("limit-gb=-1", "place with limit-gb=-1", "0, for all that the device has"),
        ("seconds=0", "place with seconds=0", "give a finite number of seconds above 0"),
        ("seconds=inf", "place with seconds=inf", "give a finite number of seconds above 0"),
    ],
)
def test_numbers_that_are_none(options: str, what: str, remedy: str) -> None:
    told = _refused(f"place{{{options}}}")
    assert what in told
    assert remedy in told


def test_a_network_that_knows_no_host() -> None:
    told = _refused("place{network=cpu-ethernet}")
    assert "says nothing of host and host_link" in told


def test_global_view_and_copies_that_are_there() -> None:
    assert "place needs the local view" in _refused("place", CLASSIFIER)
    told = _refused("place{host=[embedding], rest=device},place")
    assert "has copies between memories already" in told
