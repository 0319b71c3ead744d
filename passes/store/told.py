"""What the pass says of what it did."""

from irpar.analysis.storage.written import Written
from irpar.units import bytes_text, seconds_text

from .asked import PLACES


def notes_of(written: Written, before: int, after: int) -> tuple[str, ...]:
    """What lies where, and what that takes.

    Args:
        written: of the rank whose copies take longest.
        before, after: bytes that a rank holds at most.
    """
    lines = [f"ranks hold {bytes_text(after)} on their device instead of {bytes_text(before)}"]
    for memory, place in PLACES.items():
        there = [each for each in written.moved() if each.memory == memory]
        if there:
            sizes = zip(*((each.nbytes, each.brought, each.sent) for each in there), strict=True)
            own, brought, sent = map(bytes_text, map(sum, sizes))
            lines.append(f"{own} {place}: {brought} to the device and {sent} back in a run")
    taken = written.timeline
    lines.append(
        f"copies take {seconds_text(taken.copying)} in a run of {seconds_text(taken.compute + taken.exposed)}; "
        f"computation waits {seconds_text(taken.exposed)} for them"
    )
    return tuple(lines)


def statistics_of(written: Written) -> dict[str, int | float]:
    """What moves, in numbers."""
    moved = written.moved()
    return {
        "moved": len(moved),
        "bytes to the device": sum(each.brought for each in moved),
        "bytes from the device": sum(each.sent for each in moved),
    }
