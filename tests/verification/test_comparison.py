"""Comparing results: arrays, sequences and optionals, and what rounding of the last places explains."""

from typing import Any

import numpy as np
import pytest

from irpar.verification.comparison import UNITS, compare, compare_rounding, units

ONE = np.ones((2, 3), np.float32)

PAIRS: list[tuple[Any, Any, str]] = [
    ([ONE, 2 * ONE], [ONE, 2 * ONE], ""),
    ([], [], ""),
    ([ONE, np.zeros(4)], [ONE, np.zeros(4)], ""),
    (None, None, ""),
    ([ONE], [ONE, ONE], "is a sequence of 1, should be a sequence of 2"),
    (ONE, [ONE], "is a tensor, should be a sequence of 1"),
    ([ONE], ONE, "is a sequence of 1, should be a tensor"),
    (None, ONE, "is an absent optional, should be a tensor"),
    (ONE, None, "is a tensor, should be an absent optional"),
    ([ONE, ONE[:1]], [ONE, ONE], "is float32[1, 3], should be float32[2, 3]"),
]


@pytest.mark.parametrize(("got", "expected", "note"), PAIRS)
def test_sequences_and_optionals(got: Any, expected: Any, note: str) -> None:
    found = compare("s", got, expected)
    assert found.is_equal == (not note)
    assert found.note == note


def test_the_worst_entry_of_a_sequence_is_named() -> None:
    found = compare("s", [ONE, ONE, ONE + 3], [ONE, ONE + 1, ONE])
    assert not found.is_equal
    assert found.name == "s[2]"


def test_rounding_is_measured_by_the_largest_element() -> None:
    expected = np.array([1000.0, 1.0, 1e-3], np.float32)
    unit = 2.0**-14
    assert units(expected) == UNITS * unit
    assert compare_rounding("y", expected + np.float32(7 * unit), expected).is_equal
    found = compare_rounding("y", expected + np.array([0, 9 * unit, 0], np.float32), expected)
    assert (found.is_equal, found.measure, found.where) == (False, "rounding", (1,))


def test_small_results_are_not_equal_to_zeros() -> None:
    # Probabilities of 100,000 classes: all of them are below any tolerance that is absolute.
    expected = np.full(100_000, 1e-5, np.float32)
    assert compare("y", 0 * expected, expected).is_equal
    assert not compare_rounding("y", 0 * expected, expected).is_equal


def test_masked_elements_do_not_hide_the_others() -> None:
    expected = np.array([-3e38, -3e38, 0.5, 0.25, 2.0, -1.0, 1.5], np.float32)
    got = expected.copy()
    got[3] = 0.3
    assert not compare_rounding("y", got, expected).is_equal
    got = expected * np.float32(1 + 2.0**-23)
    assert compare_rounding("y", got, expected).is_equal


def test_infinities_and_nans_must_be_at_equal_places() -> None:
    expected = np.array([np.inf, np.nan, 1.0], np.float32)
    assert compare_rounding("y", expected.copy(), expected).is_equal
    for place in range(3):
        got = expected.copy()
        got[place] = (1.0, 1.0, np.nan)[place]
        assert compare_rounding("y", got, expected).error == np.inf


def test_other_numbers_must_be_equal() -> None:
    found = compare_rounding("i", np.array([1, 2, 3]), np.array([1, 2, 4]))
    assert (found.is_equal, found.note, found.where) == (False, "1 element differs", (2,))
    assert found.largest == 1.0
    assert compare_rounding("p", np.array([True]), np.array([False])).largest == 1.0
    assert compare_rounding("i", np.array([-7, 0]), np.array([1, 2])).note == "2 elements differ"
    assert compare_rounding("t", np.array(["a"], object), np.array(["b"], object)).largest == np.inf
