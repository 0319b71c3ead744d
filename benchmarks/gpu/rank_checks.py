"""Ranks that are processes on one GPU, joined by NCCL: collectives, families over tp=2, and the tests of faults."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from .family_checks import MESHES as FAMILY_MESHES
from .family_checks import families
from .findings import Context, Findings, markdown_table, problem_text
from .marked_tests import FAULTS, run_pytest
from .marked_tests import lines as test_lines

CHECK = Path(__file__).with_name("check.py")
MESHES = ("x=2", "a=2,b=2")
"""Whose collectives are tried: of two ranks, and of sub-groups of four."""
AT_ONCE = 3
"""How many runs of ranks go on at once."""
_END_SECONDS = 120.0


def run(context: Context) -> Findings:
    """Collectives, families, one verification by the command line, then the tests of faults."""
    from irpar.runtime.groups import GROUPS

    found = Findings(figures={"group": context.group, "collectives": {}, "families": {}})
    if context.group not in GROUPS:
        found.check(f'this irpar has no group "{context.group}"')
        return found
    for mesh in MESHES:
        found.check(_try_collectives(mesh, context, found))
    _verify_families(context, found)
    found.check(_by_command_line(context))
    if context.group == "nccl":
        run_pytest(context, found, [FAULTS])
    return found


def lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures for the report."""
    rows = [
        (f"collectives over {mesh}", ", ".join(f"{count} {kind}" for kind, count in sorted(row["kinds"].items())))
        for mesh, row in figures.get("collectives", {}).items()
    ]
    models = figures.get("families", {})
    verified = [(name, row["relative"], row["collectives"]) for name, row in sorted(models.items())]
    return [
        f"Each rank is a process, joined by the group {figures.get('group')}. Those of nccl share one GPU and talk "
        "over loopback sockets: right or wrong, never a speed.",
        "",
        *markdown_table(("run", "equal to numpy"), rows),
        "",
        *markdown_table(("model", "difference", "collectives executed"), verified),
        "",
        *test_lines(figures),
    ]


def _try_collectives(mesh: str, context: Context, found: Findings) -> str | None:
    folder = context.scratch / mesh
    folder.mkdir()
    size = math.prod(int(axis.partition("=")[2]) for axis in mesh.split(","))
    problem = start_ranks(size, mesh, folder, context)
    results = [_result(folder, rank) for rank in range(size)]
    problems = [f"rank {rank}: {line}" for rank, made in enumerate(results) for line in made.get("problems", ())]
    problems += [f"rank {rank}: {made['error']}" for rank, made in enumerate(results) if "error" in made]
    if all("done" in made for made in results):
        row = {"done": min(made["done"] for made in results), "kinds": results[0]["kinds"]}
        found.figures["collectives"][mesh] = row
    if problem or problems:
        return f"collectives over {mesh}: {'; '.join([*problems[:10], *([problem] if problem else [])])}"
    return None


def _verify_families(context: Context, found: Findings) -> None:
    """Every builder over both meshes, a few at once."""
    from tests.test_families import PLANNED

    names = {str(case) for case in PLANNED}

    def verify(name: str, mesh: dict[str, int], partition: Any, tolerance: float) -> str | None:
        label = f"{name} over {','.join(f'{axis}={size}' for axis, size in mesh.items())}"
        if context.is_late:
            return f"{label}: out of time"
        folder = context.scratch / label.replace(" ", "-")
        folder.mkdir()
        try:
            partition(mesh, folder).save(folder / "out")
            (folder / "tolerance.json").write_text(json.dumps(tolerance))
            problem = start_ranks(math.prod(mesh.values()), "verify", folder, context)
        except Exception as error:
            return f"{label}: {problem_text(error)}"
        made = _result(folder, 0)
        if "relative" not in made:
            return f"{label}: {made.get('error', 'rank 0 wrote no result')}; {problem or ''}"
        found.figures["families"][label] = {key: made[key] for key in ("relative", "collectives")}
        wrong = [made["problem"]] if made["problem"] else []
        wrong += [f"the log is not the plan: {line}" for line in made["log"][:3]]
        wrong += [problem] if problem else []
        return f"{label}: {'; '.join(wrong)}" if wrong else None

    chosen = [
        (name, mesh, partition, tolerance)
        for mesh in FAMILY_MESHES
        for name, partition, tolerance in families()
        if name in names
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for problem in pool.map(lambda entry: verify(*entry), chosen):
            found.check(problem)


def _by_command_line(context: Context) -> str | None:
    """`irpar launch -n 2 ... irpar verify`, as a user would start it."""
    out = context.scratch / "mlp-over-tp=2" / "out"
    verify = [sys.executable, "-P", "-m", "irpar.cli", "verify", str(out), "--engine", context.engine]
    rank = [sys.executable, str(CHECK), "--as-rank", *verify, "--group", context.group]
    code, text = _run(
        [sys.executable, "-P", "-m", "irpar.cli", "launch", "-n", "2", *rank], os.environ, context.seconds_left
    )
    return f"irpar launch -n 2 ... irpar verify: ended with {code}: {text[-800:]}" if code else None


def start_ranks(size: int, work: str, folder: Path, context: Context) -> str | None:
    """Run `rank_worker.main` in `size` processes, with torchrun's environment; says what went wrong."""
    words = [sys.executable, str(CHECK), "--rank-work", work, "--scratch", str(folder)]
    words += ["--engine", context.engine, "--group", context.group]
    environ = os.environ | {
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if context.group == "nccl":
        # All on the first device that this process sees.
        environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    bound = min(_END_SECONDS, context.seconds_left)
    with ThreadPoolExecutor(size) as pool:
        ended = list(
            pool.map(
                lambda rank: _run(words, environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, bound), range(size)
            )
        )
    wrong = [f"rank {rank} ended with {code}: {text[-500:]}" for rank, (code, text) in enumerate(ended) if code]
    return "; ".join(wrong) or None


def _run(words: Sequence[str], environ: Mapping[str, str], seconds: float) -> tuple[int, str]:
    """Run a command and all that it starts, for a limited time; its exit code and what it printed."""
    process = subprocess.Popen(
        words,
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        text, _ = process.communicate()
        return -1, f"did not end in {seconds:.0f} s: {text}"


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _result(folder: Path, rank: int) -> dict[str, Any]:
    try:
        made: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    except (OSError, ValueError) as error:
        return {"error": f"no result: {error}"}
    return made
