"""What a part of the check is given, and what it finds."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

MOST_FAILURES = 200
"""Failures that a report lists; the others are counted."""


@dataclass(frozen=True)
class Context:
    """What a part runs with.

    Attributes:
        engine: of irpar; "cupy" but for development.
        group: what joins ranks that are processes; "nccl" but for development.
        deadline: when to stop, by `time.monotonic`.
        scratch: a folder of its own.
        shard: its number among the processes that share the part.
        shards: how many share it.
        lists: whether to list what makes up what was measured, where the part can.
    """

    engine: str
    group: str
    deadline: float
    scratch: Path
    shard: int = 0
    shards: int = 1
    lists: bool = False

    @property
    def is_late(self) -> bool:
        """Whether to stop."""
        return time.monotonic() >= self.deadline

    @property
    def seconds_left(self) -> float:
        """Until the deadline."""
        return max(0.0, self.deadline - time.monotonic())

    def mine(self, number: int) -> bool:
        """Whether a piece of work is this process's."""
        return number % self.shards == self.shard


@dataclass
class Findings:
    """What a part, or a process of it, found.

    Attributes:
        checks: how many were made.
        failures: those that failed, a line or more each.
        notes: what a reader should know beside.
        figures: the part's own numbers, as JSON has them.
        seconds: how long it took.
    """

    checks: int = 0
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether something was checked, and nothing failed."""
        return self.checks > 0 and not self.failures

    def check(self, problem: str | None) -> None:
        """Count a check; `problem` says what failed."""
        self.checks += 1
        if problem:
            self.failures.append(problem)

    def as_json(self) -> dict[str, Any]:
        """As the report has it."""
        listed = self.failures[:MOST_FAILURES]
        return {"is_good": self.is_good, "failed": len(self.failures)} | asdict(self) | {"failures": listed}

    @classmethod
    def of_json(cls, made: Mapping[str, Any]) -> Self:
        """What `as_json` gave."""
        names = ("checks", "failures", "notes", "figures", "seconds")
        return cls(**{name: made[name] for name in names})


def merged(found: Sequence[Findings]) -> Findings:
    """The findings of processes that shared a part; they ran at the same time."""
    return Findings(
        checks=sum(one.checks for one in found),
        failures=[line for one in found for line in one.failures],
        notes=list(dict.fromkeys(line for one in found for line in one.notes)),
        figures=_merged([one.figures for one in found]),
        seconds=max((one.seconds for one in found), default=0.0),
    )


def _merged(values: Sequence[Any]) -> Any:
    """Tables key by key, lists one after the other, counts added; of all else the first."""
    first = values[0] if values else {}
    if isinstance(first, dict):
        keys = dict.fromkeys(key for value in values for key in value)
        return {key: _merged([value[key] for value in values if key in value]) for key in keys}
    if isinstance(first, list):
        return [item for value in values for item in value]
    if isinstance(first, int) and not isinstance(first, bool):
        return sum(values)
    return first


def problem_text(error: BaseException, lines: int = 4) -> str:
    """The first lines of an error's text, with its kind."""
    text = [line for line in str(error).splitlines() if line.strip()][:lines]
    return f"{type(error).__name__}: " + " | ".join(line.strip() for line in text)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    made = [f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    return [*made, *(f"| {' | '.join(_cell(value) for value in row)} |" for row in rows)]


def _cell(value: object) -> str:
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
