"""What irpar sends for the same work as XLA's two partitioners (GSPMD, Shardy) and PyTorch's DTensor.

    python benchmarks/anchors.py                       all cases, by the network that counts bytes
    python benchmarks/anchors.py mlp attn              some groups, or cases by name
    python benchmarks/anchors.py --no-run              plans only: nothing is computed and compared
    python benchmarks/anchors.py --completion strategy=propagate    with other options of complete-sharding
    python benchmarks/anchors.py --latency a100-pcie   launches counted under another network that knows latencies

The cases are a folder of ONNX models with annotations beside the bytes that the others send: ../shared/anchors beside
the repository, or --anchors FOLDER, or the environment variable IRPAR_ANCHORS.

`best known` is the least that anybody has found, by hand or by a tool. `launches` are the collectives that irpar makes
where launches cost time (`--latency`), beside those of XLA once its combiners have merged what can be sent together.

`ok`: at most what the better of XLA's two partitioners sends. Exit code 1 where a case is worse than that, where fewer
than nine of ten are at the best known, where irpar does not send less than XLA in a case that XLA is known to waste
bytes in, where it launches more, or where a case computes other numbers, or is sharded otherwise than its outputs must.
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
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE

DEFAULT_FOLDER = Path(__file__).parents[2] / "shared" / "anchors"
COMPLETION = (
    "mlp", "attn", "block", "gpt", "dense2d", "moe", "boundary", "train", "scale", "matmul_k", "partial", "reduce",
)  # fmt: skip
"""Groups whose cost completion decides; a case belongs to one by the beginning of its name."""
REDISTRIBUTION = "redistribution"
"""All other cases: what they send is decided where tensors change their sharding, or inside one operator."""
WASTEFUL = {
    "attn_fusedqkv": "a Split that is not aligned with the blocks: 7 permutes",
    "block_dp2tp4_sp": "the same activation is gathered again and again",
    "boundary_dp_mp": "from data-parallel to model-parallel: decided by propagation, not by cost",
    "mlp_tp4_free": "a free output: all-reduce where reduce-scatter is enough",
    "reshard_m24_x_n__n_y": "gathered, then cut",
    "reshard_m222_xyz_n_n__x_y_z": "gathered, then cut",
    "reshard_m24_xy_n__n_yx": "a permute behind the all-to-all",
    "concat": "Concat along a dim that is sharded",
    "slice": "Slice along a dim that is sharded",
    "reduce_sum_2axes": "a sum over two axes in two all-reduces",
}
"""In what XLA wastes bytes, as the README of the cases notes; by the beginnings of their names."""
LEAST_AT_BEST = 0.9
DTYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32, "i64": np.int64}


@dataclass(frozen=True)
class Result:
    """One case.

    Attributes:
        case: the contents of its file.
        sent: bytes that a device sends; None where irpar refused.
        launches: collectives where launches cost time.
        sent_then: bytes that a device sends there.
        largest: the largest difference of the outputs; None where nothing was computed.
        fault: what is wrong: a refusal, other numbers, an output that is sharded otherwise; "" where nothing is.
        seconds: to load, annotate and partition.
    """

    case: dict[str, Any]
    sent: int | None
    launches: int
    sent_then: int
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

    @property
    def is_best(self) -> bool:
        """At most the best known."""
        return self.sent is not None and self.sent <= self.case["sent_bytes"]["best_known"]

    @property
    def is_below(self) -> bool:
        """Less than XLA sends."""
        return self.sent is not None and self.sent < self.xla

    @property
    def has_more_launches(self) -> bool:
        """More launches than XLA has, where that is known."""
        return self.launches > self.case.get("xla_launches_if_combined", self.launches)


def group_of(name: str) -> str:
    """The group of a case."""
    return next((group for group in COMPLETION if name.startswith(group)), REDISTRIBUTION)


def measure(folder: Path, name: str, options: argparse.Namespace) -> Result:
    """Partition a case, and compare its outputs with ONNX Runtime on the whole model."""
    pipeline = DEFAULT_PIPELINE.replace("complete-sharding", f"complete-sharding{{{options.completion}}}")
    case = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    start = time.perf_counter()
    try:
        partition = cut(folder, case, options.network, pipeline)
        seconds = time.perf_counter() - start
        largest, faults = None, misplaced(partition, case)
        by_latency = cut(folder, case, options.latency, pipeline)
        faults += misplaced(by_latency, case)
        if not options.no_run and case["numerics"]:
            found = [each.verify(inputs_of(case)) for each in (partition, by_latency)]
            largest = max(verified.largest for verified in found)
            if not all(verified.is_equal for verified in found):
                faults.append("OTHER NUMBERS")
    except irpar.IrparError as error:
        return Result(case, None, 0, 0, None, f"refused: {error.what}", time.perf_counter() - start)
    sent, then = partition.plan.totals["sent_bytes"], by_latency.plan.totals
    return Result(case, sent, then["collectives"], then["sent_bytes"], largest, "; ".join(faults), seconds)


def cut(folder: Path, case: dict[str, Any], network: str, pipeline: str) -> irpar.Partition:
    """The partition of a case, with its annotations and what its outputs must be."""
    module = irpar.load(folder / case["model"])
    for name, spec in {**case["annotations"], **case["required_outputs"]}.items():
        module.shard(name, spec)
    mesh = irpar.Mesh(dict(zip(case["mesh"]["axes"], case["mesh"]["sizes"], strict=True)))
    return irpar.partition(module, mesh, network=network, pipeline=pipeline)


def misplaced(partition: irpar.Partition, case: dict[str, Any]) -> list[str]:
    """The outputs that are sharded otherwise than they must."""
    found = {entry["name"]: entry["sharding"] for entry in partition.plan.outputs}
    wanted = case["required_outputs"]
    return [f"{name} is sharded as {found.get(name)}" for name, spec in wanted.items() if found.get(name) != spec]


def inputs_of(case: dict[str, Any], lead: Sequence[int] = ()) -> dict[str, Any]:
    """The inputs, as the README of the cases says; `lead` are sizes of dims that each has before its own."""
    rng = np.random.default_rng(case["seed"])
    arrays = {}
    for name, spec in case["inputs"].items():
        shape = [*lead, *spec["shape"]]
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
    names = "".join(f"{name:>12}" for name in ("irpar", "GSPMD", "Shardy", "DTensor", "best known"))
    print(f"  {'':30}{names}{'launches':>10}{'XLA':>5}{'bytes then':>13}{'s':>7}")
    for result in results:
        sent = result.case["sent_bytes"]
        columns = (result.sent, sent["xla_gspmd"], sent["xla_shardy"], sent["dtensor"], sent["best_known"])
        texts = "".join(f"{'-' if value is None else format(int(value), ','):>12}" for value in columns)
        launches = f"{result.launches:>10}{result.case.get('xla_launches_if_combined', '-'):>5}"
        words = ["ok" if result.is_ok else "worse"]
        words += ["below XLA"] * result.is_below + ["more launches"] * result.has_more_launches + [result.fault]
        launches += f"{result.sent_then:>13,}"
        print(f"  {result.case['name']:30}{texts}{launches}{result.seconds:>7.2f}  {'  '.join(words).rstrip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; see the module for the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wanted", nargs="*", metavar="GROUP|CASE", help="only these (default: all)")
    parser.add_argument("--anchors", type=Path, default=None, metavar="FOLDER")
    parser.add_argument("--network", default="bytes", help="what irpar minimises (default bytes)")
    parser.add_argument(
        "--latency", default="h100-nvlink-ib", help="where launches are counted (default h100-nvlink-ib)"
    )
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
    groups: dict[str, list[Result]] = {}
    for name in names:
        result = measure(folder, name, options)
        groups.setdefault(group_of(name), []).append(result)
    for group in (*COMPLETION, REDISTRIBUTION):
        if group in groups:
            print_group(group, groups[group])
    return summary(groups)


def summary(groups: dict[str, list[Result]]) -> int:
    """Print what counts, and say the exit code."""
    results = [result for found in groups.values() for result in found]
    others = groups.get(REDISTRIBUTION, [])
    decided = [result for result in results if result not in others]
    print()
    worse = 0
    for title, some in (("decided by completion", decided), ("decided by redistribution", others)):
        worse += told(f"{title}: at or below the better XLA", some, [each for each in some if not each.is_ok])
    above = told("at the best known", results, [each for each in results if not each.is_best])
    wasteful = [each for each in results if each.case["name"].startswith(tuple(WASTEFUL))]
    equal = told("below XLA where it is known to waste", wasteful, [each for each in wasteful if not each.is_below])
    counted = [each for each in results if "xla_launches_if_combined" in each.case]
    more = told("launches at or below XLA's", counted, [each for each in counted if each.has_more_launches])
    faults = [each.case["name"] for each in results if each.fault]
    print(f"refused, other numbers or other shardings: {', '.join(faults) or 'none'}")
    return 1 if worse or equal or more or faults or above > (1 - LEAST_AT_BEST) * len(results) else 0


def told(title: str, results: Sequence[Result], others: Sequence[Result]) -> int:
    """Print of how many cases something is true, and those of which it is not; returns how many these are."""
    print(f"{title}: {len(results) - len(others)} of {len(results)}")
    if others:
        print(f"  not: {', '.join(result.case['name'] for result in others)}")
    return len(others)


if __name__ == "__main__":
    sys.exit(main())
