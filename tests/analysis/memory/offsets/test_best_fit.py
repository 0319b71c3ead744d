"""best_fit: the smallest hole, step by step."""

from hypothesis import given

from irpar.analysis.memory.offsets.best_fit import best_fit
from irpar.analysis.memory.offsets.lifetimes import ALIGNMENT, Lifetime

from .drawn import LIFETIMES, lifetimes


def test_memory_that_is_free_again_is_used_again():
    found = best_fit(
        [Lifetime("a", 64, 0, 1), Lifetime("b", 128, 1, 2), Lifetime("c", 64, 2, 3), Lifetime("d", 128, 3, 4)]
    )
    assert found.offsets == {"a": 0, "b": 64, "c": 0, "d": 64}
    assert found.nbytes == 192


def test_holes_that_touch_are_one():
    found = best_fit(
        [Lifetime("a", 64, 0, 0), Lifetime("b", 64, 0, 0), Lifetime("c", 64, 0, 2), Lifetime("d", 128, 1, 2)]
    )
    assert found.nbytes == 192


@given(LIFETIMES)
def test_each_gets_the_smallest_hole_that_it_fits_in(drawn):
    """Against a search of all bytes, line by line of 64."""
    held = [one for one in lifetimes(drawn) if one.nbytes]
    found = best_fit(held).offsets
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
