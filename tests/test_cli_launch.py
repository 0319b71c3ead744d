"""irpar launch on the command line: what may be launched, how many ranks, and whose error is reported."""

import json
import subprocess
import sys

import pytest

from irpar.runtime.errors import PeerError, RunError
from irpar.runtime.launch.environment import ERROR_FILE, PEER_FAILED
from tests.command_line import call, refused

IRPAR = [sys.executable, "-P", "-m", "irpar"]


@pytest.fixture
def out(tmp_path):
    """A folder whose plan says no more than the mesh."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps({"mesh": {"axes": {"dp": 2, "tp": 2}}}))
    return folder


@pytest.fixture
def launched(monkeypatch):
    """What would be launched: words, number of ranks, whether it is irpar."""
    found = []

    def note(command, size, *, is_irpar, **_):
        from irpar.runtime.launch.ending import Ending

        found.append((list(command), size, is_irpar))
        return Ending(0)

    monkeypatch.setattr("irpar.runtime.launch.processes.launch", note)
    return found


@pytest.mark.parametrize("given", [("-n", "4"), ("--ranks=4",), ("-n4",), ()])
def test_a_command_of_irpar_with_all_its_options(capsys, launched, out, given):
    words = ["run", "--inputs", "in.npz", str(out), "--json", "-n"]
    assert call(capsys, "launch", *given, *words)[0] == 0
    ((command, size, is_irpar),) = launched
    assert command == [*IRPAR, *words]
    assert (size, is_irpar) == (4, True)


@pytest.mark.parametrize("dashes", [(), ("--",)])
def test_any_program(capsys, launched, dashes):
    assert call(capsys, "launch", "-n", 3, *dashes, "echo", "--help", "--", "-n", "2")[0] == 0
    assert launched == [(["echo", "--help", "--", "-n", "2"], 3, False)]


def test_a_plan_that_cannot_be_read_is_for_the_ranks_to_tell(capsys, launched, out):
    (out / "plan.json").write_text("{")
    assert call(capsys, "launch", "-n", 3, "verify", out)[0] == 0
    assert launched[0][1] == 3


def test_what_cannot_be_launched(capsys, out):
    refused(capsys, "missing argument", "launch", "-n", 2)
    refused(capsys, "invalid value for '-n'", "launch", "-n", 0, "run", out)
    refused(capsys, "invalid value for '-n'", "launch", "-n", "x", "run", out)
    refused(capsys, "-n 3, and the mesh dp=2,tp=2 has 4 ranks", "launch", "-n", 3, "run", out)
    refused(capsys, "no folder that `irpar partition` wrote is given", "launch", "run", out / "none")
    refused(capsys, "the number of ranks is not given", "launch", "echo", "hello")
    assert "nearest names: verify" in refused(capsys, 'no program "verfy"', "launch", "-n", 2, "verfy", out)
    refused(capsys, "irpar partition is not for several ranks", "launch", "-n", 2, "partition", "x.onnx")
    refused(capsys, "irpar launch is not for several ranks", "launch", "-n", 2, "launch", "-n", 2, "run", out)


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "IRPAR_LAUNCHER": "7"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
    ],
)
def test_a_rank_launches_no_ranks(capsys, monkeypatch, environ):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    refused(capsys, "irpar launch was itself started as rank", "launch", "-n", 2, "echo")


def test_exit_code_and_error_of_the_rank_that_failed(capsys):
    code, out, err = call(capsys, "launch", "-n", 2, "sh", "-c", 'test $RANK = 0 || { echo "no way" >&2; exit 9; }')
    assert (code, out) == (9, "")
    assert err.startswith("[1] no way\nerror: rank 1 of 2 ended with exit code 9 after ")
    assert err.endswith(" s\n  it said: no way\n")


def test_a_mistake_that_all_ranks_see_is_told_once(tmp_path):
    done = subprocess.run([*IRPAR, "launch", "-n", "2", "run", "none"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == "error: cannot read the plan: No such file or directory"
    assert done.stderr.count("error:") == 1


@pytest.mark.parametrize(("error", "code"), [(PeerError("gone", rank=1), PEER_FAILED), (RunError("mine"), 2)])
def test_a_rank_leaves_its_error_to_the_launcher(capsys, monkeypatch, tmp_path, error, code):
    def fail(*_):
        raise error

    monkeypatch.setattr("irpar.api.Partition.open", fail)
    assert call(capsys, "verify", tmp_path)[0] == 2
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    assert call(capsys, "verify", tmp_path) == (code, "", "")
    assert (tmp_path / "error").read_text() == str(error)
    # Where it cannot be left, it is printed.
    assert call(capsys, "verify", tmp_path) == (code, "", f"error: {error}\n")


def test_a_bug_is_left_to_the_launcher_too(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("irpar.api.Partition.open", lambda _: 1 / 0)
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    assert call(capsys, "verify", tmp_path) == (70, "", "")
    assert (tmp_path / "error").read_text().startswith("internal error: ZeroDivisionError")


@pytest.mark.parametrize(("rank", "alone"), [(2, (2, "")), (0, (2, "error: rank 0 is gone\n"))])
def test_a_rank_whose_peer_failed(capsys, monkeypatch, tmp_path, rank, alone):
    class Opened:
        """A partition that is opened on a rank that serves, until another one fails."""

        is_driver = False

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def executor(self, *_):
            return self

        def default_engine(self, _):
            return "numpy"

        def serve(self):
            raise PeerError(f"rank {rank} is gone", rank=rank)

    monkeypatch.setattr("irpar.api.Partition.open", lambda _: Opened())
    for name, text in {"RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, text)
    code, out, err = call(capsys, "run", tmp_path)
    assert ((code, err), out) == (alone, "")
    # Under irpar launch it says what it knows, to the launcher alone.
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error"))
    assert call(capsys, "run", tmp_path) == (PEER_FAILED, "", "")
    assert (tmp_path / "error").read_text() == f"rank {rank} is gone"
