"""Why a weight is sharded, and why another is not, in words."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from irpar.advice.uses import where
from irpar.ir import Node, Value
from irpar.ir.annotate import glob_of
from irpar.ops import Kind
from irpar.ops.facts import int_attribute
from irpar.sharding import Axis, ceil_div
from irpar.units import bytes_text, count_text, flops_text

from .cut_classes import Cut, CutClass, CutClasses, is_shared_vector
from .readings import Readings
from .unknown_shapes import shape_lost_at

_DEQUANTIZED = "DequantizeLinear"
_MOST_STEPS = 8
"""Nodes that are followed from a weight to where its columns become heads."""
_Beside = tuple[Value, int | None, int]
"""A tensor that is sharded, the dim of it that would be sharded otherwise, and the dim that is."""


class CutWords:
    """Reasons about one choice of classes; names in them have `*` for the numbers of layers.

    Args:
        classes: of the graph.
        chosen: those that are sharded.
        axes: the axes that cut them.
        readings: what the partition does with the weights.
    """

    def __init__(
        self, classes: CutClasses, chosen: Mapping[int, CutClass], axes: Sequence[Axis], readings: Readings
    ) -> None:
        self.classes = classes
        self.readings = readings
        self.chosen = chosen
        self.axes = tuple(axes)
        self.said = " and ".join(dict.fromkeys(axis.name for axis in axes))
        self._heads_of: dict[int, int | None] = {}
        order = {node: place for place, node in enumerate(classes.flow.nodes)}
        constants = (value for value in classes.flow.values() if value.is_constant and value.has_uses)
        self._order = {value: order.get(value.users[0], 0) for value in constants}
        self._beside = self._conflicts()

    def _conflicts(self) -> dict[int, tuple[list[int], list[_Beside]]]:
        """For each class that is not cut what excludes it, with the places of these tensors in the graph, in order."""
        found: dict[int, tuple[list[int], list[_Beside]]] = {}
        cut = dict(self.classes.cut_places(self.chosen))
        rest = [number for number in self.classes.classes if number not in self.chosen]
        conflicts = self.classes.conflicts([*rest, *self.chosen])
        for number in rest:
            weights = self.classes.classes[number].weights.items()
            beside: list[_Beside] = [
                (value, dim, cut[value]) for value, dim in weights if value in cut and cut[value] != dim
            ]
            if not beside:
                others = conflicts[number].items()
                beside = [(value, None, cut[value]) for other, value in others if other in self.chosen and value in cut]
            if beside:
                beside.sort(key=lambda entry: self._order.get(entry[0], 0))
                found[number] = [self._order.get(value, 0) for value, _, _ in beside], beside
        return found

    # -- why it is sharded ------------------------------------------------------------------------------------------

    def why_cut(self, value: Value, dim: int) -> str:
        """Why a constant is sharded in a dim, by what its readers do with it."""
        found = list(dict.fromkeys(self._use(cut, *at) for at in self._read(value, dim) for cut in self._cuts(*at)))
        return "; ".join(found) or "its readers need a block of it"

    def _read(self, value: Value, dim: int) -> Iterator[tuple[Value, int]]:
        """What products read of a weight: where it is quantized, what is dequantized."""
        found = [node for node in value.users if node.op_type == _DEQUANTIZED and node.operands[0] is value]
        yield from ((node.results[0], dim) for node in found)
        if len(found) < len(value.users):
            yield value, dim

    def _cuts(self, value: Value, dim: int) -> list[Cut]:
        return [cut for node in value.users for cut in self.classes.cuts.get(node, ()) if (value, dim) in cut.places]

    def _use(self, cut: Cut, value: Value, dim: int) -> str:
        node = cut.node
        readings = self.readings.of(value, node)
        names = {axis.name for axis in self.axes}
        if cut.kind is Kind.REDUCE:
            rows = "input channels" if node.op_type.startswith("Conv") else "rows"
            if any(not each.is_moved and names <= each.summed for each in readings):
                return f"{rows}: {glob_of(where(node))} sums over {self.said}"
            planned = self.readings.heads.get(value.source_name)
            noun, size = (rows, cut.size) if planned is None else ("heads", planned)
        elif _are_blocks(node, value, dim):
            noun, size = "blocks", value.shape[dim]
        else:
            noun, size = self._noun(cut, value, dim)
        is_moved = any(each.is_moved for each in readings)
        beside = f"; its blocks are sent for {glob_of(where(node))}" if is_moved else self._gathered(value, dim)
        return f"{noun}: {size:,}, {ceil_div(size, self.classes.parts):,} a rank{beside}"

    def _gathered(self, value: Value, dim: int) -> str:
        """For which operator the blocks of what is made with a weight are brought together again."""
        held = self.classes.class_of(value, dim)
        if held is None or held.number not in self.chosen or value in self.classes.apart:
            return ""
        for other in held.gathered:
            node = _reader(self.classes, other, held)
            if node is not None and self.readings.is_moved(other):
                return f"; brought together for {node.operator}"
        return ""

    def _noun(self, cut: Cut, value: Value, dim: int) -> tuple[str, int]:
        planned = self.readings.heads.get(value.source_name)
        if planned is not None:
            return "heads", planned
        held = self.classes.class_of(value, dim)
        if held is not None and held.number not in self._heads_of:
            self._heads_of[held.number] = _heads(held)
        heads = None if held is None else self._heads_of[held.number]
        if held is not None and held.inputs:
            name, place = next((given.name, place) for given, place in held.inputs.items())
            return f"dim {place} of {name}" if place else "batch", cut.size
        if heads is not None:
            return "heads", self._split_size(cut) or heads
        if cut.node.op_type.startswith("Conv"):
            return "output channels", cut.size
        if held is not None and len(value.shape) == 1 and held.has_channels:
            return "channels", cut.size
        if len(value.shape) > 2 and dim < len(value.shape) - 2:
            return "matrices", cut.size
        return "columns", cut.size

    def _split_size(self, cut: Cut) -> int | None:
        """How many heads a dim is split to further on; None where it is not."""
        held = self.classes.class_of(*cut.places[0])
        node = cut.node
        for _ in range(_MOST_STEPS):
            if len(node.results) != 1 or len(node.result.uses) != 1:
                return None
            before, node = node.result, node.result.uses[0][0]
            sizes = [
                other.size
                for other in self.classes.cuts.get(node, ())
                if any(value is before and self.classes.class_of(value, dim) is held for value, dim in other.places)
            ]
            if not sizes or sizes[0] < cut.size:
                return sizes[0] if sizes else None
        return None

    # -- why it is not ------------------------------------------------------------------------------------------

    def why_whole(self, value: Value) -> str:
        """Why a constant stays replicated: the reason of the dim that comes closest to being sharded."""
        if is_shared_vector(value):
            return "several nodes read it, and it is small"
        if not value.uses:
            return "nothing reads it"
        reasons = [self._why(value, dim) for dim, size in enumerate(value.shape) if size > 1]
        return min(reasons, default=(9, "it is a single number"))[1]

    def _why(self, value: Value, dim: int) -> tuple[int, str]:
        held = self.classes.class_of(value, dim)
        size = value.shape[dim]
        if held is None:
            if size % self.classes.parts and not self._cuts(value, dim):
                return 7, f"no dim that {self.classes.parts} divides"
            return 6, self._needed(value, dim)
        if held.number in self.chosen:
            return 8, "its readers need all of it"
        if held.inputs and not held.sums_weights:
            name, place = next((given.name, place) for given, place in held.inputs.items())
            return 4, f"goes with dim {place} of the input {name}"
        if held.twice is not None:
            where_twice = glob_of(held.twice.source or held.twice.name)
            return 3, f"sharding it would shard two dims of {where_twice} at once"
        if held.gain <= 0:
            return 1, f"sharding dim {dim} would send {bytes_text(held.sent_bytes)} in every step, {_saved(held)}"
        if held.number not in self._beside:
            times = count_text(held.collectives, "collective")
            return 1, f"sharding dim {dim} would need {times} in every step, only {_saved(held)}"
        return 2, self._conflict(value, held.number)

    def _conflict(self, value: Value, number: int) -> str:
        """What of a class is sharded already: the tensor that is used last before the value."""
        places, tensors = self._beside[number]
        place = bisect_right(places, self._order.get(value, 0))
        other, dim, cut = tensors[max(place - 1, 0)]
        name = glob_of(other.source_name)
        if other is value:
            return f"dim {cut} is sharded"
        if dim is None:
            return f"goes with {name}, which is sharded in dim {cut}"
        return f"goes with dim {dim} of {name}, which is sharded in dim {cut}"

    def _needed(self, value: Value, dim: int) -> str:
        node = self.classes.needed_by(value, dim)
        return "its readers need it in full" if node is None else _need(node)


def why_no_batch(classes: CutClasses) -> str:
    """Why no dim of the inputs is sharded as a batch, by what comes closest to it."""
    inputs = classes.graph.inputs
    if not inputs:
        return "the model has no inputs"
    named = ", ".join(f"{value.name} {value.type}" for value in inputs)
    places = [
        (value, dim)
        for value in inputs
        if value.is_static
        for dim, size in enumerate(value.shape)
        if size >= classes.parts
    ]
    if not places:
        return f"the inputs ({named}) have no dim of {classes.parts} elements or more"
    reasons = sorted((_why_no_batch(classes, *place) for place in places), key=lambda reason: reason[0])
    return f"the inputs ({named}) have no batch: {reasons[0][1]}"


def _why_no_batch(classes: CutClasses, value: Value, dim: int) -> tuple[int, str]:
    """How far a dim of an input is from being a batch, and why it is none."""
    held, cut = classes.class_of(value, dim), f"sharding dim {dim} of {value.name}"
    if held is None:
        node = classes.needed_by(value, dim)
        return 4, f"dim {dim} of {value.name}: " + ("nothing reads it" if node is None else _need(node))
    if held.twice is not None:
        return 3, f"{cut} would shard two dims of {glob_of(held.twice.source or held.twice.name)} at once"
    if held.sums_weights:
        return 2, f"the products with weights sum over dim {dim} of {value.name}"
    needed = next((node for other in held.gathered if (node := _reader(classes, other, held))), None)
    why = "" if needed is None else f": {_need(needed)}"
    return 1, f"{cut} would send {bytes_text(held.sent_bytes)} in every step, {_saved(held)}{why}"


def _reader(classes: CutClasses, value: Value, held: CutClass) -> Node | None:
    """The node that needs a value whole in the dim that is in a class."""
    dims = (dim for dim in range(len(value.shape)) if classes.class_of(value, dim) is held)
    return next((node for dim in dims if (node := classes.needed_by(value, dim)) is not None), None)


def _need(node: Node) -> str:
    """That a node needs a tensor whole; or where the shapes are lost, without which it has no rule."""
    lost = shape_lost_at(node)
    return f"{node.operator} needs it in full" if lost is None else f"shape unknown behind {glob_of(where(lost))}"


def _saved(held: CutClass) -> str:
    """What cutting a class would save: `to hold 32.8 kB less`."""
    saved = [f"hold {bytes_text(held.weight_bytes)} less"] if held.weight_bytes else []
    if held.flops or not saved:
        saved.append(f"compute {flops_text(held.flops)} less")
    return f"to {' and '.join(saved)}"


def _are_blocks(node: Node, value: Value, dim: int) -> bool:
    """Whether a dim of scales or zero points counts blocks of what they belong to."""
    if node.op_type != _DEQUANTIZED or value is node.operands[0] or not int_attribute(node, "block_size", 0):
        return False
    return int_attribute(node, "axis", 1) % len(value.shape) == dim


def _heads(held: CutClass) -> int | None:
    """How many products of activations stand side by side in a class; None where it has none."""
    sizes = (
        cut.size
        for cut in held.cuts
        if cut.kind is Kind.PASS and not any(value.is_constant for value in cut.node.inputs[:2]) and _is_batched(cut)
    )
    return next(sizes, None)


def _is_batched(cut: Cut) -> bool:
    """True for the factors of a product of two tensors that are in both and in the result, such as heads."""
    node = cut.node
    if node.op_type == "Attention":
        return len({id(value) for value, _ in cut.places}) > 3
    return node.op_type in ("MatMul", "Einsum") and len({id(value) for value, _ in cut.places}) == 3
