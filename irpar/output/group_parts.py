"""Parts whose ranks are in the same groups, for programs that name the ranks of a group."""

from collections.abc import Sequence
from dataclasses import replace

from irpar.ir import DOMAIN, Graph, Module
from irpar.ops.collectives import DIALECTS, collective_axes
from irpar.sharding import Axis

from .parts import Part
from .plan_record import Plan
from .target import MODEL_FILE


def names_ranks(collectives: str) -> bool:
    """Whether programs name the ranks of groups, in what `--collectives` calls so."""
    return collectives in DIALECTS and DIALECTS[collectives].has_groups


def by_groups(module: Module, parts: Sequence[Part], plan: Plan) -> tuple[list[Part], Plan]:
    """The parts, each made several where its ranks communicate in different groups, and the plan of these.

    Args:
        module: after localize.
        parts: its parts.
        plan: its plan.
    """
    mesh = module.mesh
    made: list[tuple[tuple[int, ...], Part]] = []
    for part in parts:
        group_of = [
            {rank: number for number, group in enumerate(mesh.groups(axes)) for rank in group}
            for axes in _axes(module, part.graph)
        ]
        together: dict[tuple[int, ...], list[int]] = {}
        for rank in part.ranks:
            together.setdefault(tuple(numbers[rank] for numbers in group_of), []).append(rank)
        made.extend((tuple(ranks), part) for ranks in together.values())
    if len(made) == len(parts):
        return list(parts), plan
    made.sort(key=lambda item: item[0][0])
    split = [Part(index, part.graph, ranks, mesh.coords(ranks[0])) for index, (ranks, part) in enumerate(made)]
    entries = [{**plan.parts[part.index], "model": f"part{index}/{MODEL_FILE}"} for index, (_, part) in enumerate(made)]
    part_of = {rank: part.index for part in split for rank in part.ranks}
    ranks = [{**entry, "part": part_of[entry["rank"]]} for entry in plan.ranks]
    return split, replace(plan, parts=entries, ranks=ranks)


def _axes(module: Module, graph: Graph) -> list[tuple[Axis, ...]]:
    """Over which axes a program communicates."""
    graphs = (graph, *(function.graph for function in module.functions.values()))
    return list(
        dict.fromkeys(
            collective_axes(node)
            for inner in graphs
            for node in inner.walk()
            if node.domain == DOMAIN and "axes" in node.attributes
        )
    )
