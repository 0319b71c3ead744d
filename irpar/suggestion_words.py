"""Why a weight is cut, and why another is not, in words."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from irpar.analysis.cut_classes import Cut, CutClass, CutClasses, is_shared_vector
from irpar.analysis.uses import where
from irpar.ir import Value
from irpar.ir.annotate import glob_of
from irpar.ops import Kind
from irpar.sharding import Axis, ceil_div

from .display import bytes_text, count_text, flops_text


class CutWords:
    """Reasons about one choice of classes; names in them have `*` for the numbers of layers.

    Args:
        classes: of the graph.
        chosen: those that are cut.
        axes: the axes that cut them.
    """

    def __init__(self, classes: CutClasses, chosen: Mapping[int, CutClass], axes: Sequence[Axis]) -> None:
        self.classes = classes
        self.chosen = chosen
        self.names = [axis.name for axis in axes]
        self.axes = " and ".join(self.names)
        self._heads_of: dict[int, int | None] = {}
        order = {node: place for place, node in enumerate(classes.graph)}
        self._order = {value: order.get(value.users[0], 0) for value in classes.graph.constants if value.has_uses}
        cut = dict(classes.cut_places(chosen))
        rest = [number for number in classes.classes if number not in chosen]
        conflicts = classes.conflicts([*rest, *chosen])
        self._beside: dict[int, list[tuple[int, Value, int, int]]] = {}
        """For each class that is not cut: place, tensor, the dim of it in the class, and the dim that is cut."""
        for number in rest:
            held = classes.classes[number]
            shared = [
                (self._order.get(value, 0), value, dim, cut[value])
                for value, dim in held.weights.items()
                if value in cut and cut[value] != dim
            ]
            if not shared:
                shared = [
                    (0, value, -1, cut[value])
                    for other, value in conflicts[number].items()
                    if other in chosen and value in cut
                ]
            if shared:
                self._beside[number] = sorted(shared, key=lambda entry: entry[0])

    # -- why it is cut ------------------------------------------------------------------------------------------

    def why_cut(self, value: Value, spec: Sequence[Sequence[str] | None]) -> str:
        """Why a constant is cut, by what its readers do with the dim."""
        dim = next(place for place, axes in enumerate(spec) if axes)
        axes = [Axis.parse(axis) for axis in spec[dim] or () if axis != "?"]
        parts = self.classes.mesh.group_size(axes)
        found = list(dict.fromkeys(self._use(cut, value, dim, parts) for cut in self._cuts(value, dim)))
        return "; ".join(found) or "its readers need a block of it"

    def _cuts(self, value: Value, dim: int) -> list[Cut]:
        return [cut for node in value.users for cut in self.classes.cuts.get(node, ()) if (value, dim) in cut.places]

    def _use(self, cut: Cut, value: Value, dim: int, parts: int) -> str:
        node = cut.node
        if cut.kind is Kind.REDUCE:
            rows = "input channels" if node.op_type.startswith("Conv") else "rows"
            return f"{rows}: {glob_of(where(node))} sums over {self.axes}"
        noun, size = self._noun(cut, value, dim)
        return f"{noun}: {size:,}, {ceil_div(size, parts):,} a rank"

    def _noun(self, cut: Cut, value: Value, dim: int) -> tuple[str, int]:
        held = self.classes.class_of(value, dim)
        if held is not None and held.number not in self._heads_of:
            self._heads_of[held.number] = _heads(held)
        heads = None if held is None else self._heads_of[held.number]
        if heads is not None:
            return "heads", heads
        if cut.node.op_type.startswith("Conv"):
            return "output channels", cut.size
        if held is not None and len(value.shape) == 1 and held.has_channels:
            return "channels", cut.size
        if len(value.shape) > 2 and dim < len(value.shape) - 2:
            return "matrices", cut.size
        return "columns", cut.size

    # -- why it is not ------------------------------------------------------------------------------------------

    def why_whole(self, value: Value) -> str:
        """Why a constant stays whole: the reason of the dim that comes closest to being cut."""
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
                return 5, f"no dim that {self.classes.parts} divides"
            return 6, self._needed(value, dim)
        if held.number in self.chosen:
            return 8, "its readers need all of it"
        if held.inputs and not held.sums_weights:
            name, place = next((given.name, place) for given, place in held.inputs.items())
            return 4, f"goes with dim {place} of the input {name}"
        if held.twice is not None:
            return 3, "what goes with it would be cut in two dims at once"
        beside = self._beside.get(held.number)
        if held.gain <= 0:
            return 1, f"cutting dim {dim} would send {bytes_text(held.sent_bytes)} in every step, {_saved(held)}"
        if beside is None:
            times = count_text(held.collectives, "collective")
            return 1, f"cutting dim {dim} would need {times} in every step, only {_saved(held)}"
        return 2, self._conflict(value, beside)

    def _conflict(self, value: Value, beside: Sequence[tuple[int, Value, int, int]]) -> str:
        """What of it is cut already: the tensor that is used last before the value."""
        place = bisect_right([entry[0] for entry in beside], self._order.get(value, 0))
        _, other, dim, cut = beside[max(place - 1, 0)]
        name = glob_of(other.source or other.name)
        if other is value:
            return f"dim {cut} is cut"
        if dim < 0:
            return f"goes with {name}, which is cut in dim {cut}"
        return f"goes with dim {dim} of {name}, which is cut in dim {cut}"

    def _needed(self, value: Value, dim: int) -> str:
        node = self.classes.needed_by(value, dim)
        return "its readers need it whole" if node is None else f"{node.operator} needs it whole"


def _saved(held: CutClass) -> str:
    """What cutting a class would save: `to hold 32.8 kB less`."""
    saved = [f"hold {bytes_text(held.weight_bytes)} less"] if held.weight_bytes else []
    if held.flops:
        saved.append(f"compute {flops_text(held.flops)} less")
    return f"to {' and '.join(saved)}"


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
