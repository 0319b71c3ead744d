"""The process of a command: signals at any moment, streams that are closed, full or not read."""

import os
import signal
import subprocess
import sys
import time

import pytest

from irpar.cli import main
from irpar.models import save
from tests.budget import every, pairs
from tests.patience import patient, slowness

IRPAR = [sys.executable, "-m", "irpar.cli"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """gpt.onnx, a partition of it in out/, one that differs in wrong/; and large.onnx, which takes a while to write."""
    folder = tmp_path_factory.mktemp("process")
    save(folder / "gpt.onnx", "gpt")
    assert main(["partition", str(folder / "gpt.onnx"), "-o", str(folder / "out"), "--mesh", "tp=2", "--json"]) == 0
    save(folder / "large.onnx", "mlp", layers=2, width=8192, hidden=4096, weights="none")
    with open(folder / "large.onnx.data", "r+b") as file:
        for offset in range(0, 256 << 20, 16 << 10):  # No holes, which take no time.
            os.pwrite(file.fileno(), b"x", offset)
    return folder


def shell(command, folder):
    """Run a line of bash, in which $I is irpar; returns the exit codes of the line's last pipe, and its streams."""
    line = f'I="{sys.executable} -m irpar.cli"; {command}; echo "codes ${{PIPESTATUS[*]}}" >&3'
    read, write = os.pipe()
    try:
        done = subprocess.run(
            ["bash", "-c", f"exec 3>&{write}; {line}"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=patient(60),
            pass_fds=[write],
        )
        codes = [int(code) for code in os.read(read, 1000).decode().split()[1:]]
    finally:
        os.close(read)
        os.close(write)
    return codes, done.stdout, done.stderr


PRINTING = ["explain out '*'", "explain out --json", "inspect gpt.onnx --tensors '*'", "--help"]


@pytest.mark.parametrize(("command", "reader"), every(3, pairs(PRINTING, ["true", "head -n 1"])))
def test_a_reader_that_goes_away_is_no_error(base, command, reader):
    codes, _, err = shell(f"$I {command} | {reader}", base)
    assert codes == [0, 0]
    assert err == ""


@pytest.mark.parametrize("options", [pytest.param("", marks=pytest.mark.slow), "--json"])
def test_the_verdict_does_not_depend_on_who_reads_it(base, options):
    codes, _, err = shell(f"$I verify out --tolerance 0 {options} | true", base)
    told, _, _ = shell(f"$I verify out --tolerance 0 {options} > /dev/null", base)
    assert codes[0] == told[0]
    assert err == ""


CLOSED = {
    "verify out >&-": 0,
    "verify out 2>&-": 0,
    "verify out >&- 2>&- <&-": 0,
    "verify none 2>&-": 2,
    "verify none >&- 2>&- <&-": 2,
    "inspect gpt.onnx > /dev/full": 2,
    "inspect none 2> /dev/full": 2,
    "inspect gpt.onnx > /dev/full 2>&1": 2,
}
"""A command, to its exit code."""
LIKE_ANOTHER = {
    *("verify out >&-", "verify out 2>&-", "verify none 2>&-", "verify none >&- 2>&- <&-"),
    *("inspect gpt.onnx > /dev/full", "inspect none 2> /dev/full"),
}


@pytest.mark.parametrize(
    "command", [pytest.param(line, marks=[pytest.mark.slow] * (line in LIKE_ANOTHER)) for line in CLOSED]
)
def test_streams_that_are_closed_or_full(base, command):
    codes, _, err = shell(f"$I {command}", base)
    assert codes == [CLOSED[command]]
    assert "Traceback" not in err
    assert "Exception" not in err


def test_no_file_of_ours_is_taken_for_a_closed_stream(base, tmp_path):
    codes, _, _ = shell(f"$I partition gpt.onnx --mesh tp=2 -o {tmp_path}/out >&- 2>&- <&-", base)
    assert codes == [0]
    assert main(["verify", str(tmp_path / "out"), "--json"]) == 0


def take_signals():
    """Undo, in a child, that whoever started the tests ignores signals, as shells do for what runs in the background."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_DFL)


def interrupted(base, out, number):
    """Partition the large model, and send a signal once weights are being written; returns exit code and errors."""
    words = [*IRPAR, "partition", base / "large.onnx", "--mesh", "tp=2", "-o", out]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=take_signals
    )
    deadline = time.monotonic() + patient(30)
    while process.poll() is None and time.monotonic() < deadline:
        if list(out.parent.glob(f".{out.name}.*.new/part0/weights.bin")):
            break
        time.sleep(0.001)
    process.send_signal(number)
    _, err = process.communicate(timeout=patient(30))
    return process.returncode, err


ENDINGS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("number", every(3, ENDINGS))
def test_a_signal_while_writing_leaves_nothing(base, tmp_path, number):
    code, err = interrupted(base, tmp_path / "out", number)
    assert code == ENDINGS[number]
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_partition_leaves_goes_with_the_next_one(base, tmp_path):
    out = tmp_path / "out"
    assert interrupted(base, out, signal.SIGKILL)[0] == -signal.SIGKILL
    assert [path.name.startswith(".out.") for path in tmp_path.iterdir()] == [True]
    assert main(["partition", str(base / "gpt.onnx"), "--mesh", "tp=2", "-o", str(out), "--json"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_ignored_hangups_stay_ignored(base, tmp_path):
    codes, _, _ = shell(
        f"nohup $I partition large.onnx --mesh tp=2 -o {tmp_path}/out > /dev/null 2>&1 & pid=$!; "
        f"until ls -d {tmp_path}/.out.* 2> /dev/null > /dev/null; do sleep 0.01; done; kill -HUP $pid; wait $pid",
        base,
    )
    assert codes == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("number", every(3, ENDINGS))
@pytest.mark.parametrize(
    "milliseconds", [200, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (60, 120, 300, 400))]
)
def test_a_signal_at_any_moment_is_quiet(base, milliseconds, number):
    # The interpreter itself starts within 60 ms or so where cores are idle; before, nothing of irpar can answer.
    process = subprocess.Popen([*IRPAR, "verify", "out"], cwd=base, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    time.sleep(milliseconds / 1000 * slowness())
    process.send_signal(number)
    _, err = process.communicate(timeout=patient(30))
    assert process.returncode in (0, ENDINGS[number], -number)
    assert b"internal error" not in err
    if process.returncode == ENDINGS[number]:
        assert err.strip() == b""


WHERE_NOTHING_IS_RAISED = """
import os, signal, sys, time
number = int(sys.argv[1])
signal.signal(number, signal.default_int_handler)  # shells have what runs in the background ignore it
from irpar.process import SIGNALS, Stopped
SIGNALS.clean_up()

class Dying:
    def __del__(self):
        os.kill(os.getpid(), number)
        time.sleep(0.001)

try:
    del [Dying()][0]
    time.sleep(60)
except Stopped:
    sys.exit(SIGNALS.code)
"""


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_where_python_cannot_raise_comes_again(number):
    words = [sys.executable, "-c", WHERE_NOTHING_IS_RAISED, str(int(number))]
    done = subprocess.run(words, capture_output=True, timeout=patient(30))
    assert (done.returncode, done.stderr) == (ENDINGS[number], b"")


AT_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have what runs in the background ignore it
name, interrupted, *words = sys.argv[1:]
sys.argv = [name, *words]

class Interrupting:
    def find_spec(self, found, path=None, target=None):
        if found == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
from irpar.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("interrupted", ["irpar.process", "irpar.commands", "irpar.commands.app"])
@pytest.mark.parametrize("words", [["inspect", "gpt.onnx"], ["launch", "-n", "2", "run", "out"]], ids=" ".join)
def test_an_interrupt_while_the_command_is_imported_is_quiet(base, words, interrupted):
    command = [sys.executable, "-c", AT_IMPORT, "/usr/bin/irpar", interrupted, *words]
    ended = subprocess.run(command, cwd=base, capture_output=True, timeout=patient(30))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


def test_an_interrupt_while_a_program_imports_irpar_is_the_programs(base):
    command = [sys.executable, "-c", AT_IMPORT, "/usr/bin/program", "irpar.process"]
    ended = subprocess.run(command, cwd=base, capture_output=True, timeout=patient(30))
    assert b"KeyboardInterrupt" in ended.stderr


def test_nothing_changes_for_whoever_calls_main(base):
    handlers = [signal.getsignal(number) for number in ENDINGS]
    streams = sys.stdout, sys.stderr
    assert main(["inspect", str(base / "gpt.onnx"), "--json"]) == 0
    assert [signal.getsignal(number) for number in ENDINGS] == handlers
    assert (sys.stdout, sys.stderr) == streams


def test_a_broken_pipe_in_the_same_process(base, monkeypatch):
    def gone(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("irpar.commands.inspect.print_json", gone)
    assert main(["inspect", str(base / "gpt.onnx"), "--json"]) == 0


def test_a_signal_waits_for_an_import_to_end(tmp_path):
    # As Python's own: what is half-imported is imported whole, then the command ends.
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.6)\nprint('whole', flush=True)\n")
    program = (
        "import os, signal, threading, time\n"
        "from irpar.process import SIGNALS, Stopped\n"
        "SIGNALS.clean_up()\n"
        "threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "try:\n"
        "    import slow\n"
        "    time.sleep(20)\n"
        "except Stopped:\n"
        "    print('stopped', SIGNALS.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=patient(60)
    )
    assert (done.stdout, done.stderr) == ("whole\nstopped 143\n", "")
