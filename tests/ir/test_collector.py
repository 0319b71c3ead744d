"""The garbage collector is off inside, and afterwards as it was."""

import gc

import pytest

from irpar.ir.collector import collector_off


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_inside_and_as_it_was_after_an_error(was_on: bool) -> None:
    if not was_on:
        gc.disable()
    inside = []
    try:
        with pytest.raises(KeyError):
            _fail(inside)
        assert inside == [False]
        assert gc.isenabled() is was_on
    finally:
        gc.enable()


def _fail(inside: list[bool]) -> None:
    with collector_off():
        inside.append(gc.isenabled())
        raise KeyError
