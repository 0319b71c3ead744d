"""What a module says of what trips of a loop send."""

import pytest

from irpar.analysis.trips import Trips, When, memory_of, say_trips, say_when, trips_said
from irpar.ir import Module, parse_module
from irpar.sharding import IrparError


def module() -> Module:
    return parse_module("graph @g(%x: f32[4]) -> (%y) opset 21 { %y = Relu(%x) : f32[4] }")


def test_what_goes_without_saying_is_not_said() -> None:
    said = module()
    say_trips(said, Trips())
    assert not said.metadata
    say_trips(said, Trips("step", "micro-batch"))
    assert trips_said(said) == Trips("step", "micro-batch")


@pytest.mark.parametrize(
    ("when", "held", "words"),
    [
        ("step", 100, "gradients are reduced once a step: a rank holds about 100 B, and may hold 200 B"),
        ("micro-batch", 300, "in each micro-batch: a rank would otherwise hold about 300 B, and may hold 200 B"),
        ("step", 300, "a rank holds about 300 B, and may hold 200 B; in each micro-batch it would hold no less"),
    ],
)
def test_what_memory_decides_is_said_and_told(when: When, held: int, words: str) -> None:
    said = module()
    line = say_when(said, "reduce", when, held, 200)
    assert line.endswith(words)
    assert trips_said(said) == Trips(when, "auto")


def test_a_memory_limit_goes_before_what_the_network_knows() -> None:
    said = module()
    said.network = "h100-nvlink-ib"
    assert memory_of(said) == 80_000_000_000
    said.memory_limit = 5
    assert memory_of(said) == 5


def test_metadata_that_cannot_be_read() -> None:
    said = module()
    said.metadata["irpar.trips"] = "{"
    with pytest.raises(IrparError, match="of the module cannot be read"):
        trips_said(said)
