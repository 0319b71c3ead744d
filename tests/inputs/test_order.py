"""The order of samples: a pure function of the seed and the step."""

import numpy as np
import pytest

from irpar.inputs.order import Order


def test_an_epoch_takes_each_sample_at_most_once_and_the_next_in_another_order() -> None:
    order = Order(11, 3, seed=5)
    assert order.steps_per_epoch == 3
    epochs = [np.concatenate([order.rows(3 * epoch + step) for step in range(3)]) for epoch in range(40)]
    for rows in epochs:
        assert len(set(rows.tolist())) == 9
        assert rows.min() >= 0
        assert rows.max() < 11
    assert len({rows.tobytes() for rows in epochs}) == 40
    assert set(np.concatenate(epochs).tolist()) == set(range(11))  # What is left over comes in other epochs.


def test_steps_in_any_order_take_what_they_take_in_order() -> None:
    rows = [Order(11, 3, seed=5).rows(step).tolist() for step in range(9)]
    order = Order(11, 3, seed=5)
    for step in (8, 0, 4, 3, 8, 1):
        assert order.rows(step).tolist() == rows[step]
    assert [Order(11, 3, seed=6).rows(step).tolist() for step in range(9)] != rows


def test_without_shuffling_samples_come_as_they_lie() -> None:
    order = Order(11, 3, seed=5, is_shuffled=False)
    assert [order.rows(step).tolist() for step in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 1, 2]]


@pytest.mark.parametrize(("step", "place"), [(0, (0, 0)), (2, (0, 2)), (3, (1, 0)), (3001, (1000, 1))])
def test_the_place_of_a_step(step: int, place: tuple[int, int]) -> None:
    assert Order(11, 3).place(step) == place
