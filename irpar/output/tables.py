"""Tables about a plan: what a partition costs, what it sends and why, what stays replicated."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from irpar.analysis.cost.network_name import network_name
from irpar.sharding import Mesh, Sharding, ceil_shape
from irpar.tables.display import ROWS, shortened, table
from irpar.units import bytes_text, count_text, flops_text, seconds_text, sharding_text, share_text

from .entries import known_times, over_text

if TYPE_CHECKING:
    from .plan_record import Plan

_PLACE = re.compile(r" in [^\s\"]+, line \d+")
"""Where an annotation stands; `irpar explain` tells it."""
_NUMBERS = re.compile(r"(\d+)")
_LAYERS = re.compile(r"(?<![\d()])\d+")
"""Numbers, but not those of parts of axes: x:(1)2."""
_ANNOTATED = re.compile(r'annotated "([^"]*)"')
_REASONS = 4
"""How many reasons for collectives a summary shows, those that send the most first."""
_REPLICATED = 5
"""How many full tensors and ops a summary shows."""


def print_summary(console: Console, plan: "Plan", more: str) -> None:
    """Costs, collectives and what stays replicated; `more` is the command that tells the rest."""
    from .plan_warnings import warnings

    console.print(Text(headline(plan), style="bold"))
    console.print(cost_table(plan))
    console.print()
    print_collectives(console, plan, more)
    if plan.copies:
        console.print(copies_table(plan))
    if plan.predicted is not None:
        console.print(prediction(plan), soft_wrap=True)
    print_replicated(console, plan.replicated, more)
    print_annotations(console, plan)
    for warning in warnings(plan):
        console.print(indented(f"warning: {warning}", 0))


def print_plan(console: Console, plan: "Plan") -> None:
    """All of the summary, with what goes in and comes out, each collective that is unlike the others by itself."""
    from .plan_warnings import warnings

    console.print(Text(headline(plan), style="bold"))
    console.print(cost_table(plan))
    console.print(specs_table("input", plan.inputs))
    console.print(specs_table("output", plan.outputs))
    if plan.state:
        console.print(state_table(plan.state))
    console.print(collectives_table(plan) if plan.collectives else "nothing is sent between the ranks")
    if plan.copies:
        console.print(copies_table(plan))
    if plan.predicted is not None:
        console.print(prediction(plan))
    print_replicated(console, plan.replicated, "plan.replicated", rows=ROWS)
    print_annotations(console, plan)
    for warning in warnings(plan):
        console.print(f"warning: {warning}")


def collectives_table(plan: "Plan") -> Any:
    """Collectives with the bytes that they take and send each step, and why; those alike in all layers are one line."""
    made = table(
        "collective", "over", "times", "operand", "sent a device", "why", right=("times", "operand", "sent a device")
    )
    alike = _grouped(
        plan.collectives,
        lambda entry: (entry["kind"], over_text(entry), entry["bytes"], pattern(_reason(entry))),
    )
    for (kind, axes, size, _), entries in alike:
        times = sum(known_times(entry) for entry in entries)
        sent = sum(known_times(entry) * entry["sent_bytes"] for entry in entries)
        why = shortened(merged(list(map(_reason, entries))))
        made.add_row(kind, axes, f"{times:,}", bytes_text(size), bytes_text(sent), why)
    sent = plan.totals["sent_bytes"]
    made.add_row("all", "", f"{sum(known_times(entry) for entry in plan.collectives):,}", "", bytes_text(sent), "")
    return made


def copies_table(plan: "Plan") -> Any:
    """Copies between memories of a rank with their bytes each step, and why; those alike in all layers are one line."""
    made = table("copied each step", "times", "bytes", "of", "why", right=("times", "bytes"))
    alike = _grouped(plan.copies, lambda entry: (entry["from"], entry["to"], pattern(_reason(entry))))
    for (source, target, _), entries in alike:
        times = sum(known_times(entry) for entry in entries)
        copied = sum(known_times(entry) * entry["bytes"] for entry in entries)
        values = dict.fromkeys(entry["value"] for entry in entries)
        of = shortened(next(iter(values))) + (f" and {len(values) - 1} more" if len(values) > 1 else "")
        why = shortened(merged(list(map(_reason, entries))))
        made.add_row(f"{source} to {target}", f"{times:,}", bytes_text(copied), of, why)
    times = sum(known_times(entry) for entry in plan.copies)
    made.add_row("all", f"{times:,}", bytes_text(plan.totals["copied_bytes"]), "", "")
    return made


def memories_table(plan: "Plan") -> Any:
    """Where inputs, weights and state lie when a run begins, and why; alike ones of all layers in one line."""
    made = table("when a run begins", "", "values", "bytes", "first", "why", right=("values", "bytes"))
    alike = _grouped(plan.memories, lambda entry: (entry["memory"], entry["kind"], pattern(entry["why"] or "")))
    ordered = sorted(alike, key=lambda group: (group[0][0], -sum(entry["bytes"] for entry in group[1])))
    for (memory, kind, _), entries in ordered:
        size = bytes_text(sum(entry["bytes"] for entry in entries))
        first, why = shortened(entries[0]["value"]), shortened(merged([entry["why"] or "" for entry in entries]))
        made.add_row(on_memory(memory), kind, f"{len(entries):,}", size, first, why)
    return made


ELSEWHERE = {"on the host": "host_bytes", "on disk": "disk_bytes"}
"""Where a rank may hold something beside its device, and the field of its entry that says how much."""


def on_memory(memory: str) -> str:
    """Where something is, in words."""
    return "on disk" if memory == "disk" else f"on the {memory}"


def functions_table(plan: "Plan") -> Any:
    """Functions of communication, and what their calls share."""
    made = table("function", "over", "calls", "nodes", "buffers", "bytes", right=("calls", "nodes", "buffers", "bytes"))
    known = {entry["id"]: entry for entry in plan.collectives}
    for entry in plan.functions:
        ids = entry["collectives"]
        sizes = f"{len(ids):,}", f"{entry['nodes']:,}", f"{entry['buffers']:,}", bytes_text(entry["bytes"])
        made.add_row(entry["name"], over_text(known[ids[0]]), *sizes)
    return made


def print_annotations(console: Console, plan: "Plan") -> None:
    """The annotations that have another effect than they say, or none; those of all layers that are alike once."""
    groups: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for entry in plan.not_as_annotated:
        groups.setdefault((pattern(entry["name"]), str(entry["lies"]), pattern(entry["why"])), []).append(entry)
    for alike in groups.values():
        name, first = merged([entry["name"] for entry in alike]), alike[0]
        times = f" ({len(alike)} tensors)" if len(alike) > 1 else ""
        if first["lies"] is None:
            told = f"annotation without effect: {name}{times}: {merged([entry['why'] for entry in alike])}"
        else:
            told = f"stored otherwise than annotated: {name}{times}, as {sharding_text(first['lies'])}: {first['why']}"
        console.print(indented(told, 0))


def headline(plan: "Plan") -> str:
    """One line: the mesh, ranks and programs."""
    mesh = plan.mesh_of_ranks
    return f"mesh {mesh}: {count_text(mesh.size, 'rank')}, {count_text(len(plan.parts), 'part')}"


def prediction(plan: "Plan") -> str:
    """One line: how long a step takes by the network, and what of it is communication; empty where not known."""
    seconds = plan.predicted or {}
    step, compute = seconds.get("step_seconds"), seconds.get("compute_seconds")
    sent, exposed = seconds.get("communication_seconds"), seconds.get("exposed_communication_seconds")
    if sent is None:
        return ""
    network = network_name(plan.network)
    if step is None or compute is None:
        return f"predicted ({network}): communication {seconds_text(sent)} a step"
    hidden = "" if exposed is None or exposed >= sent else f", {seconds_text(exposed)} of it exposed"
    return (
        f"predicted ({network}): {seconds_text(step)} a step, computation {seconds_text(compute)}, "
        f"communication {seconds_text(sent)}{hidden}{_copying(seconds)}"
    )


def _copying(seconds: Mapping[str, Any]) -> str:
    """What copies between memories take by a prediction, and what of that is hidden behind the rest."""
    copies, exposed = seconds.get("copy_seconds"), seconds.get("exposed_copy_seconds")
    if copies is None or exposed is None:
        return ""
    return f", copies {seconds_text(copies)}, {seconds_text(max(0.0, copies - exposed))} of it hidden"


def cost_table(plan: "Plan") -> Any:
    """Memory and FLOPs of the whole model and of the rank that has the most."""
    whole = plan.original
    state = whole.get("state_bytes")
    rows = [
        ("peak memory", whole.get("peak_bytes"), max(rank["peak_bytes"] for rank in plan.ranks), bytes_text),
        ("computation", whole.get("flops"), plan.totals["flops_per_rank"], flops_text),
    ]
    if state is not None:
        rows.insert(0, ("state", state, _state_bytes(plan), bytes_text))
    if plan.training is None:  # Of a step the parameters are state; what is constant tells nothing of its size.
        rows.insert(0, ("weights", whole.get("weight_bytes"), max(p["weight_bytes"] for p in plan.parts), bytes_text))
    for name, field in ELSEWHERE.items():
        most = max(rank.get(field, 0) for rank in plan.ranks)
        if most:
            rows.append((name, None, most, bytes_text))
    made = table("", "one device", "per rank", "share", right=("one device", "per rank", "share"))
    for name, before, after, text in rows:
        made.add_row(
            name, "" if before is None else text(before), text(after), share_text(after, before) if before else ""
        )
    return made


def _state_bytes(plan: "Plan") -> int:
    """What the rank that has most of it keeps on its device from run to run: parameters, optimizer state, caches."""
    mesh = plan.mesh_of_ranks
    return sum(_most_bytes(entry, mesh) for entry in plan.state if entry["memory"] == "device")


def _most_bytes(entry: Mapping[str, Any], mesh: Mesh) -> int:
    """Bytes of the largest block of a tensor; 0 where its size is not known."""
    from irpar.ir import dtype_of_text  # NumPy comes with it, which a partition that is written again does not need.

    dtype, shape = dtype_of_text(entry["dtype"]), entry["shape"]
    if dtype is None or not all(isinstance(size, int) for size in shape):
        return 0
    spec = entry["sharding"]
    return dtype.nbytes(math.prod(shape if spec is None else ceil_shape(Sharding.of_spec(mesh, spec), shape)))


def print_collectives(console: Console, plan: "Plan", more: str) -> None:
    """Kinds of collectives, how often they run, what they send, and the reasons that make the most traffic."""
    if not plan.collectives:
        console.print("nothing is sent between the ranks")
        return
    made = table("sent each step", "over", "times", "per device", right=("times", "per device"))
    reasons: dict[str, list[Mapping[str, Any]]] = {}
    for (kind, axes), entries in _grouped(plan.collectives, lambda entry: (entry["kind"], over_text(entry))):
        times = sum(known_times(entry) for entry in entries)
        sent = sum(known_times(entry) * entry["sent_bytes"] for entry in entries)
        made.add_row(kind, axes, f"{times:,}", bytes_text(sent))
        alike = _grouped(entries, lambda entry: pattern(_reason(entry)))
        reasons |= {f"{kind}: {reason}": same for reason, same in alike}
    console.print(made)
    unknown = sum(entry["times"] is None for entry in plan.collectives)
    if unknown:
        console.print(f"{count_text(unknown, 'collective')} in bodies that run as often as the data says: counted once")
    ordered = sorted(reasons.items(), key=lambda item: -sum(entry["sent_bytes"] for entry in item[1]))
    for _, same in ordered[:_REASONS]:
        reason = shortened(merged(list(map(_reason, same))))
        console.print(indented(f"{len(same)} x {same[0]['kind']}: {reason}"))
    if len(ordered) > _REASONS:
        console.print(f"{count_text(len(ordered) - _REASONS, 'more reason')}: {more}", soft_wrap=True)


def _reason(entry: Mapping[str, Any]) -> str:
    return str(entry["reason"] or "no reason is known")


def print_replicated(
    console: Console, replicated: Sequence[Mapping[str, Any]], more: str, rows: int | None = _REPLICATED
) -> None:
    """What every rank holds or computes whole, the largest first, at most `rows` of it."""
    if not replicated:
        return
    groups = sorted(
        _grouped(replicated, lambda entry: (pattern(entry.get("value") or entry.get("op") or ""), entry["why"])),
        key=lambda item: -sum(entry["bytes"] or 0 for entry in item[1]),
    )
    made = table("replicated", "bytes", "why", right=("bytes",))
    for (_, why), entries in groups[:rows]:
        label = merged([str(entry.get("value") or entry.get("op") or "") for entry in entries])
        times = f" ({len(entries)})" if len(entries) > 1 else ""
        known = [entry["bytes"] for entry in entries if entry["bytes"] is not None]
        made.add_row(f"{shortened(label)}{times}", bytes_text(sum(known)) if known else "?", shortened(why))
    console.print()
    console.print(made)
    if rows is not None and len(groups) > rows:
        console.print(f"{len(groups) - rows} more: {more}", soft_wrap=True)


def specs_table(title: str, specs: Sequence[Mapping[str, Any]]) -> Any:
    """Inputs or outputs with their types and shardings."""
    made = table(title, "dtype", "sharding")
    for spec in specs:
        made.add_row(shortened(spec["name"]), spec["dtype"] or "", sharding_text(spec["sharding"], spec["shape"]))
    return made


def state_table(entries: Sequence[Mapping[str, Any]]) -> Any:
    """What stays on the ranks from run to run, and what replaces it."""
    lies_elsewhere = any(entry.get("memory", "device") != "device" for entry in entries)
    made = table("state", "kind", "replaced by", "dtype", "sharding", *(["memory"] if lies_elsewhere else []))
    for entry in entries:
        after = "" if entry["output"] is None else shortened(entry["output"])
        cut = sharding_text(entry["sharding"], entry["shape"])
        where = [entry["memory"]] if lies_elsewhere else []
        made.add_row(shortened(entry["name"]), entry["kind"], after, entry["dtype"], cut, *where)
    return made


def indented(text: str, by: int = 2) -> Padding:
    """A paragraph that keeps its indentation where it folds."""
    return Padding(Text(text), (0, 0, 0, by), expand=False)


def pattern(text: str) -> str:
    """A text with `*` for its numbers, those of parts of axes aside: one for all layers, be they `h.0`, `b0` or `l_0x`.

    What it groups, `merged` tells with the numbers in which nothing differs.
    """
    return _LAYERS.sub("*", _PLACE.sub("", text))


def _with_one_annotation(texts: Sequence[str]) -> Sequence[str]:
    """Texts that name the same annotations: where they name several, the first of them and how many more."""
    split = [_ANNOTATED.split(text) for text in texts]
    if len({len(parts) for parts in split}) > 1:
        return texts
    for place in range(1, len(split[0]), 2):
        names = dict.fromkeys(parts[place] for parts in split)
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        for parts in split:
            parts[place] = f'annotated "{next(iter(names))}"{more}'
    return ["".join(parts) for parts in split]


def merged(texts: Sequence[str]) -> str:
    """Texts of one pattern as one: numbers in which they differ are `*`, what all say alike stays.

    Of annotations that differ the first is named, as it is written, and how many more there are.
    """
    texts = _with_one_annotation(texts)
    split = [_NUMBERS.split(_PLACE.sub("", text)) for text in texts]
    if len({len(parts) for parts in split}) > 1:
        return pattern(texts[0])
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in zip(*split, strict=True))


def _grouped(entries: Sequence[Mapping[str, Any]], key: Any) -> list[tuple[Any, list[Mapping[str, Any]]]]:
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return list(groups.items())
