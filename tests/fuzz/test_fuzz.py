"""A bounded run of every target: random changes drawn by hypothesis, which makes what it finds small."""

import contextlib
import io
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .__main__ import main
from .execution import execute
from .targets import TARGETS, prepare_folder

EXAMPLES = 300
SECONDS = 10


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with what damaged files stand beside."""
    folder = tmp_path_factory.mktemp("fuzz")
    with contextlib.redirect_stdout(io.StringIO()):
        prepare_folder(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_input_gives_a_result_or_one_clear_error(target, here, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(here))
    executions: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.randoms(use_true_random=False))
    def run(random):
        executions[target.name] += 1
        fault = execute(target, random, here)
        assert fault is None, f"{fault.what}\n{fault.text}"

    run()
    with capsys.disabled():
        print(f"\n{target.name}: {executions[target.name]:,} executions, no crash, no hang")


@pytest.mark.slow
def test_the_command_runs_targets_in_processes(tmp_path, capfd):
    code = main(["shardings", "plan", "--seconds", str(SECONDS), "--keep", str(tmp_path)])
    told = capfd.readouterr().out
    assert code == 0, told
    assert "executions, 0 faults" in told
