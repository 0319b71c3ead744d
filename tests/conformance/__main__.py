"""Print how irpar does on ONNX's own backend cases: `python -m tests.conformance [--cuts]`."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from tests.kernels import conformance as kernel_cases

from . import families, partitions
from .cases import KINDS, all_cases, cases
from .round_trips import After, Before, RoundTrip, round_trip


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--cuts", action="store_true", help="also cut every case over two devices (some minutes)")
    options = parser.parse_args(arguments)
    console = Console()
    checks = [_round_trips(console), _kernels(console), _families(console)]
    if options.cuts:
        checks.append(_cuts(console))
    return 0 if all(checks) else 1


def _round_trips(console: Console) -> bool:
    """The table of round trips; True where each case that was right still is."""
    table = Table("cases", "all", "ONNX Runtime runs", "as expected", "the same after", "differ", "refused")
    rows = {kind: [round_trip(case) for case in cases(kind)] for kind in KINDS}
    rows["together"] = [one for row in rows.values() for one in row]
    for kind, row in rows.items():
        table.add_row(kind, *(f"{count:,}" for count in _counts(row)))
    console.print(table)
    right = [one for one in rows["together"] if one.before is Before.RIGHT]
    for one in rows["together"]:
        if one.after is After.DIFFERS or (one.before is Before.RIGHT and one.after is After.REFUSED):
            console.print(f"{one.case}: {one.note}", markup=False)
    refused = Counter(one.note for one in rows["together"] if one.after is After.REFUSED)
    for note, count in refused.most_common():
        console.print(f"refused, {count} x: {note}", markup=False)
    return all(one.after is After.SAME for one in right)


def _counts(row: list[RoundTrip]) -> list[int]:
    right = [one for one in row if one.before is Before.RIGHT]
    return [
        len(row),
        sum(one.before is not Before.FAILS for one in row),
        len(right),
        sum(one.after is After.SAME for one in right),
        sum(one.after is After.DIFFERS for one in row),
        sum(one.after is After.REFUSED for one in row),
    ]


def _kernels(console: Console) -> bool:
    """What the kernels of the numpy engine pass; True where they fail no case but the excluded ones."""
    found = {case.name: (case, kernel_cases.problem(case)) for case in kernel_cases.cases()}
    passed = [case for case, problem in found.values() if problem is None]
    operators = {call.kernel.op_type for case in passed for call in case.calls}
    failed = {name: problem for name, (_, problem) in found.items() if problem is not None}
    console.print(f"numpy kernels: {len(passed):,} of {len(found):,} cases of {len(operators)} operators")
    for name, problem in failed.items():
        why = kernel_cases.EXCLUDED.get(name, f"WRONG: {problem}")
        console.print(f"  {name}: {why}", markup=False)
    return failed.keys() <= kernel_cases.EXCLUDED.keys()


def _families(console: Console) -> bool:
    """Which operators of the model families lack a kernel; True where none does."""
    found = families.operators()
    lacking = families.lacking(found)
    console.print(f"operators of the model families: {len(found)}; without a numpy kernel: {len(lacking)}")
    for operator, models in lacking.items():
        console.print(f"  {operator}: {', '.join(models)}", markup=False)
    return not lacking


def _cuts(console: Console) -> bool:
    """What came of cutting every case; True where every result was right."""
    found = [partitions.cut(case, model) for case, model in partitions.ruled(all_cases())]
    table = Table("engine", "cases", "cuts that are right", "does not run the case on one device")
    for engine in partitions.ENGINES:
        runs = [one.runs[engine] for one in found]
        cannot = sum(any(text.startswith(engine) for text in one.not_run) for one in found)
        table.add_row(engine, f"{sum(map(bool, runs)):,}", f"{sum(runs):,}", f"{cannot:,}")
    console.print(table)
    refused = [f"{one.case}: {text}" for one in found for text in one.refused]
    wrong = [f"{one.case}: {text}" for one in found for text in one.wrong]
    console.print(f"cases with a sharding rule: {len(found):,}; cuts refused: {len(refused)}; wrong: {len(wrong)}")
    for text in (*refused, *wrong):
        console.print(text, markup=False)
    return not wrong


if __name__ == "__main__":
    sys.exit(main())
