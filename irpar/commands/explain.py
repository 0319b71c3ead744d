"""irpar explain: why a tensor is sharded as it is, and why a collective is there."""

import fnmatch
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from irpar.output.entries import known_times, over_text
from irpar.output.tables import (
    ELSEWHERE,
    copies_table,
    functions_table,
    headline,
    indented,
    merged,
    on_memory,
    pattern,
    prediction,
    print_replicated,
    specs_table,
    state_table,
)
from irpar.sharding import IrparError, nearest_names
from irpar.tables.display import output, print_json, shortened
from irpar.units import bytes_text, count_text, sharding_text

from .gone import why_gone
from .options import Json, Out

if TYPE_CHECKING:
    from rich.console import Console

    from irpar.output.plan_record import Plan

Entry = Mapping[str, Any]
_FIRST_STEPS, _LAST_STEPS = 6, 4
"""Of a long chain of reasons its two ends are shown."""

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[VALUE|COLLECTIVE]", help="A tensor by name or glob, or a collective by its id.", show_default=False
    ),
]


Conflicts = Annotated[
    bool, typer.Option("--conflicts", help="Where annotations pull a tensor in two directions, and what that costs.")
]


Memory = Annotated[
    bool,
    typer.Option(
        "--memory",
        help="What ranks hold: parameters, gradients, optimizer state, activations, buffers; what of it at the peak, "
        "and what would lower that.",
    ),
]


Rank = Annotated[
    int | None,
    typer.Option(
        "--rank",
        metavar="RANK",
        help="--memory: whose peak; if not given, that of a rank that holds most.",
        show_default=False,
    ),
]


Picture = Annotated[
    Path | None,
    typer.Option(
        "--svg",
        metavar="FILE.svg",
        help="--memory: draw memory over the steps of the program, before and after recompute.",
        show_default=False,
    ),
]


Force = Annotated[bool, typer.Option("--force", help="Replace the file of --svg.")]


def explain_command(
    out: Out,
    target: Target = None,
    conflicts: Conflicts = False,
    memory: Memory = False,
    rank: Rank = None,
    picture: Picture = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Say why a tensor is sharded as it is, or why a collective is there. Without a target: all collectives."""
    from irpar.output.plan_reading import read_plan

    if not memory and (rank is not None or picture is not None):
        option = "--svg" if rank is None else "--rank"
        raise IrparError(f"{option} is for --memory alone", do="leave it out, or give --memory too")
    if force and picture is None:
        raise IrparError("--force is for --svg alone", do="leave it out, or give --svg FILE.svg too")
    plan = read_plan(out)
    if conflicts or memory:
        if target is not None:
            shown = "--conflicts shows all of them" if conflicts else "--memory is about ranks"
            raise IrparError(shown, do=f"leave out {target}")
        if conflicts and memory:
            raise IrparError("--conflicts and --memory are two reports", do="ask for one")
        if conflicts:
            _explain_conflicts(plan, as_json)
            return
        from .explain_memory import MemoryReportOptions, explain_memory

        explain_memory(plan, out, MemoryReportOptions(rank, picture, force, as_json))
        return
    if target is None:
        _explain_all(plan, as_json)
        return
    collectives = [entry for entry in plan.collectives if target in (str(entry["id"]), f"id={entry['id']}")]
    copies = [entry for entry in plan.copies if target in (str(entry["id"]), f"id={entry['id']}")]
    values = [] if collectives or copies else _matching(plan, target)
    copies += [entry for entry in plan.copies if entry["value"] in {target.removeprefix("%"), *_names(values)}]
    if not (collectives or copies or values):
        raise _unknown(plan, target)
    chains = {entry["name"]: _chains(plan, entry) for entry in values}
    related = collectives or [entry for entry in plan.collectives if entry["value"] in {v["source"] for v in values}]
    if as_json:
        found = [{**entry, "chains": chains[entry["name"]], **_memories(plan, entry)} for entry in values]
        print_json({"values": found, "collectives": related, **({"copies": copies} if plan.copies else {})})
        return
    console = output()
    told: set[tuple[str, str]] = set()
    for entry in values:
        _print_value(console, entry, chains[entry["name"]], told)
        for lies in _memories(plan, entry).get("memories", ()):
            console.print(indented(_memory_text(lies)))
    _print_collectives(console, related, str)
    for entry in copies:
        _print_copy(console, entry)


def _memories(plan: "Plan", value: Entry) -> dict[str, Sequence[Entry]]:
    """Where a value lies when a run begins, if the plan says so."""
    found = [entry for entry in plan.memories if entry["value"] in (value["name"], value["source"])]
    return {"memories": found} if found else {}


def _names(values: Sequence[Entry]) -> set[str]:
    return {name for entry in values for name in (entry["name"], entry["source"])}


def _explain_all(plan: "Plan", as_json: bool) -> None:
    if as_json:
        lists = {"inputs": plan.inputs, "outputs": plan.outputs, "replicated": plan.replicated}
        head = {"mesh": plan.mesh, "pipeline": plan.pipeline, "network": plan.network, "predicted": plan.predicted}
        copies = {"copies": plan.copies} if plan.copies else {}
        print_json({**head, "collectives": plan.collectives, **copies, "functions": plan.functions, **lists})
        return
    console = output()
    console.print(Text(headline(plan), style="bold"))
    if plan.predicted is not None:
        console.print(prediction(plan), soft_wrap=True)
    console.print(specs_table("input", plan.inputs))
    console.print()
    console.print(specs_table("output", plan.outputs))
    if plan.state:
        console.print()
        console.print(state_table(plan.state))
    _print_collectives(console, plan.collectives, shortened)
    if plan.copies:
        console.print()
        console.print(copies_table(plan))
        console.print(Text(_held(plan)), soft_wrap=True)
    if plan.functions:
        console.print()
        console.print(functions_table(plan))
        console.print(Text(_reuse(plan)), soft_wrap=True)
    print_replicated(console, plan.replicated, "", rows=None)
    console.print("\nfor one tensor or collective: irpar explain OUT NAME, irpar explain OUT ID", soft_wrap=True)


def _held(plan: "Plan") -> str:
    """Where what a rank holds lies at the most."""
    fields = {"on the device": "peak_bytes", **ELSEWHERE}
    most = {where: max(rank.get(field, 0) for rank in plan.ranks) for where, field in fields.items()}
    return "a rank holds at most " + ", ".join(f"{bytes_text(size)} {where}" for where, size in most.items() if size)


def _memory_text(entry: Entry) -> str:
    """Where something lies when a run begins, and why."""
    why = f": {entry['why']}" if entry["why"] else ""
    return f"{entry['kind']} of {bytes_text(entry['bytes'])}, lies {on_memory(entry['memory'])}{why}"


def _print_copy(console: "Console", entry: Entry) -> None:
    """A copy between memories: of what, when, and why."""
    times = "" if entry["times"] == 1 else f", {entry['times']} times"
    if entry["times"] is None:
        times = ", as often as the body that it stands in runs"
    console.print()
    console.print(Text(f"{entry['id']}  copy from {entry['from']} to {entry['to']}"), style="bold")
    console.print(indented(f"of {entry['value']}: {bytes_text(entry['bytes'])}{times}"))
    if entry.get("before"):
        console.print(indented(f"begins before {entry['before']}"))
    if entry.get("reader"):
        console.print(indented(f"first read by {entry['reader']}"))
    if entry.get("reason"):
        console.print(indented(entry["reason"]))


def _reuse(plan: "Plan") -> str:
    """What calls of functions save."""
    calls = sum(len(entry["collectives"]) for entry in plan.functions)
    saved = [(len(entry["collectives"]) - 1, entry) for entry in plan.functions]
    buffers = sum(more * entry["buffers"] for more, entry in saved)
    size = sum(more * entry["bytes"] for more, entry in saved)
    text = f"{count_text(calls, 'collective')} are calls of {count_text(len(plan.functions), 'function')}"
    if not buffers:
        return f"{text}, which hold no buffers of their own"
    return f"{text}, whose buffers they share: {count_text(buffers, 'buffer')} of {bytes_text(size)} are saved"


# -- conflicts ----------------------------------------------------------------------------------------------------


def _explain_conflicts(plan: "Plan", as_json: bool) -> None:
    """Each conflict with both of its sides, how it was resolved, and its cost; alike ones of all layers once."""
    entries = [entry for entry in plan.collectives if entry.get("conflict")]
    if as_json:
        print_json({"conflicts": entries})
        return
    console = output()
    if not entries:
        console.print(_without_conflicts(plan))
        return
    sent = sum(map(_sent, entries))
    total = plan.totals["sent_bytes"]
    console.print(
        Text(
            f"{bytes_text(sent)} of {bytes_text(total)} are sent because tensors are sharded otherwise "
            "than they are needed"
        ),
        style="bold",
    )
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((*entry["axes"], pattern(_told(entry))), []).append(entry)
    for alike in sorted(groups.values(), key=lambda entries: -sum(map(_sent, entries))):
        text = "\n".join(map(shortened, merged(list(map(_told, alike))).splitlines()))
        times = f"{len(alike)} x " if len(alike) > 1 else ""
        console.print()
        console.print(Text(f"{times}{text.splitlines()[0]}"), style="bold")
        for line in text.splitlines()[1:]:
            console.print(indented(line))
        console.print(indented(f"each rank sends {bytes_text(sum(map(_sent, alike)))}"))
    console.print()
    console.print("What avoids one move may cause another elsewhere: compare the bytes that `irpar partition` reports.")


def _without_conflicts(plan: "Plan") -> str:
    """What to say where no annotation is in the way of another."""
    from irpar.ops.collectives import REDUCING

    other = [entry for entry in plan.collectives if entry["kind"] not in REDUCING]
    if not other:
        return "no annotation is in the way of another: nothing is moved but sums"
    sent = bytes_text(sum(map(_sent, other)))
    return (
        f"no annotation is in the way of another; beside sums, {count_text(len(other), 'collective')} of {sent} "
        "are what operators need of other devices, or run replicated: `irpar explain OUT` names them"
    )


def _sent(entry: Entry) -> int:
    return int(known_times(entry) * entry["sent_bytes"])


def _told(entry: Entry) -> str:
    conflict = entry["conflict"]
    how = f"{entry['kind']} over {','.join(entry['axes'])}"
    if conflict["rematerialized"]:
        how += ", and sharded again: no collective leads straight there (full rematerialisation)"
    lines = [
        f"{conflict['value']} for {conflict['node']}",
        f"is sharded as {conflict['lies']}" + (f": {conflict['because']}" if conflict["because"] else ""),
        f"is needed as {conflict['needed']}"
        + (f": {conflict['needed_because']}" if conflict["needed_because"] else ""),
        f"resolved by {how}",
        f"{'to' if conflict['rematerialized'] else 'what may'} avoid it: {conflict['avoid']}",
    ]
    return "\n".join(lines)


# -- values -------------------------------------------------------------------------------------------------------


def _matching(plan: "Plan", target: str) -> list[Entry]:
    """The values whose name is the target, or else match it as a glob."""
    name = target.removeprefix("%")
    known = list(_values(plan))
    found = [entry for entry in known if name in (entry["name"], entry["source"])]
    if not found and re.search(r"[*?\[]", name):
        matcher = re.compile(fnmatch.translate(name)).match
        found = [entry for entry in known if matcher(entry["name"]) or matcher(entry["source"])]
    return found


def _values(plan: "Plan") -> Iterator[Entry]:
    """The sharded values; then what is whole: replicated values, inputs and outputs that are not among these."""
    seen: set[str] = set()
    for entry in plan.values:
        seen.update((entry["name"], entry["source"]))
        yield entry
    for listed in (plan.replicated, plan.inputs, plan.outputs):
        for entry in listed:
            name = entry.get("value") or entry.get("name")
            if name is not None and name not in seen:
                seen.add(name)
                why: dict[str, Any] = {"why": entry.get("why") or "nothing asks for a sharding"}
                why |= {"follows": None, "axes": []}
                shape, sharding = entry.get("shape"), entry.get("sharding")
                yield {"name": name, "source": name, "shape": shape, "sharding": sharding, "partial": [], "why": [why]}


def _chains(plan: "Plan", entry: Entry) -> list[list[dict[str, Any]]]:
    """For each reason of a sharding the steps from it back to what the user wrote."""
    known = {value["name"]: value for value in plan.values}
    return [list(_chain(known, entry["name"], reason)) for reason in entry["why"] or ()]


def _chain(known: Mapping[str, Entry], name: str, reason: Entry) -> Iterator[dict[str, Any]]:
    waiting = [(name, reason)]
    met: set[tuple[str, str]] = set()
    while waiting:
        name, reason = waiting.pop()
        if (name, reason["why"]) in met:
            continue
        met.add((name, reason["why"]))
        yield {"value": name, "why": reason["why"], "axes": reason["axes"]}
        source = known.get(reason["follows"])
        if source is not None:
            wanted = set(reason["axes"])
            waiting += [
                (source["name"], inner)
                for inner in reversed(source["why"] or [])
                if not inner["axes"] or not wanted or wanted & set(inner["axes"])
            ]


def _print_value(
    console: "Console", entry: Entry, chains: Sequence[Sequence[Mapping[str, Any]]], told: set[tuple[str, str]]
) -> None:
    """A value and the steps of its reasons; of `told` ones that end a chain only the first is shown again."""
    name = entry["source"] if entry["source"] == entry["name"] else f"{entry['source']} (%{entry['name']})"
    console.print(Text(f"{name} {_placement(entry)}", style="bold"))
    for chain in chains:
        axes = ",".join(chain[0]["axes"])
        if axes:
            console.print(f"  {axes}:")
        steps = [(step["value"], step["why"]) for step in chain]
        known = len(steps)
        while known and steps[known - 1] in told:
            known -= 1
        told.update(steps)
        # The names that steps start with can be asked for; those inside are told by the next step.
        lines = [f"%{value} {shortened(why)}" for value, why in steps] if len(steps) > 1 else [chain[0]["why"]]
        if len(steps) - known > 2:
            lines[known + 1 :] = [f"... {len(steps) - known - 1} more steps, as above ..."]
        left_out = len(lines) - _FIRST_STEPS - _LAST_STEPS
        if left_out > 1:
            lines[_FIRST_STEPS:-_LAST_STEPS] = [f"... {left_out} more steps (--json has all) ..."]
        for line in lines:
            console.print(indented(line, 4 if axes else 2))


def _placement(entry: Entry) -> str:
    if entry["shape"] is None and not entry["sharding"]:
        return "replicated"
    text = sharding_text(entry["sharding"], entry["shape"])
    if entry["partial"]:
        return f"{text} partial({', '.join(entry['partial'])})"
    return text if any(axes for axes in entry["sharding"] or ()) else f"{text} replicated"


def _unknown(plan: "Plan", target: str) -> IrparError:
    if target.isascii() and target.isdecimal():
        known = [entry["id"] for entry in (*plan.collectives, *plan.copies)]
        do = f"give an id of 0 to {max(known)}" if known else "nothing is sent at all"
        return IrparError(f"there is no collective {target}", do=do)
    names = {name for entry in _values(plan) for name in (entry["name"], entry["source"])}
    name = target.removeprefix("%")
    without = [entry["why"] for entry in plan.not_as_annotated if entry["name"] == name and entry["lies"] is None]
    gone = why_gone(plan, target, names)
    notes = (*(f"annotation without effect: {why}" for why in without), *([gone] if gone else []))
    return IrparError(
        f'the plan tells nothing of "{target}"',
        notes=notes or nearest_names(target, names),
        do="give a tensor of the program, or the id of a collective: see `irpar explain OUT`; what nothing reads, or "
        "is computed before the model runs, is not in it",
    )


# -- collectives --------------------------------------------------------------------------------------------------


def _print_collectives(console: "Console", entries: Sequence[Entry], written: Callable[[str], str]) -> None:
    """Collectives, each with its reason; one that has the reason of another says so.

    Args:
        console: where to.
        entries: of the plan.
        written: how texts with names are written.
    """
    first: dict[str, Entry] = {}
    for entry in entries:
        known = first.setdefault(entry["reason"] or str(entry["id"]), entry)
        why = written(entry["reason"] or "") if known is entry else f"for the same reason as {known['id']}"
        _print_collective(console, entry, written(entry["value"]), why)


def _print_collective(console: "Console", entry: Entry, value: str, why: str) -> None:
    reduce = f" {entry['reduce']}" if entry["reduce"] else ""
    times = f", {entry['times']} times" if entry["times"] != 1 else ""
    if entry["times"] is None:
        times = ", as often as the body that it stands in runs"
    console.print()
    console.print(
        Text(f"{entry['id']}  {entry['kind']}{reduce} over {over_text(entry)} ({entry['group_size']} ranks)"),
        style="bold",
    )
    console.print(
        indented(
            f"of {value}: {bytes_text(entry['bytes'])} {entry['dtype']}, "
            f"each rank sends at most {bytes_text(entry['sent_bytes'])}{times}"
        )
    )
    if why:
        console.print(indented(why))
