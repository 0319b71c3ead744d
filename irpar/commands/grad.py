"""irpar grad: the gradients of a model as one more ONNX model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.errors import listed
from irpar.tables.display import output, print_json, table

from .model_target import check_model_target
from .options import Bind, Json, ModelFile, bind_of
from .progress_report import ProgressReport

if TYPE_CHECKING:
    from irpar.ir import Module

Grads = Annotated[
    Path, typer.Option("-o", "--out", metavar="GRADS.onnx", help="The model to write.", show_default=False)
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        "--output",
        metavar="NAME",
        help="An output that is differentiated, by name or glob; all of floats if none is named. May be repeated.",
    ),
]
Wrt = Annotated[
    list[str] | None,
    typer.Option(
        "--wrt",
        metavar="GLOB",
        help="Weights or inputs by which, by name or glob; if none is named, all weights of floats but single numbers. "
        "May be repeated.",
    ),
]
KeepOutputs = Annotated[
    bool, typer.Option("--keep-outputs", help="Write the model's own outputs too, before the gradients.")
]
StraightThrough = Annotated[
    bool,
    typer.Option(
        "--straight-through",
        help="Let gradients pass QuantizeLinear as if it did not round, where it does not saturate.",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace GRADS.onnx if it exists.")]


def grad_command(
    model: ModelFile,
    out: Grads,
    outputs: Outputs = None,
    wrt: Wrt = None,
    bind: Bind = None,
    keep_outputs: KeepOutputs = False,
    straight_through: StraightThrough = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the gradients of a model as one more ONNX model, which stock ONNX Runtime runs.

    It has the model's inputs and grad.OUTPUT for each output, and gives grad.TENSOR for each weight: the sum of the
    outputs times these, differentiated.
    """
    from irpar.differentiation import gradients
    from irpar.onnx_io import load, save

    check_model_target(out, model, "the model of gradients", force)
    with ProgressReport(is_shown=not as_json):
        given = load(model)
        made = gradients(
            given,
            outputs=outputs or (),
            wrt=wrt or (),
            keep_outputs=keep_outputs,
            straight_through=straight_through,
            bind=bind_of(bind),
        )
        save(made, out)
    _report(given, made, out, as_json)


def _report(given: "Module", made: "Module", out: Path, as_json: bool) -> None:
    """Say what was written."""
    from irpar.onnx_io import data_file
    from irpar.passes.autodiff import GRAD
    from irpar.passes.autodiff.saved import saved_activations, zero_gradients
    from irpar.units import bytes_text, count_text

    graph = made.graph
    saved = saved_activations(graph)
    nodes = {phase: sum(node.phase == phase for node in graph.walk()) for phase in ("forward", "backward")}
    opsets = given.opsets.get("", 0), made.opsets.get("", 0)
    seeds = [value for value in graph.inputs if value.name.startswith(GRAD)]
    results = [(name, value) for name, value in zip(graph.output_names, graph.outputs, strict=True)]
    zeros = zero_gradients(graph)
    known = [count for count in saved.values() if count is not None]
    if as_json:
        facts: dict[str, Any] = {
            "model": str(out),
            "inputs": {value.name: str(value.type) for value in seeds},
            "outputs": {name: str(value.type) for name, value in results},
            "zero": zeros,
            "nodes": nodes,
            "opset": {"before": opsets[0], "after": opsets[1]},
            "saved_activations": {"tensors": len(saved), "bytes": sum(known) if len(known) == len(saved) else None},
        }
        print_json(facts)
        return
    made_table = table("result", "type")
    for name, value in results[:_MOST_SHOWN]:
        made_table.add_row(name, str(value.type))
    if len(results) > _MOST_SHOWN:
        made_table.add_row(f"... {len(results) - _MOST_SHOWN} more (--json has all)", "")
    output().print(made_table)
    print_line = output().print
    print_line(f"given as input: {', '.join(f'{value.name} : {value.type}' for value in seeds)}", highlight=False)
    size = f", {bytes_text(sum(known))}" if known and len(known) == len(saved) else ""
    print_line(
        f"{nodes['forward']:,} nodes forward, {nodes['backward']:,} backward, "
        f"{count_text(len(saved), 'activation')} saved between them{size}"
    )
    if zeros:
        shown = listed([name.removeprefix(GRAD) for name in zeros], _MOST_NAMED)
        print_line(f"zeros, since no output depends on it in a way that has a derivative: {shown}", highlight=False)
    if opsets[0] < opsets[1]:
        print_line(f"opset {opsets[0]} became {opsets[1]}: older nodes are written otherwise, no weight is touched")
    weights = data_file(out)
    beside = f", with its weights in {weights.name} beside it" if weights.exists() else ""
    print_line(f"written: {out}{beside}", soft_wrap=True)


_MOST_SHOWN = 20
"""Results in the table."""
_MOST_NAMED = 5
"""Tensors in a line."""
