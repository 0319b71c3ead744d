"""Random placement graphs, and all their assignments by the definition."""

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from irpar.analysis.placement import PlacedValue, PlacementGraph, Unit
from irpar.analysis.placement.graph import BEFORE

Array = np.ndarray[Any, Any]

MOST_HOMES = 3
"""Units besides the nodes: where inputs, weights and state lie."""


def random_graph(random: Random, nodes: int) -> PlacementGraph:
    """Nodes that read each other, and what lies somewhere from the start; some of them pinned."""
    units = [Unit(f"n{number}", *_costs(random)) for number in range(nodes)]
    values = []
    for number in range(random.randint(0, MOST_HOMES)):
        unit = random.randrange(nodes)
        if random.random() < 0.5:
            unit = len(units)
            units.append(Unit(f"h{number}"))
        until = random.choice((BEFORE, nodes // 2, nodes))
        values.append(_value(random, f"h{number}", unit, BEFORE, nodes, until))
    for number in range(nodes):
        until = random.choice((BEFORE, BEFORE, nodes))
        values += [_value(random, f"v{number}", number, number, nodes, until) for _ in range(random.choice((1, 1, 2)))]
        if random.random() < 0.1:
            state = _value(random, f"s{number}", number, BEFORE, 0, nodes)
            new = _value(random, f"t{number}", number, number, nodes, BEFORE)
            values += [
                state,
                PlacedValue(new.name, state.nbytes, number, number, new.reads, BEFORE, 1, new.to_device, True),
            ]
    return PlacementGraph(tuple(units), tuple(values), nodes)


def layered_graph(random: Random, layers: int) -> PlacementGraph:
    """Equal layers of three units: a node whose result its update reads, last layer first, and the state of that."""
    result, state = random.randint(3, 10), random.randint(3, 10)
    node, update = (Unit("", random.randint(3, 10), random.randint(3, 10)) for _ in range(2))
    to_host, to_device = random.randint(0, 10), random.randint(0, 10)
    units, values, times = [], [], 3 * layers
    for layer in range(layers):
        first, late = 3 * layer, times - 1 - 2 * layer
        units += [replace(node, name=f"n{layer}"), replace(update, name=f"u{layer}"), Unit(f"h{layer}")]
        reads = ((layer + 1, first + 3), (late, first + 1)) if layer + 1 < layers else ((late, first + 1),)
        values += [
            PlacedValue(f"v{layer}", result, first, layer, reads, BEFORE, to_host, to_device),
            PlacedValue(f"s{layer}", state, first + 2, BEFORE, ((late, first + 1),), times, to_device, to_device),
        ]
    return PlacementGraph(tuple(units), tuple(values), times)


def _costs(random: Random) -> tuple[int | None, int | None]:
    costs: list[int | None] = [random.randint(0, 20), random.randint(0, 20)]
    if random.random() < 0.12:
        costs[random.randrange(2)] = None
    return costs[0], costs[1]


def _value(random: Random, name: str, unit: int, made: int, nodes: int, until: int) -> PlacedValue:
    readers = range(made + 1, nodes)
    reads = sorted(random.sample(readers, min(random.randint(0, 3), len(readers))))
    to_host, to_device = random.choice((0, random.randint(0, 10))), random.randint(0, 10)
    return PlacedValue(
        name, random.randint(0, 10), unit, made, tuple((each, each) for each in reads), until, to_host, to_device
    )


def all_outcomes(graph: PlacementGraph) -> tuple[Array, Array]:
    """The cost and the peak of each assignment that there is."""
    choices = [[False, True] if where is None else [where] for where in graph.fixed]
    there = np.array(np.meshgrid(*choices, indexing="ij"), bool).reshape(len(choices), -1)
    cost = np.zeros(there.shape[1], np.int64)
    held = np.zeros((graph.times + 2, there.shape[1]), np.int64)
    for unit, where in zip(graph.units, there, strict=True):
        cost += np.where(where, unit.device or 0, unit.host or 0)
    for value in graph.values:
        made_here = there[value.unit]
        readers = {time: there[unit] for time, unit in value.reads}
        is_far = np.any([~where for where in readers.values()], axis=0) if readers else False
        is_near = np.any(list(readers.values()), axis=0) if readers else False
        cost += np.where(made_here & is_far, value.to_host, 0) + np.where(~made_here & is_near, value.to_device, 0)
        for time in range(-1, graph.times + 1):
            earlier = np.any([where for read, where in readers.items() if read <= time] or [False], axis=0)
            later = np.any([where for read, where in readers.items() if read >= time] or [False], axis=0)
            as_made = made_here & (value.made <= time) & ((time <= max(value.until, value.made)) | later)
            as_copy = ~made_here & earlier & later
            held[time + 1] += value.nbytes * ((as_made & (not value.shares)) | as_copy)
    return cost, held.max(axis=0)
