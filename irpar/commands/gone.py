"""Why a tensor of the model is none of its partition: what took it apart, and what stands there now."""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpar.sharding import IrparError

if TYPE_CHECKING:
    from irpar.ir import Value
    from irpar.output.plan_record import Plan

_MOST_NAMED = 6
_TAKING = frozenset({"Split", "Slice", "Gather"})


def why_gone(plan: "Plan", target: str, known: Collection[str]) -> str | None:
    """One line for a tensor of the model that the plan lacks; None where the model is gone, or has none so named.

    Args:
        plan: of the partition.
        target: what was asked for.
        known: the names that the plan has.
    """
    value = _value_of_model(plan, target.removeprefix("%"))
    if value is None:
        return None
    after = _nearest(value, lambda at: [result for node in at.users for result in node.results], known)
    there = f"; there now: {', '.join(after[:_MOST_NAMED])}" if after else ""
    sections = {entry["source"]: entry["sections"] for entry in plan.values if entry.get("sections")}
    if "split-weights" not in plan.pipeline or not _is_taken_apart(value):
        return f"it is a tensor of the model, but the passes put something else in its place{there}"
    inside = [name for name in _nearest(value, _operands, known) if name in sections]
    if inside:
        told = ", ".join(f"{name} ({_sections(sections[name])})" for name in inside[:_MOST_NAMED])
        return f"split-weights took it apart, into the sections of {told}{there}"
    return f"its readers take sections of it, and split-weights made a product of its own for each{there}"


def _value_of_model(plan: "Plan", name: str) -> "Value | None":
    """A tensor of the model file; None where the file is not the one that was partitioned."""
    from irpar.api import load
    from irpar.ir.annotate import named_values
    from irpar.output.plan_source import sha256_of

    path = plan.source["model"]
    try:
        if path is None or sha256_of(Path(path)) != plan.source["sha256"]:
            return None
        return next((value for found, value in named_values(load(path)) if found == name), None)
    except (IrparError, OSError):
        return None


def _is_taken_apart(value: "Value") -> bool:
    """Whether nodes that take sections read it, in the end; elementwise ones may stand between."""
    waiting, seen = [value], {value}
    while waiting:
        users = waiting.pop().users
        if any(node.op_type in _TAKING for node in users):
            return True
        results = {result for node in users for result in node.results} - seen
        seen |= results
        # Only what stands in one line with it: another reader would have kept the weight whole.
        waiting += results if len(users) == 1 else ()
    return False


def _operands(value: "Value") -> "Iterable[Value]":
    return () if value.node is None else value.node.inputs


def _nearest(
    value: "Value", beside: "Callable[[Value], Iterable[Value]]", wanted: Collection[str] | Mapping[str, Any]
) -> list[str]:
    """The first values in a direction, along each way, whose names are wanted."""
    found: dict[str, None] = {}
    waiting, seen = [value], {value}
    while waiting:
        for each in beside(waiting.pop(0)):
            if each in seen:
                continue
            seen.add(each)
            if each.source_name in wanted:
                found[each.source_name] = None
            else:
                waiting.append(each)
    return list(found)


def _sections(sections: Mapping[str, Any]) -> str:
    """Where the sections of a tensor are."""
    ranges = ", ".join(f"{start}:{stop}" for start, stop in sections["of"])
    return f"{ranges} of dim {sections['dim']}"
