"""The launcher: what becomes of what ranks print."""

import io
import os
import re
import signal
import subprocess
import time
import uuid

import pytest

from irpar.runtime.launch.processes import launch
from tests.patience import patient

from .launched import FOREVER, IRPAR, marked, python, run_ranks


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
        pytest.param("$I launch -n 2 echo hello >&-", [0], marks=pytest.mark.slow),
        ("$I launch -n 2 echo hello >&- 2>&- <&-", [0]),
        ("$I launch -n 2 echo hello > /dev/full", [2]),
        pytest.param("$I launch -n 2 sh -c 'exit 3' 2> /dev/full", [3], marks=pytest.mark.slow),
        pytest.param("$I launch -n 2 sh -c 'echo no >&2' 2>&-", [0], marks=pytest.mark.slow),
    ],
)
def test_streams_that_are_closed_or_full(line, expected):
    text = f'I="{" ".join(IRPAR)}"; {line}; echo "codes ${{PIPESTATUS[*]}}" >&3'
    read, write = os.pipe()
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&{write}; {text}"],
        capture_output=True,
        text=True,
        timeout=patient(30),
        pass_fds=[write],
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
    deadline = time.monotonic() + patient(10)
    while len(run.ranks()) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    run.process.terminate()
    start = time.monotonic()
    assert run.process.wait(patient(20)) == 143
    assert time.monotonic() - start < patient(9)
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
    assert time.monotonic() - start < patient(8)
    for process in marked(mark):
        os.kill(process, signal.SIGKILL)
