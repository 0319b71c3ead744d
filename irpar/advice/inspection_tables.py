"""What `irpar inspect` prints of a model."""

from typing import TYPE_CHECKING

from rich.text import Text

from irpar.tables.display import facts, name_with, print_rows, shortened, table
from irpar.units import bytes_text, count_text, flops_text, scaled, share_text

if TYPE_CHECKING:
    from rich.console import Console

    from .inspection import Inspection, ScopeFact


def print_inspection(console: "Console", found: "Inspection", rows: int | None) -> None:
    """Sizes, parameters, places and operators; tables have at most `rows` lines."""
    console.print(Text(found.model, style="bold"), soft_wrap=True)
    _print_facts(console, found)
    _print_states(console, found, rows)
    _print_parameters(console, found, rows)
    _print_layers(console, found, rows)
    _print_scopes(console, found, rows)
    _print_operators(console, found, rows)
    _print_unsharded(console, found, rows)
    for note in found.notes:
        console.print(f"\n{note}")
    if found.symbols:
        binds = " ".join(f"--bind {symbol}=..." for symbol in found.symbols)
        console.print(f"\nFLOPs and memory need the sizes of all symbols: {binds}", soft_wrap=True)


def _print_facts(console: "Console", found: "Inspection") -> None:
    memory = found.memory
    rows = {
        "made by": found.producer,
        "opsets": ", ".join(f"{domain} {version}" for domain, version in found.opsets.items()),
        "nodes": f"{found.nodes_in_file:,}"
        + (f" and {count_text(found.functions, 'function')}" * bool(found.functions)),
        "inputs": "\n".join(f"{fact.name} {fact.type}" for fact in found.inputs),
        "outputs": "\n".join(f"{fact.name} {fact.type}" for fact in found.outputs),
        "symbols": ", ".join(found.symbols),
        "parameters": f"{scaled(found.parameter_elements, '')}, {bytes_text(found.parameter_bytes)}",
        "computation": "" if found.flops is None else flops_text(found.flops),
    }
    if memory is not None:
        where = f" at {shortened(memory.node)}" if memory.node else ""
        rows["memory"] = (
            f"{bytes_text(memory.peak)} on one device: weights {bytes_text(memory.weights)}, "
            f"activations {bytes_text(memory.activations)}{where}"
        )
    console.print(facts(rows))


def _print_states(console: "Console", found: "Inspection", rows: int | None) -> None:
    """What stays on the ranks from run to run."""
    if not found.states:
        return
    made = table("state", "kind", "replaced by", "dtype", "shape", "memory", "bytes", right=("bytes",))
    for fact in found.states[:rows]:
        made.add_row(
            shortened(fact.name),
            fact.kind,
            "" if fact.replaced_by is None else shortened(fact.replaced_by),
            fact.dtype or "?",
            "?" if fact.shape is None else f"[{', '.join(map(str, fact.shape))}]",
            fact.memory,
            "?" if fact.bytes is None else bytes_text(fact.bytes),
        )
    print_rows(console, made, len(found.states), rows)


def _print_parameters(console: "Console", found: "Inspection", rows: int | None) -> None:
    made = table("parameters", "tensors", "type", "bytes", "share", right=("tensors", "bytes", "share"))
    groups = sorted(found.parameters, key=lambda group: -group.bytes)
    for group in groups[:rows]:
        share = share_text(group.bytes, found.parameter_bytes)
        made.add_row(
            name_with(shortened(group.pattern), map(shortened, group.uses)),
            f"{group.tensors:,}",
            group.type,
            bytes_text(group.bytes),
            share,
        )
    print_rows(console, made, len(groups), rows)


def _print_layers(console: "Console", found: "Inspection", rows: int | None) -> None:
    """What the model repeats, up to weights."""
    if not found.layers:
        return
    made = table("layers", "times", "nodes", "parameters", "they differ in", right=("times", "nodes", "parameters"))
    for fact in found.layers[:rows]:
        made.add_row(
            f"from {shortened(fact.first)}",
            f"{fact.count:,}",
            f"{fact.nodes:,}",
            scaled(fact.parameters, ""),
            "\n".join(map(shortened, fact.differ)) or "nothing",
        )
    print_rows(console, made, len(found.layers), rows)


def _print_scopes(console: "Console", found: "Inspection", rows: int | None) -> None:
    """Where parameters and FLOPs are: scopes as deep as fit in the table."""
    depths = range(1, max((fact.scope.count("/") + 1 for fact in found.scopes), default=0) + 1)
    if not any(fact.scope for fact in found.scopes):
        return
    known = {depth: {fact.within(depth) for fact in found.scopes} for depth in depths}
    fitting = [depth for depth in depths if rows is None or len(known[depth]) <= rows]
    depth = max(fitting, default=1)
    groups: dict[str, list[ScopeFact]] = {}
    for fact in found.scopes:
        groups.setdefault(fact.within(depth), []).append(fact)
    columns = ("nodes", "parameters", "FLOPs", "share", "moved bytes")
    made = table("scope", *columns, right=columns)
    for scope, facts_ in list(groups.items())[:rows]:
        flops = sum(fact.flops or 0 for fact in facts_)
        made.add_row(
            shortened(scope) or "(none)",
            f"{sum(fact.nodes for fact in facts_):,}",
            bytes_text(sum(fact.parameter_bytes for fact in facts_)),
            "" if found.flops is None else scaled(flops, ""),
            "" if found.flops is None else share_text(flops, found.flops),
            "" if found.flops is None else bytes_text(sum(fact.bytes or 0 for fact in facts_)),
        )
    print_rows(console, made, len(groups), rows)


def _print_operators(console: "Console", found: "Inspection", rows: int | None) -> None:
    columns = ("nodes", "FLOPs", "share", "moved bytes")
    last = ("sharding",) if found.unsharded else ()
    made = table("operator", *columns, *last, right=columns)
    for fact in found.operators[:rows]:
        made.add_row(
            fact.op,
            f"{fact.nodes:,}",
            "" if fact.flops is None else scaled(fact.flops, ""),
            "" if fact.flops is None or found.flops is None else share_text(fact.flops, found.flops),
            "" if fact.bytes is None else bytes_text(fact.bytes),
            *("" if fact.can_shard else "see below" for _ in last),
        )
    print_rows(console, made, len(found.operators), rows)


def _print_unsharded(console: "Console", found: "Inspection", rows: int | None) -> None:
    if not found.unsharded:
        console.print("\nevery operator has a sharding rule")
        return
    made = table("cannot be sharded", "nodes", "why", "first", right=("nodes",))
    for entry in found.unsharded[:rows]:
        made.add_row(entry.op, f"{entry.nodes:,}", shortened(entry.why), shortened(entry.first))
    print_rows(console, made, len(found.unsharded), rows)
