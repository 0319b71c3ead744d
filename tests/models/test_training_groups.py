"""Training steps of every family in every group that runs here: the state after some steps is the same, bit for bit."""

import json
from pathlib import Path

import numpy as np
import pytest

import irpar
from irpar.cli import main
from irpar.models import FAMILIES, build
from irpar.output.checkpoint import Checkpoint
from tests.models.test_partitioned_gradients import annotated
from tests.models.test_training import CLASSES, batches
from tests.runtime.groups.mpi_libraries import find

MESH = {"dp": 2, "tp": 2}
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_groups_agree(family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loss = "cross_entropy" if family in CLASSES else "mse"
    step = irpar.train_step(build(family, preset="tiny"), loss=loss, optimizer="adamw", learning_rate=1e-3)
    data = batches(step, STEPS)
    names = [name for name in data[0] if name != "learning_rate"]
    np.savez(tmp_path / "data.npz", **{name: np.concatenate([batch[name] for batch in data]) for name in names})
    irpar.partition(annotated(step, family, MESH), MESH).save(tmp_path / "out")

    def words(group: str) -> list[str]:
        run = ["run", str(tmp_path / "out"), "--data", str(tmp_path / "data.npz"), "--steps", str(STEPS)]
        return [*run, "--checkpoint", str(tmp_path / group), "--group", group, "--json"]

    for group in ("threads", "processes"):
        assert main(words(group)) == 0, capfd.readouterr().err
        assert json.loads(capfd.readouterr().out)["steps"] == STEPS
    groups = ["threads", "processes"]
    library = find("MPICH")
    if not isinstance(library, str):
        ended = library.run(4, "irpar", *words("mpi"))
        assert ended.code == 0, ended.err
        groups.append("mpi")
    first, *others = (Checkpoint.open(tmp_path / group) for group in groups)
    state = first.read(list(first.tensors), {})
    for other in others:
        for name, array in other.read(list(other.tensors), {}).items():
            np.testing.assert_array_equal(array, state[name], err_msg=name)
