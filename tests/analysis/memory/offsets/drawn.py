"""Lifetimes at random, and what holds for all offsets of them."""

from collections.abc import Sequence

from hypothesis import strategies as st

from irpar.analysis.memory.offsets.lifetimes import Lifetime, Offsets, most_held

LIFETIMES = st.lists(st.tuples(st.integers(0, 500), st.integers(0, 20), st.integers(0, 10)), max_size=40)
"""Bytes, first step, and how many more."""
ALIGNMENTS = st.sampled_from([1, 64, 100])


def lifetimes(drawn: Sequence[tuple[int, int, int]]) -> list[Lifetime[int]]:
    return [Lifetime(key, nbytes, first, first + more) for key, (nbytes, first, more) in enumerate(drawn)]


def check_offsets(held: Sequence[Lifetime[int]], found: Offsets[int], alignment: int) -> None:
    """Nothing overlaps with what is held at the same time, and the block is neither too small nor needlessly large."""
    assert list(found.offsets) == [one.key for one in held]
    assert all(offset % alignment == 0 for offset in found.offsets.values())
    assert found.nbytes == max((found.offsets[one.key] + one.nbytes for one in held), default=0)
    assert most_held(held, alignment) - alignment < found.nbytes or not found.nbytes
    assert found.nbytes <= sum(one.nbytes + alignment for one in held)
    for one in held:
        for other in held[: one.key]:
            # What has no bytes may lie anywhere.
            if one.nbytes and other.nbytes and one.first <= other.last and other.first <= one.last:
                begin, end = found.offsets[one.key], found.offsets[other.key]
                assert begin + one.nbytes <= end or end + other.nbytes <= begin
