"""What plan.json says of each value: how it is sharded, and why."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from irpar.analysis.explanation.origins import cutting_names
from irpar.ir import Decision, Graph, JoinedTensor, Value

from .plan_record import Plan as Plan


def value_entries(graph: Graph, decisions: dict[str, list[Decision]]) -> list[dict[str, Any]]:
    """All values with a sharding, and why they are sharded so; outputs under the names that they have outside, too."""
    rows = [
        _value(value, value.name, value.source_name, decisions.get(value.name, ()))
        for body in graph.graphs()
        for value in body.values()
        if value.sharding is not None
    ]
    known = {name for row in rows for name in (row["name"], row["source"])}
    for name, value in zip(graph.output_names, graph.outputs, strict=True):
        if name not in known and value.sharding is not None:
            same = Decision(f"is %{value.name}", value.name)
            axes = cutting_names(value.sharding)
            rows.append(_value(value, name, name, [replace(same, axes=(axis,)) for axis in axes] or [same]))
    listed = {row["name"] for row in rows}
    for reason in (reason for row in rows for reason in row["why"]):
        _pass_over_gone(reason, listed, decisions)
    return rows


def _pass_over_gone(reason: dict[str, Any], listed: Set[str], decisions: Mapping[str, Sequence[Decision]]) -> None:
    """Where the program has no value any more that a reason follows: it follows the nearest that this one does itself.

    A value of which only the shape was read (by EyeLike, say) is computed no longer once shapes are constants. Where
    it was annotated itself, the chain ends with that.
    """
    name, met = reason["follows"], set[str]()
    while name is not None and name not in listed and name not in met:
        met.add(name)
        about = [why for why in decisions.get(name, ()) if not why.axes or set(reason["axes"]) & set(why.axes)]
        if not about:
            return
        nearest = min(about, key=lambda why: not why.axes)  # As readers of chains do: of these axes before of all.
        name = nearest.follows
        if name is None:
            reason |= {"why": f"{reason['why']}, {nearest.why}", "follows": None}
    if name in listed:
        reason["follows"] = name


def _value(value: Value, name: str, source: str, decisions: Sequence[Decision]) -> dict[str, Any]:
    assert value.sharding is not None
    axes = value.sharding.canonical.axis_names
    return {
        "name": name,
        "source": source,
        "shape": list(value.whole_shape),
        "sharding": value.sharding.spec(),
        "partial": [str(axis) for axis in value.sharding.partial],
        "sections": _sections(value),
        "why": [
            {"why": decision.why, "follows": decision.follows, "axes": list(decision.axes)}
            for decision in decisions
            if not decision.axes or not axes.isdisjoint(decision.axes)
        ],
    }


def _sections(value: Value) -> dict[str, Any] | None:
    """Of a constant with blocks of several sections of a tensor side by side: along which dim, and which sections."""
    data = value.data
    if not isinstance(data, JoinedTensor) or data.sections is None:
        return None
    return {"dim": data.dim, "of": [list(section) for section in data.sections]}
