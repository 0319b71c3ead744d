"""irpar explain OUT --memory: what a rank holds, what of it at its peak, and what would lower that."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from irpar.output.tables import ELSEWHERE, memories_table, pattern
from irpar.sharding import IrparError
from irpar.tables.display import output, print_json, shortened, table
from irpar.units import bytes_text, count_text, sharding_text

from .model_target import refuse_existing

if TYPE_CHECKING:
    from rich.console import Console

    from irpar.output.plan_record import Plan

    from .explain_peak import PeakReport

SUFFIX = ".svg"


@dataclass(frozen=True)
class MemoryReportOptions:
    """What is asked for beside the tables.

    Attributes:
        rank: whose peak; None: that of the first rank that holds most.
        picture: a file for the picture; None: none.
        force: whether that may replace one.
        as_json: whether JSON is printed.
    """

    rank: int | None = None
    picture: Path | None = None
    force: bool = False
    as_json: bool = False

    def check(self) -> None:
        """Refuse a file that is no picture, or that is there.

        Raises:
            IrparError: it is refused.
        """
        if self.picture is None:
            return
        if self.picture.suffix.lower() != SUFFIX:
            raise IrparError("the picture is SVG", where=str(self.picture), do="give a file that ends in .svg")
        refuse_existing(self.picture, self.force)


def explain_memory(plan: "Plan", folder: Path, asked: MemoryReportOptions) -> None:
    """Print what each rank holds, ranks that hold the same together; then what is held at the peak of one.

    Args:
        plan: of the partition.
        folder: where it is.
        asked: what else.

    Raises:
        IrparError: the plan was written before plans said so, or something that is asked for cannot be.
    """
    if not all("memory" in entry for entry in plan.ranks):
        raise IrparError("this plan does not say what memory is for", do="partition the model again")
    asked.check()
    from .explain_peak import PeakReport

    report, missing = None, ""
    try:
        report = PeakReport.of(plan, folder, asked.rank)
    except IrparError as error:
        if asked.rank is not None or asked.picture is not None:
            raise
        missing = f"{error.what}: {error.where}" if error.where else error.what
    if report is not None and asked.picture is not None:
        report.draw(asked.picture)
    if asked.as_json:
        peak = {"peak": None, "changes": [], "untried": [], "time_of": None} if report is None else report.facts()
        memories = {"memories": plan.memories} if plan.memories else {}
        print_json(
            {"ranks": plan.ranks, "zero": (plan.training or {}).get("zero"), **memories, **peak, "missing": missing}
        )
    else:
        _print(output(), plan, report, missing, asked.picture)


def _print(console: "Console", plan: "Plan", report: "PeakReport | None", missing: str, picture: Path | None) -> None:
    """Print the tables."""
    names = list(plan.ranks[0]["memory"])
    elsewhere = {place: field for place, field in ELSEWHERE.items() if any(field in entry for entry in plan.ranks)}
    right = [*names, "peak", *elsewhere]
    made = table("ranks", *right, right=right)
    for ranks, entry in _alike(plan.ranks):
        others = (bytes_text(entry.get(field, 0)) for field in elsewhere.values())
        held = (bytes_text(entry["memory"][name]) for name in names)
        made.add_row(ranks, *held, bytes_text(entry["peak_bytes"]), *others)
    console.print(made)
    console.print(
        Text("of each kind the most that is held at once; activations: what else is held at the peak"),
        soft_wrap=True,
    )
    console.print()
    if plan.memories:
        console.print(memories_table(plan))
        console.print("which of it is copied when: irpar explain OUT", soft_wrap=True)
        console.print()
    if report is None:
        console.print(Text(f"what is held at the peak is in the programs: {missing}"), soft_wrap=True)
        console.print("do: partition the model again", soft_wrap=True)
    else:
        report.print(console)
    zero = (plan.training or {}).get("zero")
    if zero is not None:
        console.print()
        _print_zero(console, zero)
    if picture is not None:
        console.print(f"\npicture: {picture}", soft_wrap=True)


def _alike(entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, Mapping[str, Any]]]:
    """The ranks that hold the same, as a text, and what that is."""
    found: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for entry in entries:
        elsewhere = (entry.get(field) for field in ELSEWHERE.values())
        found.setdefault((entry["peak_bytes"], *entry["memory"].values(), *elsewhere), []).append(entry)
    return [(_ranks_text([entry["rank"] for entry in same]), same[0]) for same in found.values()]


def _ranks_text(ranks: Sequence[int]) -> str:
    """`0 to 7`, or `0, 2 and 6 more`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    first = ", ".join(map(str, ranks[:2]))
    return first if len(ranks) <= 2 else f"{first} and {len(ranks) - 2} more"


def _print_zero(console: Any, zero: Mapping[str, Any]) -> None:
    """What the pass says, and the parameters of which ranks do not hold equal shares."""
    again = ", parameters gathered again in the backward pass" if zero["regather"] else ""
    console.print(Text(f"ZeRO, stage {zero['stage']}, over {', '.join(zero['axes'])}{again}"), soft_wrap=True)
    if not zero["parameters"]:
        return
    alike = dict.fromkeys(
        (pattern(entry["parameter"]), sharding_text(entry["sharding"]), entry["why"]) for entry in zero["parameters"]
    )
    count = count_text(len(zero["parameters"]), "parameter")
    console.print(f"{count} that it leaves as they are or shards unevenly, {count_text(len(alike), 'kind')}:")
    rows = table("parameter", "sharding", "why")
    for name, sharding, why in alike:
        rows.add_row(shortened(name), sharding, why)
    console.print(rows)
