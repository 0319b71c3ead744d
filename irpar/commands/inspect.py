"""irpar inspect: what a model is made of, what cannot be sharded, and what to cut."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from irpar.display import (
    bytes_text,
    count_text,
    facts,
    flops_text,
    name_with,
    output,
    print_json,
    scaled,
    share_text,
    table,
)
from irpar.sharding import IrparError

from .options import Bind, Json, ModelFile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from irpar.inspection import Inspection, NamedTensor, ScopeFact

_ROWS = 20
"""How many lines a table has without --all."""

Tensors = Annotated[
    str | None,
    typer.Option(
        "--tensors",
        metavar="GLOB",
        help='List tensors by name, "*" for all, and what weights are for.',
        show_default=False,
    ),
]
All = Annotated[bool, typer.Option("--all", help=f"Show all lines of the tables, not only {_ROWS}.")]
Suggest = Annotated[
    str | None,
    typer.Option(
        "--suggest",
        metavar="AXES",
        help="Choose what to cut over a mesh such as tp=4 or dp=2,tp=4, and write a --shardings file. Axes named dp, "
        "data or batch (dp2, data_1 ... too) cut the batch of the inputs, all others the weights.",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="The file of --suggest, YAML or (.json) JSON; without it, MODEL.shardings.yaml beside the model.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file of --suggest if it is a --shardings file.")]


def inspect_command(
    model: ModelFile,
    bind: Bind = None,
    tensors: Tensors = None,
    suggest: Suggest = None,
    out: Output = None,
    force: Force = False,
    is_all: All = False,
    as_json: Json = False,
) -> None:
    """Show what a model is made of, what cannot be sharded and why, and (--suggest) what to cut."""
    from irpar import inspection

    from .loading import load_model

    rows = None if is_all else _ROWS
    if suggest is not None:
        if tensors is not None:
            raise IrparError("--suggest and --tensors are two questions", do="ask one at a time")
        from .suggest import suggest_shardings

        suggest_shardings(model, bind, suggest, out, force=force, as_json=as_json, rows=rows)
        return
    if out is not None or force:
        given = "-o" if out is not None else "--force"
        raise IrparError(f"{given} is for the file of --suggest", do="add --suggest tp=4, or leave it out")
    module = load_model(model, bind)
    if tensors is not None:
        _list_tensors(inspection.tensors(module, tensors), as_json)
        return
    inspected = inspection.inspect(module)
    if as_json:
        print_json(inspection.as_json(inspected))
    else:
        _print(output(), inspected, rows)


def _list_tensors(found: "Sequence[NamedTensor]", as_json: bool) -> None:
    if as_json:
        print_json({"tensors": [{"name": fact.name, "type": fact.type, "uses": list(fact.uses)} for fact in found]})
        return
    made = table("tensor", "type")
    for fact in found:
        made.add_row(name_with(fact.name, fact.uses), fact.type)
    output().print(made)


def _print(console: "Console", found: "Inspection", rows: int | None) -> None:
    console.print(Text(found.model, style="bold"), soft_wrap=True)
    _print_facts(console, found)
    _print_parameters(console, found, rows)
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
        where = f" at {memory.node}" if memory.node else ""
        rows["memory"] = (
            f"{bytes_text(memory.peak)} on one device: weights {bytes_text(memory.weights)}, "
            f"activations {bytes_text(memory.activations)}{where}"
        )
    console.print(facts(rows))


def _print_parameters(console: "Console", found: "Inspection", rows: int | None) -> None:
    made = table("parameters", "tensors", "type", "bytes", "share", right=("tensors", "bytes", "share"))
    groups = sorted(found.parameters, key=lambda group: -group.bytes)
    for group in groups[:rows]:
        share = share_text(group.bytes, found.parameter_bytes)
        made.add_row(
            name_with(group.pattern, group.uses), f"{group.tensors:,}", group.type, bytes_text(group.bytes), share
        )
    _print_table(console, made, len(groups), rows)


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
            scope or "(none)",
            f"{sum(fact.nodes for fact in facts_):,}",
            bytes_text(sum(fact.parameter_bytes for fact in facts_)),
            "" if found.flops is None else scaled(flops, ""),
            "" if found.flops is None else share_text(flops, found.flops),
            "" if found.flops is None else bytes_text(sum(fact.bytes or 0 for fact in facts_)),
        )
    _print_table(console, made, len(groups), rows)


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
    _print_table(console, made, len(found.operators), rows)


def _print_unsharded(console: "Console", found: "Inspection", rows: int | None) -> None:
    if not found.unsharded:
        console.print("\nevery operator has a sharding rule")
        return
    made = table("cannot be sharded", "nodes", "why", "first", right=("nodes",))
    for entry in found.unsharded[:rows]:
        made.add_row(entry.op, f"{entry.nodes:,}", entry.why, entry.first)
    _print_table(console, made, len(found.unsharded), rows)


def _print_table(console: "Console", made: "object", count: int, rows: int | None) -> None:
    console.print()
    console.print(made)
    if rows is not None and count > rows:
        console.print(f"{count - rows} more: --all shows them")
