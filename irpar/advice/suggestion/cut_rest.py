"""Nodes that the chosen classes leave whole, and single weights of theirs that are worth cutting all the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from irpar.analysis.cost.figures import worth
from irpar.ir import Node, Value
from irpar.ops import Kind

from .cut_classes import Cut, CutClass, CutClasses, Place


@dataclass(frozen=True)
class SingleCut:
    """One node that runs in parts alone: what it gives is brought together at once.

    Attributes:
        node: the node.
        weight: the constant, and the dim of it that is sharded.
        kept_whole: what else would come to lie in parts: what is made of its results alone, or the operand that it
            sums over.
        gain: what it is worth.
    """

    node: Node
    weight: Place
    kept_whole: tuple[Value, ...]
    gain: float


def single_cuts(
    classes: CutClasses, chosen: Mapping[int, CutClass], may_cut: Callable[[Value], bool]
) -> list[SingleCut]:
    """The best cut of each node that is worth one, in order of the graph.

    Args:
        classes: of the graph.
        chosen: the classes that are sharded.
        may_cut: whether a constant can be annotated.
    """
    taken = {value for value, _ in classes.cut_places(chosen)}
    found = []
    for node, cuts in classes.cuts.items():
        if node in classes.flow.ties:
            continue
        held = [classes.class_of(*cut.places[0]) for cut in cuts]
        if any(one is not None and one.number in chosen for one in held):
            continue
        options = [
            option
            for cut in cuts
            for value, dim in cut.places
            if value.is_constant and value not in taken and len(value.uses) == 1 and may_cut(value)
            for option in [_option(classes, cut, (value, dim))]
            if option.gain > 0
        ]
        if options:
            found.append(max(options, key=lambda option: option.gain))
    return found


def _option(classes: CutClasses, cut: Cut, weight: Place) -> SingleCut:
    node = cut.node
    if cut.kind is Kind.REDUCE:
        sent = classes.sum_bytes(cut)
        kept = tuple(value for value, _ in cut.places if not value.is_constant)
    else:
        sent = sum(map(classes.gather_bytes, node.results))
        held = classes.class_of(*weight)
        kept = tuple(_last_of_chain(classes, value, held) for value in node.results)
    gain = worth(classes.saved_flops(cut), classes.saved_bytes(*weight), sent)
    return SingleCut(node, weight, kept, gain)


def _last_of_chain(classes: CutClasses, value: Value, held: CutClass | None) -> Value:
    """The last value that comes of one value and constants alone, and has a dim in the class of the cut."""
    while len(value.uses) == 1:
        node, _ = value.uses[0]
        reads_one = [other for other in node.inputs if not other.is_constant] == [value]
        if not reads_one or len(node.results) != 1 or not node.result.is_static:
            break
        found = [classes.class_of(node.result, dim) for dim in range(len(node.result.shape))]
        if held is None or held not in found:
            break
        value = node.result
    return value
