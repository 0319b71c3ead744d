"""irpar warm: what a partition needs on this machine's GPU, compiled ahead."""

import os
import time
from dataclasses import asdict
from pathlib import Path

from irpar.tables.display import output, print_json
from irpar.units import count_text

from .options import Json, Out, Tf32
from .progress_report import ProgressReport


def warm_command(out: Out, tf32: Tf32 = False, as_json: Json = False) -> None:
    """Compile ahead the kernels that a partition needs on this machine's GPU, so that no run waits for them.

    Each segment of each part runs once on zeros, one part after the other, on one GPU that holds one rank. What is
    compiled lies in CuPy's cache, where all later processes of this user on GPUs of this kind find it.
    """
    from irpar.runtime.warm import warm

    start = time.perf_counter()
    with ProgressReport(not as_json) as report:
        warmed = warm(out, tf32=tf32, progress=report.segments)
    seconds, cache = time.perf_counter() - start, kernel_cache()
    if as_json:
        print_json({**asdict(warmed), "seconds": seconds, "cache": str(cache)})
        return
    console = output()
    ran, parts = count_text(warmed.segments, "segment"), count_text(warmed.parts, "part")
    console.print(f"{ran} of {parts} ran in {seconds:.1f} s; their kernels lie in {cache}", soft_wrap=True)
    for line in warmed.left:
        console.print(f"not run: {line}", soft_wrap=True)
    for note in warmed.notes:
        console.print(note, soft_wrap=True)


def kernel_cache() -> Path:
    """The folder in which CuPy keeps what it compiles."""
    given = os.environ.get("CUPY_CACHE_DIR")
    return Path(given) if given else Path.home() / ".cupy" / "kernel_cache"
