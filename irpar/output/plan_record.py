"""The record that plan.json holds, and its text. What it is made of is in `plan`; the format is in docs/plan.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from irpar.sharding import Mesh
from irpar.units import count_text

FORMAT = "irpar-plan/1"
BYTES_ALONE = "bytes"
"""The network that counts sent bytes alone; it knows no device."""


@dataclass
class Plan:
    """The contents of plan.json, field by field as in docs/plan.md."""

    source: dict[str, Any]
    pipeline: str
    mesh: dict[str, Any]
    ranks: list[dict[str, Any]]
    parts: list[dict[str, Any]]
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    replicated: list[dict[str, Any]]
    totals: dict[str, Any]
    original: dict[str, Any]
    values: list[dict[str, Any]] = field(default_factory=list)
    network: str = BYTES_ALONE
    memory_limit: int | None = None
    predicted: dict[str, Any] | None = None
    not_as_annotated: list[dict[str, Any]] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    memories: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] | None = None
    functions: list[dict[str, Any]] = field(default_factory=list)
    dialect: str = "irpar"
    id: str | None = None
    format: str = FORMAT

    def __repr__(self) -> str:
        mesh, totals = self.mesh_of_ranks, self.totals
        return (
            f"<plan over {mesh}: {count_text(mesh.size, 'rank')}, {count_text(len(self.parts), 'part')}, "
            f"{count_text(totals['collectives'], 'collective')} that send {totals['sent_bytes']:,} bytes a device>"
        )

    def _repr_html_(self) -> str:
        from irpar.tables.html import report_html

        from .tables import print_plan

        return report_html(lambda page: print_plan(page, self))

    def to_json(self) -> str:
        """The text of plan.json: one line for each entry of a list."""
        return plan_text(self.field_texts())

    def field_texts(self) -> dict[str, str]:
        """The text of each field, in the order of plan.json, for `plan_text`."""
        fields = vars(self)
        return {name: field_text(fields[name]) for name in dict.fromkeys(("format", "id", *fields))}

    @property
    def mesh_of_ranks(self) -> Mesh:
        """The mesh that the ranks form."""
        devices = self.mesh.get("devices")
        return Mesh(self.mesh["axes"], tuple(devices) if devices else None)


def plan_text(fields: Mapping[str, str]) -> str:
    """The text of plan.json, of the texts of its fields."""
    lines = [f"  {json.dumps(name)}: {text}" for name, text in fields.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def field_text(value: Any) -> str:
    """The text of one field: a line for each entry of a list."""
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    rows = ",\n    ".join(map(json.dumps, value))
    return f"[\n    {rows}\n  ]"
