"""One arena for all segments of a program, on the engine numpy."""

import numpy as np
import pytest

import irpar
from irpar.ir import clone_module
from irpar.models import FAMILIES, build
from irpar.runtime.engines import arena_height
from irpar.runtime.engines.arena import ArenaLayout
from irpar.runtime.engines.program_arena import program_layout
from irpar.runtime.executor import Executor
from irpar.runtime.program import build_program
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, batches, trained
from tests.runtime.engines.poison import Poison
from tests.runtime.programs import module

OVER_BORDERS = """
    mesh @m = ["x"=2]
    graph local @g(%x: f32[1024] of [1024]) -> (%y, %z) opset 21 ranks [0, 1] {
      %a = Neg(%x) : f32[1024] of [1024]
      %b = Exp(%a) : f32[1024] of [1024] partial(sum: x)
      %s = irpar.AllReduce(%b) {axes=["x"], reduce="sum", id=0} : f32[1024] of [1024]
      %c = Neg(%s) : f32[1024] of [1024]
      %d = Exp(%c) : f32[1024] of [1024]
      %e = Add(%d, %a) : f32[1024] of [1024]
      %y = Exp(%e) : f32[1024] of [1024]
      %z = Neg(%d) : f32[1024] of [1024]
    }
"""


def places(layout: ArenaLayout) -> dict[str, int]:
    return {value.name: slot.offset for value, slot in layout.slots.items()}


def layout_of(text: str) -> ArenaLayout:
    return program_layout(build_program(module(text).graph))


def test_what_goes_from_segment_to_segment_has_a_place_and_what_others_may_hold_has_none():
    layout = layout_of(OVER_BORDERS)
    # `b` is taken by communication, `s` given by it; `y` and `z` are results of the program.
    assert places(layout) == {"a": 0, "c": 4096, "d": 8192, "e": 4096}
    assert layout.nbytes == 3 * 4096
    assert {value.name for value in layout.leaving} == {"b", "y", "z"}


def test_numbers_over_borders(monkeypatch):
    loaded, x = module(OVER_BORDERS), np.linspace(-1, 1, 1024, dtype=np.float32)
    poison = Poison(monkeypatch)
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        found = [executor.run({"x": x}) for _ in range(2)]
    d = np.exp(-2 * np.exp(-x))
    assert poison.gone
    for each in found:
        np.testing.assert_allclose(each["y"], np.exp(d - x), rtol=1e-6)
        np.testing.assert_allclose(each["z"], -d, rtol=1e-6)


NO_BYTES = """
    mesh @m = ["x"=1]
    graph local @g(%c: bool[8] of [8], %x: str[8] of [8], %i: i8[64] of [64]) -> (%s, %n) opset 21 ranks [0] {
      %t = Where(%c, %x, %x) : str[8] of [8]
      %u = Concat(%t, %x) {axis=0} : str[16] of [16]
      %s = Concat(%u, %t) {axis=0} : str[24] of [24]
      %a = Cast(%i) {to=22} : i4[64] of [64]
      %j = Neg(%i) : i8[64] of [64]
      %b = Cast(%j) {to=22} : i4[64] of [64]
      %k = Cast(%a) {to=3} : i8[64] of [64]
      %l = Cast(%b) {to=3} : i8[64] of [64]
      %m = Sub(%k, %l) : i8[64] of [64]
      %n = Neg(%m) : i8[64] of [64]
    }
"""


def test_what_bytes_do_not_hold_as_numpy_does_has_no_place():
    loaded, x = module(NO_BYTES), np.array(list("abcdefgh"), object)
    numbers = np.arange(64).astype(np.int8) % 15 - 7
    assert set(places(layout_of(NO_BYTES))).isdisjoint("tuab")
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        found = executor.run({"c": np.ones(8, bool), "x": x, "i": numbers})
    assert list(found["s"]) == [*x, *x, *x]
    np.testing.assert_array_equal(found["n"], -2 * numbers)


SUMS = """
    mesh @m = ["x"=2]
    graph local @g(%x: f32[1024] of [1024]) -> (%y) opset 21 ranks [0, 1] {
      %a = Neg(%x) : f32[1024] of [1024] partial(sum: x)
      %d = irpar.AllReduce(%a) {axes=["x"], reduce="sum", id=0} : f32[1024] of [1024]
      %b = Exp(%x) : f32[1024] of [1024] partial(sum: x)
      %e = irpar.AllReduce(%b) {axes=["x"], reduce="sum", id=1} : f32[1024] of [1024]
      %c = Abs(%x) : f32[1024] of [1024] partial(sum: x)
      %f = irpar.AllReduce(%c) {axes=["x"], reduce="sum", id=2} : f32[1024] of [1024]
      %s = Add(%d, %e) : f32[1024] of [1024]
      %y = Add(%s, %f) : f32[1024] of [1024]
    }
"""


def test_what_communication_took_is_not_held_with_what_it_gave(monkeypatch):
    # At most four are planned at once; with `s` in an arena all the while, and four outside, it is one more.
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", 4096)
    assert places(layout_of(SUMS)) == {"s": 0}
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", 4095)
    assert places(layout_of(SUMS)) == {}


VIEWS = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[32, 32]) -> (%y, %v) opset 21 ranks [0] {
      %s = constant : i64[1] [1024]
      %a = Neg(%x) : f32[32, 32]
      %t = Transpose(%a) {perm=[1, 0]} : f32[32, 32]
      %r = Reshape(%t, %s) : f32[1024]
      %b = Neg(%r) : f32[1024]
      %c = Exp(%b) : f32[1024]
      %d = Neg(%c) : f32[1024]
      %v = Reshape(%d, %s) : f32[1024]
      %e = Neg(%v) : f32[1024]
      %y = Exp(%e) : f32[1024]
    }
"""


def test_a_copy_does_not_hold_what_was_copied_and_a_view_that_leaves_has_nothing_under_it():
    # Elements of `t` lie apart: `r` is a copy, so `b` may lie where `a` lay. `v` is a view of `d`, and a result.
    assert places(layout_of(VIEWS)) == {"a": 0, "b": 0, "c": 4096, "e": 0}


LOOP = """
    mesh @m = ["x"=1]
    graph local @g(%x: f32[1024], %n: i64[]) -> (%y) opset 21 ranks [0] {
      %true = constant : bool[] true
      %a = Neg(%x) : f32[1024]
      %r = Loop(%n, %true, %a) {body=graph @body(%i: i64[], %go: bool[], %state: f32[1024]) -> (%still, %next) {
        %still = Identity(%go) : bool[]
        %p = Exp(%state) : f32[1024]
        %q = Neg(%p) : f32[1024]
        %next = Add(%q, %a) : f32[1024]
      }} : f32[1024]
      %y = Exp(%r) : f32[1024]
    }
"""


def test_what_bodies_hold_in_a_trip_has_places(monkeypatch):
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", 1 << 20)
    # What a trip gives the next one takes: `next` has no place, and `r` neither.
    assert places(layout_of(LOOP)) == {"a": 0, "p": 4096, "q": 8192}
    loaded, x = module(LOOP), np.linspace(-1, 1, 1024, dtype=np.float32)
    poison = Poison(monkeypatch)
    expected = -x
    for _ in range(3):
        expected = -np.exp(expected) - x
    with Executor(loaded, loaded.mesh, engine="numpy") as executor:
        found = executor.run({"x": x, "n": np.int64(3)})["y"]
    assert poison.gone
    np.testing.assert_allclose(found, np.exp(expected), rtol=1e-6)


MESHES = {"one rank": {"d": 1}, "dp=2 x tp=2": {"dp": 2, "tp": 2}}
QUICK = ("mlp", "control")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
@pytest.mark.parametrize("micro_batches", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_step_reads_nothing_of_what_is_over(mesh: str, micro_batches: int, family: str, monkeypatch) -> None:
    """Numbers that go as soon as the layout has no use for them change no bit; nor does it if all lies anywhere."""
    monkeypatch.setattr(arena_height, "ALLOWED_BYTES", 1 << 40)  # As much as can lie in the arena does.
    loaded = irpar.load(build(family, preset="tiny"))
    loaded.set_mesh(irpar.Mesh(MESHES[mesh]))
    annotated(loaded, family, MESHES[mesh])
    loss = "cross_entropy" if family in CLASSES else "mse"
    step = irpar.train_step(loaded, loss=loss, optimizer="momentum", micro_batches=micro_batches)
    partition, data = irpar.partition(clone_module(step)), batches(step, 2)
    with monkeypatch.context() as patch:
        patch.setattr("irpar.runtime.engines.arena.Arenas.take", lambda *arguments: None)
        expected = trained(partition, data, engine="numpy")
    poison = Poison(monkeypatch)
    found = trained(partition, data, engine="numpy")
    assert poison.gone
    assert found[0] == expected[0]
    for name, array in expected[1].items():
        np.testing.assert_array_equal(found[1][name].view(np.uint8), array.view(np.uint8), err_msg=name)
