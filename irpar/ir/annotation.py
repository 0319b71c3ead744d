"""What a user says of a tensor: its pattern, its sharding, and where the words came from."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from irpar.sharding import DimSpec, IrparError, is_priority

from .value import Value


class AnnotationError(IrparError):
    """An annotation that matches nothing or does not fit."""


@dataclass(frozen=True)
class Annotation:
    """One entry of `--shardings`: a name or glob, and per dim None, an axis, or a list of axes, "?" and "priority=1".

    `where` is the place that messages name, such as `shardings.yaml, line 7`; `said` what the user wrote there, where
    that was not the pattern itself. `is_implied`: nobody wrote an entry for it, so it cannot be left out by itself.
    `behind` is what such a rule says of the same tensor: it holds where this entry is left out.
    """

    pattern: str
    spec: tuple[DimSpec, ...]
    where: str = ""
    said: str = ""
    is_implied: bool = False
    behind: "Annotation | None" = None

    @property
    def title(self) -> str:
        """What reasons call the annotation."""
        return (self.said or f'"{self.pattern}"') + (f" in {self.where}" if self.where else "")

    def names(self, value: Value) -> bool:
        """True where the pattern is the value's own name, not a glob that it matches."""
        return self.pattern in (value.source, value.name) or not re.search(r"[*?\[]", self.pattern)

    @property
    def can_be_left_out(self) -> bool:
        """Whether somebody wrote this entry, and the tensor is free, cut otherwise, or open without it."""
        if self.is_implied or self.behind is None:
            return not self.is_implied
        mine, other = (tuple(map(_cut, annotation.spec)) for annotation in (self, self.behind))
        is_open = any(dim is not None and "?" in dim for dim in self.behind.spec)
        return mine != other or (is_open and not any(mine))

    def place(self) -> str:
        """The annotation and its place, as one line of a message."""
        entry = f"{json.dumps(self.pattern, ensure_ascii=False)}: {spec_json(self.spec)}"
        return entry + (f"      {self.where}" if self.where else "")


def _cut(dim: DimSpec) -> tuple[str, ...]:
    """The axes that a dim is said to be sharded by."""
    axes = (dim,) if isinstance(dim, str) else dim or ()
    return tuple(axis for axis in axes if axis != "?" and not is_priority(axis))


def spec_json(spec: Sequence[DimSpec]) -> str:
    """As a --shardings file in JSON writes it."""
    return json.dumps(spec, ensure_ascii=False)
