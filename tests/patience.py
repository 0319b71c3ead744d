"""How much longer than on an idle machine things may take: one factor for the bounds of all tests.

A bound says that a wait ends, not how fast: `patient(10)` is 10 s on an idle machine, and more where others use its cores.
"""

import os

GENEROUS = 4.0
"""What a bound allows for at least: others may begin any time."""

SECONDS = r"[\d.]+ s"
"""A time-out that `slowness` has scaled, as errors tell it: a regular expression."""


def slowness() -> float:
    """How many processes want each core now; 1 on an idle machine."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def patient(seconds: float) -> float:
    """A bound in seconds, by how slow the machine is; `IRPAR_TEST_PATIENCE` is a factor instead."""
    said = os.environ.get("IRPAR_TEST_PATIENCE")
    return seconds * (float(said) if said else max(GENEROUS, slowness()))
