"""Files and folders that take their place when they are complete."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from irpar.files import atomic
from irpar.files.atomic import (
    WriteError,
    _exchange_names,
    check_file,
    is_leftover,
    left_aside,
    new_file,
    new_folder,
    new_pair,
    notes_on_aside,
)
from tests.patience import patient


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_takes_its_place_at_the_end(tmp_path):
    (tmp_path / "a").write_text("old")
    with new_file(tmp_path / "a", "it") as fresh:
        fresh.write_text("new")
        assert (tmp_path / "a").read_text() == "old"
        assert is_leftover(fresh.name)
    assert (tmp_path / "a").read_text() == "new"
    assert names(tmp_path) == ["a"]


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").touch()
    for new in (
        new_file(tmp_path / "a", "it"),
        new_folder(tmp_path / "d"),
        new_pair(tmp_path / "a", tmp_path / "b", "it"),
    ):
        with pytest.raises(KeyError), new:
            raise KeyError
    assert (tmp_path / "a").read_text() == "old"
    assert names(tmp_path) == ["a", "d"]
    assert names(tmp_path / "d") == ["old"]


def test_a_folder_takes_the_place_of_another(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "old").touch()
    with new_folder(tmp_path / "d") as fresh:
        (fresh / "new").touch()
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["new"]


def test_a_fresh_folder_that_another_process_takes_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    """Between its making and its opening, which no lock can cover."""
    swept = []

    def opened(path, flags, *mode, real=os.open):
        if not swept and is_leftover(Path(path).name):
            swept.append(path)
            Path(path).rmdir()
        return real(path, flags, *mode)

    monkeypatch.setattr(atomic.os, "open", opened)
    with new_folder(tmp_path / "d") as fresh:
        (fresh / "new").touch()
    assert swept
    assert names(tmp_path) == ["d"]
    assert names(tmp_path / "d") == ["new"]


def test_an_empty_data_file_is_not_made(tmp_path):
    for text in ("", "numbers"):
        with new_pair(tmp_path / "a", tmp_path / "a.data", "it") as (fresh, data):
            fresh.write_text("text")
            data.write_text(text)
        assert names(tmp_path) == (["a", "a.data"] if text else ["a"])


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for target, told in (("pipe", "a named pipe"), ("link", "a device"), (".", "a folder")):
        with (
            pytest.raises(WriteError, match=f"cannot write it: the target is {told}"),
            new_file(tmp_path / target, "it"),
        ):
            pass
    with pytest.raises(WriteError, match="the target is a device"):
        check_file("/dev/null", "it")
    with pytest.raises(WriteError, match="a folder"):
        check_file("", "it")
    assert names(tmp_path) == ["link", "pipe"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("a")
    with new_file(tmp_path / "link", "it") as fresh:
        fresh.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"


def test_the_longest_name(tmp_path):
    with new_file(tmp_path / ("ä" * 127), "it") as fresh:
        fresh.write_text("new")
    assert names(tmp_path) == ["ä" * 127]


HOLD = "from irpar.files.atomic import *; import sys, time\nwith new_{kind}({arguments}) as fresh: print(fresh, flush=True); time.sleep(60)"


@pytest.mark.parametrize(("kind", "arguments"), [("file", '"x", "it"'), ("folder", 'Path("x")')])
def test_leftovers_of_killed_processes_go_and_those_of_others_stay(tmp_path, kind, arguments):
    code = HOLD.format(kind=kind, arguments=arguments)
    holders = [
        subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        fresh = [Path(holder.stdout.readline().strip()).name for holder in holders]
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait(patient(10))
        (tmp_path / ".x.notes.new").touch()
        (tmp_path / ".xy.12345678.new").touch()
        assert names(tmp_path) == sorted([*fresh, ".x.notes.new", ".xy.12345678.new"])
        new = new_file(tmp_path / "x", "it") if kind == "file" else new_folder(tmp_path / "x")
        with new:
            pass
        assert names(tmp_path) == sorted(["x", fresh[1], ".x.notes.new", ".xy.12345678.new"])
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate(timeout=patient(10))


def test_an_old_folder_goes_only_when_the_new_one_is_there(tmp_path):
    (tmp_path / ".d.01234567.old").mkdir()
    with new_folder(tmp_path / "d"):
        pass
    assert names(tmp_path) == [".d.01234567.old", "d"]
    with new_folder(tmp_path / "d"):
        pass
    assert names(tmp_path) == ["d"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(WriteError, match="cannot write it: No such file"), new_file(tmp_path / "no" / "a", "it"):
        pass


def replaceable(folder: Path) -> Path:
    """A folder that holds `old`."""
    (folder / "d").mkdir()
    (folder / "d" / "old").touch()
    return folder / "d"


def test_two_folders_exchange_their_names_in_one_step(tmp_path):
    target = replaceable(tmp_path)
    (tmp_path / "e").mkdir()
    if not _exchange_names(target, tmp_path / "e"):
        pytest.skip("this file system cannot exchange names")
    assert names(tmp_path / "e") == ["old"]
    assert _exchange_names(target, tmp_path / "e")
    assert not _exchange_names(target, tmp_path / "none")
    over, absent = threading.Event(), []

    def look():
        while not over.is_set():
            if not target.is_dir():
                absent.append(True)

    reader = threading.Thread(target=look)
    reader.start()
    for number in range(200):
        with new_folder(target) as fresh:
            (fresh / str(number)).touch()
        assert names(target) == [str(number)]
    over.set()
    reader.join()
    assert absent == []
    assert names(tmp_path) == ["d", "e"]


KILLED = """
import os, signal, sys
from pathlib import Path
from irpar.files import atomic
atomic._exchange_names = lambda one, other: False
rename = os.rename
def once(source, target):
    rename(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
os.rename = once
with atomic.new_folder(Path(sys.argv[1])) as fresh:
    (fresh / "new").touch()
"""


def test_a_process_that_is_killed_between_two_renames(tmp_path):
    """Where names cannot be exchanged: what it left is found, and stays until the target is there."""
    target = replaceable(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(target)])
    assert ended.returncode == -signal.SIGKILL
    old, new = left_aside(target)
    assert (old.suffix, names(old)) == (".old", ["old"])
    assert (new.suffix, names(new)) == (".new", ["new"])
    assert notes_on_aside([old, new]) == (f"what was there is now {old}", f"what was to take its place is {new}")
    with pytest.raises(RuntimeError), new_folder(target):
        raise RuntimeError
    assert left_aside(target) == [old, new]
    with new_folder(target) as fresh:
        (fresh / "newer").touch()
    assert left_aside(target) == []
    with new_folder(target):
        pass
    assert names(tmp_path) == ["d"]


def test_a_system_that_cannot_exchange_names(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange_names", lambda *_: False)
    target = replaceable(tmp_path)
    with new_folder(target) as fresh:
        (fresh / "new").touch()
    assert (names(tmp_path), names(target)) == (["d"], ["new"])


def test_a_path_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(WriteError, match="cannot write the state: embedded null byte"), new_file("a\0b", "the state"):
        pass
