"""Recompute: what irpar's schedules cost beside Chen's, Checkmate's and Moccasin's on the same training graphs.

    python benchmarks/recompute.py [--anchors FOLDER] [--seconds N] [--layers N ...]
    python benchmarks/recompute.py --only known saved --write   parts, into benchmarks/results/recompute.{json,md}
    python benchmarks/recompute.py --only layers --layers 20 --write    those of other layers stay as they are

The graphs (*.json) and the best costs that are known of them are not in the repository: --anchors, IRPAR_ANCHORS, or
../shared/anchors beside this project, in a folder recompute. Costs are those of all that runs, relative to no
recompute, at a budget relative to the peak of what is not held throughout. Where the best is proven, irpar may not cost
more; elsewhere half a percent more. Then saved bytes and recomputed FLOPs of one block beside PyTorch's min-cut
partitioner, whose points are optimal for these. Last gpts of more and more layers: 60 nodes in 5 s, 500 in 60 s, 96
layers in 60 s, within 3 % of what 12 layers cost a layer. The exit code is 1 where something is missed.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irpar.analysis.recompute import TrainingGraph, TrainingNode, read_graph, simulate, solve
from irpar.analysis.recompute.saved_sets import cheapest_set, on_demand
from irpar.analysis.recompute.solution import HEURISTICS, Heuristics

Row = dict[str, Any]
"""What is said of one case, in the order of the columns; `good`: whether nothing is missed."""

RESULTS = Path(__file__).parent / "results" / "recompute.json"
DEFAULT_FOLDER = Path(__file__).resolve().parents[2] / "shared" / "anchors"
SLACK = 0.005
"""By how much a cost that is not proven may be above the best that is known."""
ROUNDING = 0.00005
"""Of costs that are known to four digits."""
LAYERED = (2, 12, 20, 96)
"""Layers of the gpts."""
PER_LAYER = 0.03
"""By how much 96 layers may cost more a layer than 12."""


@dataclass(frozen=True)
class Known:
    """The best cost that is known.

    Attributes:
        graph: file.
        budget: relative to the peak without recompute.
        cost: relative to that without recompute.
        proven: whether nothing is cheaper, as far as the searcher's model goes.
        chen: cost and peak of Chen's segments; None where nobody said.
    """

    graph: str
    budget: float
    cost: float
    proven: bool = True
    chen: str = ""


KNOWN = (
    Known("linear16", 0.60, 1.2424),
    Known("linear16", 0.40, 1.3333),
    Known("linear16", 0.30, 1.6061),
    Known("vgg16", 0.95, 1.0000, chen="1.2215 @ 0.831"),
    # The least that any schedule holds is 0.8312, which was given as 0.83.
    Known("vgg16", 0.8312, 1.0019),
    Known("gpt2", 0.60, 1.0293, chen="1.3149 @ 0.471"),
    Known("gpt2", 0.50, 1.0850),
    Known("gpt2", 0.40, 1.1454),
    Known("gpt4", 0.50, 1.0500, proven=False, chen="1.2853 @ 0.384"),
    Known("gpt4", 0.40, 1.1038, proven=False),
    Known("gpt4", 0.30, 1.1629, proven=False),
)


def beside_known(folder: Path, seconds: float) -> Iterator[Row]:
    """What is found beside what is known."""
    for known in KNOWN:
        graph = read_graph(folder / f"{known.graph}.json")
        plain = simulate(graph, range(len(graph.nodes)))
        budget = graph.fixed_mem + int((plain.peak - graph.fixed_mem) * known.budget)
        heuristics = Heuristics(graph)
        alone = {name: _cost_text(heuristics, budget, name) for name in HEURISTICS}
        found = solve(graph, budget, seconds=seconds)
        cost = found.outcome.cost / plain.cost
        most = known.cost + ROUNDING if known.proven else known.cost * (1 + SLACK)
        yield {
            "graph": known.graph,
            "nodes": len(graph.nodes),
            "budget": f"{known.budget:.2f}",
            "Chen, as published": known.chen,
            "best known": f"{known.cost:.4f}{'*' if known.proven else ''}",
            **alone,
            "auto": f"{cost:.4f}{'*' if found.proven else ''}",
            "by": found.method,
            "seconds": f"{found.seconds:.1f}",
            "good": cost <= most,
        }


def _cost_text(heuristics: Heuristics, budget: int, name: str) -> str:
    """What one heuristic finds by itself; - where that does not fit."""
    outcomes = [simulate(heuristics.graph, schedule) for schedule in heuristics.schedules(name, budget)]
    least = min((each.cost for each in outcomes if each.peak <= budget), default=None)
    return "-" if least is None else f"{least / heuristics.graph.cost:.4f}"


# -- gpts of many layers -------------------------------------------------------------------------------------------

TOKENS, WIDTH, HEADS, LENGTH, VOCABULARY = 1024, 512, 8, 256, 5000
_ROW = 4 * TOKENS * WIDTH
_SCORES = 4 * TOKENS * HEADS * LENGTH
_PRODUCT = 2 * TOKENS * WIDTH * WIDTH
_ATTEND = 2 * TOKENS * LENGTH * WIDTH


class _Writer:
    """Writes nodes, each with the nodes that it reads; returns its number."""

    def __init__(self) -> None:
        self.nodes: list[TrainingNode] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, name: str, cost: int, mem: int, *reads: int, bwd: bool = False) -> int:
        self.nodes.append(TrainingNode(name, cost, mem, bwd))
        self.edges += [(read, len(self.nodes) - 1) for read in reads]
        return len(self.nodes) - 1


def gpt(layers: int) -> TrainingGraph:
    """A step of a gpt: 12 nodes forward and 14 backward a layer; FLOPs, and bytes of float32."""
    writer = _Writer()
    x = writer.add("emb", _ROW // 4, _ROW)
    tape = []
    for _ in range(layers):
        a = writer.add("ln1", 2 * _ROW, _ROW, x)
        qkv = writer.add("qkv", 3 * _PRODUCT, 3 * _ROW, a)
        scores = writer.add("scores", _ATTEND, _SCORES, qkv)
        softmax = writer.add("softmax", 5 * _SCORES // 4, _SCORES, scores)
        context = writer.add("ctx", _ATTEND, _ROW, qkv, softmax)
        y = writer.add("add1", _ROW // 4, _ROW, x, writer.add("proj", _PRODUCT, _ROW, context))
        b = writer.add("ln2", 2 * _ROW, _ROW, y)
        up = writer.add("fc1", 4 * _PRODUCT, 4 * _ROW, b)
        gelu = writer.add("gelu", 10 * _ROW, 4 * _ROW, up)
        tape.append((x, a, qkv, softmax, context, y, b, up, gelu))
        x = writer.add("add2", _ROW // 4, _ROW, y, writer.add("fc2", 4 * _PRODUCT, _ROW, gelu))
    last = writer.add("lnf", 2 * _ROW, _ROW, x)
    head = writer.add("head", 2 * TOKENS * WIDTH * VOCABULARY, 4 * TOKENS * VOCABULARY, last)
    writer.add("loss", 5 * TOKENS * VOCABULARY, 4, head)

    def back(name: str, cost: int, mem: int, *reads: int) -> int:
        return writer.add(name, cost, mem, *reads, bwd=True)

    d = back("dloss", 5 * TOKENS * VOCABULARY, 4 * TOKENS * VOCABULARY, head)
    d = back("dlnf", 2 * _ROW, _ROW, x, back("dhead", 4 * TOKENS * WIDTH * VOCABULARY, _ROW, last, d))
    for x, a, qkv, softmax, context, y, b, up, gelu in reversed(tape):
        e = back("dgelu", 10 * _ROW, 4 * _ROW, up, back("dfc2", 8 * _PRODUCT, 4 * _ROW, gelu, d))
        e = back("dln2", 2 * _ROW, _ROW, y, back("dfc1", 8 * _PRODUCT, _ROW, b, e))
        d = back("acc", _ROW // 4, _ROW, d, e)
        e = back("dproj", 2 * _PRODUCT, _ROW, context, d)
        dp = back("dP", _ATTEND, _SCORES, qkv, e)
        dv = back("dV", _ATTEND, _ROW, softmax, e)
        ds = back("dsoftmax", 5 * _SCORES // 4, _SCORES, softmax, dp)
        e = back("acc", 3 * _ROW // 4, 3 * _ROW, dv, back("dscores", 2 * _ATTEND, 3 * _ROW, qkv, ds))
        e = back("dln1", 2 * _ROW, _ROW, x, back("dqkv", 6 * _PRODUCT, _ROW, a, e))
        d = back("acc", _ROW // 4, _ROW, d, e)
    back("demb", _ROW // 4, 4, d)
    return TrainingGraph(tuple(writer.nodes), tuple(writer.edges), name=f"gpt-{layers}")


def layered(counts: list[int], seconds: float) -> Iterator[Row]:
    """What gpts of several depths cost at half their peak and below, and how long that takes."""
    a_layer = gpt(2).cost - gpt(1).cost
    shares: dict[tuple[int, float], float] = {}
    for layers in counts:
        graph = gpt(layers)
        for budget in (0.5, 0.4):
            peak = simulate(graph, range(len(graph.nodes))).peak
            found = solve(graph, int(peak * budget), seconds=seconds if len(graph.nodes) > 60 else min(seconds, 4))
            more = (found.outcome.cost - graph.cost) / layers / a_layer
            shares[layers, budget] = 1 + more
            limit = 5 if len(graph.nodes) <= 60 else 60
            above = 12 in counts and layers > 12 and 1 + more > (1 + PER_LAYER) * shares[12, budget]
            yield {
                "layers": layers,
                "nodes": len(graph.nodes),
                "budget": budget,
                "cost": f"{found.outcome.cost / graph.cost:.4f}",
                "more a layer, beside one layer's own": f"{more:.4f}",
                "by": found.method,
                "seconds": f"{found.seconds:.1f}",
                "good": found.seconds <= limit and not above,
            }


def with_other_layers(rows: list[Row], known: Iterable[Row]) -> list[Row]:
    """Rows, and those of earlier runs for gpts of other depths."""
    depths = {row["layers"] for row in rows}
    return sorted([*rows, *(row for row in known if row["layers"] not in depths)], key=lambda row: row["layers"])


# -- saved bytes of one block --------------------------------------------------------------------------------------

MIN_CUT = ((31.47, 0.0), (27.26, 0.0), (18.87, 0.268), (10.49, 2.147), (2.10, 4.295), (0.0, 4.832))
"""MB that PyTorch's min-cut partitioner saves of a block beside its input, and GFLOP that are recomputed for that."""
_STATISTICS = 8 * TOKENS
"""Bytes of the mean and the deviation of each row."""


def block() -> TrainingGraph:
    """One block of the gpt, with q, k and v apart; only products cost something, as PyTorch counts."""
    writer = _Writer()
    x = writer.add("x", 0, 0)
    a = writer.add("ln1", 0, _ROW, x)
    moments = [writer.add("ln1 statistics", 0, _STATISTICS, x)]
    q, k, v = (writer.add(name, _PRODUCT, _ROW, a) for name in "qkv")
    softmax = writer.add("softmax", 0, _SCORES, writer.add("scores", _ATTEND, _SCORES, q, k))
    context = writer.add("ctx", _ATTEND, _ROW, softmax, v)
    y = writer.add("add1", 0, _ROW, x, writer.add("proj", _PRODUCT, _ROW, context))
    b = writer.add("ln2", 0, _ROW, y)
    moments.append(writer.add("ln2 statistics", 0, _STATISTICS, y))
    up = writer.add("fc1", 4 * _PRODUCT, 4 * _ROW, b)
    gelu = writer.add("gelu", 0, 4 * _ROW, up)
    read = (a, *moments, q, k, v, softmax, context, y, b, up, gelu)
    writer.add("add2", 0, 0, y, writer.add("fc2", 4 * _PRODUCT, _ROW, gelu))
    writer.add("backward", 0, 0, *read, bwd=True)
    return TrainingGraph(tuple(writer.nodes), tuple(writer.edges), name="block")


def saved_bytes() -> Iterator[Row]:
    """What is recomputed at the saved bytes of PyTorch's points."""
    graph = block()
    for megabytes, gigaflops in MIN_CUT:
        # The points are rounded to 0.01 MB.
        saved = cheapest_set(graph, round(megabytes * 1e6 + 5e3))
        assert saved is not None
        again = simulate(graph, on_demand(graph, saved)).cost - graph.cost
        held = sum(graph.nodes[place].mem for place in saved)
        yield {
            "saved MB, PyTorch": f"{megabytes:.2f}",
            "recomputed GFLOP, PyTorch": f"{gigaflops:.3f}",
            "saved MB": f"{held / 1e6:.2f}",
            "recomputed GFLOP": f"{again / 1e9:.3f}",
            "good": again <= gigaflops * 1e9 + 5e5,
        }


# -- tables --------------------------------------------------------------------------------------------------------

TITLES = {
    "known": "Cost of all that runs at a budget, beside the best that is known; `*` proven, - does not fit",
    "saved": "Saved bytes and recomputed FLOPs of one block, beside PyTorch's min-cut partitioner",
    "layers": "Gpts of more and more layers at a share of their peak",
}


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """A table, line by line."""
    for number, row in enumerate(rows):
        told = {name: value for name, value in row.items() if name != "good"}
        if not number:
            yield f"| {' | '.join(told)} | |"
            yield f"|{'---|' * (len(told) + 1)}"
        yield f"| {' | '.join(map(str, told.values()))} | {'' if row['good'] else 'MISSED'} |"


def report(found: dict[str, Any]) -> str:
    """The results in words."""
    tables = [
        f"{TITLES[part]} ({found['on'][part]}):\n\n" + "\n".join(lines(found[part])) for part in TITLES if part in found
    ]
    begin = "# Recompute\n\nWritten by `python benchmarks/recompute.py --write`."
    return "\n\n".join([begin, *tables]) + "\n"


def main() -> int:
    """Run all, or some parts; 1 where something is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--anchors", type=Path, help="folder of anchors")
    parser.add_argument("--seconds", type=float, default=20, help="of search for one answer")
    parser.add_argument("--layers", type=int, nargs="*", default=list(LAYERED), help="of the gpts")
    parser.add_argument("--only", nargs="*", choices=list(TITLES), default=list(TITLES), help="these parts")
    parser.add_argument("--write", action="store_true", help="write the results beside this script")
    options = parser.parse_args()
    folder = (options.anchors or Path(os.environ.get("IRPAR_ANCHORS", DEFAULT_FOLDER))) / "recompute"
    parts = {
        "known": lambda: beside_known(folder, options.seconds),
        "saved": saved_bytes,
        "layers": lambda: layered(options.layers, options.seconds),
    }
    if "known" in options.only and not folder.is_dir():
        print(f"no anchors at {folder}\n")
        del parts["known"]
    found: dict[str, Any] = {}
    for name in (name for name in parts if name in options.only):
        found[name] = list[Row]()
        print(f"{TITLES[name]}:\n")
        for line in lines(_noted(parts[name](), found[name])):
            print(line, flush=True)
        print()
    if options.write:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        on = f"on {os.cpu_count()} cores that others shared, Python {platform.python_version()}"
        if "layers" in found:
            found["layers"] = with_other_layers(found["layers"], known.get("layers", []))
        known |= found | {"on": known.get("on", {}) | dict.fromkeys(found, on)}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(report(known))
    return 0 if all(row["good"] for rows in found.values() for row in rows) else 1


def _noted(rows: Iterable[Row], notes: list[Row]) -> Iterator[Row]:
    for row in rows:
        notes.append(row)
        yield row


if __name__ == "__main__":
    sys.exit(main())
