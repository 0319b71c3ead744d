"""irpar plan-memory: offsets for buffers that are held for a time, and how small the memory is that takes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irpar.sharding import IrparError
from irpar.tables.display import output, print_json
from irpar.units import bytes_text, count_text

from .model_target import refuse_existing
from .options import Json

if TYPE_CHECKING:
    from irpar.analysis.memory.offsets.exact import Smallest
    from irpar.analysis.memory.offsets.lifetimes import Lifetime
    from irpar.ir import Node

Source = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.csv|OUT",
        help="Buffers in google/minimalloc's form (id,lower,upper,size), or a folder that `irpar partition` wrote.",
        show_default=False,
    ),
]
Target = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FILE.csv", help="Write the buffers with their offsets.", show_default=False),
]
Rank = Annotated[
    int | None, typer.Option("--rank", metavar="RANK", help="Of OUT: whose memory; 0 if not given.", show_default=False)
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Look for the smallest memory (CP-SAT), and for a proof that it is that.")
]
Seconds = Annotated[
    float | None,
    typer.Option("--seconds", metavar="SECONDS", help="--exact: how long; 30 if not given.", show_default=False),
]
Alignment = Annotated[
    int | None,
    typer.Option(
        "--alignment",
        metavar="BYTES",
        help="What offsets are multiples of: 1 for FILE.csv, 64 for OUT if not given.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file of -o.")]


def plan_memory_command(
    source: Source,
    target: Target = None,
    rank: Rank = None,
    exact: Exact = False,
    seconds: Seconds = None,
    alignment: Alignment = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Give each buffer a place in little memory: buffers that are held at different times share it.

    Prints the peak of the offsets that were found, the lower bound (the most that lives at once, or what CP-SAT proved)
    and the gap between them.
    """
    from irpar.analysis.memory.offsets.buffers_file import write_buffers
    from irpar.analysis.memory.offsets.exact import SECONDS

    if seconds is not None and not exact:
        raise IrparError("--seconds is for --exact alone", do="leave it out, or give --exact too")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise IrparError(f"--seconds is {seconds}", do="give a number above 0")
    if alignment is not None and not 0 < alignment <= 2**20:
        raise IrparError(f"--alignment is {alignment}", do="give a number of bytes from 1 to 1048576")
    if target is not None:
        refuse_existing(target, force)
    held, default = _read(source, rank)
    found = _plan(held, alignment or default, (seconds or SECONDS) if exact else None)
    if target is not None:
        write_buffers(target, held, found.found.offsets)
    if as_json:
        facts = {"buffers": len(held), "peak": found.nbytes, "lower_bound": found.bound, "gap": found.gap}
        print_json({**facts, "is_optimal": found.is_optimal, "file": None if target is None else str(target)})
        return
    _print(found, len(held), target)


def _read(source: Path, rank: int | None) -> "tuple[Sequence[Lifetime[str]], int]":
    """The buffers, and what their offsets are multiples of where nothing is said."""
    from irpar.analysis.memory.offsets.buffers_file import read_buffers
    from irpar.analysis.memory.offsets.lifetimes import ALIGNMENT

    if source.is_dir():
        return _of_rank(source, rank or 0), ALIGNMENT
    if rank is not None:
        raise IrparError("--rank is for a partition", do=f"leave it out: {source} is a file")
    return read_buffers(source), 1


def _of_rank(folder: Path, rank: int) -> "list[Lifetime[str]]":
    """What a rank of a partition holds, constants left out: they lie elsewhere."""
    from irpar.analysis.memory.arena import Scratch, arena_lifetimes
    from irpar.analysis.memory.offsets.lifetimes import Lifetime
    from irpar.analysis.opening import with_calls_opened
    from irpar.ir import Value
    from irpar.runtime.pieces import open_programs

    graph = with_calls_opened(open_programs(folder, [rank]).modules[0]).graph
    found = []
    for one in arena_lifetimes(graph):
        match one.key:
            case Value(name=name):
                pass
            case Scratch(node):
                name = f"scratch of {_made_by(node)}"
            case node:
                name = f"inside {_made_by(node)}"
        found.append(Lifetime(name, one.nbytes, one.first, one.last))
    return found


def _made_by(node: "Node") -> str:
    """A node by the first value that it makes: several may have come from one of the model, and share its label."""
    return node.results[0].name if node.results else node.label


def _plan(held: "Sequence[Lifetime[str]]", alignment: int, seconds: float | None) -> "Smallest[str]":
    """Offsets by heuristics, or where there are seconds by all means."""
    from irpar.analysis.memory.offsets.exact import Smallest, smallest
    from irpar.analysis.memory.offsets.heuristics import place
    from irpar.analysis.memory.offsets.lifetimes import aligned, most_held

    if seconds is not None:
        return smallest(held, seconds, alignment)
    found = place(held, alignment)
    return Smallest(found, aligned(found.nbytes, alignment), most_held(held, alignment))


def _print(found: "Smallest[str]", count: int, target: Path | None) -> None:
    console = output()
    console.print(f"{count_text(count, 'buffer')}")
    console.print(f"peak         {found.nbytes:,} bytes ({bytes_text(found.nbytes)})")
    console.print(f"lower bound  {found.bound:,} bytes ({bytes_text(found.bound)})")
    told = "none: no memory is smaller" if found.is_optimal else f"at most {found.gap:.2%} of the peak"
    console.print(f"gap          {told}")
    if target is not None:
        console.print(f"offsets      {target}", soft_wrap=True)
