"""Schedules of the learning rate."""

import math
from typing import Any

import pytest

from irpar.training.schedule import Schedule, ScheduleError


def rates(count: int, **options: Any) -> list[float]:
    schedule = Schedule(1.0, **options)
    return [schedule.rate(step) for step in range(count)]


def test_rates() -> None:
    assert rates(3) == [1, 1, 1]
    assert rates(4, warmup=2) == [0.5, 1, 1, 1]
    assert rates(6, kind="linear", steps=4) == [1, 0.75, 0.5, 0.25, 0, 0]
    assert rates(6, kind="linear", steps=6, warmup=2) == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(3, kind="linear", steps=2, least=0.5) == [1, 0.75, 0.5]
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(5)]
    assert rates(5, kind="cosine", steps=4, least=0.1) == pytest.approx(cosine)
    assert rates(3, kind="cosine", steps=2, warmup=2) == [0.5, 1, 1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kind": "exponential"}, 'there is no schedule "exponential"'),
        ({"learning_rate": -1.0}, "a learning rate of -1.0"),
        ({"learning_rate": math.nan}, "a learning rate of nan"),
        ({"warmup": -1}, "a warm-up of -1 steps"),
        ({"kind": "linear", "warmup": 5, "steps": 4}, "a warm-up of 5 steps in a run of 4"),
        ({"kind": "linear", "steps": 4, "least": math.nan}, "a learning rate of nan at the end"),
        ({"kind": "cosine", "steps": 4, "least": -0.5}, "a learning rate of -0.5 at the end"),
    ],
)
def test_schedules_that_cannot_be(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule(**{"learning_rate": 1.0, **options})
    assert caught.value.what == told
    assert caught.value.do


def test_facts_make_the_schedule_again() -> None:
    schedule = Schedule(0.5, "cosine", 3, 40, 0.01)
    assert Schedule(**schedule.facts()) == schedule
