"""The launcher: signals, a launcher that dies, and one that is process 1 of a container."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from irpar.runtime.launch import processes as launcher
from irpar.runtime.launch.run_files import shared_folder
from tests.budget import every
from tests.patience import patient

from .launched import DEAF, FOREVER, IRPAR, marked, python, run_ranks, shell


@pytest.mark.parametrize(
    ("number", "code"), every(2, [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
)
def test_signals_reach_the_ranks(launched, number, code):
    told = f"[signal.signal(n, lambda n, _: (print('got', n), sys.exit(0))) for n in (1, 2, 15)]; print('ready', rank); {FOREVER}"
    run = launched(2, told)
    run.wait_for("ready 0", "ready 1")
    run.process.send_signal(number)
    found, out, err = run.end()
    assert (found, err) == (code, "")
    assert out.count(f"got {int(number)}") == 2
    run.check_nothing_left()


def test_a_rank_of_irpar_is_interrupted_without_a_word(tmp_path):
    # Python itself answers until irpar listens, and a rank starts to listen at any moment.
    begun = "open(sys.argv[1], 'a').close(); rank or os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    ending, out, err = run_ranks(python(begun, str(tmp_path / "begun")), 2, is_irpar=True)
    assert (ending.code, ending.text, out, err) == (130, "", "", "")


def test_a_second_interrupt_does_not_wait(monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 600.0)
    mark = f"mark-{uuid.uuid4().hex}"
    # Of two that come before the launcher looks, it hears one.
    often = "[(os.kill(os.getppid(), signal.SIGINT), time.sleep(0.1)) for _ in range(600)] if rank else time.sleep(60)"
    start = time.monotonic()
    ending, _, _ = run_ranks(python(DEAF + often, mark), 2)
    assert ending.code == 130
    assert time.monotonic() - start < 50  # Deaf ranks end after 60 s, of one interrupt.
    assert marked(mark) == []


@pytest.mark.slow
def test_one_interrupt_ends_what_is_deaf_within_ten_seconds(launched):
    run = launched(2, f"{DEAF}print('ready', rank); {FOREVER}")
    run.wait_for("ready 0", "ready 1")
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert time.monotonic() - start < patient(10)
    run.check_nothing_left()


@pytest.mark.parametrize("milliseconds", [100, 250, 400])
def test_an_interrupt_at_any_moment_leaves_nothing(launched, milliseconds):
    run = launched(4, FOREVER)
    time.sleep(milliseconds / 1000)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code in (143, -signal.SIGTERM)
    assert "Traceback" not in err
    run.check_nothing_left()


def test_ignored_hangups_stay_ignored():
    line = ["nohup", *IRPAR, "launch", "-n", "1", *shell("echo ready; sleep 0.5; echo done")]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=patient(10))[0] == b"done\n"
    assert process.returncode == 0


def test_where_the_launcher_is_killed_the_ranks_end(launched):
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; {FOREVER}', sys.argv[1]])"
    run = launched(3, f"{child}; print('ready', rank, os.environ['IRPAR_RUN_ID']); {FOREVER}")
    run_id = run.wait_for("ready 0", "ready 1", "ready 2").split()[-1]
    segment = shared_folder() / f"irpar-{run_id}-segment"
    segment.write_bytes(b"x")
    deadline = time.monotonic() + patient(3)
    while len(run.ranks()) < 6 and time.monotonic() < deadline:  # A child that begins has no command line yet.
        time.sleep(0.02)
    assert len(run.ranks()) == 6
    run.process.kill()
    run.check_nothing_left(3)
    deadline = time.monotonic() + patient(3)
    while (files := list(shared_folder().glob(f"irpar-{run_id}*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert files == []


CAN_UNSHARE = subprocess.run(
    ["unshare", "-r", "--pid", "--fork", "--mount-proc", "true"], capture_output=True, check=False
).returncode


@pytest.mark.skipif(CAN_UNSHARE != 0, reason="this machine lets nobody make process namespaces")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("rank == 1 and sys.exit(3)", 3)])
def test_as_process_1_of_a_container(end, code):
    orphan = (
        "subprocess.Popen(['sh', '-c', 'sleep 0.2 & exit 0']).wait(); print('pid', os.getppid()); time.sleep(0.5); "
    )
    words = ["unshare", "-r", "--pid", "--fork", "--mount-proc", *IRPAR, "launch", "-n", "2", *python(orphan + end)]
    start = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(20))
    assert done.returncode == code
    assert "pid 1" in done.stdout
    assert time.monotonic() - start < patient(6)


@pytest.mark.skipif(CAN_UNSHARE != 0, reason="this machine lets nobody make process namespaces")
def test_process_1_hears_signals_and_reaps_orphans():
    program = (
        "rank or [subprocess.Popen(['sh', '-c', 'sleep 0.1 & exit 0']).wait() for _ in range(5)]; time.sleep(0.6)\n"
        "state = \"cat /proc/[0-9]*/stat 2>&- | sed 's/.*) //' | cut -c1\"\n"
        "while rank == 0 and 'Z' in subprocess.getoutput(state): time.sleep(0.05)\n"
        "print('no zombies', rank); rank or os.kill(1, signal.SIGTERM); time.sleep(60)"
    )
    words = ["unshare", "-r", "--pid", "--fork", "--mount-proc", *IRPAR, "launch", "-n", "2", *python(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(20))
    assert done.returncode == 143
    assert "no zombies 0" in done.stdout


def test_signals_of_the_process_are_as_before():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    handles = len(os.listdir("/proc/self/fd"))
    run_ranks(shell("exit 0"), 2)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) <= handles  # Those of an earlier test may be closed meanwhile.
    assert sys.exc_info() == (None, None, None)
