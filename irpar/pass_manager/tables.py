"""What passes took, and what they counted."""

from collections.abc import Sequence

from rich.table import Table

from irpar.tables.display import table

from .progress import PassRecord

_TIMING = ("seconds", "share", "nodes")


def timing_table(records: Sequence[PassRecord]) -> Table:
    """Seconds, share of the time and nodes, a line a pass."""
    made = table("pass", *_TIMING, "changed", right=_TIMING)
    total = sum(record.seconds for record in records)
    for record in records:
        share = record.seconds / total if total else 0.0
        changed = "yes" if record.changed else "no"
        made.add_row(record.text, f"{record.seconds:.4f}", f"{share:.0%}", f"{record.nodes:,}", changed)
    made.add_row("total", f"{total:.4f}", "", "", "")
    return made


def statistics_table(records: Sequence[PassRecord]) -> Table:
    """What the passes counted, a line a number."""
    made = table("pass", "statistic", "value", right=("value",))
    for record in records:
        for name, value in record.statistics.items():
            made.add_row(record.name, name, f"{value:,}" if isinstance(value, int) else f"{value:.6g}")
    return made
