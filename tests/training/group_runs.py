"""Runs of the command line in each way that ranks can be joined."""

from typing import Any

import pytest

from tests.command_line import Capture, call
from tests.runtime.groups.mpi_libraries import find


def run_in_group(capfd: Capture, group: str, *words: Any, ranks: int = 4) -> None:
    """Run `irpar run` with some words in a group, and hold that it ends well; skipped where there is no MPI for it."""
    said = ["run", *map(str, words), "--engine", "numpy", "--group", group]
    if group == "mpi":
        library = find("MPICH")
        if isinstance(library, str):
            pytest.skip(library)
        ended = library.run(ranks, "irpar", *said)
        assert ended.code == 0, ended.err
    else:
        code, _, err = call(capfd, *said)
        assert code == 0, err
