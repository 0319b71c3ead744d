"""Annotated values of a program: what their readers meet first is the annotated sharding.

y = MatMul(x : [8, 64@tp], w : [64@tp, 32]) annotated [8@tp, 32]      y_1 = MatMul(x, w) : [8, 32] partial(sum: tp)
                                                                      y = irpar.ReduceScatter(y_1) : [8@tp, 32]
What a node gives otherwise is moved before anybody reads it, and only what comes of that has the name of the value. Of
constants, an annotation says what a rank holds; their readers may be served by other blocks.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from irpar.ir import Annotation, Decision, Module, Value
from irpar.sharding import IrparError, Mesh, Sharding

from .trees import is_move


def is_held(module: Module, value: Value) -> bool:
    """Whether a value is one that is annotated, no constant, and lies as annotated: its readers stand behind it."""
    annotation = module.annotated.get(value.name)
    if annotation is None or value.is_constant or value.sharding is None:
        return False
    return lies_as_said(annotation, value.sharding)


def lies_as_said(annotation: Annotation, lies: Sharding) -> bool:
    """Whether a sharding is what an annotation says; open dims may have more axes behind those that it names."""
    return said_of(annotation, lies.mesh).allows(lies)


def is_met(value: Value, said: Sharding) -> bool:
    """Whether who reads a value, collectives that move it on aside, reads it as was said or as moved from there."""
    if all(is_move(user) for user in value.users):
        return True
    step: Value | None = value
    while step is not None:
        if step.sharding is not None and said.allows(step.sharding):
            return True
        step = step.node.inputs[0] if step.node is not None and is_move(step.node) else None
    return False


def said_of(annotation: Annotation, mesh: Mesh) -> Sharding:
    """The sharding that an annotation says, open dims and priorities included."""
    return Sharding.of_spec(mesh, annotation.spec)


# -- the end --------------------------------------------------------------------------------------------------------


def settled_annotations(module: Module) -> list[dict[str, Any]]:
    """Check that annotations hold in a local module; what plan.json lists that is sharded otherwise, or nowhere.

    After: no decision says that a value is annotated which is sharded otherwise.

    Returns:
        Entries of the plan's `not_as_annotated`: of weights that are stored otherwise, and of values that are gone.

    Raises:
        IrparError: a value is sharded otherwise than it is annotated.
    """
    by_name = {value.name: value for body in module.graph.graphs() for value in body.values()}
    listed: dict[tuple[str, str], dict[str, Any]] = {}
    for name, annotation in module.annotated.items():
        found = by_name.get(name)
        if found is None:
            listed.setdefault((name, ""), _entry(name, annotation, None, "the passes put something else in its place"))
        elif found.sharding is not None and not lies_as_said(annotation, found.sharding):
            if not found.is_constant:
                raise _not_held(found, annotation)
            _list_stored(listed, found, annotation)
    standing = _standing(by_name.values(), module.gone)
    for name, gone in module.gone.items():
        if not any(lies_as_said(gone.annotation, lies) for lies in standing[name]):
            listed.setdefault((name, ""), _entry(name, gone.annotation, None, gone.why))
    _correct_decisions(module, by_name.values())
    return list(listed.values())


def _standing(values: Iterable[Value], names: Iterable[str]) -> dict[str, list[Sharding]]:
    """How the values lie that stand for those of some names in the source model."""
    found: dict[str, list[Sharding]] = {name: [] for name in names}
    for value in values if found else ():
        if value.sharding is not None and value.source_name in found:
            found[value.source_name].append(value.sharding)
    return found


def _entry(name: str, annotation: Annotation, lies: Sharding | None, why: str) -> dict[str, Any]:
    return {
        "name": name,
        "annotation": annotation.title,
        "lies": None if lies is None else lies.spec(),
        "why": why,
    }


_STORED = "a rank holds the blocks that are read there, which are no more, and less is sent"


def _list_stored(listed: dict[tuple[str, str], dict[str, Any]], value: Value, annotation: Annotation) -> None:
    assert value.sharding is not None
    entry = _entry(value.source_name, annotation, value.sharding, _STORED)
    listed.setdefault((value.source_name, str(value.sharding.canonical)), entry)


def _not_held(value: Value, annotation: Annotation) -> IrparError:
    assert value.sharding is not None
    return IrparError(
        f"%{value.name} is annotated {said_of(annotation, value.sharding.mesh)}, "
        f"but would be sharded as {value.sharding}",
        where=annotation.place(),
        do="run insert-redistribution between complete-sharding and localize, or leave out the annotation",
    )


def _correct_decisions(module: Module, values: Iterable[Value]) -> None:
    """Let nothing be called annotated that is sharded otherwise than its annotation says."""
    known = (*module.annotated.values(), *(gone.annotation for gone in module.gone.values()))
    titles = {f"annotated {annotation.title}": annotation for annotation in known}
    for value in values:
        told = module.decisions.get(value.name)
        if told and value.sharding is not None and not titles.keys().isdisjoint([decision.why for decision in told]):
            module.decisions[value.name] = [_corrected(decision, value.sharding, titles) for decision in told]


def _corrected(decision: Decision, lies: Sharding, titles: Mapping[str, Annotation]) -> Decision:
    annotation = titles.get(decision.why)
    if annotation is None or lies_as_said(annotation, lies):
        return decision
    said = said_of(annotation, lies.mesh)
    return replace(decision, why=f"stored so, not as {said}, which {annotation.title} says: less is sent")
