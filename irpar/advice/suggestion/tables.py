"""What `irpar inspect --suggest` prints of a suggestion."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from irpar.tables.display import name_with, print_rows, shortened, table
from irpar.units import bytes_text, count_text, flops_text, sharding_text, share_text

if TYPE_CHECKING:
    from rich.console import Console

    from .report import TensorGroup
    from .result import Prediction, Suggestion


def print_suggestion(console: "Console", found: "Suggestion", rows: int | None, model: str) -> None:
    """What is sharded, what stays replicated, and what it costs; tables have at most `rows` lines."""
    console.print(
        Text(f"{model} over {found.mesh}: {count_text(found.mesh.size, 'rank')}", style="bold"), soft_wrap=True
    )
    _print_cut(console, found.cut, rows)
    _print_whole(console, found.whole, rows)
    _print_prediction(console, found.prediction)
    for note in found.notes:
        console.print(f"\n{shortened(note)}")


def _print_cut(console: "Console", groups: "Sequence[TensorGroup]", rows: int | None) -> None:
    if not groups:
        return
    made = table("sharded", "tensors", "is sharded as", "why", right=("tensors",))
    for group in groups[:rows]:
        made.add_row(_labelled(group), f"{len(group.names):,}", _lies(group), shortened(group.reason))
    print_rows(console, made, len(groups), rows)


def _print_whole(console: "Console", groups: "Sequence[TensorGroup]", rows: int | None) -> None:
    if not groups:
        return
    made = table("replicated", "tensors", "bytes", "why", right=("tensors", "bytes"))
    for group in groups[:rows]:
        made.add_row(
            _labelled(group),
            f"{len(group.names):,}",
            bytes_text(group.bytes),
            shortened(group.reason),
        )
    print_rows(console, made, len(groups), rows)


def _labelled(group: "TensorGroup") -> Any:
    """The name, and below it the use of a tensor whose name does not tell it."""
    return name_with(shortened(group.pattern), [shortened(group.use)] if group.use else [])


def _lies(group: "TensorGroup") -> str:
    return f"{group.dtype}{sharding_text(group.spec, group.shape)}"


def _print_prediction(console: "Console", found: "Prediction") -> None:
    made = table("", "one device", "per rank", "share", right=("one device", "per rank", "share"))
    for name, whole, part, text in (
        ("weights", found.weight_bytes, found.weight_bytes_per_rank, bytes_text),
        ("computation", found.flops, found.flops_per_rank, flops_text),
    ):
        made.add_row(name, text(whole), text(part), share_text(part, whole))
    console.print()
    console.print(made)
    console.print()
    if not found.by_kind:
        console.print("nothing is sent between the ranks")
        return
    sent = table("sent each step", "times", "per device", right=("times", "per device"))
    for kind, counts in _largest_first(found.by_kind):
        sent.add_row(kind, f"{counts['collectives']:,}", bytes_text(counts["sent_bytes"]))
    console.print(sent)


def _largest_first(by_kind: Mapping[str, Mapping[str, int]]) -> list[tuple[str, Mapping[str, int]]]:
    return sorted(by_kind.items(), key=lambda item: -item[1]["sent_bytes"])
