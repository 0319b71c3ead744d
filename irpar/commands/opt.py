"""irpar opt: passes over IR text, for tests and for people who write passes."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irpar.tables.display import output, print_json
from irpar.units import count_text

from .options import (
    Bind,
    DumpIr,
    Json,
    MeshText,
    Network,
    Pipeline,
    PrintIrAfter,
    PrintIrAfterAll,
    PrintIrAfterChange,
    PrintIrBefore,
    Shardings,
    Statistics,
    Timing,
    VerifyEach,
)
from .partition import passes_json, print_tables
from .progress_report import ProgressReport

if TYPE_CHECKING:
    from irpar.ir import Module

Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE", help="IR text, a reproducer of a failed pass, or an .onnx model.", show_default=False
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="Write the text to a file instead of standard output.", show_default=False
    ),
]


def opt_command(
    file: Source,
    pipeline: Pipeline = None,
    out: Target = None,
    mesh: MeshText = None,
    shardings: Shardings = None,
    bind: Bind = None,
    network: Network = None,
    dump_ir: DumpIr = None,
    print_ir_before: PrintIrBefore = None,
    print_ir_after: PrintIrAfter = None,
    print_ir_after_all: PrintIrAfterAll = False,
    print_ir_after_change: PrintIrAfterChange = False,
    verify_each: VerifyEach = False,
    timing: Timing = False,
    statistics: Statistics = False,
    as_json: Json = False,
) -> None:
    """Run passes over IR text and print the IR that they leave. A reproducer brings its own passes."""
    from irpar.ir.text.files import check_text_target, write_text
    from irpar.pass_manager import Instrumentation, PassManager

    from .loading import annotate_model

    if out is not None:
        check_text_target(out)
    module, its_own = _read(file, bind)
    if network is not None:
        from irpar.analysis.cost.network_file import find_network

        module.network = find_network(network).text
    with ProgressReport(is_shown=not as_json) as report:
        watch = Instrumentation(
            print_ir_before=print_ir_before or (),
            print_ir_after=print_ir_after or (),
            print_ir_after_all=print_ir_after_all,
            print_ir_after_change=print_ir_after_change,
            dump_ir=dump_ir,
            verify_each=verify_each,
            progress=report.passes,
        )
        manager = PassManager.parse(its_own if pipeline is None else pipeline, watch)
        if mesh is not None or shardings is not None:
            annotate_model(module, mesh, shardings, needs_mesh=False)
        result = manager.run(module)
    if out is not None:
        write_text(module, out)
    if as_json:
        text = None if out is not None else module.printed().text
        print_json({"pipeline": str(manager), "passes": passes_json(result), "file": out and str(out), "text": text})
        return
    print_tables(result, timing, statistics)
    if out is None:
        _print(module)
    else:
        output().print(f"{len(result.records)} passes ran; written to {out}", soft_wrap=True)


def _print(module: "Module") -> None:
    printed = module.printed()
    print(printed.text, end="")
    in_memory = sum(name.startswith("#") for name in printed.resources)
    if in_memory:
        tensors = count_text(in_memory, "tensor")
        print(f"the text names {tensors} without the numbers; -o FILE writes these too", file=sys.stderr)


def _read(file: Path, bind: list[str] | None) -> "tuple[Module, str]":
    """The module, and the pipeline that a reproducer brings (empty for other files)."""
    from irpar.ir import verify
    from irpar.ir.text.files import read_text
    from irpar.pass_manager.reproducer import reproducer_pipeline

    from .loading import load_model
    from .options import bind_of

    if file.suffix == ".onnx":
        return load_model(file, bind), ""
    module = read_text(file)
    verify(module)
    if sizes := bind_of(bind):
        from irpar.passes.bind_dims import BindDims

        BindDims(sizes=sizes).run(module)
    return module, reproducer_pipeline(file) or ""
