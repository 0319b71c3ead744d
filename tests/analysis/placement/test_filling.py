"""What is added to an assignment that fits, in parts."""

import time

import numpy as np

from irpar.analysis.placement import PlacedValue, PlacementGraph, Unit
from irpar.analysis.placement.filling import filled, parts
from irpar.analysis.placement.graph import BEFORE
from irpar.analysis.placement.simulation import Simulator

UPDATES = 20
SIZE = 10**8


def updates() -> PlacementGraph:
    """Updates of two nodes each, of a state of their own, that all read one number, which lies somewhere by itself."""
    nodes = [Unit(f"n{number}", 10, 1) for number in range(2 * UPDATES)]
    number = len(nodes)
    reads = tuple((2 * update, 2 * update) for update in range(UPDATES))
    values = [PlacedValue("number", 4, number, BEFORE, reads, BEFORE, 1, 1)]
    for update in range(UPDATES):
        one, other = 2 * update, 2 * update + 1
        values.append(PlacedValue(f"state{update}", SIZE, one, BEFORE, (), 2 * UPDATES, 50, 50))
        values.append(PlacedValue(f"change{update}", SIZE, one, one, ((other, other),), BEFORE, 50, 50))
    return PlacementGraph((*nodes, Unit("number")), tuple(values), 2 * UPDATES)


def test_what_one_number_connects_is_apart() -> None:
    found = parts(Simulator(updates()), np.ones(2 * UPDATES + 1, np.int64))
    assert sorted(found) == [*([2 * update, 2 * update + 1] for update in range(UPDATES)), [2 * UPDATES]]


def test_a_number_goes_with_the_only_part_that_reads_it() -> None:
    labels = np.zeros(2 * UPDATES + 1, np.int64)
    labels[[0, 1, 2 * UPDATES]] = 1
    assert [sorted(part) for part in parts(Simulator(updates()), labels)] == [[0, 1, 2 * UPDATES]]


def test_as_many_updates_go_as_there_is_room_for() -> None:
    simulator = Simulator(updates())
    host, device = (False,) * (2 * UPDATES + 1), (True,) * (2 * UPDATES + 1)
    limit = 6 * SIZE + 4
    best, outcome = filled(simulator, host, device, limit, time.monotonic() + 60)
    assert outcome == simulator.outcome(best)
    assert outcome.peak <= limit
    assert sum(best[: 2 * UPDATES : 2]) == 5  # Of the state of five, beside the change of one.
