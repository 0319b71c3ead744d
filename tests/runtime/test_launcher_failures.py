"""The launcher: how a run ends whose ranks fail, hang or are stopped, and what it tells of them."""

import os
import re
import signal
import subprocess
import time
import uuid

import pytest

from irpar.runtime.launch import guard
from irpar.runtime.launch import processes as launcher
from irpar.runtime.launch.environment import PEER_FAILED
from irpar.runtime.launch.rank_process import LaunchError, RankProcess
from tests.patience import patient

from .launched import DEAF, FOREVER, marked, python, run_ranks

# -- ranks that fail ----------------------------------------------------------------------------------------------


def test_the_first_failure_counts():
    start = time.monotonic()
    program = "rank == 2 and sys.exit('the reason'); time.sleep(60)"
    ending, _, err = run_ranks(python(program), 4)
    assert (ending.code, ending.rank) == (1, 2)
    assert re.fullmatch(r"rank 2 of 4 ended with exit code 1 after \d\.\d s\n  it said: the reason", ending.text)
    assert err == "[2] the reason\n"
    assert time.monotonic() - start < patient(10)


def test_what_a_failing_rank_said_is_quoted_from_its_error_on():
    program = "print('error: a thing', '  do: another', sep='\\n', file=sys.stderr); sys.exit(2)"
    ending, _, _ = run_ranks(python(program), 1)
    assert ending.text.splitlines()[1:] == ["  it said: error: a thing", "      do: another"]


@pytest.mark.parametrize(
    ("name", "cause"), [("SIGKILL", "out of memory is one cause"), ("SIGSEGV", "crashed"), ("SIGUSR1", "")]
)
def test_a_rank_that_is_killed(name, cause):
    ending, _, _ = run_ranks(python(f"rank == 1 and os.kill(os.getpid(), signal.{name}); {FOREVER}"), 3)
    assert (ending.code, ending.rank) == (128 + getattr(signal, name), 1)
    assert ending.text.startswith(f"rank 1 of 3 was killed by {name} after ")
    assert cause in ending.text


def test_a_rank_that_ends_itself_at_a_signal():
    program = "signal.signal(15, lambda *_: os._exit(143)); rank == 1 and os.kill(os.getpid(), 15); time.sleep(60)"
    ending, _, _ = run_ranks(python(program), 2)
    assert (ending.code, ending.rank) == (143, 1)
    assert ending.text.startswith("rank 1 of 2 ended with exit code 143, as SIGTERM ends it, after ")


def test_a_container_without_memory_is_told(monkeypatch, tmp_path):
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr("irpar.runtime.launch.ending._MEMORY_EVENTS", events)
    killed = "open(sys.argv[1], 'w').write('oom_kill 3'); os.kill(os.getpid(), 9)"
    ending, _, _ = run_ranks(python(killed, str(events)), 1)
    assert "\n  the memory of this container is at its limit" in ending.text
    ending, _, _ = run_ranks(python(killed, str(events)), 1)
    assert "at its limit" not in ending.text


def test_a_rank_may_end_before_the_others():
    ending, out, _ = run_ranks(python("rank and time.sleep(0.3); print(rank)"), 2)
    assert (ending.code, out) == (0, "0\n[1] 1\n")


def test_a_rank_that_cannot_be_started(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF no program")
    program.chmod(0o755)
    with pytest.raises(LaunchError, match=r"rank 0 of 2 cannot be started: Exec format error[^$]*do: "):
        run_ranks([str(program)], 2)


def test_a_rank_that_cannot_be_started_ends_those_that_were(monkeypatch):
    start = launcher.RankProcess.start
    mark = f"mark-{uuid.uuid4().hex}"

    def fail(command, rank, environ):
        if rank == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return start(command, rank, environ)

    monkeypatch.setattr(launcher.RankProcess, "start", fail)
    with pytest.raises(LaunchError, match="rank 2 of 3 cannot be started: Resource temporarily unavailable"):
        run_ranks(python(FOREVER, mark), 3)
    assert marked(mark) == []


def test_ranks_that_do_not_listen_are_killed(soon):
    program = f"{DEAF}rank == 1 and sys.exit(4); {FOREVER}"
    start = time.monotonic()
    ending, _, _ = run_ranks(python(program), 3)
    assert (ending.code, ending.rank) == (4, 1)
    assert time.monotonic() - start < patient(10)


def test_ranks_clean_up_before_they_end():
    clean = "signal.signal(15, lambda *_: (print('clean', flush=True), sys.exit(0))); print('ready', flush=True); "
    program = f"{clean}time.sleep(0.5) or sys.exit(1) if rank == 0 else {FOREVER}"
    ending, out, _ = run_ranks(python(program), 2)
    assert (ending.code, ending.rank) == (1, 0)
    assert "[1] clean" in out


def test_what_a_rank_leaves_behind_is_ended(soon):
    mark = f"mark-{uuid.uuid4().hex}"
    child = f"subprocess.Popen([*{python(DEAF + FOREVER, mark)!r}]); time.sleep(0.2)"
    ending, _, _ = run_ranks(python(child), 2)
    assert ending.code == 0
    assert marked(mark) == []


STOPS = "(open(sys.argv[1], 'w').write(str(os.getpid())), os.kill(os.getpid(), signal.SIGSTOP))"
UNTIL_STOPPED = "until grep -qs '^State:.T' /proc/$(cat $1 2>&-)/status; do sleep 0.05; done"
"""Python: a rank that tells which process it is, and stops itself. A line of sh: wait until it has."""


def test_a_rank_that_is_stopped_is_told_of(soon, tmp_path):
    program = f"{STOPS} if rank else subprocess.run(['sh', '-c', {UNTIL_STOPPED!r}, 'sh', sys.argv[1]]); time.sleep(1); sys.exit(9)"
    ending, _, err = run_ranks(python(program, str(tmp_path / "process")), 2)
    assert (ending.code, ending.rank) == (9, 0)
    assert "rank 1 was stopped (by SIGSTOP, or a debugger): the others may have waited for it" in ending.text
    assert re.search(r"^irpar launch: rank 1 is stopped .*; kill -CONT \d+ lets it go on$", err, re.MULTILINE)


@pytest.mark.parametrize("after", ["sys.exit(0)", "signal.pause()"])
def test_a_rank_that_is_stopped_for_long_ends_the_run(soon, after):
    program = f"rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); {after}"
    start = time.monotonic()
    ending, _, _ = run_ranks(python(program), 2, seconds=60 if "exit" in after else 0.3)
    assert (ending.code, ending.rank) == (1, 1)
    assert re.match(r"rank 1 of 2 was stopped \(by SIGSTOP\) for \d+ s: the run was ended\n  do: ", ending.text)
    assert time.monotonic() - start < patient(10)


def test_a_rank_that_goes_on_in_time_ends_no_run(soon, tmp_path):
    # Rank 0 lets rank 1 go on, and does not end before it: for one that is the last to run there is less patience.
    go_on = f"{UNTIL_STOPPED}; sleep 0.4; kill -CONT $(cat $1); until [ -e $2 ]; do sleep 0.05; done"
    program = (
        f"{STOPS} and open(sys.argv[2], 'w') if rank else subprocess.run(['sh', '-c', {go_on!r}, 'sh', *sys.argv[1:]])"
    )
    for turn in range(2):
        files = [str(tmp_path / f"{name}-{turn}") for name in ("process", "done")]
        ending, _, err = run_ranks(python(program, *files), 2, seconds=5)
        assert (ending.code, ending.text) == (0, "")
        assert "rank 1 is stopped" in err


@pytest.mark.slow
def test_time_in_which_the_launcher_itself_is_stopped_counts_not(launched):
    run = launched(2, "print('here', rank); time.sleep(4)", env={**os.environ, "IRPAR_TIMEOUT": "0.1"})
    run.wait_for("here 0", "here 1")
    everybody = [run.process.pid, *run.ranks()]
    for process in everybody:
        os.kill(process, signal.SIGSTOP)
    time.sleep(6)
    for process in everybody:
        os.kill(process, signal.SIGCONT)
        time.sleep(0.6)
    code, _, err = run.end()
    assert (code, err) == (0, "")


def test_where_other_processes_are_seen_none_is_taken_for_a_rank(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda _: "1")
    assert not guard.sees_processes()
    process = subprocess.Popen(python("signal.pause()"), start_new_session=True)
    try:
        assert RankProcess(0, process).state == ""
        assert guard.has_members(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not guard.has_members(process.pid)


# -- ranks of irpar -----------------------------------------------------------------------------------------------


def left(code, text="", after=0.0):
    """A program that ends as a rank of irpar does."""
    return f"time.sleep({after}); open(os.environ['IRPAR_ERROR_FILE'], 'w').write({text!r}); sys.exit({code})"


def each(*programs):
    return python(f"exec({list(programs)!r}[rank])")


def test_the_rank_that_failed_is_told_and_not_those_that_it_took_along():
    told = [left(PEER_FAILED, "rank 2 failed"), left(PEER_FAILED, "rank 2 failed"), left(2, "the reason\n  do: x", 0.3)]
    ending, _, _ = run_ranks(each(*told), 3, is_irpar=True)
    assert (ending.code, ending.rank, ending.text) == (2, 2, "rank 2: the reason\n  do: x")


def test_what_all_ranks_say_is_told_once():
    same = [left(2, "there is no such folder", 0.1 * rank) for rank in range(3)]
    ending, _, _ = run_ranks(each(*same), 3, is_irpar=True)
    assert (ending.code, ending.text) == (2, "there is no such folder")


def test_what_rank_0_says_is_told_of_the_command():
    ending, _, _ = run_ranks(each(left(2, "no inputs"), left(PEER_FAILED, "rank 0 failed")), 2, is_irpar=True)
    assert (ending.code, ending.rank, ending.text) == (2, 0, "no inputs")


def test_ranks_that_wait_for_one_that_hangs(soon):
    late = left(PEER_FAILED, "rank 1 (tp=1) did not come")
    ending, _, _ = run_ranks(each(late, FOREVER, late), 3, is_irpar=True)
    assert (ending.code, re.sub("^rank 2: ", "", ending.text)) == (2, "rank 1 (tp=1) did not come")


def test_a_rank_of_irpar_that_is_killed():
    killed = "os.kill(os.getpid(), 9)"
    ending, _, _ = run_ranks(each(left(PEER_FAILED, "rank 1 is gone", 0.1), killed), 2, is_irpar=True)
    assert (ending.code, ending.rank) == (137, 1)
    assert ending.text.startswith("rank 1 of 2 was killed by SIGKILL")


def test_an_answer_is_no_failure():
    ending, _, _ = run_ranks(each("sys.exit(1)", "time.sleep(0.2)"), 2, is_irpar=True)
    assert (ending.code, ending.text) == (1, "")
