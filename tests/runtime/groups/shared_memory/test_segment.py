"""What lies where in the memory that ranks share."""

import pytest

from irpar.runtime.groups.shared_memory.segment import SegmentLayout
from irpar.runtime.groups.wire.header import HEADER_BYTES


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 64, 240])
def test_layouts_are_bounded_and_hold_a_record(count: int) -> None:
    layout = SegmentLayout.of(count)
    assert layout.nbytes < 512 << 20
    assert layout.ring % 64 == 0
    assert layout.longest > HEADER_BYTES + 64
    assert layout.slot >= 32 << 10
    assert SegmentLayout(**layout.numbers()) == layout


def test_nothing_lies_on_anything_else() -> None:
    places = sorted(SegmentLayout.of(5).places.values())
    assert len(set(places)) == len(places)
    assert all(place % 4096 == 0 for place in places)
