"""store: where things lie, when copies stand where, what programs then hold, and what is refused."""

from typing import Any

import pytest

import irpar
from irpar import models
from irpar.analysis.memory.liveness import constant_bytes, peak, peak_bytes
from irpar.analysis.storage.auto import FoundMoves, solve
from irpar.ir import Graph, Module
from irpar.ops.bodies import waits_for_copy
from irpar.ops.memory_copies import copied_bytes, copies_of, is_copy, source_memory, target_memory
from irpar.passes.store import StoreError
from irpar.sharding import IrparError
from tests.training.programs import classifier, on_mesh

from .golden import check, read, run, run_pipeline

CHAIN = """
mesh @m = ["d"=1]
graph local @g(%x: f32[2, 4] of [2, 4]) -> (%y) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] data("w2", 0, 64) from "h.2.w"
  %a = MatMul(%x, %w0) : f32[2, 4] scope "h.0"
  %b = MatMul(%a, %w1) : f32[2, 4] scope "h.1"
  %y = MatMul(%b, %w2) : f32[2, 4] scope "h.2"
}
"""


def test_weights_are_brought_layer_by_layer() -> None:
    check(
        "store{weights=disk, prefetch=1, threshold-kb=0}",
        CHAIN,
        """\
mesh @m = ["d"=1]
graph local @g(%x: f32[2, 4] of [2, 4]) -> (%y) opset 21 ranks [0] {
  %w0 = constant : f32[4, 4] in disk data("w0", 0, 64) from "h.0.w"
  %w1 = constant : f32[4, 4] in disk data("w1", 0, 64) from "h.1.w"
  %w2 = constant : f32[4, 4] in disk data("w2", 0, 64) from "h.2.w"
  %w0_1 = irpar.Copy(%w0) {to="device", id=0} : f32[4, 4] scope "h.0" doc "read by MatMul of %a"
  %w1_1 = irpar.CopyStart(%w1) {to="device", id=1} : inflight<f32[4, 4]> scope "h.1" doc "read by MatMul of %b"
  %a = MatMul(%x, %w0_1) : f32[2, 4] scope "h.0"
  %w1_2 = irpar.Wait(%w1_1) {id=1} : f32[4, 4] scope "h.1"
  %w2_1 = irpar.CopyStart(%w2) {to="device", id=2} : inflight<f32[4, 4]> scope "h.2" doc "read by MatMul of %y"
  %b = MatMul(%a, %w1_2) : f32[2, 4] scope "h.1"
  %w2_2 = irpar.Wait(%w2_1) {id=2} : f32[4, 4] scope "h.2"
  %y = MatMul(%b, %w2_2) : f32[2, 4] scope "h.2"
}
""",
    )


def test_what_is_pinned_stays() -> None:
    module = run("store{weights=host, prefetch=0, pin-gb=1e-7, threshold-kb=0}", CHAIN)
    assert [value.memory for value in module.graph.constants] == ["device", "host", "host"]


SKIP = """
mesh @m = ["d"=1]
graph local @g(%x: f32[8, 8] of [8, 8]) -> (%y) opset 21 ranks [0] {
  %shape = constant : i64[2] [4, 16]
  %w0 = constant : f32[8, 8] data("w0", 0, 256) from "w0"
  %w1 = constant : f32[8, 8] data("w1", 0, 256) from "w1"
  %w2 = constant : f32[8, 8] data("w2", 0, 256) from "w2"
  %w3 = constant : f32[8, 8] data("w3", 0, 256) from "w3"
  %a = MatMul(%x, %w0) : f32[8, 8] scope "first"
  %v = Reshape(%a, %shape) : f32[4, 16] scope "first"
  %b = MatMul(%x, %w1) : f32[8, 8]
  %c = MatMul(%b, %w2) : f32[8, 8]
  %d = MatMul(%c, %w3) : f32[8, 8]
  %e = Reshape(%d, %shape) : f32[4, 16]
  %y = Add(%v, %e) : f32[4, 16]
}
"""


def test_activations_leave_after_their_last_use_near_by_and_views_of_them_are_made_again() -> None:
    check(
        "store{activations=disk, prefetch=1, threshold-kb=0}",
        SKIP,
        """\
mesh @m = ["d"=1]
graph local @g(%x: f32[8, 8] of [8, 8]) -> (%y) opset 21 ranks [0] {
  %shape = constant : i64[2] [4, 16]
  %w0 = constant : f32[8, 8] data("w0", 0, 256) from "w0"
  %w1 = constant : f32[8, 8] data("w1", 0, 256) from "w1"
  %w2 = constant : f32[8, 8] data("w2", 0, 256) from "w2"
  %w3 = constant : f32[8, 8] data("w3", 0, 256) from "w3"
  %a = MatMul(%x, %w0) : f32[8, 8] scope "first"
  %a_1 = irpar.CopyStart(%a) {to="disk", id=0} : inflight<f32[8, 8]> in disk scope "first" doc "not read before Add of %y"
  %b = MatMul(%x, %w1) : f32[8, 8]
  %a_2 = irpar.Wait(%a_1) {id=0} : f32[8, 8] in disk scope "first"
  %a_2_1 = irpar.CopyStart(%a_2) {to="device", id=1} : inflight<f32[8, 8]> scope "first" doc "read by Add of %y"
  %c = MatMul(%b, %w2) : f32[8, 8]
  %a_2_2 = irpar.Wait(%a_2_1) {id=1} : f32[8, 8] scope "first"
  %d = MatMul(%c, %w3) : f32[8, 8]
  %e = Reshape(%d, %shape) : f32[4, 16]
  %v.again = Reshape(%a_2_2, %shape) : f32[4, 16] scope "first"
  %y = Add(%v.again, %e) : f32[4, 16]
}
""",
    )


STEP = """
mesh @m = ["d"=1]
graph local @g(%x: f32[8, 8] of [8, 8], state parameter %w: f32[8, 8] of [8, 8], state moment of "w" %m: f32[8, 8] of [8, 8]) -> (%loss, %new_w replaces %w, %new_m replaces %m) opset 21 ranks [0] {
  %a = MatMul(%x, %w) {| phase=forward} : f32[8, 8] of [8, 8]
  %loss = ReduceSum(%a) {keepdims=0 | phase=forward} : f32[] of []
  %g = MatMul(%x, %a) {| phase=backward} : f32[8, 8] of [8, 8]
  %new_m = Add(%m, %g) {| phase=optimizer} : f32[8, 8] of [8, 8]
  %new_w = Sub(%w, %new_m) {| phase=optimizer} : f32[8, 8] of [8, 8]
}
"""


def test_state_that_is_replaced_leaves_when_it_is_made() -> None:
    check(
        "store{weights=host, state=disk, prefetch=0, threshold-kb=0}",
        STEP,
        """\
mesh @m = ["d"=1]
graph local @g(%x: f32[8, 8] of [8, 8], state parameter %w: f32[8, 8] of [8, 8] in host, state moment of "w" %m: f32[8, 8] of [8, 8] in disk) -> (%loss, %new_w_1 as "new_w" replaces %w, %new_m_1 as "new_m" replaces %m) opset 21 ranks [0] {
  %w_1 = irpar.Copy(%w) {to="device", id=0 | phase=forward} : f32[8, 8] of [8, 8] doc "read by MatMul of %a"
  %a = MatMul(%x, %w_1) {| phase=forward} : f32[8, 8] of [8, 8]
  %loss = ReduceSum(%a) {keepdims=0 | phase=forward} : f32[] of []
  %g = MatMul(%x, %a) {| phase=backward} : f32[8, 8] of [8, 8]
  %w_2 = irpar.Copy(%w) {to="device", id=1 | phase=optimizer} : f32[8, 8] of [8, 8] doc "read by Sub of %new_w"
  %m_1 = irpar.Copy(%m) {to="device", id=2 | phase=optimizer} : f32[8, 8] of [8, 8] doc "read by Add of %new_m"
  %new_m = Add(%m_1, %g) {| phase=optimizer} : f32[8, 8] of [8, 8]
  %new_w = Sub(%w_2, %new_m) {| phase=optimizer} : f32[8, 8] of [8, 8]
  %new_w_1 = irpar.Copy(%new_w) {to="host", id=3} : f32[8, 8] of [8, 8] in host doc "replaces w, which lies there"
  %new_m_1 = irpar.Copy(%new_m) {to="disk", id=4} : f32[8, 8] of [8, 8] in disk doc "replaces m, which lies there"
}
""",
    )


# -- what programs then are ----------------------------------------------------------------------------------------


def without_copies(module: Module) -> Module:
    """A module in which copies are taken out again, and all lies on the device."""
    for graph in module.graphs:
        copies = [node for node in graph if is_copy(node) or waits_for_copy(node)]
        for node in copies:
            node.result.replace_uses(node.inputs[0])
        for node in reversed(copies):
            node.erase()
        for value in graph.values():
            value.memory = "device"
    return module


def moved(graph: Graph) -> dict[tuple[str, str], int]:
    """The bytes that copies of a program move, by where from and where to."""
    found: dict[tuple[str, str], int] = {}
    for node in copies_of(graph):
        way = source_memory(node), target_memory(node)
        found[way] = found.get(way, 0) + copied_bytes(node)
    return found


@pytest.mark.parametrize(
    "options",
    [
        "weights=host, prefetch=0",
        "weights=disk, state=disk, activations=disk, prefetch=1",
        "weights=host, state=disk, activations=host, prefetch=3",
        "auto=true, limit-gb={limit}, seconds=0",
    ],
)
@pytest.mark.parametrize("mesh", ["tp=2", *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("d=1", "z=2"))])
def test_without_its_copies_a_program_is_as_before(options: str, mesh: str) -> None:
    module = on_mesh(classifier(optimizer="adam"), mesh).module
    assert module is not None
    before, options = str(module), options.format(limit=0.6e-9 * peak_bytes(module))
    run_pipeline(f"store{{{options}, threshold-kb=0}}", module)
    assert any(map(moved, module.graphs))
    module.memory_limit = None
    assert str(without_copies(module)) == before


# -- what they hold and copy ---------------------------------------------------------------------------------------


def layers(count: int, width: int) -> Module:
    """Equal layers in a row: LayerNormalization, MatMul and Add of [width, width], for one row of input."""
    lines = []
    for n in range(count):
        lines += [
            f'%s{n} = constant : f32[{width}] data("s{n}", 0, {4 * width})',
            f'%w{n} = constant : f32[{width}, {width}] data("w{n}", 0, {4 * width * width})',
            f'%b{n} = constant : f32[{width}] data("b{n}", 0, {4 * width})',
            f'%n{n} = LayerNormalization(%x{n}, %s{n}, %b{n}) {{axis=-1}} : f32[1, {width}] scope "h.{n}"',
            f'%m{n} = MatMul(%n{n}, %w{n}) : f32[1, {width}] scope "h.{n}"',
            f'%t{n} = Tanh(%m{n}) : f32[1, {width}] scope "h.{n}"',
            f'%x{n + 1} = Add(%x{n}, %t{n}) : f32[1, {width}] scope "h.{n}"',
        ]
    head = f"graph local @g(%x0: f32[1, {width}] of [1, {width}]) -> (%x{count}) opset 21 ranks [0] {{"
    return read("\n".join(['mesh @m = ["d"=1]', head, *lines, "}"]))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("memory", ["host", "disk"])
def test_layers_are_streamed_as_zero_inference_does(memory: str, prefetch: int) -> None:
    """To the device come the bytes of the weights, once a pass; it holds a layer, and those that are on their way."""
    width = 256
    module = layers(8, width)
    layer = 4 * (width * width + 2 * width)
    assert constant_bytes(module.graph) == 8 * layer
    run_pipeline(f"store{{weights={memory}, prefetch={prefetch}, threshold-kb=0}}", module)
    assert moved(module.graph) == {(memory, "device"): 8 * layer}
    activations = 4 * 4 * width
    assert (1 + prefetch) * layer < peak_bytes(module) <= (1 + prefetch) * layer + activations + 2 * 4 * width
    assert peak(module.graph, memory=memory).total_bytes == 8 * layer  # type: ignore[arg-type]


def test_a_weight_that_is_read_at_both_ends_is_copied_again_but_one_that_is_read_soon_stays() -> None:
    text = """
    mesh @m = ["d"=1]
    graph local @g(%x: f32[8, 8] of [8, 8]) -> (%y) opset 21 ranks [0] {
      %w0 = constant : f32[8, 8] data("w0", 0, 256) from "w0"
      %w1 = constant : f32[8, 8] data("w1", 0, 256) from "w1"
      %w2 = constant : f32[8, 8] data("w2", 0, 256) from "w2"
      %a = MatMul(%x, %w0) : f32[8, 8]
      %b = MatMul(%a, %w1) : f32[8, 8]
      %c = MatMul(%b, %w2) : f32[8, 8]
      %y = MatMul(%c, %w0) : f32[8, 8]
    }
    """
    for prefetch, copies in ((0, 4), (1, 4), (2, 3)):
        module = run(f"store{{weights=host, prefetch={prefetch}, threshold-kb=0}}", text)
        assert len(list(copies_of(module.graph))) == copies, prefetch


def test_what_has_to_move_for_a_limit_moves() -> None:
    module = layers(6, 128)
    held = peak_bytes(module)
    records = run_pipeline(f"store{{auto=true, limit-gb={held * 0.4e-9}, seconds=0}}", module)
    assert peak_bytes(module) <= held * 0.4
    assert module.memory_limit == round(held * 0.4)
    weights = [value for value in module.graph.constants if value.name.startswith("w")]
    assert {value.memory for value in weights} == {"device", "host"}
    assert "computation waits" in records[0].notes[-1]


def test_what_the_host_has_no_room_for_lies_on_disk() -> None:
    module = layers(6, 128)
    held = peak_bytes(module)
    run_pipeline(f"store{{auto=true, limit-gb={held * 0.4e-9}, host-gb={held * 0.2e-9}, seconds=0}}", module)
    assert peak(module.graph, memory="host").total_bytes <= held * 0.2
    assert {value.memory for value in module.graph.constants} == {"device", "host", "disk"}


def test_programs_that_are_alike_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []

    def search(*arguments: Any) -> FoundMoves:
        searches.append(arguments)
        return solve(*arguments)

    monkeypatch.setattr("irpar.passes.store.for_limit.solve", search)
    text = str(layers(6, 128)).replace('"d"=1', '"d"=2')
    head, _, program = text.partition("graph local @g")
    both = f"{head}graph local @g{program}\ngraph local @g1{program.replace('ranks [0]', 'ranks [1]')}"
    module = read(both)
    held = peak_bytes(module)
    run_pipeline(f"store{{auto=true, limit-gb={held * 0.4e-9}, seconds=0}}", module)
    assert len(searches) == 1
    one, other = (len(list(copies_of(graph))) for graph in module.graphs)
    assert one == other > 0
    assert peak_bytes(module) <= held * 0.4


def test_seconds_are_those_of_all_tries_together(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def search(*arguments: Any) -> FoundMoves:
        given.append(arguments[-1])
        return solve(*arguments[:-1], 0)

    monkeypatch.setattr("irpar.passes.store.for_limit.solve", search)
    monkeypatch.setattr("irpar.passes.store.for_limit.held_after", lambda *_: 10**9)
    module = layers(6, 128)
    with pytest.raises(IrparError, match="a rank holds"):
        run_pipeline(f"store{{auto=true, limit-gb={peak_bytes(module) * 0.9e-9}, seconds=3}}", module)
    first, second = given
    assert 0 <= second < first <= 3


def test_where_host_and_disk_have_little_room_the_largest_choose_first() -> None:
    text = """
    mesh @m = ["d"=1]
    graph local @g(%x: f32[8, 8]) -> (%y) opset 21 ranks [0] {
      %w0 = constant : f32[8, 16] data("w0", 0, 512) from "w0"
      %w1 = constant : f32[16, 24] data("w1", 0, 1536) from "w1"
      %w2 = constant : f32[24, 8] data("w2", 0, 768) from "w2"
      %a = MatMul(%x, %w0) : f32[8, 16]
      %b = MatMul(%a, %w1) : f32[8, 24]
      %y = MatMul(%b, %w2) : f32[8, 8]
    }
    """
    room = "host-gb=1.6e-6, disk-gb=1.3e-6"  # With w0 on the host, w1 has room nowhere.
    module = run(f"store{{weights=auto, limit-gb=2.9e-6, threshold-kb=0, seconds=0, {room}}}", text)
    assert {value.name: value.memory for value in module.graph.constants if value.memory != "device"} == {
        "w0": "disk",
        "w1": "host",
        "w2": "disk",
    }


def test_what_fits_stays() -> None:
    module = layers(3, 16)
    before = str(module)
    records = run_pipeline("store{auto=true, limit-gb=1}", module)
    assert records[0].notes[0].endswith("which fits")
    module.memory_limit = None
    assert str(module) == before


def test_no_limit_is_above_that_of_the_module() -> None:
    module = layers(6, 128)
    held = peak_bytes(module)
    module.memory_limit = held // 2
    run_pipeline(f"store{{auto=true, limit-gb={held / 1e9}, seconds=0}}", module)
    assert peak_bytes(module) <= held // 2 == module.memory_limit


def test_a_bound_that_is_next_to_nothing_is_one() -> None:
    with pytest.raises(StoreError, match="host-gb allows 1e-09 GB"):
        run_pipeline("store{weights=host, threshold-kb=0, host-gb=4e-10}", read(CHAIN))


@pytest.mark.parametrize("options", ["auto=true, limit-gb=1e300", "weights=host, pin-gb=1e300, host-gb=1e300"])
def test_a_bound_above_all_bounds(options: str) -> None:
    module = layers(3, 16)
    run_pipeline(f"store{{{options}, threshold-kb=0}}", module)
    assert not list(copies_of(module.graph))


UNEVEN = """
mesh @m = ["d"=2]
graph local @g(%x: f32[2, 4] of [2, 4]) -> (%y) opset 21 ranks [1] {
  %w = constant : f32[4, 5] of [4, 11@d] data("w", 96, 80) from "w"
  %y = MatMul(%x, %w) : f32[2, 5] of [2, 11@d]
}
graph local @h(%x: f32[2, 4] of [2, 4]) -> (%y) opset 21 ranks [0] {
  %w = constant : f32[4, 6] of [4, 11@d] data("w", 0, 96) from "w"
  %y = MatMul(%x, %w) : f32[2, 6] of [2, 11@d]
}
"""


def test_the_least_limit_is_that_of_the_rank_that_holds_most() -> None:
    with pytest.raises(StoreError, match=r"a rank holds 176 bytes .* the limit is 20") as told:
        run_pipeline("store{weights=auto, threshold-kb=0, limit-gb=2e-8}", read(UNEVEN))
    assert told.value.do.endswith("limit-gb=0.000000176")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("", "store has nothing to move"),
        ("weights=host, prefetch=-1", "prefetch=-1"),
        ("weights=host, threshold-kb=-1", "threshold-kb=-1"),
        ("weights=host, limit-gb=inf", r"limit-gb=inf(.|\n)*give a finite number of 0 or more; 0, or nothing, is what"),
        ("weights=host, host-gb=inf", r"host-gb=inf(.|\n)*0, or nothing, is no bound"),
        ("auto=true, pin-gb=1, limit-gb=1", "store with pin-gb and auto"),
        ("auto=true", "store with auto needs a limit"),
        ("weights=host, prefetch=0, threshold-kb=0, limit-gb=1e-8", r"a rank holds \d+ bytes .* the limit is 10"),
        (
            "weights=host, threshold-kb=0, host-gb=1e-8",
            r"192 bytes .* are to lie in host memory, host-gb allows 1e-08 GB",
        ),
        ("weights=disk, threshold-kb=0, disk-gb=1e-8", "are to lie on disk, disk-gb allows"),
    ],
)
def test_what_cannot_be_is_refused(options: str, told: str) -> None:
    module = read(CHAIN)
    module.network = "bytes"
    with pytest.raises(IrparError, match=told):
        run_pipeline(f"store{{{options}}}", module)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("state=disk, threshold-kb=0", "state=disk: the program has no state; steps of training have some"),
        ("weights=host", "weights=host: all are smaller than threshold-kb=1, the largest has 64 bytes"),
        ("weights=host, state=disk, threshold-kb=0", "state=disk: the program has no state"),
    ],
)
def test_what_there_is_nothing_of_is_told(options: str, told: str) -> None:
    (record,) = run_pipeline(f"store{{{options}}}", read(CHAIN))
    assert record.notes[-1].startswith(told)


def test_a_limit_that_nothing_fits_says_the_least_that_does() -> None:
    module = layers(6, 128)
    with pytest.raises(StoreError, match=r"a rank holds [\d,]+ bytes") as caught:
        run_pipeline("store{auto=true, limit-gb=1e-6, seconds=0}", module)
    least = float(str(caught.value.do).rpartition("=")[2])
    run_pipeline(f"store{{auto=true, limit-gb={least}, seconds=0}}", module)
    assert peak_bytes(module) <= least * 1e9 < 1.01 * peak_bytes(module)


def test_global_view_is_refused() -> None:
    with pytest.raises(IrparError, match="store needs the local view") as told:
        run_pipeline("store{weights=host}", irpar.load(models.build("mlp")))
    assert "store{weights=host}" in str(told.value)
