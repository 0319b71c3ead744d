"""Annotations: a glob over value names of the source model, and how the values that it matches are sharded."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from irpar.globs import matching_names
from irpar.sharding import IrparError, Mesh, Sharding, nearest_names

from .annotation import Annotation, AnnotationError
from .decisions import Decision, Gone
from .graph import Graph
from .module import Module
from .types import tensor_type
from .value import Value


def annotate(module: Module, annotation: Annotation) -> int:
    """Apply an annotation, or keep it until the module has a mesh.

    Returns:
        How many values it matches.

    Raises:
        AnnotationError: it matches nothing, or does not fit what it matches.
    """
    if module.meshes:
        return apply(module, annotation, module.mesh)
    matched = matches(module, annotation)
    for value in matched:
        type_ = tensor_type(value.type)
        if type_ is not None and type_.shape is not None:
            _check(annotation, value)
    module.annotations.append(annotation)
    return len(matched)


def apply(module: Module, annotation: Annotation, mesh: Mesh) -> int:
    """Set the sharding of every value that an annotation matches.

    Raises:
        AnnotationError: it matches nothing, names an axis that the mesh lacks, or has another number of dims.
    """
    return apply_to(module, annotation, mesh, matches(module, annotation))


def apply_to(module: Module, annotation: Annotation, mesh: Mesh, matched: Sequence[Value]) -> int:
    """Set the sharding of values that are known to be what an annotation means.

    Raises:
        AnnotationError: it names an axis that the mesh lacks, or has another number of dims.
    """
    try:
        sharding = Sharding.of_spec(mesh, annotation.spec)
    except IrparError as error:
        first = f"it matches {len(matched)} tensor(s), the first: {matched[0].name} {matched[0].type}"
        raise AnnotationError(error.what, where=annotation.place(), notes=(first,), do=error.do) from error
    bound = [value for value in matched if _binds(module, annotation, sharding, value)]
    for value in bound:
        value.sharding = sharding
        module.annotated[value.name] = annotation
        module.decisions[value.name] = [Decision(f"annotated {annotation.title}")]
    return len(matched)


def _binds(module: Module, annotation: Annotation, sharding: Sharding, value: Value) -> bool:
    """Whether an annotation decides a value; one by its own name goes before a glob, whichever comes first.

    Raises:
        AnnotationError: the annotation does not fit the value, or an equally close one says something else.
    """
    _check(annotation, value)
    known = module.annotated.get(value.name)
    if value.sharding is None:
        return True
    if known is not None and known.names(value) != annotation.names(value):
        return annotation.names(value)
    if value.sharding == sharding:
        return known is None
    raise AnnotationError(
        f"%{value.name} is annotated twice: {value.sharding} and {sharding}",
        where=annotation.place(),
        notes=(f"the other: {known.place()}",) if known is not None else (),
        do="keep one of the two entries",
    )


def _check(annotation: Annotation, value: Value) -> None:
    type_ = tensor_type(value.type)
    if type_ is None or type_.shape is None:
        raise AnnotationError(
            f"%{value.name} is {value.type}: only tensors of known rank can be sharded",
            where=annotation.place(),
            do="annotate a tensor; run infer-types first where the rank is not known",
        )
    if len(type_.shape) != len(annotation.spec):
        raise AnnotationError(
            f"the annotation has {len(annotation.spec)} dims, but {value.name} is {value.type}",
            where=annotation.place(),
            do=f"write one entry for each of its {len(type_.shape)} dims, null where a dim is not sharded",
        )


def annotate_further(module: Module, value: Value, sharding: Sharding, words: str) -> bool:
    """Let a value be sharded so, whatever it was annotated with; `words` say what wants that.

    An annotation that says the same stays; another one cannot be left out by itself any more.

    Returns:
        Whether that is another sharding than the value had.
    """
    known = module.annotated.get(value.name)
    is_new = value.sharding != sharding
    if known is not None and not is_new:
        return False
    said = words if known is None else f"{known.title} and {words}"
    value.sharding = sharding
    module.annotated[value.name] = Annotation(value.source_name, tuple(sharding.spec()), said=said, is_implied=True)
    module.decisions[value.name] = [Decision(f"annotated by {words}" if known is None else f"annotated {said}")]
    return is_new


def hand_over(module: Module, name: str, heir: str, why: str) -> None:
    """Keep the annotation of a value that is taken out, and the reasons, under the name of the one that stands for it.

    Args:
        module: with the log.
        name: of the value.
        heir: the name of the other, which is sharded so too.
        why: what took the value out.
    """
    annotation = module.annotated.pop(name, None)
    if annotation is not None:
        module.gone[name] = Gone(annotation, why)
        module.annotated.setdefault(heir, annotation)
    known = module.decisions.pop(name, None)
    if known is not None:
        module.decisions.setdefault(heir, known)


def note_gone(module: Module, before: Mapping[str, Annotation], why: str) -> None:
    """Log what annotated values and operators a pass has taken out, as far as it has left that they were annotated.

    In global view that is also a value without a sharding.

    Args:
        module: after the pass.
        before: what was annotated before it.
        why: what took them out.
    """
    if not before and not module.run_as_said:
        return
    there = _annotated_names(module)
    for name, annotation in before.items():
        if name not in there and name in module.annotated:
            del module.annotated[name]
            module.gone[name] = Gone(annotation, why)
    if module.run_as_said and not module.is_local:
        names = {node.source or node.name for graph in module.graphs for node in graph.walk() if node.strategy}
        for name in module.run_as_said.keys() - names:
            module.gone[name] = Gone(module.run_as_said.pop(name), why)


def _annotated_names(module: Module) -> set[str]:
    """The names of the annotated values that are there; in global view of those that have a sharding."""
    found: set[str] = set()
    for graph in module.graphs:
        table = graph.names.table
        names = module.annotated.keys() & table.keys()
        found.update(names if module.is_local else (name for name in names if table[name].sharding is not None))
    return found


def matches(module: Module, annotation: Annotation) -> list[Value]:
    """The values whose source name, name, or name as a graph result matches; an exact name goes before a glob.

    Raises:
        AnnotationError: none does; the message lists the nearest names.
    """
    return module.named_values.matches(annotation)


class NamedValues:
    """The values of a module by the names that annotations may call them; `Module.named_values` keeps one.

    Args:
        module: the module, as it is now.
    """

    def __init__(self, module: Module) -> None:
        self._graphs = [(graph, graph.names.changes) for graph in module.graphs]
        self._outputs: list[tuple[Graph, tuple[Value, ...], list[str]]] = []
        self._values: dict[str, list[Value]] = {}
        for graph in _graphs(module):
            self._outputs.append((graph, graph.outputs, list(graph.output_names)))
            for name, value in _named(graph):
                self._values.setdefault(name, []).append(value)

    def is_of(self, module: Module) -> bool:
        """Whether the module still has these values by these names: as many steps as its graphs have results."""
        return (
            [graph for graph, _ in self._graphs] == module.graphs
            and all(graph.names.changes == changes for graph, changes in self._graphs)
            and all(graph.outputs == outputs and graph.output_names == names for graph, outputs, names in self._outputs)
        )

    def matches(self, annotation: Annotation) -> list[Value]:
        """As the function `matches`.

        Raises:
            AnnotationError: no name matches; the message lists the nearest names.
        """
        found = matching(annotation.pattern, self._values)
        if found:
            return list(dict.fromkeys(found))
        raise AnnotationError(
            f"no tensor matches {json.dumps(annotation.pattern, ensure_ascii=not annotation.pattern.isprintable())}",
            where=annotation.place(),
            notes=nearest_names(annotation.pattern, self._values),
            do="write a name or glob of the model's tensors; `irpar inspect MODEL --tensors '*'` lists them",
        )


_NUMBER = re.compile(r"(?<![A-Za-z0-9()])\d+(?![A-Za-z0-9])")  # not those of sub-axes: x:(1)2
"""A number that is a step of a name by itself: the 0 of h.0.attn and of MatMul_0, not that of fc0."""

T = TypeVar("T")


def glob_of(text: str) -> str:
    """A text with `*` for the numbers that are steps of names: one glob for the same tensor of all layers."""
    return _NUMBER.sub("*", text)


def matching(pattern: str, known: Mapping[str, Sequence[T]]) -> list[T]:
    """What has the name `pattern`; where nothing has, what has a name that it matches as a glob."""
    return [found for name in matching_names(pattern, known) for found in known[name]]


def named_values(module: Module) -> Iterable[tuple[str, Value]]:
    """The values of all graphs and of the bodies in them, each with every name that annotations may call it."""
    for graph in _graphs(module):
        yield from _named(graph)


def _graphs(module: Module) -> Iterator[Graph]:
    return (inner for outer in module.graphs for inner in outer.graphs())


def _named(graph: Graph) -> Iterator[tuple[str, Value]]:
    for value in graph.values():
        yield value.source_name, value
    yield from zip(graph.output_names, graph.outputs, strict=True)
