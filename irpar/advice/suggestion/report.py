"""What is told of a suggestion: tensors that are treated alike, layers together, each group with one reason."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from irpar.advice.parameters import exact_use_texts, use_texts
from irpar.advice.uses import uses_of
from irpar.analysis.memory.liveness import value_bytes
from irpar.ir import Graph, Value
from irpar.ir.annotate import glob_of
from irpar.sharding import Axis

from .cut_classes import CutClasses
from .file import Spec, pattern_of
from .words import CutWords


@dataclass
class TensorGroup:
    """Tensors of the source model that differ only in numbers inside their names, and are treated alike.

    Attributes:
        pattern: their name with `*` for these numbers; a single tensor keeps its own.
        names: all of them, in order.
        dtype, shape: of each.
        bytes: of all.
        spec: how each is sharded.
        reason: why, or why not.
        use: what computes with them, where their names do not tell; else empty.
    """

    pattern: str
    names: list[str]
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    spec: Spec
    reason: str
    use: str


Found = dict[tuple[object, ...], TensorGroup]


class Groups:
    """Groups of the inputs and weights of one graph and the bodies in it.

    Args:
        graph: that the choice was made for.
        sources: names of the constants of the source model; others are not told of.
        words: the reasons; None where no axis cuts weights.
    """

    def __init__(self, graph: Graph, sources: Collection[str], words: CutWords | None) -> None:
        self.graph = graph
        self.constants = [value for inner in graph.graphs() for value in inner.constants]
        self.sources = sources
        self.words = words
        self._of_parts: dict[tuple[Axis, ...], CutWords] = {}

    def made(
        self, shardings: Mapping[str, Spec], annotated: Mapping[str, Spec], places: Mapping[str, int]
    ) -> tuple[list[TensorGroup], list[TensorGroup]]:
        """Those that are sharded, in order, and those that stay replicated, most bytes first.

        Args:
            shardings: name to how the tensor is sharded in the end.
            annotated: name to how the suggestion annotates it.
            places: name to where in the model it is first used.
        """
        cut: Found = {}
        whole: Found = {}
        values = [*self.graph.inputs, *self.constants]
        for value in sorted(values, key=lambda value: places.get(value.source_name, len(places))):
            spec = shardings.get(value.source_name)
            if spec is None or not (value.is_input or value.source_name in self.sources):
                continue
            if any(spec):
                _put(cut, value, spec, self._why_cut(value, spec))
            elif self.words is not None and value.is_constant and not _is_small(value):
                reason = _why_annotated(annotated.get(value.source_name, ())) or self.words.why_whole(value)
                _put(whole, value, spec, reason)
        by_size = sorted(map(_labelled, whole.values()), key=lambda group: -group.bytes)
        return list(map(_labelled, cut.values())), by_size

    def _why_cut(self, value: Value, spec: Spec) -> str:
        dim, axes = next((dim, axes) for dim, axes in enumerate(spec) if axes)
        cut = tuple(map(Axis.parse, axes))
        if value.is_input:
            of_weights = {axis.name for axis in self.words.axes} if self.words is not None else set()
            return "follows the weights that meet it" if cut[0].name in of_weights else "batch"
        if self.words is None:
            return "follows the batch"
        words = self.words if cut == self.words.axes else self._words_of(cut)
        return words.why_cut(value, dim)

    def _words_of(self, axes: tuple[Axis, ...]) -> CutWords:
        """The words for a tensor that other axes cut, such as a part of those that cut the rest."""
        assert self.words is not None
        if axes not in self._of_parts:
            known = self.words.classes
            classes = CutClasses(self.graph, known.mesh, axes, known.shares, known.flow)
            self._of_parts[axes] = CutWords(classes, {}, axes, self.words.readings)
        return self._of_parts[axes]

    def comments(self, lines: Mapping[str, Spec], groups: Iterable[TensorGroup]) -> dict[str, str]:
        """The reason of each line of the file, and the use of tensors whose names do not tell it.

        Args:
            lines: of the file.
            groups: of tensors that are sharded in the end; other lines keep one whole, or cut one that ends up whole.
        """
        group_of = {name: group for group in groups for name in (group.pattern, *group.names)}
        values = {value.source_name: value for value in self.constants}
        comments = {}
        for line, spec in lines.items():
            group = group_of.get(line)
            use = "" if group is None else group.use
            if use and line in values:
                use = "; ".join(exact_use_texts(values[line]))
            if group is None or not _keeps(group.spec, spec):
                reason = _why_annotated(spec, group) or "replicated, so that the sharding ends here"
            else:
                reason = group.reason
            comments[line] = f"{use}; {reason}" if use else reason
        return comments


def _why_annotated(spec: Spec, group: TensorGroup | None = None) -> str:
    """Why a tensor is annotated that is sharded otherwise in the end; "" where the annotation shards nothing.

    Args:
        spec: the annotation.
        group: how it is sharded in the end; None: whole.
    """
    if not any(spec):
        return ""
    start = f"{_cut_dims(spec)} is sharded, so that its readers can run in parts"
    if group is None:
        return f"{start}; small enough that each rank then holds it in full"
    return f"{start}; each rank then holds what they read, sharded in {_cut_dims(group.spec)}: {group.reason}"


def _keeps(spec: Spec, annotated: Spec) -> bool:
    """Whether a tensor is sharded as it was annotated, and perhaps further."""
    return any(annotated) and all(
        (axes or ())[: len(said)] == said for axes, said in zip(spec, (said or () for said in annotated), strict=True)
    )


def _cut_dims(spec: Spec) -> str:
    return " and ".join(f"dim {dim}" for dim, axes in enumerate(spec) if axes)


def _is_small(value: Value) -> bool:
    """A single number, or sizes, axes and the like."""
    if not value.is_static or max(value.shape, default=1) <= 1:
        return True
    return bool(value.dtype.is_index) and len(value.shape) < 2


def _put(groups: Found, value: Value, spec: Spec, reason: str) -> None:
    """Add a tensor to those that are treated alike."""
    name, use = value.source_name, _use(value)
    key = (glob_of(name), spec, value.dtype, value.shape, reason, use)
    known = groups.get(key)
    if known is None:
        dtype = value.dtype.text
        groups[key] = TensorGroup(name, [name], dtype, value.shape, value_bytes(value), spec, reason, use)
    elif name not in known.names:
        known.names.append(name)
        known.bytes += value_bytes(value)


def _use(value: Value) -> str:
    """What a weight is for, where its name does not say where it belongs."""
    scopes = [use.node.scope for use in uses_of(value) if use.node.scope]
    if not scopes or any(value.source_name.startswith(scope.replace("/", ".")) for scope in scopes):
        return ""
    return "; ".join(use_texts(value))


def _labelled(group: TensorGroup) -> TensorGroup:
    group.pattern = pattern_of(group.names)
    return group
