"""Write docs/models.md: every family of models over three meshes, verified, with what it costs.

python tools/models_table.py
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import irpar  # noqa: E402
from irpar.output.tables import pattern  # noqa: E402
from irpar.units import bytes_text  # noqa: E402
from tests import test_exports, test_families  # noqa: E402
from tests.shares import EXCESS, MESHES  # noqa: E402

DOCUMENT = ROOT / "docs" / "models.md"
_NAMES = 3
"""How many groups of whole tensors and operators a row names, the largest first."""
_FAMILIES_TESTED_ELSEWHERE = ("mlp", "gpt", "llama")

HEAD = """# Models

Every family of models that irpar is tested with, built by `irpar.models` and exported from PyTorch and transformers
(see tests/fixtures), over three meshes: `python tools/models_table.py` writes this page. Only weights and inputs are
annotated, the Megatron way: rows of the batch over dp, heads, feed-forward, channels or experts over tp.

- **difference**: the largest |a - b| / (1 + |b|) from ONNX Runtime on the original; see [verify.md](verify.md).
- **FLOPs**: what a rank computes, times the number of ranks, by what the model computes; 1.0 is an even division.
- **sent**: the most that one rank sends in one step; these models are small (batch 4, one or two layers).
- **replicated**: the largest of what no axis shards.

"""
TITLES = "| model | exporter | mesh | difference | FLOPs | collectives | sent | replicated |"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        model, exporter, mesh: what it is of.
        difference: the largest, relative; it may differ in its last bits between machines.
        costs: the other columns.
    """

    model: str
    exporter: str
    mesh: str
    difference: float
    costs: tuple[str, ...]

    def __str__(self) -> str:
        return f"| {' | '.join([self.model, self.exporter, self.mesh, f'{self.difference:.0e}', *self.costs])} |"


def rows() -> Iterator[Row]:
    """All lines, in order.

    Raises:
        IrparError: a partition differs from its original.
    """
    with tempfile.TemporaryDirectory() as folder:
        for case in (*map(test_families.Case, _FAMILIES_TESTED_ELSEWHERE), *test_families.CASES):
            for mesh in MESHES:
                partition = test_families.partitioned(case, mesh, Path(folder))
                yield _row(_settings_of(case), "irpar.models", partition, None, case.tolerance)
    for export in test_exports.EXPORTS:
        model, exporter, sizes = export.split("_")
        inputs, _ = test_exports.numbers_of(export)
        for mesh in MESHES:
            partition = test_exports.partitioned(export, mesh)
            tolerance = test_exports.TOLERANCE.get(model, 1e-4)
            yield _row(model, f"{exporter}, {sizes}", partition, inputs, tolerance)


def _settings_of(case: test_families.Case) -> str:
    settings = " ".join(f"{name}={value}" for name, value in case.settings)
    return f"{case.family} {settings}".strip()


def _row(
    model: str, exporter: str, partition: irpar.Partition, inputs: Mapping[str, Any] | None, tolerance: float
) -> Row:
    verified = partition.verify(inputs, tolerance=tolerance)
    verified.check()
    plan = partition.plan
    axes = plan.mesh["axes"]
    totals = plan.totals
    share = totals["flops_per_rank"] / plan.original["flops"] * prod(axes.values())
    kinds = ", ".join(f"{found['collectives']} {kind}" for kind, found in totals["by_kind"].items())
    costs = (f"{share:.2f}", kinds or "none", bytes_text(totals["sent_bytes"]), _whole(plan.replicated))
    difference = max((found.relative for found in verified.differences), default=0.0)
    return Row(model, exporter, ",".join(f"{axis}={size}" for axis, size in axes.items()), difference, costs)


def _whole(replicated: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, int] = {}
    for entry in replicated:
        name = pattern(entry.get("value") or entry["op"])
        groups[name] = groups.get(name, 0) + (entry["bytes"] or 0)
    names = [f"`{name}`" for name in sorted(groups, key=lambda name: -groups[name])]
    more = [f"{len(names) - _NAMES} more"] if len(names) > _NAMES else []
    return ", ".join(names[:_NAMES] + more) or "nothing"


def exceptions() -> Iterator[str]:
    """What has more than its share, and why."""
    for table in (test_families.MORE_THAN_ITS_SHARE, test_exports.MORE_THAN_ITS_SHARE):
        reasons: dict[str, dict[str, list[str]]] = {}
        for (case, mesh), (_, why) in table.items():
            reasons.setdefault(why, {}).setdefault(case, []).append(mesh)
        for why, cases in reasons.items():
            told = ", ".join(f"{case} ({' and '.join(meshes)})" for case, meshes in cases.items())
            yield f"- {told}: {why}"


def document() -> str:
    """The whole page."""
    table = [TITLES, "|---|---|---|---:|---:|---|---:|---|", *map(str, rows())]
    return HEAD + "\n".join([*table, "", f"## More than {EXCESS} of its share", "", *exceptions(), ""])


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
