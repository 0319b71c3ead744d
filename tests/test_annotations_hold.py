"""Annotations hold: readers of an annotated value meet it as annotated, and operators run as `ops` says, or irpar says
that it cannot be."""

import tempfile
import traceback
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import irpar
from irpar.pass_manager import PassFailure

from .random_annotations import Annotated, annotated_programs, of_kinds, partitioned
from .random_programs import REFUSALS, UnsteadyError, check_run, expected_of

ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
EVERY = 5
"""Of so many programs the numbers of one are compared."""
MOST_REFUSED = 0.1


def draws(count: int) -> Counter[str]:
    """Draw programs; returns what became of them, and of what their annotations were."""
    ends: Counter[str] = Counter()
    made: list[Annotated] = []
    with tempfile.TemporaryDirectory() as folder:

        @settings(
            max_examples=count,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=ANY_TIME,
            phases=[Phase.generate],
        )
        @given(annotated_programs(Path(folder)))
        def draw(drawn: Annotated) -> None:
            made.append(drawn)
            ends[outcome(drawn, Path(folder), runs=len(made) % EVERY == 0)] += 1

        draw()
    print(dict(ends), of_kinds(made))
    return ends


def outcome(drawn: Annotated, folder: Path, *, runs: bool) -> str:
    try:
        partition, lost = partitioned(drawn, folder)
    except PassFailure:
        raise
    except irpar.IrparError as error:
        return f"refused: {error.what}"
    assert lost == [], drawn
    if runs:
        try:
            check_run(partition, drawn.program.engines[0], drawn.program, expected_of(drawn.program))
        except UnsteadyError:
            return "the original has no steady answer"
    return "held"
