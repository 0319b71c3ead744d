"""The record that plan.json holds, and its text. What it is made of is in `plan`; the format is in docs/plan.md."""

import json
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
    predicted: dict[str, Any] | None = None
    not_as_annotated: list[dict[str, Any]] = field(default_factory=list)
    state: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    training: dict[str, Any] | None = None
    functions: list[dict[str, Any]] = field(default_factory=list)
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
        fields = vars(self)
        first = ("format", "id")
        order = [*first, *(name for name in fields if name not in first)]
        lines = []
        for name in order:
            value = fields[name]
            if isinstance(value, list) and value:
                rows = ",\n    ".join(json.dumps(row) for row in value)
                lines.append(f"  {json.dumps(name)}: [\n    {rows}\n  ]")
            else:
                lines.append(f"  {json.dumps(name)}: {json.dumps(value)}")
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @property
    def mesh_of_ranks(self) -> Mesh:
        """The mesh that the ranks form."""
        devices = self.mesh.get("devices")
        return Mesh(self.mesh["axes"], tuple(devices) if devices else None)
