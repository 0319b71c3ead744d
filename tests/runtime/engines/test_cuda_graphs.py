"""CUDA graphs of the engine cupy, on a stand-in that replays what was captured on the memory as it is then."""

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.training_facts import facts_of
from irpar.onnx_io import to_module
from irpar.runtime.engines import cupy as engine
from irpar.runtime.engines.cuda_graphs import piece
from irpar.runtime.engines.cuda_graphs.lent_places import LentPlaces
from irpar.runtime.engines.device_arrays import PlacedKernel
from irpar.runtime.engines.lanes import RankStream
from irpar.runtime.engines.operation import Environment
from irpar.runtime.errors import NodeError
from irpar.runtime.executor import Executor
from irpar.training.trainer import Trainer
from irpar.verification.inputs import random_inputs
from tests import strict_graphs
from tests.runtime.devices import strict_device
from tests.runtime.engines.compiled import Compiled
from tests.runtime.engines.test_cupy import FAMILIES, DeviceGroup
from tests.strict_device import STRICT, StrictArray
from tests.training.programs import batch, classifier, same


def compiled(text: str, *, keep_on_device: bool = False, captures: bool = True, lends: bool = False) -> Compiled:
    """A program of one segment on the stand-in."""
    return Compiled(text, placed, on_host, keep_on_device=keep_on_device, captures=captures, lends=lends)


def placed(array: np.ndarray) -> StrictArray:
    """An array of the stand-in."""
    return StrictArray(array.copy())


def on_host(array: Any) -> np.ndarray:
    """What came out, as numpy has it."""
    return array._array if isinstance(array, StrictArray) else array


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Without a device; nodes are not fused, so that they can be counted."""
    monkeypatch.setattr(engine, "fused", lambda segment, constants: (segment, frozenset()))
    with strict_device():
        yield


@pytest.fixture
def launches() -> Callable[[], int]:
    """How many graphs were launched since it was asked last."""
    last = strict_graphs.Graph.launches

    def count() -> int:
        nonlocal last
        before, last = last, strict_graphs.Graph.launches
        return last - before

    return count


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Floats that no two seeds share."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


CHAIN = """
    graph @chain(%x: f32[n, 8]) -> (%y) opset 21 {
      %two = constant : f32[1] [2]
      %a = Add(%x, %two) : f32[n, 8]
      %b = Exp(%a) : f32[n, 8]
      %c = Sub(%b, %x) : f32[n, 8]
      %y = Tanh(%c) : f32[n, 8]
    }
"""


@pytest.mark.parametrize("on_device", [False, True])
def test_the_first_run_warms_up_the_second_captures_later_ones_replay(
    on_device: bool, launches: Callable[[], int]
) -> None:
    chain = compiled(CHAIN, keep_on_device=on_device)
    for run in range(5):
        chain.check(numbers(3, 8, seed=run), on_device=on_device)
        assert launches() == (run > 0)
    assert chain.captured == (1, 4, 0)


def test_results_that_stay_on_the_device_outlive_later_replays() -> None:
    chain = compiled(CHAIN, keep_on_device=True)
    given = [numbers(3, 8, seed=run) for run in range(5)]
    found = [chain.run(array, on_device=True)[0] for array in given]
    for array, result in zip(given, found, strict=True):
        np.testing.assert_array_equal(result._array, chain.expected(array)[0])


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each copy that a rank lets its stream do from one place of its device to another."""
    found: list[int] = []
    copy = RankStream.copy

    def counted(self: RankStream, target: int, source: int, size: int, stream: Any) -> None:
        found.append(size)
        copy(self, target, source, size, stream)

    monkeypatch.setattr(RankStream, "copy", counted)
    return found


VIEWED = """
    graph @viewed(%x: f32[4, 8]) -> (%y, %z) opset 21 {
      %shape = constant : i64[1] [32]
      %a = Neg(%x) : f32[4, 8]
      %b = Exp(%a) : f32[4, 8]
      %y = Reshape(%b, %shape) : f32[32]
      %z = Tanh(%a) : f32[4, 8]
    }
"""


@pytest.mark.parametrize("text", [CHAIN.replace("[n, 8]", "[4, 8]"), VIEWED], ids=["chain", "viewed"])
@pytest.mark.parametrize("lends", [False, True], ids=["owned", "borrowed"])
def test_results_are_copied_once_and_those_that_are_borrowed_never(text: str, lends: bool, copies: list[int]) -> None:
    program = compiled(text, keep_on_device=True, lends=lends)
    arena = program.engine.arena(0, program.device.arena_bytes)
    given = [numbers(4, 8, seed=run) for run in range(5)]
    found = []
    for array in given:
        copies.clear()
        found.append(program.run(array, on_device=True, arena=arena))
        for result, expected in zip(found[-1], program.expected(array), strict=True):
            np.testing.assert_array_equal(result._array, expected)
    results = len(found[-1])
    assert copies == [given[0].nbytes] * (1 if lends else 1 + results)  # The input is always copied.
    again = zip(found[-2], program.expected(given[-1] if lends else given[-2]), strict=True)
    for result, expected in again:
        np.testing.assert_array_equal(result._array, expected)


CUT = """
    graph @cut(%x: f32[4, 8], %limit: f32[8]) -> (%y, %n, %z) opset 21 {
      %zero = constant : i64[] [0]
      %a = Neg(%x) : f32[4, 8]
      %b = Exp(%a) : f32[4, 8]
      %y = CumSum(%b, %zero) : f32[4, 8]
      %m = Greater(%limit, %limit) : bool[8]
      %n = NonZero(%m) : i64[1, n]
      %c = Tanh(%a) : f32[4, 8]
      %z = Exp(%c) : f32[4, 8]
    }
"""


def test_results_of_pieces_are_copied_once(copies: list[int]) -> None:
    """Those of kernels too that write where they like, which the next piece writes over."""
    program = compiled(CUT, keep_on_device=True)
    arena, found = program.engine.arena(0, program.device.arena_bytes), []
    given = [(numbers(4, 8, seed=run), numbers(8)) for run in range(5)]
    for arrays in given:
        copies.clear()
        found.append(program.run(*arrays, on_device=True, arena=arena))
    assert len(program.engine.notes) == 1
    assert copies.count(128) == 3  # The input, and two results.
    (runner,) = program.device._runners.values()
    pieces = [step for step in runner._steps if isinstance(step, piece.Piece)]
    assert {value.name for one in pieces for value in one.taken} == {"y", "z"}  # No graph copies these.
    for arrays, results in zip(given, found, strict=True):
        for result, expected in zip(results, program.expected(*arrays), strict=True):
            np.testing.assert_array_equal(on_host(result), expected)


def test_whoever_borrows_has_an_arena() -> None:
    """Though nothing has a place in it: graphs of runs that go on at once write to places of their own."""
    assert compiled(CHAIN, keep_on_device=True).device.arena_bytes == 0
    program = compiled(CHAIN, keep_on_device=True, lends=True)
    assert program.device.arena_bytes == 1
    arenas = [program.engine.arena(0, 1) for _ in range(2)]
    for run in range(3):
        given = [numbers(3, 8, seed=2 * run + place) for place in range(2)]
        found = [program.run(array, on_device=True, arena=arena)[0] for array, arena in zip(given, arenas, strict=True)]
        for array, result in zip(given, found, strict=True):
            np.testing.assert_array_equal(result._array, program.expected(array)[0])


LOGITS = """
    graph @logits(%x: f16[2, 3, 8], %w: f16[8, 5], %b: f16[5]) -> (%y, %z, %u) opset 21 {
      %a = Neg(%x) : f16[2, 3, 8]
      %y = MatMul(%a, %w) : f16[2, 3, 5]
      %z = irpar.FusedMatMul(%a, %w, %b) : f16[2, 3, 5]
      %u = irpar.FusedMatMul(%a, %w, %b, %y) : f16[2, 3, 5]
    }
"""


@pytest.mark.parametrize("lends", [False, True], ids=["owned", "borrowed"])
def test_rows_of_products_that_leave_may_lie_further_apart(lends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where something is added that lies as the product does."""
    asked: list[int] = []
    monkeypatch.setattr(piece.padding, "pitched", lambda *given: asked.append(given[-1]))
    program = compiled(LOGITS, keep_on_device=True, lends=lends)
    given = [array.astype(np.float16) for array in (numbers(2, 3, 8), numbers(8, 5, seed=1), numbers(5, seed=2))]
    for _ in range(3):
        program.check(*given, on_device=True, tolerance=1e-2)
    assert asked == [8, 8, 0]


def test_cuda_kernels_write_results_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the kernel for all devices may give views: of a cache, say."""
    asked: list[str] = []
    room = piece.Piece._room_of
    monkeypatch.setattr(
        piece.Piece, "_room_of", lambda self, node, value: asked.append(value.name) or room(self, node, value)
    )
    monkeypatch.setattr(PlacedKernel, "writes_out", property(lambda self: self._node.op_type == "Reshape"))
    viewed = compiled(VIEWED, keep_on_device=True)
    for run in range(3):
        viewed.check(numbers(4, 8, seed=run), on_device=True)
    assert asked == ["y", "z"]


def test_a_copy_of_rows_that_lie_further_apart_has_none_between_them() -> None:
    program = compiled(CHAIN, keep_on_device=True)
    program.run(numbers(3, 8), on_device=True)
    (runner,) = program.device._runners.values()
    lane = program.engine.lanes._lanes[0]
    apart = StrictArray(numbers(2, 3, 8).astype(np.float16)[..., :5])
    copy = runner._copied(apart, lane, lane.stream)
    assert copy.flags.c_contiguous
    np.testing.assert_array_equal(copy._array, apart._array)


def test_inputs_and_outputs_that_lie_on_the_host_have_places_in_the_arena() -> None:
    chain = compiled(CHAIN.replace("[n, 8]", "[3, 8]"))
    arena = chain.engine.arena(0, chain.device.arena_bytes)
    for run in range(4):
        chain.check(numbers(3, 8, seed=run), arena=arena)
    assert chain.captured == (1, 4, 0)
    assert chain.engine.lanes._lanes[0].lent == {id(piece.memory_of(arena.memory))}  # Replays write nowhere else.


def test_inputs_of_any_layout_are_copied_in() -> None:
    chain = compiled(CHAIN, keep_on_device=True)
    for run in range(4):
        array = numbers(8, 3, seed=run)
        (found,) = chain.device.run([StrictArray(array).T])
        np.testing.assert_array_equal(found._array, chain.expected(array.T)[0])


def test_graphs_are_switched_off() -> None:
    chain = compiled(CHAIN, captures=False)
    for run in range(3):
        chain.check(numbers(3, 8, seed=run))
    assert chain.captured == (0, 0, 4)


def test_an_environment_variable_switches_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.CUDA_GRAPHS, "0")
    chain = compiled(CHAIN)
    for run in range(3):
        chain.check(numbers(3, 8, seed=run))
    assert chain.captured == (0, 0, 4)


TOKENS = """
    graph @tokens(%ids: i64[2, 3], %mask: bool[2, 3], %length: i64[]) -> (%y, %last) opset 21 {
      %table = constant : f32[4, 2] [0.5, 1, 2, 3, 4, 5, 6, 7]
      %e = Gather(%table, %ids) {axis=0} : f32[2, 3, 2]
      %zero = constant : f32[1] [0]
      %axis = constant : i64[1] [2]
      %m = Unsqueeze(%mask, %axis) : bool[2, 3, 1]
      %w = Where(%m, %e, %zero) : f32[2, 3, 2]
      %l = Cast(%length) {to=1} : f32[]
      %y = Div(%w, %l) : f32[2, 3, 2]
      %one = constant : i64[] [1]
      %last = Sub(%length, %one) : i64[]
    }
"""


def test_tokens_masks_and_lengths_are_never_baked_in(launches: Callable[[], int]) -> None:
    tokens = compiled(TOKENS)
    for run in range(6):
        random = np.random.default_rng(run)
        tokens.check(random.integers(0, 4, (2, 3)), random.random((2, 3)) < 0.5, np.asarray(run + 1))
        assert launches() == (run > 0)
    assert tokens.captured == (1, 6, 0)


SIZED = """
    graph @sized(%x: f32[4, 8], %n: i64[1]) -> (%y, %m) opset 21 {
      %zero = constant : i64[1] [0]
      %one = constant : i64[1] [1]
      %m = Add(%n, %one) : i64[1]
      %e = Exp(%x) : f32[4, 8]
      %s = Slice(%e, %zero, %m) : f32[k, 8]
      %t = Tanh(%s) : f32[k, 8]
      %y = Neg(%t) : f32[k, 8]
    }
"""


def test_numbers_that_the_host_reads_are_part_of_the_key(launches: Callable[[], int]) -> None:
    sized = compiled(SIZED)
    for run, size in enumerate([1, 1, 2, 2, 1, 2]):
        sized.check(numbers(4, 8, seed=run), np.array([size]))
        assert launches() == (run in (1, 3, 4, 5))


def test_numbers_that_change_all_the_time_split_the_graph(launches: Callable[[], int]) -> None:
    text = """
        graph @adam(%x: f32[8], %g: f32[8], %v: f32[8], %s: f32[8], %step: i64[]) -> (%y, %a, %b) opset 21, "ai.onnx.preview.training" 1 {
          %rate = constant : f32[] [0.1]
          %e = Exp(%x) : f32[8]
          %f = Neg(%e) : f32[8]
          %p, %a, %b = ai.onnx.preview.training.Adam(%rate, %step, %f, %g, %v, %s) : f32[8], f32[8], f32[8]
          %q = Exp(%p) : f32[8]
          %y = Neg(%q) : f32[8]
        }
    """
    adam = compiled(text)
    for step in range(piece.CHANGES + 6):
        arrays = [np.abs(numbers(8, seed=step * 4 + place)) for place in range(4)]
        adam.check(*arrays, np.asarray(step))
    launches()
    adam.check(*arrays, np.asarray(step + 1))
    assert launches() == 2
    assert adam.captured == (2, 4, 1)
    assert adam.engine.notes == (
        "ai.onnx.preview.training.Adam splits CUDA graphs: the host reads %step for it, whose numbers change (node Adam of %p)",
    )


def test_shapes_that_change_are_captured_again_and_the_oldest_let_go(launches: Callable[[], int]) -> None:
    chain = compiled(CHAIN)
    sizes = range(1, piece.GRAPHS + 2)
    for size in sizes:
        for run in range(2):
            chain.check(numbers(size, 8, seed=size * 10 + run))
    launches()
    for size, replays in ((piece.GRAPHS + 1, 1), (2, 1)):
        chain.check(numbers(size, 8, seed=size))
        assert launches() == replays
    (runner,) = chain.device._runners.values()
    (step,) = runner._steps
    assert [len(graphs) for graphs in step._graphs.values()] == [piece.GRAPHS]
    chain.check(numbers(1, 8, seed=3))  # It was let go, and is captured again.
    assert launches() == 1


def test_shapes_that_never_come_again_are_never_captured(launches: Callable[[], int]) -> None:
    chain = compiled(CHAIN)
    for size in range(1, 30):
        chain.check(numbers(size, 8))
    assert launches() == 0


def test_captures_that_are_not_replayed_end() -> None:
    chain = compiled(CHAIN)
    sizes = [*range(1, piece.GRAPHS + 2)]
    for turn in range(12):
        for size in sizes:
            chain.check(numbers(size, 8, seed=turn))
    (runner,) = chain.device._runners.values()
    (step,) = runner._steps
    assert step._captures == piece.CAPTURES


SPLIT = """
    graph @split(%x: f32[12]) -> (%y) opset 21 {
      %a = Neg(%x) : f32[12]
      %b = Abs(%a) : f32[12]
      %c = Floor(%x) : f32[12]
      %i = NonZero(%c) : i64[1, k] from "/where"
      %axis = constant : i64[1] [0]
      %j = Squeeze(%i, %axis) : i64[k]
      %p = Gather(%b, %j) {axis=0} : f32[k]
      %q = Neg(%p) : f32[k]
      %y = Tanh(%q) : f32[k]
    }
"""


@pytest.mark.parametrize("on_device", [False, True])
def test_a_size_that_numbers_decide_splits_the_graph(on_device: bool, launches: Callable[[], int]) -> None:
    split = compiled(SPLIT, keep_on_device=on_device)
    x = numbers(12)
    x[:4] = [0.5, 2.5, 0.25, -3]
    for run in range(5):
        split.check(np.roll(x, run), on_device=on_device)
        # What follows is of other sizes whenever the numbers are; here it is not.
        assert launches() == (0, 2)[run > 0]
    assert split.captured == (2, 7, 1)
    assert split.engine.notes == (
        "NonZero splits CUDA graphs: the current stream is capturing, so D2H transfers are disallowed (node /where)",
    )
    x[:] = 5
    split.check(x, on_device=on_device)
    assert launches() == 1


def test_a_capture_that_fails_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, launches: Callable[[], int]
) -> None:
    """Also where CUDA itself has given it up; what is left is captured without the node."""
    plain = STRICT.exp

    def refuse(x: object, out: object = None) -> object:
        if strict_graphs.CURRENT.capture is not None:
            strict_graphs.CURRENT.capture.is_invalid = True
            raise strict_graphs.RefusedError("no part of a graph")
        return plain(x, out=out)

    monkeypatch.setattr(STRICT, "exp", refuse)
    text = """
        graph @failing(%x: f32[12]) -> (%y) opset 21 {
          %a = Neg(%x) : f32[12]
          %b = Abs(%a) : f32[12]
          %c = Exp(%b) : f32[12]
          %d = Neg(%c) : f32[12]
          %e = Tanh(%d) : f32[12]
          %f = Exp(%e) : f32[12]
          %y = Neg(%f) : f32[12]
        }
    """
    failing = compiled(text)
    for run in range(4):
        failing.check(numbers(12, seed=run))
        assert launches() == (0, 2)[run > 0]
    assert failing.captured == (2, 4, 3)
    assert failing.engine.notes == ("Exp splits CUDA graphs: no part of a graph (node Exp of %c)",)


def test_a_graph_that_is_refused_as_a_whole_runs_node_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        strict_graphs.end_capture()
        raise strict_graphs.RefusedError("cudaGraphInstantiate")

    monkeypatch.setattr(strict_graphs, "end_capture", strict_graphs.end_capture)
    chain = compiled(CHAIN)
    monkeypatch.setattr(STRICT.cuda.Stream, "end_capture", lambda stream: refuse())
    for run in range(4):
        chain.check(numbers(3, 8, seed=run))
    assert chain.captured == (0, 0, 4)


CROWDED = """
    graph @crowded(%x: f32[64, 64]) -> (%y) opset 21 {
      %axes = constant : i64[1] [0]
      %a = Exp(%x) : f32[64, 64]
      %b = ReduceSum(%a, %axes) {keepdims=1} : f32[1, 64]
      %c = Softmax(%b) {axis=1} : f32[1, 64]
      %d = Mul(%c, %b) : f32[1, 64]
      %e = LogSoftmax(%d) {axis=1} : f32[1, 64]
      %y = Tanh(%e) : f32[1, 64]
    }
"""


@pytest.mark.parametrize("on_device", [False, True])
def test_what_kernels_make_beside_results_lies_where_the_arena_is_free(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that is held is written over: replays find garbage there, and give the same numbers."""
    grown: list[int] = []
    grow = LentPlaces.grow

    def noted(self: LentPlaces, size: int) -> Any:
        grown.append(size)
        return grow(self, size)

    monkeypatch.setattr(LentPlaces, "grow", noted)
    program = compiled(CROWDED, keep_on_device=on_device)
    arena = program.engine.arena(0, program.device.arena_bytes)
    for run in range(5):
        arena.memory[...] = 0xA5
        program.check(numbers(64, 64, seed=run), on_device=on_device, arena=arena, tolerance=1e-6)
    assert program.captured == (1, 6, 0)
    assert len(grown) >= 2
    blocks = program.engine.lanes._lanes[0]._memory._blocks
    # Where inputs and outputs lie elsewhere, what is summed up and the sums fill the arena.
    assert [block.size for block in blocks] == ([256] if on_device else [])


def test_what_kernels_make_beside_results_shares_blocks_that_go_with_the_graphs() -> None:
    """CuPy's pools hold their free blocks until they are told to let go of them, also when nobody has the pools."""
    before = {*strict_graphs.Pool.holding}
    program = compiled(CROWDED, keep_on_device=True)
    arena = program.engine.arena(0, program.device.arena_bytes)
    for run in range(3):
        program.check(numbers(64, 64, seed=run), on_device=True, arena=arena, tolerance=1e-6)
    # One has the blocks: that of the stream.
    assert len(strict_graphs.Pool.holding - before) == 1
    del program, arena
    gc.collect()
    assert not strict_graphs.Pool.holding - before


def test_a_result_that_a_kernel_made_elsewhere_does_not_stay_at_a_lent_place(monkeypatch: pytest.MonkeyPatch) -> None:
    call = PlacedKernel.__call__
    monkeypatch.setattr(
        PlacedKernel, "__call__", lambda self, inputs, environment: call(self, inputs, Environment(environment))
    )
    program = compiled(CROWDED, keep_on_device=False)
    arena = program.engine.arena(0, program.device.arena_bytes)
    for run in range(4):
        program.check(numbers(64, 64, seed=run), arena=arena, tolerance=1e-6)


def test_a_device_without_room_for_a_graph_goes_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise MemoryError("Out of memory allocating 96 bytes.")

    chain = compiled(CHAIN)
    monkeypatch.setattr(piece.Piece, "_room", full)
    for run in range(4):
        chain.check(numbers(3, 8, seed=run))


def test_errors_of_models_are_told_as_without_graphs() -> None:
    text = """
        graph @failing(%x: f32[4], %shape: i64[2]) -> (%y) opset 21 {
          %a = Neg(%x) : f32[4]
          %b = Reshape(%a, %shape) : f32[a, b] from "/shape"
          %y = Neg(%b) : f32[a, b]
        }
    """
    failing = compiled(text)
    for _ in range(3):
        failing.check(numbers(4), np.array([2, 2]))
    for _ in range(3):
        with pytest.raises(NodeError, match="Reshape failed") as raised:
            failing.device.run([numbers(4), np.array([3, 2])])
        assert raised.value.where == "node /shape"
    failing.check(numbers(4, seed=1), np.array([2, 2]))


def test_small_constants_that_a_capture_needs_stay_with_it() -> None:
    """What the host computes of shapes is brought to the device once."""
    text = """
        graph @mean(%x: f32[4, n]) -> (%y) opset 21 {
          %s = Shape(%x) : i64[2]
          %one = constant : i64[] [1]
          %n = Gather(%s, %one) {axis=0} : i64[]
          %f = Cast(%n) {to=1} : f32[]
          %e = Exp(%x) : f32[4, n]
          %y = Div(%e, %f) : f32[4, n]
        }
    """
    mean = compiled(text)
    gc.freeze()  # What other tests left need not be looked through seven times.
    for run, size in enumerate([3, 3, 5, 3, 5, 5, 3]):
        mean.check(numbers(4, size, seed=run))
        gc.collect()


def test_what_the_host_gives_is_not_the_callers_to_change() -> None:
    """It stays with the graph."""
    sizes = compiled("""
        graph @sizes(%x: f32[2, n]) -> (%y, %s) opset 21 {
          %e = Exp(%x) : f32[2, n]
          %y = Neg(%e) : f32[2, n]
          %s = Shape(%x) : i64[2]
        }
    """)
    for run in range(4):
        x = numbers(2, 5, seed=run)
        sizes.check(x)
        for array in sizes.run(x):
            if array.flags.writeable:
                array.fill(7)


STATE = """
    graph @counted(%x: f32[2000], state statistic %m: f32[2000], state statistic %n: f32[2000]) -> (%y, %k replaces %m) opset 21 {
      %a = Add(%x, %m) : f32[2000]
      %b = Add(%a, %n) : f32[2000]
      %y = Tanh(%b) : f32[2000]
      %k = Neg(%a) : f32[2000]
    }
"""


@pytest.mark.parametrize("lends", [False, True], ids=["owned", "borrowed"])
def test_state_is_read_where_it_lies_and_copied_where_it_moves(lends: bool, launches: Callable[[], int]) -> None:
    """That which nothing replaces may stay on the host; what replaces it is never borrowed."""
    counted = compiled(STATE, keep_on_device=True, lends=lends)
    rest, state = numbers(2000, seed=1), numbers(2000, seed=2)
    on_device, expected = placed(state), state
    names = [value.name for value in counted.segment.inputs]
    for run in range(10):
        x = numbers(2000, seed=run)
        given = {"x": placed(x), "m": on_device, "n": rest}
        found = dict(zip(counted.segment.outputs, counted.device.run([given[name] for name in names]), strict=True))
        before, held = on_device, expected
        y, on_device = (found[value] for value in counted.segment.graph.outputs)
        np.testing.assert_array_equal(before._array, held)
        np.testing.assert_array_equal(y._array, np.tanh(x + expected + rest))
        expected = -(x + expected)
        np.testing.assert_array_equal(on_device._array, expected)
    launches()
    counted.device.run([given[name] for name in names])
    assert launches() == 1


def test_ranks_capture_and_replay_at_once() -> None:
    """Each on a stream of its own."""
    chain = compiled(CHAIN)
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            for number in range(12):
                x = numbers(2 + number % 3, 8, seed=rank * 100 + number)
                np.testing.assert_array_equal(chain.device.run([x], rank=rank)[0], chain.expected(x)[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert len(chain.device._runners) == 3


LARGE = """
    graph @large(%x: f32[70000], %s: f32[3]) -> (%y, %z) opset 21 {
      %one = constant : i64[1] [1]
      %zero = constant : i64[1] [0]
      %t = ReduceSum(%s, %zero) {keepdims=0} : f32[]
      %a = Add(%x, %t) : f32[70000]
      %y = Neg(%a) : f32[70000]
      %z = Unsqueeze(%x, %zero) : f32[1, 70000]
    }
"""


def test_large_inputs_are_read_where_they_lie_until_they_move(launches: Callable[[], int]) -> None:
    large = compiled(LARGE, keep_on_device=True)
    arrays = [placed(numbers(70000, seed=place)) for place in range(8)]
    names = [value.name for value in large.segment.inputs]
    found: list[tuple[np.ndarray, Any, Any]] = []
    for run, place in enumerate([0, 0, 0, 1, 1, 0, 2, 3, 4, 5, 6, 7, 7]):
        arrays[place]._array += 1
        x, given = arrays[place]._array.copy(), {"x": arrays[place], "s": placed(numbers(3, seed=run))}
        results = dict(zip(large.segment.outputs, large.device.run([given[name] for name in names]), strict=True))
        y, z = (results[value] for value in large.segment.graph.outputs)
        np.testing.assert_array_equal(z._array[0], x)
        expected = -(x + given["s"]._array.sum())
        found.append((expected, y, z))
        assert launches() == (run > 0)
    for expected, y, _ in found:
        np.testing.assert_array_equal(y._array, expected)


def test_small_inputs_that_stay_are_read_where_they_lie_until_they_move(copies: list[int]) -> None:
    program = compiled(LARGE, keep_on_device=True, lends=True)
    arena = program.engine.arena(0, program.device.arena_bytes)
    names = [value.name for value in program.segment.inputs]
    large, small = placed(numbers(70000)), [placed(numbers(3, seed=place)) for place in range(2)]
    copied = []
    for place in (*[0] * (piece.STAYS + 5), 1, *[0] * (piece.STAYS + 5), *[0, 1] * 3):
        small[place]._array += 1
        given = {"x": large, "s": small[place]}
        copies.clear()
        results = program.device.run([given[name] for name in names], 0, arena)
        expected = -(large._array + small[place]._array.sum())
        np.testing.assert_array_equal(
            results[program.segment.outputs.index(program.segment.graph.outputs[0])]._array, expected
        )
        copied.append(copies.count(small[place]._array.nbytes))
    is_read_there = [place for place, count in enumerate(copied) if not count]
    assert is_read_there == [0, *range(piece.STAYS + 3, piece.STAYS + 5)]  # The first run launches node by node.


def test_what_moves_seldom_is_not_copied(launches: Callable[[], int]) -> None:
    large = compiled(LARGE, keep_on_device=True)
    small = placed(numbers(3))
    names = [value.name for value in large.segment.inputs]
    for place in range(6):
        given = {"x": placed(numbers(70000, seed=place)), "s": small}
        for _ in range(piece.REPLAYS + 2):
            large.device.run([given[name] for name in names])
    (runner,) = large.device._runners.values()
    (step,) = runner._steps
    assert {value.name for value in step._bound} == {"x", "s"}
    assert sum(map(len, step._graphs.values())) == 1  # Those of arrays that are gone are let go.


def test_large_inputs_from_the_host_are_copied_from_the_second_run_on(launches: Callable[[], int]) -> None:
    large = compiled(LARGE, keep_on_device=True)
    for run in range(4):
        large.check(numbers(70000, seed=run), numbers(3, seed=run))
        assert launches() == (run > 0)


def test_what_an_arena_holds_is_captured_with_it(launches: Callable[[], int]) -> None:
    text = CHAIN.replace("[n, 8]", "[3, 8]")
    chain = compiled(text, keep_on_device=True)
    arenas = [chain.engine.arena(0, chain.device.arena_bytes) for _ in range(2)]
    for run in range(6):
        chain.check(numbers(3, 8, seed=run), on_device=True, arena=arenas[run % 2])
        assert launches() == (run > 0)
    (runner,) = chain.device._runners.values()
    (step,) = runner._steps
    assert len(step._graphs) == 2
    del arenas[0]
    gc.collect()
    assert len(step._graphs) == 1  # What was captured with an arena goes with it.


LOOP = """
    graph @loop(%x: f32[8], %trips: i64[]) -> (%y) opset 21 {
      %a = Neg(%x) : f32[8]
      %b = Exp(%a) : f32[8]
      %c = Loop(%trips, _, %b) {body=graph @body(%i: i64[], %on: bool[], %s: f32[8]) -> (%same, %u) {
        %same = Identity(%on) : bool[]
        %f = Cast(%i) {to=1} : f32[]
        %t = Add(%s, %f) : f32[8]
        %u = Tanh(%t) : f32[8]
      }} : f32[8]
      %d = Neg(%c) : f32[8]
      %y = Exp(%d) : f32[8]
    }
"""


def test_loops_whose_trips_the_host_knows_are_captured_with_the_rest(launches: Callable[[], int]) -> None:
    loop = compiled(LOOP)
    for run, trips in enumerate([2, 2, 3, 2, 3, 3]):
        loop.check(numbers(8, seed=run), np.asarray(trips))
        assert launches() == (run not in (0, 2))
    assert loop.captured == (1, 5, 0)


def test_a_branch_that_the_device_decides_splits(launches: Callable[[], int]) -> None:
    branch = compiled("""
        graph @branch(%x: f32[8]) -> (%y) opset 21 {
          %a = Neg(%x) : f32[8]
          %zero = constant : f32[] [0.0]
          %total = ReduceSum(%a) {keepdims=0} : f32[]
          %up = Greater(%total, %zero) : bool[]
          %c = If(%up) {then_branch=graph @then() -> (%t) {
            %t = Exp(%a) : f32[8]
          }, else_branch=graph @else() -> (%e) {
            %e = Abs(%a) : f32[8]
          }} : f32[8] from "/if"
          %d = Neg(%c) : f32[8]
          %y = Exp(%d) : f32[8]
        }
    """)
    for run in range(6):
        branch.check(numbers(8, seed=run))
        assert launches() == (0, 2)[run > 0]
    assert branch.captured == (2, 5, 1)
    assert branch.engine.notes == (
        "If splits CUDA graphs: it reads %up on the host, which the device computes (node /if)",
    )


def lies(executor: Executor) -> dict[str, int]:
    """Where what is trained lies on rank 0, and what the optimizer keeps of it."""
    kinds = {state.spec.name: state.kind for state in executor.states}
    held = executor._held._held[1][0]
    return {name: block.data.ptr for name, block in held.items() if kinds[name] in ("parameter", "master", "moment")}


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("adamw", {"precision": "fp16", "loss_scale": "dynamic"}),
        pytest.param("adamw", {}, marks=pytest.mark.slow),
        pytest.param("momentum", {}, marks=pytest.mark.slow),
    ],
    ids=["fp16", "f32", "momentum"],
)
def test_training_replays_with_state_where_it_lies(
    optimizer: str, options: dict[str, str], launches: Callable[[], int]
) -> None:
    partition = irpar.partition(classifier(optimizer=optimizer, **options), "d=1")
    with partition.trainer(engine="numpy") as trainer:
        losses = [trainer.step(batch(number)) for number in range(6)]
        expected = trainer.read_all()
    assert partition.module is not None
    facts = facts_of(partition.module.metadata)
    mesh = partition.module.mesh
    assert facts is not None
    with Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        trainer = Trainer(executor, facts)
        captures, places = [], []
        for number in range(6):
            assert trainer.step(batch(number)) == losses[number]
            captures.append(launches())
            places.append(lies(executor))
        same(trainer.read_all(), expected)
        assert places[0] == places[-1]
        assert captures[-1] > 0
        assert len({*captures[3:]}) == 1
        state = trainer.read_all()
        other = Trainer(executor, facts)  # Another session, whose state lies elsewhere.
        assert [other.step(batch(number)) for number in range(6)] == losses
        same(other.read_all(), expected)
        same(trainer.read_all(), state)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "settings"), FAMILIES, ids=str)
def test_families_are_replayed_as_they_were_run(family: str, settings: dict) -> None:
    loaded = to_module(models.build(family, **settings))
    irpar.annotate(loaded, models.annotations(family, "dp", "tp", **settings))
    partition = irpar.partition(loaded, irpar.Mesh({"dp": 2, "tp": 2}))
    assert partition.module is not None
    mesh = partition.module.mesh
    before = strict_graphs.Graph.launches
    with Executor(partition.module, mesh, engine="cupy", group=DeviceGroup(mesh)) as executor:
        plain = Executor(partition.module, mesh, engine="numpy")
        for seed in range(4):
            inputs = random_inputs(plain.inputs, loaded.graph, seed=seed)
            found = executor.run(inputs)
            for name, array in plain.run(inputs).items():
                tolerance = 1e-2 if array.dtype == np.float16 else 1e-5
                np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance)
    assert strict_graphs.Graph.launches > before
