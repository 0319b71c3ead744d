"""Strategies of operators, MindSpore's way: how each operand and result is sharded, by counts or by axes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from irpar.ir import Annotation, Module, Node, NodeStrategy, Value
from irpar.ir.annotate import apply_to, matching
from irpar.sharding import DimSpec, IrparError, Sharding, nearest_names, with_priority

from .cuts import Counts, CutsError, match_cuts

Strategy = Counts | tuple[DimSpec, ...]
"""How one tensor is sharded: a count a dim, or axes a dim."""


@dataclass(frozen=True)
class OpCuts:
    """What is said of the operators that a name or glob matches.

    Attributes:
        pattern: name or glob of nodes.
        cuts: for "in" and "out" the strategy of each operand or result; None where one is left free.
        text: what was written, as messages show it.
        where: file and line; empty where there is none.
        error: what mistakes are raised as.
        priority: of the dims that are sharded and have none of their own.
    """

    pattern: str
    cuts: dict[str, tuple[Strategy | None, ...]]
    text: str
    where: str = ""
    error: type[IrparError] = CutsError
    priority: int = 0

    @property
    def place(self) -> str:
        """The text and its place, as one line of a message."""
        return f"{self.text}      {self.where}" if self.where else self.text


def named_nodes(module: Module) -> dict[str, list[Node]]:
    """The nodes of the main graphs by their names in the source model."""
    found: dict[str, list[Node]] = {}
    for graph in module.graphs:
        for node in graph:
            if name := node.source or node.name:
                found.setdefault(name, []).append(node)
    return found


def annotate_ops(module: Module, entry: OpCuts, nodes: Mapping[str, Sequence[Node]]) -> int:
    """Annotate the operands and results of all nodes that an entry matches. The module must have its mesh.

    Args:
        module: the module, its types inferred.
        entry: what is said.
        nodes: from `named_nodes`.

    Returns:
        How many nodes match.

    Raises:
        IrparError: of the type `entry.error`: none matches, or the strategies do not fit a node or the mesh.
    """
    matched = matching(entry.pattern, nodes)
    if not matched:
        raise entry.error(
            f'no op is called "{entry.pattern}"',
            where=entry.place,
            notes=nearest_names(entry.pattern, nodes),
            do="write the name or a glob of nodes of the model",
        )
    for node in matched:
        try:
            specs = sorted(_specs(module, node, entry), key=lambda said: said[1])
        except CutsError as error:
            raise entry.error(error.what, where=entry.place, notes=error.notes, do=error.do) from None
        said = f'by the cuts of op "{entry.pattern}"'
        shardings: list[Sharding | None] = [None] * (len(node.operands) + len(node.results))
        for value, place, spec in specs:
            dims = tuple(with_priority(spec, entry.priority))
            apply_to(module, Annotation(value.source_name, dims, entry.where, said), module.mesh, [value])
            shardings[place] = Sharding.of_spec(module.mesh, dims)
        count = len(node.operands)
        title = Annotation(node.source or node.name, (), entry.where, said)
        node.strategy = NodeStrategy(tuple(shardings[:count]), tuple(shardings[count:]), title)
        module.run_as_said[node.source or node.name] = title
    return len(matched)


def _specs(module: Module, node: Node, entry: OpCuts) -> Iterator[tuple[Value, int, Sequence[DimSpec]]]:
    """The sharding by axes of each tensor that an entry speaks of, with its place among operands and results."""
    counted: list[tuple[Value, int, Counts]] = []
    for value, place, strategy in _given(node, entry):
        counts = tuple(count for count in strategy if isinstance(count, int))
        if len(counts) == len(strategy):
            counted.append((value, place, counts))
        else:
            yield value, place, [dim for dim in strategy if not isinstance(dim, int)]
    for (_, place, _), (value, spec) in zip(counted, match_cuts(node, counted, module.mesh), strict=True):
        yield value, place, spec


def _given(node: Node, entry: OpCuts) -> Iterator[tuple[Value, int, Strategy]]:
    """The tensors that an entry gives strategies for, with their places."""
    operands = [(value, place) for place, value in enumerate(node.operands) if value is not None]
    results = [(value, place) for place, value in enumerate(node.results, len(node.operands))]
    for key, listed in entry.cuts.items():
        values, word = (operands, "operand") if key == "in" else (results, "result")
        if len(listed) != len(values):
            raise CutsError(
                f"{node.label} has {len(values)} {word}s, the entry has cuts for {len(listed)}",
                notes=(f"the {word}s: {', '.join(f'{value.name} {value.type}' for value, _ in values)}",),
                do=f"write one list for each {word}, null for one that is left free",
            )
        for (value, place), strategy in zip(values, listed, strict=True):
            if strategy is not None:
                yield value, place, strategy
