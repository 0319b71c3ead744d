from hypothesis import example, given
from hypothesis import strategies as st

from irpar import models
from irpar.analysis.memory.arena import ALIGNMENT, Lifetime, arena_bytes, place
from irpar.analysis.memory.liveness import peak
from irpar.ir.text.files import parse_module
from irpar.onnx_io import to_module

LIFETIMES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 10)), max_size=40)


@example([(0, 0, 1), (1, 0, 0), (65, 1, 0)])
@given(LIFETIMES)
def test_nothing_overlaps_with_what_is_held_at_the_same_time(drawn):
    held = [Lifetime(key, nbytes, first, first + steps) for key, (nbytes, first, steps) in enumerate(drawn)]
    found = place(held)
    assert all(offset % ALIGNMENT == 0 for offset in found.offsets.values())
    assert all(found.offsets[one.key] + one.nbytes <= found.nbytes for one in held)
    for one in held:
        for other in held[: one.key]:
            # What has no bytes may lie anywhere.
            if one.nbytes and other.nbytes and one.first <= other.last and other.first <= one.last:
                begin, end = found.offsets[one.key], found.offsets[other.key]
                assert begin + one.nbytes <= end or end + other.nbytes <= begin


@given(LIFETIMES)
def test_an_arena_is_no_smaller_than_what_is_held_at_once(drawn):
    held = [Lifetime(key, nbytes, first, first + steps) for key, (nbytes, first, steps) in enumerate(drawn)]
    most = max((sum(one.nbytes for one in held if one.first <= step <= one.last) for step in range(31)), default=0)
    assert most <= place(held).nbytes <= sum(one.nbytes + ALIGNMENT for one in held)


def test_memory_that_is_free_again_is_used_again():
    found = place(
        [Lifetime("a", 64, 0, 1), Lifetime("b", 128, 1, 2), Lifetime("c", 64, 2, 3), Lifetime("d", 128, 3, 4)]
    )
    assert found.offsets == {"a": 0, "b": 64, "c": 0, "d": 64}
    assert found.nbytes == 192


def test_holes_that_touch_are_one():
    found = place([Lifetime("a", 64, 0, 0), Lifetime("b", 64, 0, 0), Lifetime("c", 64, 0, 2), Lifetime("d", 128, 1, 2)])
    assert found.nbytes == 192


def test_a_chain_needs_what_it_holds_at_most():
    graph = parse_module(
        """
        graph @g(%x: f32[1024]) -> (%c) opset 21 {
          %a = Relu(%x) : f32[1024]
          %b = Neg(%a) : f32[1024]
          %c = Exp(%b) : f32[1024]
        }
        """
    ).graph
    assert arena_bytes(graph) == peak(graph).activation_bytes == 2 * 4096


def test_a_started_collective_holds_its_operand_until_the_wait():
    graph = parse_module(
        """
        mesh @m = ["x"=2]
        graph local @g(%x: f32[1024]) -> (%c) opset 21 ranks [0, 1] {
          %a = Relu(%x) : f32[1024]
          %s = irpar.AllReduceStart(%a) {axes = ["x"], id = 0, reduce = "sum"} : inflight<f32[1024]>
          %b = Neg(%x) : f32[1024]
          %r = irpar.Wait(%s) : f32[1024]
          %c = Add(%b, %r) : f32[1024]
        }
        """
    ).graph
    # At Wait: a, whose numbers may still be under way, b and r.
    assert peak(graph).activation_bytes == 3 * 4096
    assert arena_bytes(graph) == 3 * 4096


def test_arenas_of_all_families_are_about_as_large_as_what_is_held():
    for family in models.FAMILIES:
        graph = to_module(models.build(family)).graph
        assert arena_bytes(graph) <= 1.2 * peak(graph).activation_bytes + 64 * ALIGNMENT


@given(LIFETIMES)
def test_each_gets_the_smallest_hole_that_it_fits_in(drawn):
    """Against a search of all bytes, line by line of 64."""
    held = [Lifetime(key, nbytes, first, first + steps) for key, (nbytes, first, steps) in enumerate(drawn) if nbytes]
    found = place(held).offsets
    taken: dict[int, Lifetime[int]] = {}
    for one in sorted(held, key=lambda one: (one.first, -one.nbytes)):
        taken = {line: other for line, other in taken.items() if other.last >= one.first}
        lines = -(-one.nbytes // ALIGNMENT)
        top = max(taken, default=-1) + 1
        free = [line for line in range(top) if line not in taken]
        holes: list[list[int]] = []
        for line in free:
            if holes and holes[-1][-1] == line - 1:
                holes[-1].append(line)
            else:
                holes.append([line])
        fitting = [hole for hole in holes if len(hole) >= lines]
        begin = min(fitting, key=len)[0] if fitting else top
        assert found[one.key] == begin * ALIGNMENT
        taken.update((line, one) for line in range(begin, begin + lines))
