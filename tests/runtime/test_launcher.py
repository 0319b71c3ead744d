"""The launcher: what ranks get, what their output becomes, and how a run ends whatever happens to it."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from irpar.runtime import guard, launcher
from irpar.runtime.environment import PEER_FAILED, World
from irpar.runtime.launcher import launch
from irpar.runtime.rank_process import LaunchError, RankProcess
from irpar.runtime.run_files import shared_folder

from .launched import IRPAR, Launched, marked, python, run_ranks, shell

FOREVER = "time.sleep(60)"
DEAF = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "


@pytest.fixture
def launched():
    """Starts `irpar launch`; whatever is left of it is killed after the test."""
    started = []

    def start(size, program, **options):
        started.append(Launched(size, program, **options))
        return started[-1]

    yield start
    for run in started:
        for process in [run.process.pid, *marked(run.mark)]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.process.communicate()


@pytest.fixture
def soon(monkeypatch):
    """The launcher's patience made short, for what runs in this process."""
    for name, seconds in {"GRACE": 0.5, "_LEFTOVER": 0.2, "_SETTLE": 0.5, "_STOPPED": 0.2, "_LOOK": 0.05}.items():
        monkeypatch.setattr(launcher, name, seconds)


# -- what ranks get -----------------------------------------------------------------------------------------------


def test_the_environment_of_the_ranks():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "IRPAR_RUN_ID"]
    program = f"import json; print(json.dumps({{k: v for k, v in os.environ.items() if k in {names} or 'IRPAR' in k}}))"
    ending, out, err = run_ranks(python(program), 3)
    assert (ending.code, ending.text, err) == (0, "", "")
    found = [json.loads(re.sub(r"^\[\d\] ", "", line)) for line in out.splitlines()]
    worlds = sorted((World.of_environment(environ) for environ in found), key=lambda world: world.rank)
    assert [(world.rank, world.local_rank) for world in worlds] == [(0, 0), (1, 1), (2, 2)]
    assert {world.run_id for world in worlds} == {found[0]["IRPAR_RUN_ID"]}
    for world in worlds:
        assert (world.size, world.local_size, world.launcher) == (3, 3, "irpar launch")
        assert (world.master_addr, world.store_port) == ("127.0.0.1", int(found[0]["MASTER_PORT"]))


def test_the_cores_are_divided_unless_the_user_did(monkeypatch):
    print_threads = python("print(os.environ['OMP_NUM_THREADS'])")
    cores = len(os.sched_getaffinity(0))
    assert run_ranks(print_threads, 1, environ={})[1] == f"{cores}\n"
    assert run_ranks(print_threads, cores + 1, environ={})[1].splitlines()[0].endswith("1")
    assert run_ranks(print_threads, 1, environ={"OMP_NUM_THREADS": "7"})[1] == "7\n"


def test_what_a_launcher_around_this_one_set_does_not_reach_the_ranks():
    ending, out, _ = run_ranks(
        python("print([name for name in os.environ if 'TORCH' in name])"), 1, environ={"TORCHELASTIC_RUN_ID": "x"}
    )
    assert (ending.code, out) == (0, "[]\n")


def test_rank_0_gets_the_input(launched):
    run = launched(2, "print(sys.stdin.read())", stdin=subprocess.PIPE)
    run.process.stdin.write(b"hello")
    code, out, _ = run.end()
    assert code == 0
    assert sorted(out.splitlines()) == ["[1] ", "hello"]


# -- what ranks print ---------------------------------------------------------------------------------------------


def test_output_has_the_rank_before_it_but_for_that_of_rank_0():
    _, out, err = run_ranks(python("print('out'); print(); print('err', file=sys.stderr)"), 3)
    assert sorted(out.splitlines()) == ["", "[1] ", "[1] out", "[2] ", "[2] out", "out"]
    assert sorted(err.splitlines()) == ["[0] err", "[1] err", "[2] err"]


def test_the_output_of_rank_0_is_passed_on_byte_for_byte():
    out = io.BytesIO()
    program = python("rank or os.write(1, bytes(range(256)) * 10_000 + b'no end')")
    assert launch(program, 2, stdout=out, stderr=io.BytesIO()).code == 0
    assert out.getvalue() == bytes(range(256)) * 10_000 + b"no end"


def test_lines_come_when_they_are_written(launched):
    run = launched(2, "print('here', rank); time.sleep(60)")
    run.wait_for("here 1")
    run.process.terminate()
    assert run.end()[0] == 143


def test_parts_of_lines_are_put_together():
    program = "[(os.write(1, b'x' * 9), time.sleep(0.01)) for _ in range(5)]; os.write(1, b'\\nlast')"
    _, out, _ = run_ranks(python(program), 3)
    lines = out.splitlines()
    for start in ("[1] ", "[2] ", ""):
        assert lines.count(start + "x" * 45) == 1
        assert lines.count(start + "last") == 1


def test_a_flood_from_all_ranks_mixes_no_lines():
    program = "[os.write(1 + i % 2, b'%d:%s\\n' % (rank, str(rank).encode() * (i % 3000))) for i in range(2000)]"
    ending, out, err = run_ranks(python(program), 4)
    assert ending.code == 0
    for stream in (out, err):
        lines = stream.splitlines()
        assert len(lines) == 4000
        for line in lines:
            rank, text = re.sub(r"^\[\d\] ", "", line).split(":")
            assert set(text) <= {rank}
            assert line.startswith("0:" if stream is out and rank == "0" else f"[{rank}] ")


def test_lines_without_end():
    _, out, _ = run_ranks(python("os.write(1, b'y' * 3_500_000)"), 2)
    assert out.count("y") == 7_000_000
    assert [line[:5] for line in out.splitlines() if line.startswith("[")] == ["[1] y"] * out.count("[1] ")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("$I launch -n 2 sh -c 'yes | head -n 100000' | head -n 1", [0, 0]),
        ("$I launch -n 2 echo hello >&-", [0]),
        ("$I launch -n 2 echo hello >&- 2>&- <&-", [0]),
        ("$I launch -n 2 echo hello > /dev/full", [2]),
        ("$I launch -n 2 sh -c 'exit 3' 2> /dev/full", [3]),
        ("$I launch -n 2 sh -c 'echo no >&2' 2>&-", [0]),
    ],
)
def test_streams_that_are_closed_or_full(line, expected):
    text = f'I="{" ".join(IRPAR)}"; {line}; echo "codes ${{PIPESTATUS[*]}}" >&3'
    read, write = os.pipe()
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&{write}; {text}"], capture_output=True, text=True, timeout=30, pass_fds=[write]
    )
    os.close(write)
    with os.fdopen(read) as codes:
        assert [int(code) for code in codes.read().split()[1:]] == expected
    assert "Traceback" not in done.stderr


def test_a_disk_that_is_full_is_told_after_the_ranks_have_ended(tmp_path):
    program = python("print('x'); time.sleep(0.3); open(sys.argv[1], 'w').close()", str(tmp_path / "done"))
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        launch(program, 1, stdout=full, stderr=io.BytesIO())
    assert (tmp_path / "done").exists()


def test_a_reader_that_hangs_keeps_nobody_alive(launched):
    read, write = os.pipe()
    run = launched(2, "[os.write(1, b'x' * 999 + b'\\n') for _ in range(10_000)]", stdout=write)
    os.close(write)
    deadline = time.monotonic() + 10
    while len(run.ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    run.process.terminate()
    start = time.monotonic()
    assert run.process.wait(20) == 143
    assert time.monotonic() - start < 9
    assert run.process.stderr.read() == b""
    run.check_nothing_left()
    os.close(read)


def test_streams_that_do_not_wait(launched):
    read, write = os.pipe()
    os.set_blocking(write, False)
    run = launched(1, "[os.write(1, b'x' * 999 + b'\\n') for _ in range(1000)]", stdout=write)
    os.close(write)
    time.sleep(0.5)
    with open(read, "rb") as pipe:
        assert pipe.read() == (b"x" * 999 + b"\n") * 1000
    assert run.end()[0] == 0


def test_what_holds_the_output_open_is_not_waited_for():
    mark = f"mark-{uuid.uuid4().hex}"
    daemon = f"subprocess.Popen([*{python(FOREVER, mark)!r}], start_new_session=True); print('done')"
    start = time.monotonic()
    ending, out, _ = run_ranks(python(daemon), 2)
    assert (ending.code, sorted(out.splitlines())) == (0, ["[1] done", "done"])
    assert time.monotonic() - start < 8
    for process in marked(mark):
        os.kill(process, signal.SIGKILL)


# -- ranks that fail ----------------------------------------------------------------------------------------------


def test_the_first_failure_counts():
    start = time.monotonic()
    program = "rank == 2 and sys.exit('the reason'); time.sleep(60)"
    ending, _, err = run_ranks(python(program), 4)
    assert (ending.code, ending.rank) == (1, 2)
    assert re.fullmatch(r"rank 2 of 4 ended with exit code 1 after \d\.\d s\n  it said: the reason", ending.text)
    assert err == "[2] the reason\n"
    assert time.monotonic() - start < 10


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
    monkeypatch.setattr("irpar.runtime.ending._MEMORY_EVENTS", events)
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
    assert time.monotonic() - start < 10


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


def test_a_rank_that_is_stopped_is_told_of(soon):
    program = "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); time.sleep(1); sys.exit(9)"
    ending, _, err = run_ranks(python(program), 2)
    assert (ending.code, ending.rank) == (9, 0)
    assert "rank 1 was stopped (by SIGSTOP, or a debugger): the others may have waited for it" in ending.text
    assert re.search(r"^irpar launch: rank 1 is stopped .*; kill -CONT \d+ lets it go on$", err, re.MULTILINE)


@pytest.mark.parametrize("after", ["sys.exit(0)", "signal.pause()"])
def test_a_rank_that_is_stopped_for_long_ends_the_run(soon, after):
    program = f"rank == 1 and os.kill(os.getpid(), signal.SIGSTOP); {after}"
    start = time.monotonic()
    ending, _, _ = run_ranks(python(program), 2, seconds=60 if "exit" in after else 0.3)
    assert (ending.code, ending.rank) == (1, 1)
    assert re.match(r"rank 1 of 2 was stopped \(by SIGSTOP\) for \d s: the run was ended\n  do: ", ending.text)
    assert time.monotonic() - start < 10


def test_a_rank_that_goes_on_in_time_ends_no_run(soon):
    stop = "os.kill(os.getpid(), signal.SIGSTOP)"
    program = f"subprocess.Popen(['sh', '-c', f'sleep 0.4; kill -CONT {{os.getpid()}}']) and {stop} if rank else None"
    for _ in range(2):
        ending, _, err = run_ranks(python(f"{program}; time.sleep(0.5)"), 2, seconds=5)
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


# -- signals, and a launcher that dies ----------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
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


def test_a_second_interrupt_does_not_wait(launched):
    run = launched(2, f"{DEAF}print('ready', rank); {FOREVER}")
    run.wait_for("ready 0", "ready 1")
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert time.monotonic() - start < 4.5
    run.check_nothing_left()


@pytest.mark.slow
def test_one_interrupt_ends_what_is_deaf_within_ten_seconds(launched):
    run = launched(2, f"{DEAF}print('ready', rank); {FOREVER}")
    run.wait_for("ready 0", "ready 1")
    start = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    assert time.monotonic() - start < 10
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
    assert process.communicate(timeout=10)[0] == b"done\n"
    assert process.returncode == 0


def test_where_the_launcher_is_killed_the_ranks_end(launched):
    child = f"subprocess.Popen([sys.executable, '-c', 'import time; {FOREVER}', sys.argv[1]])"
    run = launched(3, f"{child}; print('ready', rank, os.environ['IRPAR_RUN_ID']); {FOREVER}")
    run_id = run.wait_for("ready 0", "ready 1", "ready 2").split()[-1]
    segment = shared_folder() / f"irpar-{run_id}-segment"
    segment.write_bytes(b"x")
    assert len(run.ranks()) == 6
    run.process.kill()
    run.check_nothing_left(3)
    deadline = time.monotonic() + 3
    while (files := list(shared_folder().glob(f"irpar-{run_id}*"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert files == []


def test_shared_memory_is_cleared():
    program = "open(f'/dev/shm/irpar-{os.environ[\"IRPAR_RUN_ID\"]}-{rank}', 'w'); print(os.environ['IRPAR_RUN_ID']); "
    for end, code in (("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)):
        ending, out, _ = run_ranks(python(program + end), 2)
        assert ending.code == code
        run_id = out.split()[-1]
        assert run_id
        assert list(Path("/dev/shm").glob(f"irpar-{run_id}*")) == []


def test_two_launches_at_once_do_not_meet(launched):
    program = "print(os.environ['IRPAR_RUN_ID'], os.environ['MASTER_PORT']); time.sleep(0.3)"
    first, second = launched(2, program), launched(2, program)
    (_, one, _), (_, other, _) = first.end(), second.end()
    ones, others = set(one.replace("[1] ", "").splitlines()), set(other.replace("[1] ", "").splitlines())
    assert len(ones) == len(others) == 1
    assert ones != others


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
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == code
    assert "pid 1" in done.stdout
    assert time.monotonic() - start < 6


@pytest.mark.skipif(CAN_UNSHARE != 0, reason="this machine lets nobody make process namespaces")
def test_process_1_hears_signals_and_reaps_orphans():
    program = (
        "rank or [subprocess.Popen(['sh', '-c', 'sleep 0.1 & exit 0']).wait() for _ in range(5)]; time.sleep(0.6); "
        "zombies = [p for p in os.listdir('/proc') if p.isdigit() and open(f'/proc/{p}/stat').read().split(') ')[1][0] == 'Z']; "
        "print('zombies', zombies); rank or os.kill(1, signal.SIGTERM); time.sleep(60)"
    )
    words = ["unshare", "-r", "--pid", "--fork", "--mount-proc", *IRPAR, "launch", "-n", "2", *python(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    assert done.returncode == 143
    assert "zombies []" in done.stdout


def test_signals_of_the_process_are_as_before():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    handles = len(os.listdir("/proc/self/fd"))
    run_ranks(shell("exit 0"), 2)
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert len(os.listdir("/proc/self/fd")) == handles
    assert sys.exc_info() == (None, None, None)
