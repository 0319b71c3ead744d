"""Options that several commands share, and what their texts mean."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from irpar.sharding import IrparError, Mesh

_PASSES = "Watch the passes"

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
ModelFile = Annotated[Path, typer.Argument(metavar="MODEL", help="An ONNX model.", show_default=False)]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="A folder that `irpar partition` wrote.", show_default=False)]
Bind = Annotated[
    list[str] | None,
    typer.Option(
        "--bind",
        metavar="NAME=SIZE",
        help="Size of a symbolic dim, such as batch=8 (or batch=8,seq=128). May be repeated.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Fix an input's value, such as sr=16000: what depends on it is folded, and the input takes no other. "
        "A number or a list in JSON's form, or FILE.npy. May be repeated.",
    ),
]
MeshText = Annotated[
    str | None, typer.Option("--mesh", metavar="AXES", help="The devices, such as dp=2,tp=4.", show_default=False)
]
Network = Annotated[
    str | None,
    typer.Option(
        "--network",
        metavar="PRESET|FILE",
        help="What communication costs: bytes (the default), h100-nvlink-ib, a100-pcie, cpu-ethernet, or a file "
        "such as irpar calibrate writes.",
        show_default=False,
    ),
]
Shardings = Annotated[
    Path | None,
    typer.Option("--shardings", metavar="FILE", help="How tensors are sharded: YAML or JSON.", show_default=False),
]
Pipeline = Annotated[
    str | None,
    typer.Option(
        "--pipeline", metavar="PASSES", help="Passes, such as infer-types,cse{...},localize.", show_default=False
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="What computes: ort, numpy or cupy. By default cupy where CuPy finds a GPU with room for the ranks, "
        "else ort.",
        show_default=False,
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse what the engine cupy would compute on the host instead of the GPU.")
]
Tf32 = Annotated[
    bool,
    typer.Option(
        "--tf32", help="Let the engine cupy multiply float32 faster, operands rounded to TF32 (10 bits of mantissa)."
    ),
]
Inputs = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="FILE", help="An .npz file with an array for each input.", show_default=False),
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=VALUE",
        help="An input: a number or a list in JSON's form, one number for a full tensor, or FILE.npy. "
        "May be repeated; goes before what --inputs says.",
    ),
]

PrintIrBefore = Annotated[
    list[str] | None,
    typer.Option("--print-ir-before", metavar="PASS", help="Print the IR before a pass.", rich_help_panel=_PASSES),
]
PrintIrAfter = Annotated[
    list[str] | None,
    typer.Option("--print-ir-after", metavar="PASS", help="Print the IR after a pass.", rich_help_panel=_PASSES),
]
PrintIrAfterAll = Annotated[
    bool, typer.Option("--print-ir-after-all", help="Print the IR after every pass.", rich_help_panel=_PASSES)
]
PrintIrAfterChange = Annotated[
    bool,
    typer.Option(
        "--print-ir-after-change", help="Print the IR after every pass that changed it.", rich_help_panel=_PASSES
    ),
]
DumpIr = Annotated[
    Path | None,
    typer.Option(
        "--dump-ir",
        metavar="DIR",
        help="Write the IR to a file after every pass.",
        rich_help_panel=_PASSES,
        show_default=False,
    ),
]
VerifyEach = Annotated[
    bool, typer.Option("--verify-each", help="Verify the IR after every pass.", rich_help_panel=_PASSES)
]
Timing = Annotated[bool, typer.Option("--timing", help="Print the time of every pass.", rich_help_panel=_PASSES)]
Statistics = Annotated[bool, typer.Option("--statistics", help="Print what passes counted.", rich_help_panel=_PASSES)]


_MOST_DIGITS = 19
"""Of 2**63 - 1, the greatest size there is; int() reads no number of thousands of digits."""


def bind_of(texts: Sequence[str] | None) -> dict[str, int]:
    """Sizes of symbolic dims from `batch=8` and the like.

    Raises:
        IrparError: a text has another form, or a symbol comes twice, or a size has too many digits.
    """
    sizes: dict[str, int] = {}
    for text in (part for given in texts or () for part in given.split(",")):
        name, equals, size = (part.strip() for part in text.rpartition("="))
        if not equals or not name or not (size.isascii() and size.isdecimal()):
            raise IrparError(f'cannot read --bind "{text}"', do="write NAME=SIZE, such as --bind batch=8")
        if name in sizes:
            raise IrparError(f"--bind gives {name} twice", do="give each symbol once")
        if len(size.lstrip("0")) > _MOST_DIGITS:
            raise IrparError(f"--bind gives {name} a size of {len(size)} digits", do="give one below 2**63")
        sizes[name] = int(size)
    return sizes


def mesh_of(text: str | None) -> Mesh | None:
    """The mesh that --mesh means; None where it is not given.

    Raises:
        IrparError: the text has another form.
    """
    return None if text is None else Mesh.parse(text)


def choice(option: str, value: str, known: Collection[str]) -> str:
    """An option's value, checked against what there is.

    Raises:
        IrparError: it is unknown.
    """
    if value in known:
        return value
    do = "use " + " or ".join(f"{option} {name}" for name in known)
    raise IrparError(f'there is no {option} "{value}"', do=do)
