"""Random training steps with ZeRO on random meshes: they compute what the unsharded step computes, and run as planned.

A draw that failed once stands below as a step of its own.
"""

from random import Random

import pytest
from hypothesis import given, settings

from irpar.passes.zero import Zero
from irpar.sharding import Mesh
from tests.budget import budget
from tests.random_programs import SEEDS
from tests.training.random_steps import RandomStep, check, random_step

FOUND = {
    # The verifier took shardings for others that only spell the same blocks otherwise.
    "an axis of one device": RandomStep(
        "tied",
        {"B": 3, "F": 6, "H": 12, "C": 4},
        {"optimizer": "sgd", "loss": "mse"},
        Mesh({"x": 1, "y": 3}),
        Zero(2, ("x",), 0),
        {"x": [["y"], None], "grad.a": [None, ["y"], ["x", "?"]]},
    ),
    "a moment annotated by parts of an axis": RandomStep(
        "bodies",
        {"B": 4, "F": 5, "H": 3, "C": 6},
        {"optimizer": "lamb", "eps": 1e-3},
        Mesh({"x": 4}, (2, 0, 3, 1)),
        Zero(1, ("x",), 0),
        {"x": [["x"], None], "v.m": [["x:(1)2", "x:(2)2"], None]},
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_what_failed_once(name: str) -> None:
    check(FOUND[name])


def _checked(seed: int) -> None:
    check(random_step(Random(f"zero/{seed}")))


@settings(max_examples=budget(20, least=2), derandomize=True, database=None)
@given(SEEDS)
def test_a_few(seed: int) -> None:
    _checked(seed)


@pytest.mark.slow
@settings(max_examples=budget(100), derandomize=True, database=None)
@given(SEEDS)
def test_many(seed: int) -> None:
    _checked(seed)
