"""Random programs of nodes with odd attributes: what ONNX Runtime computes, the partition computes, or it is refused.

A program that failed once stands in tests/test_odd_attributes.py as a small one of its own.
"""

from collections import Counter

import numpy as np
import pytest

from .budget import budget
from .odd_programs import Outcome, survey
from .random_attributes import draw

KNOWN_REFUSALS = (
    "onnx's version converter cannot convert it",
    "its size depends on data",
    "ONNX Runtime has no CPU kernel",
    "draws random numbers",
    # Of operands that ONNX's text does not allow, and ONNX Runtime alone lets pass:
    "MaxUnpool failed",
    "GroupNormalization failed",
    "MatMulNBits failed: weights or scales are not those",
    "RoiAlign failed: attribute coordinate_transformation_mode",
)
"""What may be refused of these programs; anything else is needless."""
MOST_UNFIT = 0.05
PROGRAMS = 3000
PART = 150
"""Programs that a test tries."""


def _check(found: list[Outcome]) -> None:
    faults = [outcome for outcome in found if outcome.kind in ("wrong", "crashed")]
    assert not faults, "\n\n".join(f"{fault.seed}: {fault.kind} {fault.text}" for fault in faults)
    needless = [
        outcome
        for outcome in found
        if outcome.kind == "refused" and not any(reason in outcome.text for reason in KNOWN_REFUSALS)
    ]
    assert not needless, "\n\n".join(f"{outcome.seed}: {outcome.text}" for outcome in needless)
    counts = Counter(outcome.kind for outcome in found)
    assert counts["unfit"] <= MOST_UNFIT * len(found) + 1, counts


def test_few_programs() -> None:
    _check(list(survey(range(15))))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, PART))
def test_many_programs(first: int) -> None:
    _check(list(survey(range(first, first + budget(PART)))))


def test_a_program_is_drawn_by_its_seed_alone() -> None:
    first, again = draw(3), draw(3)
    assert first is not None
    assert again is not None
    assert first.model == again.model
    assert first.annotations == again.annotations
    assert all(np.array_equal(array, again.inputs[name]) for name, array in first.inputs.items())
