"""Partitions that are run in every group, and results that are equal to the last bit."""

from pathlib import Path

import numpy as np

from irpar.cli import main

from .random_graphs import Array
from .random_programs import Program
from .runtime.groups.mpi_libraries import find

GROUPS = ("threads", "processes", "mpi")


def same(got: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        if array.dtype == object:  # strings: their bytes are addresses
            assert np.array_equal(got[name], array), name
        else:
            assert got[name].tobytes() == array.tobytes(), name


def may_run_out(program: Program) -> bool:
    """Whether a drawn program can be run so: a file of arrays has no texts, and ranks are processes."""
    has_texts = any(array.dtype == object for array in program.inputs.values())
    return "ort" in program.engines and program.mesh.size <= 4 and not has_texts


def run_out(folder: Path, inputs: dict[str, Array], group: str, ranks: int) -> dict[str, Array]:
    """What `irpar run` gives in a group."""
    np.savez(folder / "in.npz", **inputs)
    words = ["run", str(folder / "out"), "--inputs", str(folder / "in.npz"), "--outputs", str(folder / f"{group}.npz")]
    words += ["--group", group]
    if group == "mpi":
        library = find("MPICH")
        assert not isinstance(library, str)
        ended = library.run(ranks, "irpar", *words)
        assert ended.code == 0, ended.err
    else:
        assert main(words) == 0
    with np.load(folder / f"{group}.npz") as found:
        return {name: found[name] for name in found.files}
