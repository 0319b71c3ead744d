"""What irpar sends for the same work as XLA's two partitioners (GSPMD, Shardy) and PyTorch's DTensor.

    python benchmarks/anchors.py                       all cases, by the network that counts bytes
    python benchmarks/anchors.py mlp attn              some groups, or cases by name
    python benchmarks/anchors.py --no-run              plans only: nothing is computed and compared
    python benchmarks/anchors.py --completion strategy=propagate    with other options of complete-sharding

The cases are a folder of ONNX models with annotations beside the bytes that the others send: ../shared/anchors beside
the repository, or --anchors FOLDER, or the environment variable IRPAR_ANCHORS.

`ok`: at most what the better of XLA's two partitioners sends. Exit code 1 where a case of the groups that completion
decides is worse than that, or any case computes other numbers, or lies otherwise than its outputs must.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import irpar
from irpar.default_pipeline import DEFAULT_PIPELINE

DEFAULT_FOLDER = Path(__file__).parents[2] / "shared" / "anchors"
COMPLETION = (
    "mlp", "attn", "block", "gpt", "dense2d", "moe", "boundary", "train", "scale", "matmul_k", "partial", "reduce",
)  # fmt: skip
"""Groups whose cost completion decides; a case belongs to one by the beginning of its name."""
REDISTRIBUTION = "redistribution"
"""All other cases: what they send is decided where tensors change their sharding, or inside one operator."""
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        case: the contents of its file.
        sent: bytes that a device sends; None where irpar refused.
        collectives: how many.
        largest: the largest difference of the outputs; None where nothing was computed.
        fault: what is wrong: a refusal, other numbers, an output that lies otherwise; "" where nothing is.
        seconds: to load, annotate and partition.
    """

    case: dict[str, Any]
    sent: int | None
    collectives: int
    largest: float | None
    fault: str
    seconds: float

    @property
    def xla(self) -> float:
        """What the better of XLA's two partitioners sends."""
        sent = self.case["sent_bytes"]
        return min(value for value in (sent["xla_gspmd"], sent["xla_shardy"]) if value is not None)

    @property
    def is_ok(self) -> bool:
        """At most what XLA sends."""
        return self.sent is not None and self.sent <= self.xla


def group_of(name: str) -> str:
    """The group of a case."""
    return next((group for group in COMPLETION if name.startswith(group)), REDISTRIBUTION)


def measure(folder: Path, name: str, network: str, pipeline: str, is_run: bool) -> Result:
    """Partition a case, and compare its outputs with ONNX Runtime on the whole model."""
    case = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    start = time.perf_counter()
    try:
        partition = cut(folder, case, network, pipeline)
        seconds = time.perf_counter() - start
        largest, faults = None, misplaced(partition, case)
        if is_run and case["numerics"]:
            verified = partition.verify(inputs_of(case))
            largest = verified.largest
            if not verified.is_equal:
                faults.append("OTHER NUMBERS")
    except irpar.IrparError as error:
        return Result(case, None, 0, None, f"refused: {error.what}", time.perf_counter() - start)
    totals = partition.plan.totals
    return Result(case, totals["sent_bytes"], totals["collectives"], largest, "; ".join(faults), seconds)


def cut(folder: Path, case: dict[str, Any], network: str, pipeline: str) -> irpar.Partition:
    """The partition of a case, with its annotations and what its outputs must be."""
    module = irpar.load(folder / case["model"])
    for name, spec in {**case["annotations"], **case["required_outputs"]}.items():
        module.shard(name, spec)
    mesh = irpar.Mesh(dict(zip(case["mesh"]["axes"], case["mesh"]["sizes"], strict=True)))
    return irpar.partition(module, mesh, network=network, pipeline=pipeline)


def misplaced(partition: irpar.Partition, case: dict[str, Any]) -> list[str]:
    """The outputs that lie otherwise than they must."""
    found = {entry["name"]: entry["sharding"] for entry in partition.plan.outputs}
    wanted = case["required_outputs"]
    return [f"{name} lies as {found.get(name)}" for name, spec in wanted.items() if found.get(name) != spec]


def inputs_of(case: dict[str, Any]) -> dict[str, Any]:
    """The inputs, as the README of the cases says."""
    rng = np.random.default_rng(case["seed"])
    arrays = {}
    for name, spec in case["inputs"].items():
        shape = spec["shape"]
        if spec["kind"] == "normal":
            drawn = rng.standard_normal(shape) * spec["scale"]
        else:
            drawn = rng.integers(0, spec["hi"], shape)
        arrays[name] = np.asarray(drawn).astype(DTYPES[spec["dtype"]])
    return arrays


def print_group(group: str, results: Sequence[Result]) -> None:
    """One line for each case."""
    met = sum(result.is_ok for result in results)
    print(f"\n{group}: {met} of {len(results)} at or below XLA")
    print(f"  {'':30}{'irpar':>12}{'GSPMD':>12}{'Shardy':>12}{'DTensor':>12}{'best known':>12}{'launches':>10}{'s':>7}")
    for result in results:
        sent = result.case["sent_bytes"]
        columns = (result.sent, sent["xla_gspmd"], sent["xla_shardy"], sent["dtensor"], sent["best_known"])
        texts = "".join(f"{'-' if value is None else format(int(value), ','):>12}" for value in columns)
        verdict = "ok" if result.is_ok else "worse"
        beaten = "  below XLA" if result.is_ok and result.sent is not None and result.sent < result.xla else ""
        print(
            f"  {result.case['name']:30}{texts}{result.collectives:>10}{result.seconds:>7.2f}  {verdict}{beaten}"
            f"{'  ' + result.fault if result.fault else ''}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="GROUP|CASE", help="only these (default: all)")
    parser.add_argument("--anchors", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--network", default="bytes", help="what irpar minimises (default bytes)")
    parser.add_argument("--completion", default="", metavar="OPTIONS", help="of the pass complete-sharding")
    parser.add_argument("--no-run", action="store_true", help="compute nothing")
    options = parser.parse_args(arguments)
    given = options.anchors or (Path(os.environ["IRPAR_ANCHORS"]) if "IRPAR_ANCHORS" in os.environ else None)
    folder = (given or DEFAULT_FOLDER) / "cases"
    names = sorted(path.stem for path in folder.glob("*.json"))
    if not names:
        print(f"no cases in {folder}: give --anchors FOLDER", file=sys.stderr)
        return 0 if given is None else 2
    if options.wanted:
        names = [name for name in names if name in options.wanted or group_of(name) in options.wanted]
    pipeline = DEFAULT_PIPELINE.replace("complete-sharding", f"complete-sharding{{{options.completion}}}")
    groups: dict[str, list[Result]] = {}
    for name in names:
        result = measure(folder, name, options.network, pipeline, not options.no_run)
        groups.setdefault(group_of(name), []).append(result)
    for group in (*COMPLETION, REDISTRIBUTION):
        if group in groups:
            print_group(group, groups[group])
    return summary(groups)


def summary(groups: dict[str, list[Result]]) -> int:
    """Print what counts, and say the exit code."""
    decided = [result for group, results in groups.items() if group != REDISTRIBUTION for result in results]
    others = groups.get(REDISTRIBUTION, [])
    faults = [result.case["name"] for result in (*decided, *others) if result.fault]
    worse = [result.case["name"] for result in decided if not result.is_ok]
    left = [result.case["name"] for result in others if not result.is_ok]
    print(f"\ndecided by completion: {len(decided) - len(worse)} of {len(decided)} at or below the better XLA")
    print(f"  worse: {', '.join(worse) or 'none'}")
    print(f"decided by redistribution: {len(others) - len(left)} of {len(others)} at or below the better XLA")
    print(f"  worse: {', '.join(left) or 'none'}")
    print(f"refused, other numbers or other shardings: {', '.join(faults) or 'none'}")
    return 1 if worse or faults else 0


if __name__ == "__main__":
    sys.exit(main())
