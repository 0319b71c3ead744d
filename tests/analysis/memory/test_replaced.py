"""What is written over the state that it replaces."""

import pytest

from irpar.analysis.memory.liveness import held_bytes, peak, uses_of
from irpar.analysis.memory.replaced import let_go, reads_of, update_of, written_over
from irpar.ir import Graph, parse_module

STEP = """
graph @step(%x: f32[256], state parameter %w: f32[256], state moment of "w" %m: f32[256]) -> (%loss, %m_1 replaces %m, %w_1 replaces %w) opset 21 {
  %k = constant : f32[] 0.5
  %y = Mul(%x, %w) {| phase=forward} : f32[256]
  %loss = ReduceSum(%y) {keepdims=0 | phase=forward} : f32[]
  %g = Neg(%x) {| phase=backward} : f32[256]
  %h = Mul(%m, %k) {| phase=optimizer} : f32[256]
  %m_1 = Add(%h, %g) {| phase=optimizer} : f32[256]
  %w_1 = Sub(%w, %m_1) {| phase=optimizer} : f32[256]
}
"""


def step(*changes: tuple[str, str], text: str = STEP) -> Graph:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_module(text).graph


def names(graph: Graph) -> dict[str, str]:
    return {new.name: old.name for new, old in written_over(graph).items()}


def test_results_lie_where_nothing_is_read_any_more() -> None:
    graph = step()
    first = update_of(graph)
    assert first is not None
    assert first.result.name == "h"
    assert names(graph) == {"m_1": "m", "w_1": "w"}
    # w, m and g, and h, while h is made, and loss.
    assert peak(graph).activation_bytes == 4 * 1024 + 4


LAST = "  %w_1 = Sub(%w, %m_1) {| phase=optimizer} : f32[256]\n"
FIRST = "  %y = Mul"
WITH_LATER = ("-> (%loss", "-> (%loss, %late")


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([WITH_LATER, (LAST, LAST + "  %late = Neg(%w) : f32[256]\n")], {"m_1": "m"}),
        ([WITH_LATER, (LAST, LAST + "  %late = Neg(%v) : f32[16, 16]\n"), (FIRST, "  %v = Reshape(%w, %s) : f32[16, 16]\n" + FIRST), ("  %k =", "  %s = constant : i64[2] [16, 16]\n  %k =")], {"m_1": "m"}),
        ([("-> (%loss", "-> (%loss, %w")], {"m_1": "m"}),
        ([WITH_LATER, (LAST, LAST + "  %late = Identity(%w_1) : f32[256]\n")], {"m_1": "m"}),
        ([WITH_LATER, (LAST, LAST + "  %late = Neg(%w_1) : f32[256]\n")], {"m_1": "m", "w_1": "w"}),
        ([("%w_1 = Sub(%w, %m_1)", "%w_1 = Identity(%m_1)")], {}),
        ([("f32", "f16")], {}),
        ([("phase=optimizer", "phase=backward")], {}),
        ([("-> (%loss", '-> (%loss as "other"')], {}),
    ],
    ids=["read later", "a view read later", "given back", "a view given back", "new value read", "a kernel that may give a view", "f16", "no update", "no loss"],
)  # fmt: skip
def test_else_there_is_a_second_copy(changes: list[tuple[str, str]], left: dict[str, str]) -> None:
    assert names(step(*changes)) == left


LOOPED = """
graph @step(%xs: f32[4, 256], %start: f32[256], %c: bool[], state parameter %w: f32[256]) -> (%loss, %w_1 replaces %w) opset 21 {
  %g = Scan(%start, %xs) {body=graph(%sum: f32[256], %x: f32[256]) -> (%given) {
    %h = Mul(%x, %w) {| phase=forward} : f32[256]
    %given = Add(%sum, %h) {| phase=backward} : f32[256]
  }, num_scan_inputs=1 | phase=backward} : f32[256]
  %loss = ReduceSum(%g) {keepdims=0 | phase=forward} : f32[]
  %w_1 = Sub(%w, %g) {| phase=optimizer} : f32[256]
}
"""
SUM = "%given = Add(%sum, %h) {| phase=backward}"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ([], {"w_1": "w"}),
        ([(SUM, "%given = Identity(%w)")], {}),
        ([("Scan(%start", "Scan(%w")], {}),
        ([(SUM, "%v = Identity(%w) : f32[256]\n    %given = Identity(%v)")], {}),
        ([(SUM, "%given = If(%c) {then_branch=graph() -> (%w) {\n    }, else_branch=graph() -> (%n) {\n      %n = Neg(%h) : f32[256]\n    }}")], {}),
        ([(SUM, "%given = If(%c) {then_branch=graph() -> (%m) {\n      %m = Neg(%w) : f32[256]\n    }, else_branch=graph() -> (%n) {\n      %n = Neg(%h) : f32[256]\n    }}")], {"w_1": "w"}),
    ],
    ids=["computed", "given on", "where it starts", "a view of a view", "of one branch", "computed in branches"],
)  # fmt: skip
def test_what_a_loop_gives_may_be_a_view_of_what_its_body_gives_on(
    changes: list[tuple[str, str]], found: dict[str, str]
) -> None:
    assert names(step(*changes, text=LOOPED)) == found


def test_what_nodes_read_is_found_once_for_all_orders() -> None:
    graph = step(WITH_LATER, (LAST, LAST + "  %late = Neg(%w) : f32[256]\n"))
    reads = reads_of(graph)
    assert uses_of(graph, reads) == uses_of(graph)
    assert names(graph) == {"m_1": "m"}
    *others, update, late = graph
    graph.reorder([*others, late, update])
    assert uses_of(graph, reads) == uses_of(graph)
    assert names(graph) == {"m_1": "m", "w_1": "w"}


@pytest.mark.parametrize(("operand", "held"), [("%w", 4), ("%h", 3)])
def test_the_old_value_goes_when_its_last_reader_has_run_or_the_update_begins(operand: str, held: int) -> None:
    graph = step(("%w_1 = Sub(%w, %m_1) {", f'%w_1 = Einsum({operand}, %m_1) {{equation="i,i->i" '))
    assert {old.name: new.name for old, new in let_go(graph).items()} == {"w": "w_1", "m": "m_1"}
    at = {node.result.name: nbytes for node, nbytes in held_bytes(graph) if node is not None}
    # h, g and m_1, and w where it is read later; then one of w and h, m_1 and w_1; and the loss. m is gone.
    assert (at["m_1"], at["w_1"]) == (held * 1024 + 4, 3 * 1024 + 4)


MIXED = """
graph @step(%x: f32[256], state parameter %w: bf16[256], state master of "w" %m: f32[256]) -> (%loss, %m_1 replaces %m, %w_1 replaces %w) opset 21 {
  %wide = Cast(%w) {to=1 | phase=forward} : f32[256]
  %y = Mul(%x, %wide) {| phase=forward} : f32[256]
  %loss = ReduceSum(%y) {keepdims=0 | phase=forward} : f32[]
  %m_1 = Sub(%m, %x) {| phase=optimizer} : f32[256]
  %w_1 = Cast(%m_1) {to=16 | phase=optimizer} : bf16[256]
}
"""


def test_narrow_parameters_lie_where_they_were_though_the_update_reads_masters_alone() -> None:
    graph = step(text=MIXED)
    assert names(graph) == {"m_1": "m", "w_1": "w"}
    # x, m, wide and y, and w.
    assert peak(graph).activation_bytes == 4 * 1024 + 512


def test_where_ranks_meet_in_between_memory_is_handed_on() -> None:
    text = """
    mesh @m = ["dp"=2]
    graph local @step(%x: f32[4] of [8@dp], state parameter %w: f32[4] of [8@dp]) -> (%loss, %w_1 replaces %w) opset 21 ranks [0, 1] {
      %k = constant : f32[] of [] replicated 0.5
      %loss = ReduceSum(%k) {keepdims=0 | phase=forward} : f32[] of [] replicated
      %d = Mul(%w, %k) {| phase=optimizer} : f32[4] of [8@dp]
      %n = ReduceSum(%x) {keepdims=0 | phase=optimizer} : f32[] of [] partial(sum: dp)
      %s = irpar.AllReduce(%n) {axes=["dp"], reduce="sum", id=0 | phase=optimizer} : f32[] of [] replicated
      %w_1 = Mul(%d, %s) {| phase=optimizer} : f32[4] of [8@dp]
    }
    """
    assert names(parse_module(text).graph) == {"w_1": "w"}


@pytest.mark.parametrize(("place", "found"), [("before", {"w_1": "w"}), ("after", {})])
def test_what_is_in_flight_is_read_until_the_wait(place: str, found: dict[str, str]) -> None:
    wait = """
      %g = irpar.Wait(%f) {id=0 | phase=optimizer} : f32[4] of [8@dp]
      %late = Neg(%g) : f32[4] of [8@dp]"""
    text = f"""
    mesh @m = ["dp"=2]
    graph local @step(%x: f32[4] of [8@dp], state parameter %w: f32[4] of [8@dp]) -> (%loss, %w_1 replaces %w, %late) opset 21 ranks [0, 1] {{
      %k = constant : f32[] of [] replicated 0.5
      %loss = ReduceSum(%k) {{keepdims=0 | phase=forward}} : f32[] of [] replicated
      %f = irpar.AllReduceStart(%w) {{axes=["dp"], reduce="sum", id=0 | phase=optimizer}} : inflight<f32[4]> of [8@dp]
      {wait if place == "before" else ""}
      %w_1 = Mul(%x, %k) {{| phase=optimizer}} : f32[4] of [8@dp]
      {wait if place == "after" else ""}
    }}
    """
    assert names(parse_module(text).graph) == found
