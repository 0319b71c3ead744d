"""The report: gpu_speed.json, where results gather, and gpu_speed.md for people."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.findings import markdown_table

from .cases import CASES, SHORT
from .rates import COPY, best
from .stopwatch import IN_A_ROW, RUNS
from .work import LeastWork

NAME = "gpu_speed"
FORMAT = "irpar-gpu-speed/1"
SIDES = {"irpar": "irpar", "eager": "eager", "compile": "compile", "autotune": "max-autotune"}
PLAIN_SIDES = tuple(side for side in SIDES if side != "autotune")
Made = dict[str, Any]


def read(folder: Path) -> Made:
    """What has been measured; nothing where there is no report."""
    path = folder / f"{NAME}.json"
    if not path.is_file():
        return {"format": FORMAT, "entries": {}}
    made: Made = json.loads(path.read_text())
    return made


def merge(folder: Path, entry: Mapping[str, Any]) -> None:
    """Put what was measured of one name into both files, in the place of what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    made = read(folder)
    made["entries"][entry["name"]] = dict(entry)
    _replace(folder / f"{NAME}.json", json.dumps(made, indent=1) + "\n")
    _replace(folder / f"{NAME}.md", "\n".join(markdown(made["entries"])) + "\n")


def _replace(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    os.replace(fresh, path)


def markdown(entries: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lines of the readable report."""
    rates = entries.get("rates", {})
    order = {name: place for place, name in enumerate(CASES)}
    cases = sorted(
        (one for one in entries.values() if "times" in one), key=lambda one: order.get(one["name"], len(order))
    )
    made = [
        "# The speed of irpar on a GPU",
        "",
        "Written by `python benchmarks/gpu/speed.py`; benchmarks/gpu/README.md explains it.",
        "",
        *_machines(entries.values()),
        *_rates(rates),
    ]
    if cases:
        made += ["", "## Models", "", *_explained(), "", *_cases(cases, rates), "", *_details(cases)]
    if "rows" in entries.get("kernels", {}):
        made += ["", "## Operators alone", "", *_kernels(entries["kernels"], rates)]
    return [*made, *_problems(entries.values())]


def _explained() -> list[str]:
    return [
        f"Milliseconds, medians of {RUNS} runs in turn in one process, inputs and results on the device: waited for "
        f"one by one; in brackets each of {IN_A_ROW} in a row. compile: torch.compile, mode reduce-overhead. Roofline: "
        "the longer of the FLOPs of products (without what is masked) at the highest rate measured, and of the bytes "
        "of weights, inputs and results, each once, at that of copies; its share is that of irpar in a row. Host: "
        "until a call in a row comes back."
    ]


def _machines(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What each run was made on; runs on the same are one row."""
    names: dict[tuple[str, ...], list[str]] = {}
    for entry in entries:
        machine = entry.get("machine", {})
        facts = tuple(
            str(machine.get(name) or "")
            for name in ("device", "driver", "cuda_driver", "cupy", "cublas", "torch", "commit", "sources")
        )
        names.setdefault((str(entry.get("date", ""))[:10], *facts), []).append(entry["name"])
    header = ("date", "device", "driver", "CUDA", "CuPy", "cuBLAS", "PyTorch", "commit", "sources", "measured")
    rows = [(*facts, f"{len(listed)}: {', '.join(listed)}") for facts, listed in names.items()]
    return markdown_table(header, rows)


def _rates(rates: Mapping[str, Any]) -> list[str]:
    if "products" not in rates:
        return []
    rows = [
        (f"product {SHORT.get(dtype, dtype)}, TFLOP/s", *(_tera(table.get(who)) for who in ("PyTorch", "irpar")))
        for dtype, table in rates.get("products", {}).items()
    ]
    rows.append(("copy, read and written, GB/s", *(_giga(rates[COPY].get(who)) for who in ("PyTorch", "CuPy"))))
    return ["", "## The device's rates", "", *markdown_table(("", "PyTorch", "irpar, CuPy"), rows)]


def _cases(cases: Iterable[Mapping[str, Any]], rates: Mapping[str, Any]) -> list[str]:
    sides = [side for side in SIDES if side != "autotune" or any("autotune" in one["times"] for one in cases)]
    header = ("case", *(f"{SIDES[side]} ms" for side in sides), "irpar / compile", "roofline ms", "share", "host us")
    return markdown_table((*header, "nodes", "graphs, nodes in them"), [_case(one, sides, rates) for one in cases])


def _case(one: Mapping[str, Any], sides: list[str], rates: Mapping[str, Any]) -> tuple[object, ...]:
    times, irpar, compiled = one["times"], one["times"].get("irpar"), one["times"].get("compile")
    roof = roofline(one, rates)
    return (
        one["name"],
        *(_both(times.get(side)) for side in sides),
        f"{irpar['waited'] / compiled['waited']:.2f}" if irpar and compiled else "",
        _milli(roof),
        f"{roof / irpar['in_a_row']:.0%}" if irpar and roof else "",
        f"{irpar['host'] * 1e6:.0f}" if irpar else "",
        one.get("nodes", ""),
        "; ".join(_captured(facts) for facts in one.get("segments", ())),
    )


def roofline(one: Mapping[str, Any], rates: Mapping[str, Any]) -> float | None:
    """Seconds that a case takes at least; None where that is not known, or the rates are of another device."""
    devices = {entry.get("machine", {}).get("device") for entry in (one, rates)}
    if "work" not in one or "products" not in rates or len(devices) > 1:
        return None
    flop_rate, byte_rate = best(rates["products"].get(one["rate"], {})), best(rates[COPY])
    return LeastWork(**one["work"]).seconds(flop_rate, byte_rate) if flop_rate and byte_rate else None


def _captured(facts: Mapping[str, int]) -> str:
    """Of a segment: graphs, and nodes in them of all."""
    return f"{facts['pieces']}, {facts['captured']}/{facts['captured'] + facts['eager']}" if facts else "not captured"


def _details(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    rows = [
        (
            one["name"],
            *(
                f"{one['whole'][side] * 1e3:.1f}" if side in one["whole"] else ""
                for side in SIDES
                if side != "autotune"
            ),
            ", ".join(f"{side} {error:.1e}" for side, error in one.get("errors", {}).items()),
            f"{one['allowed']:g}" if "allowed" in one else "",
            _clocks(one.get("clocks", {})),
            ", ".join(f"{name} {seconds:.0f} s" for name, seconds in one["prepared_in"].items() if seconds >= 0.5),
        )
        for one in cases
    ]
    header = ("case", "irpar ms", "eager ms", "compile ms", "apart from eager", "allowed", "clocks", "made ready in")
    return ["From and to arrays of the host; and what else there is to know:", "", *markdown_table(header, rows)]


def _clocks(told: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in told.items())


def _kernels(kernels: Mapping[str, Any], rates: Mapping[str, Any]) -> list[str]:
    rows = []
    for row in kernels["rows"]:
        flop_rate = best(rates.get("products", {}).get(row["dtype"], {}))
        byte_rate = best(rates.get(COPY, {}))
        made, moved = row["flops"] / row["seconds"], row["nbytes"] / row["seconds"]
        of_limit = max(made / flop_rate if flop_rate else 0, moved / byte_rate if byte_rate else 0)
        rows.append(
            (
                row["label"],
                f"{row['seconds'] * 1e6:.1f}",
                _tera(made) if row["flops"] else "",
                _giga(moved),
                f"{of_limit:.0%}" if of_limit else "",
                "; ".join(row["notes"]),
            )
        )
    told = (
        "The device's time by events, behind a kernel that spins until all runs are asked for. Share: of the rate of "
        "products or of copies, whichever is nearer. What fits the cache (tens of MB) may pass the rate of copies."
    )
    return [told, "", *markdown_table(("operator", "us", "TFLOP/s", "GB/s", "share", "notes"), rows)]


def _problems(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    told = [
        f"- {entry['name']}: {' '.join(str(text).split())}"
        for entry in entries
        for text in (*entry.get("problems", ()), *entry.get("notes", ()))
    ]
    return ["", "## Problems and notes", "", *told] if told else []


def _both(times: Mapping[str, float] | None) -> str:
    return "" if times is None else f"{times['waited'] * 1e3:.3f} ({times['in_a_row'] * 1e3:.3f})"


def _milli(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _tera(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e12:.1f}"


def _giga(rate: float | None) -> str:
    return "" if rate is None else f"{rate / 1e9:.0f}"
