"""irpar inspect: what a model is made of, what cannot be sharded, and what to shard."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irpar.sharding import IrparError
from irpar.tables.display import ROWS, name_with, output, print_json, table

from .options import Bind, Json, ModelFile, Set

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpar.advice.inspection import NamedTensor


Tensors = Annotated[
    str | None,
    typer.Option(
        "--tensors",
        metavar="GLOB",
        help='List tensors by name, "*" for all, and what weights are for.',
        show_default=False,
    ),
]
All = Annotated[bool, typer.Option("--all", help=f"Show all lines of the tables, not only {ROWS}.")]
Suggest = Annotated[
    str | None,
    typer.Option(
        "--suggest",
        metavar="AXES",
        help="Choose what to shard over a mesh such as tp=4 or dp=2,tp=4, and write a --shardings file. Axes named dp, "
        "data or batch (dp2, data_1 ... too) shard the batch of the inputs, all others the weights.",
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
    set_: Set = None,
    tensors: Tensors = None,
    suggest: Suggest = None,
    out: Output = None,
    force: Force = False,
    is_all: All = False,
    as_json: Json = False,
) -> None:
    """Show what a model is made of, what cannot be sharded and why, and (--suggest) what to shard."""
    from irpar.advice import inspection

    from .loading import load_model

    rows = None if is_all else ROWS
    if suggest is not None:
        if tensors is not None:
            raise IrparError("--suggest and --tensors are two questions", do="ask one at a time")
        from .suggest import suggest_shardings

        suggest_shardings(model, bind, set_, suggest, out, force=force, as_json=as_json, rows=rows)
        return
    if out is not None or force:
        given = "-o" if out is not None else "--force"
        raise IrparError(f"{given} is for the file of --suggest", do="add --suggest tp=4, or leave it out")
    module = load_model(model, bind, set_=set_)
    if tensors is not None:
        _list_tensors(inspection.tensors(module, tensors), as_json)
        return
    inspected = inspection.inspect(module)
    if as_json:
        print_json(inspection.as_json(inspected))
    else:
        from irpar.advice.inspection_tables import print_inspection

        print_inspection(output(), inspected, rows)


def _list_tensors(found: "Sequence[NamedTensor]", as_json: bool) -> None:
    if as_json:
        print_json({"tensors": [{"name": fact.name, "type": fact.type, "uses": list(fact.uses)} for fact in found]})
        return
    made = table("tensor", "type")
    for fact in found:
        made.add_row(name_with(fact.name, fact.uses), fact.type)
    output().print(made)
