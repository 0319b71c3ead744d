"""The order of collectives: equal on all members of each group, so that no rank waits for one that waits for it."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from irpar.ir import Graph, Module, Node, Strings
from irpar.ops.bodies import called_communication, is_numbered
from irpar.ops.facts import int_attribute
from irpar.ops.op_def import traits
from irpar.sharding import Axis, IrparError, Mesh


def order_problems(module: Module) -> Iterator[str]:
    """What is wrong with the order in which the programs of a local module come to collectives.

    Members of a group must come to the same ones in one order; and over all groups there must be an order that each
    program follows: a before b on one rank and b before a on another, each over a group of its own, would wait forever.
    """
    if not module.is_local or len(module.graphs) < 2 or len(module.meshes) != 1:
        return  # All ranks run one program.
    sequences = [list(_collectives(graph)) for graph in module.graphs]
    yield from _group_problems(module.mesh, module.graphs, sequences)
    yield from _common_order_problems(module.graphs, sequences)


_Known = tuple[int, tuple[str, ...]]
"""The id of a collective, and its axes."""


def _collectives(graph: Graph) -> Iterator[_Known]:
    for node in graph.walk():
        if is_numbered(node) and type(node.attributes["id"]) is int:
            axes = _axes(node)
            if axes:
                yield int_attribute(node, "id"), axes


def _axes(node: Node) -> tuple[str, ...]:
    """The axes of a collective, or of that in a function; none of what goes from rank to rank, and of a wait."""
    for inner in called_communication(node) or (node,):
        found = inner.attributes.get("axes")
        if isinstance(found, Strings) and not traits(inner).waits:
            return tuple(map(str, found))
    return ()


def _group_problems(mesh: Mesh, graphs: Sequence[Graph], sequences: Sequence[list[_Known]]) -> Iterator[str]:
    """Programs of ranks of one group that come to different collectives over its axes."""
    for axes in dict.fromkeys(axes for sequence in sequences for _, axes in sequence):
        ids = [[number for number, over in sequence if over == axes] for sequence in sequences]
        for first, second in _together(mesh, graphs, axes):
            if ids[first] == ids[second]:
                continue
            told = [_first_difference(ids[first], ids[second]), _first_difference(ids[second], ids[first])]
            where = f"graphs @{graphs[first].name} and @{graphs[second].name}"
            yield f"{where} come to collectives over {','.join(axes)} in different orders: {told[0]}, and {told[1]}"
            break


def _together(mesh: Mesh, graphs: Sequence[Graph], axes: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of programs some ranks of which are in one group: each with the first of its group."""
    program = {rank: place for place, graph in enumerate(graphs) for rank in graph.ranks}
    try:
        groups = mesh.groups([Axis.parse(axis) for axis in axes])
    except IrparError:
        return []  # Of axes that cannot be the check of the node tells.
    found: dict[tuple[int, int], None] = {}
    for ranks in groups:
        first, *others = dict.fromkeys(program[rank] for rank in ranks if rank in program) or (0,)
        found.update(dict.fromkeys((first, other) for other in others))
    return list(found)


def _first_difference(ids: Sequence[int], others: Sequence[int]) -> str:
    place = next((at for at, (one, other) in enumerate(zip(ids, others, strict=False)) if one != other), len(others))
    return f"id={ids[place]}" if place < len(ids) else "the end"


def _common_order_problems(graphs: Sequence[Graph], sequences: Sequence[list[_Known]]) -> Iterator[str]:
    """A circle of collectives each of which a program comes to before the next."""
    after: dict[int, set[int]] = {}
    waits: dict[int, int] = {}
    for sequence in dict.fromkeys(tuple(dict.fromkeys(number for number, _ in known)) for known in sequences):
        for number in sequence:
            after.setdefault(number, set())
            waits.setdefault(number, 0)
        for one, other in pairwise(sequence):
            if other not in after[one]:
                after[one].add(other)
                waits[other] += 1
    ready = [number for number, count in waits.items() if not count]
    while ready:
        number = ready.pop()
        del waits[number]
        for other in after[number]:
            waits[other] -= 1
            if not waits[other]:
                ready.append(other)
    if waits:
        names = ", ".join(f"@{graph.name}" for graph in graphs)
        yield f"graphs {names} have no common order of collectives {sorted(waits)}: ranks would wait for each other"
