"""irpar pack: the parts of some ranks in one file, to bring them where they run."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from irpar.sharding import IrparError
from irpar.tables.display import output, print_json, table
from irpar.units import bytes_text

from .options import Json, Out
from .progress_report import ProgressReport

if TYPE_CHECKING:
    from irpar.runtime.packing import Pack

Ranks = Annotated[
    list[str],
    typer.Option(
        "--rank",
        metavar="RANKS",
        help="Which ranks: 3, or 2,3, or 8-15. May be repeated.",
        show_default=False,
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--out",
        metavar="FILE",
        help="The tar file to write; OUT-rank3.tar and the like if not given.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace FILE if it is a tar file.")]
_RANKS = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.ASCII)


def pack_command(
    out: Out,
    rank: Ranks,
    target: Target = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Pack what some ranks need to run: plan.json, their parts, and checksums, which irpar run compares.

    tar -xf unpacks it to a folder of the partition's name; packs of several ranks can go into one.
    """
    from irpar.runtime.packing import write_pack
    from irpar.runtime.pieces import mesh_of

    ranks = _ranks_of(rank, mesh_of(out).size)
    with ProgressReport(is_shown=not as_json) as report:
        made = write_pack(out, ranks, target, force=force, progress=report.bytes)
    if as_json:
        print_json(
            {
                "file": str(made.path),
                "bytes": made.size,
                "folder": made.name,
                "ranks": list(made.ranks),
                "parts": list(made.parts),
                "files": [{"name": file.name, "bytes": file.size, "sha256": file.sha256} for file in made.files],
            }
        )
    else:
        _print(made)


def _ranks_of(texts: Sequence[str], size: int) -> list[int]:
    """The ranks that the texts of --rank name, in order.

    Raises:
        IrparError: a text has another form, or there is no such rank.
    """
    found: set[int] = set()
    for first, last in _runs(texts):
        if last >= size:
            raise IrparError(
                f"there is no rank {last}: the partition has ranks 0 to {size - 1}", do=f"give ranks of 0 to {size - 1}"
            )
        found.update(range(first, last + 1))
    return sorted(found)


def _runs(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    for text in (part.strip() for given in texts for part in given.split(",")):
        match = _RANKS.fullmatch(text)
        first, last = (int(match[1]), int(match[2] or match[1])) if match is not None else (1, 0)
        if first > last:
            raise IrparError(f'cannot read --rank "{text}"', do="write ranks as 3, as 2,3 or as 8-15")
        yield first, last


def _print(made: "Pack") -> None:
    from irpar.runtime.packing import rank_runs

    console = output()
    shown = table("file", "bytes", right=("bytes",))
    for file in made.files:
        shown.add_row(file.name, bytes_text(file.size))
    console.print(shown)
    console.print(
        f"\nrank{'s' * (len(made.ranks) > 1)} {', '.join(rank_runs(made.ranks))}: written to {made.path}",
        soft_wrap=True,
    )
    console.print(f"next, where it runs: tar -xf {made.path.name}, which makes {made.name}/", soft_wrap=True)
