"""What is read of an entry of plan.json: between which ranks something goes, and how often."""

from collections.abc import Mapping
from typing import Any

_SHOWN_PAIRS = 4


def over_text(entry: Mapping[str, Any]) -> str:
    """Between which ranks something of plan.json goes: the axes that it runs over, or the ranks, by pairs."""
    pairs: list[int] = entry.get("pairs", [])
    listed = [f"{source} to {target}" for source, target in zip(pairs[::2], pairs[1::2], strict=True)]
    if len(listed) > _SHOWN_PAIRS:
        listed[_SHOWN_PAIRS - 1 :] = [f"{len(listed) - _SHOWN_PAIRS + 1} more"]
    return ",".join(entry["axes"]) or f"ranks {', '.join(listed)}"


def known_times(entry: Mapping[str, Any]) -> int:
    """How often a collective of plan.json runs; one in a body whose runs nobody knows before counts once."""
    times: int | None = entry["times"]
    return 1 if times is None else times
