"""Passes that only make programs faster keep to the memory limit of the module."""

import time

import pytest

from irpar.analysis.memory.limit_search import MOST_TRIES, search_within
from irpar.analysis.memory.liveness import peak_bytes
from irpar.ir import Module, clone_module
from irpar.ir.compare import same_module
from irpar.ir.text.files import parse_module, print_module
from irpar.ir.text.lexer import TextError
from irpar.pass_manager import PassManager
from irpar.passes.fuse_communication.limit import within_limit
from irpar.passes.fuse_communication.transfers import Bucket
from tests.budget import every

SENT_TWICE = """
    module {network="h100-nvlink-ib"%s}
    mesh @m = ["tp"=2]
    graph local @g(%%a: f32[4], %%b: f32[2, 6]) -> (%%c, %%d) opset 21 ranks [0, 1] {
      %%c = irpar.AllReduce(%%a) {axes=["tp"], reduce="sum", id=0} : f32[4]
      %%d = irpar.AllReduce(%%b) {axes=["tp"], reduce="sum", id=1} : f32[2, 6]
    }
"""


def loaded(limit: int | None = None) -> Module:
    return parse_module(SENT_TWICE % ("" if limit is None else f", memory_limit={limit}"))


def merged(module: Module, pipeline: str = "fuse-communication") -> tuple[int, tuple[str, ...]]:
    """How many collectives there are after a pipeline, and what it noted."""
    result = PassManager.parse(pipeline).run(module)
    return sum(node.op_type == "AllReduce" for node in module.graph), result.notes


def needed() -> tuple[int, int]:
    """What a rank holds before and after merging, by liveness."""
    module = loaded()
    before = peak_bytes(module)
    merged(module)
    return before, peak_bytes(module)


def test_merging_takes_memory():
    before, after = needed()
    assert before == 4 * (4 + 12 + 12)  # What the first gave, and what the second takes and gives
    assert after > before


def test_a_pass_that_would_break_the_limit_does_not_act():
    _, after = needed()
    module = loaded(after - 1)
    kept = clone_module(module)
    count, notes = merged(module)
    assert count == 2
    assert notes == (
        f"fuse-communication: not done: a rank would hold {after:,} bytes, the memory limit is {after - 1:,}",
    )
    assert same_module(module, kept) is None


def test_a_pass_acts_within_the_limit():
    assert merged(loaded(needed()[1])) == (1, ())


def test_a_pass_does_not_add_to_what_is_above_the_limit():
    assert merged(loaded(1))[0] == 2


def many(limit: int | None = None) -> Module:
    """Two small collectives beside large numbers, and four large ones, each with its reader."""
    lines = [f"  %p{n} = Neg(%x{n}) : f32[{size}]" for n, size in enumerate(SIZES)]
    for n, size in enumerate(SIZES):
        reduce = "max" if size == 2 else "sum"
        lines.append(f'  %y{n} = irpar.AllReduce(%p{n}) {{axes=["tp"], reduce="{reduce}", id={n}}} : f32[{size}]')
    lines += [f"  %z{n} = Relu(%y{n}) : f32[{size}]" for n, size in enumerate(SIZES)]
    inputs = ", ".join(f"%x{n}: f32[{size}]" for n, size in enumerate(SIZES))
    outputs = ", ".join(f"%z{n}" for n in range(len(SIZES)))
    facts = "" if limit is None else f", memory_limit={limit}"
    head = f'module {{network="h100-nvlink-ib"{facts}}}\nmesh @m = ["tp"=2]\n'
    body = "\n".join(lines)
    return parse_module(f"{head}graph local @g({inputs}) -> ({outputs}) opset 21 ranks [0, 1] {{\n{body}\n}}\n")


SIZES = (2, 2, 1000, 1000, 1000, 1000)


def test_merges_that_fit_are_done_and_others_are_not():
    """Under every limit: what is held stays below it, and more memory never leaves more launches."""
    module = many()
    alone, counts, told = peak_bytes(module), set(), set()
    merged(module)
    most = peak_bytes(module)
    assert most > alone
    before = None
    for limit in (*every(2, range(alone - 50, most, 50)), most):
        module = many(limit)
        count, notes = merged(module)
        assert peak_bytes(module) <= max(limit, alone)
        assert before is None or count <= before
        before = count
        counts.add(count)
        told.update(note.split(":")[1] for note in notes)
    assert counts == {2, 3, 4, 5, 6}
    assert any("1 more would be merged, but for" in note for note in told)


def test_what_was_not_tried_is_not_laid_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("irpar.passes.fuse_communication.limit.MOST_TRIES", 2)
    limit = peak_bytes(many())
    count, notes = merged(many(limit))  # The first try is of all, the second of the four large ones.
    assert count == 6
    assert notes == (
        f"fuse-communication: 1 more would be merged, but for the memory limit of {limit:,} bytes",
        "fuse-communication: 3 more may fit the memory limit, but 2 ways were tried before",
    )


@pytest.mark.parametrize("limit", [1, 10**9])
def test_merges_without_an_order_are_told_as_that(limit: int) -> None:
    """Some of the merges, and all of them, above the limit or below it."""
    module = many(limit)
    found = [[Bucket((0, 1)), Bucket((2, 3, 4, 5))]]
    kept, notes = within_limit(module, found, lambda _, merges: merges == [[Bucket((0, 1))]])
    assert kept == [[Bucket((0, 1))]]
    assert notes == ("3 more would be merged, but ranks would come to them in different orders",)
    kept, notes = within_limit(module, found, lambda *_: False)
    assert kept == [[]]
    assert notes == ("4 more would be merged, but ranks would come to them in different orders",)


def test_what_takes_no_memory_is_done_above_the_limit():
    module = parse_module(
        """
        module {memory_limit=1}
        mesh @m = ["tp"=2]
        graph local @g(%x: f32[8]) -> (%c) opset 21 ranks [0, 1] {
          %a = Exp(%x) : f32[8]
          %b = Exp(%x) : f32[8]
          %c = Add(%a, %b) : f32[8]
        }
        """
    )
    merged(module, "cse")
    assert len(list(module.graph)) == 2


def test_the_text_form_has_the_limit():
    module = loaded(5000)
    assert module.memory_limit == 5000
    assert parse_module(print_module(module).text).memory_limit == 5000
    assert clone_module(module).memory_limit == 5000
    assert "memory_limit" in (same_module(module, loaded(5001)) or "")
    assert "memory_limit" not in print_module(loaded()).text


@pytest.mark.parametrize("wrong", ["-1", "1.5", '"24 GB"'])
def test_a_limit_is_a_number_of_bytes(wrong):
    with pytest.raises(TextError, match="bytes that a rank may hold"):
        parse_module(SENT_TWICE % f", memory_limit={wrong}")


# -- searches ----------------------------------------------------------------------------------------------------------


def searched(limit: int, more: int, fits_from: int = 0, finds_from: int = 0) -> tuple[int | None, int, list[int]]:
    """A search whose programs hold more than it thinks: what it found, what was held, and for which limits."""
    asked: list[int] = []

    def search(limit: int, seconds: float) -> tuple[int, bool] | None:
        assert 0 < seconds <= 60
        asked.append(limit)
        return (max(limit, fits_from), limit >= fits_from) if limit >= finds_from else None

    found, held = search_within(limit, time.monotonic() + 60, search, lambda found: found + more)
    return found, held, asked


def test_a_limit_is_lowered_by_what_is_held_too_much():
    assert searched(100, 0) == (100, 100, [100])
    assert searched(100, 7) == (93, 100, [100, 93])


def test_what_does_not_fit_is_not_searched_for_less():
    assert searched(100, 7, fits_from=97) == (None, 104, [100, 93])
    assert searched(100, 7, finds_from=97) == (None, 107, [100, 93])
    assert searched(100, 7, finds_from=101) == (None, 0, [100])


def test_lower_limits_end_somewhere():
    held = iter(range(200, 100, -1))
    found, least = search_within(100, time.monotonic(), lambda asked, _: (asked, True), lambda _: next(held))
    assert (found, least) == (None, 200 - MOST_TRIES + 1)
