import os
import time
from pathlib import Path

import pytest

from irpar.cache.folder import DEFAULT_LIMIT, CacheFolder
from irpar.errors import IrparError


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def used(folder: Path, key: str, seconds_ago: float) -> None:
    moment = time.time() - seconds_ago
    os.utime(folder / f"{key}.partition", (moment, moment))


def test_what_is_stored_is_found(tmp_path):
    folder = CacheFolder(tmp_path / "not" / "there", 1000)
    folder.store("key", b"content")
    assert folder.load("key") == b"content"
    assert folder.load("other") is None
    assert names(folder.path) == {"key.partition"}
    assert (tmp_path / "not" / "there").stat().st_mode & 0o077 == 0


def test_the_least_recently_used_makes_room(tmp_path):
    folder = CacheFolder(tmp_path, 400)
    for age, key in enumerate("cab"):
        folder.store(key, b"x" * 80)
        used(tmp_path, key, 100 - age)
    assert folder.load("c") is not None  # the oldest, but used just now
    folder.store("d", b"x" * 80)
    assert names(tmp_path) == {"b.partition", "c.partition", "d.partition"}


def test_what_is_larger_than_the_cache_is_not_kept(tmp_path):
    folder = CacheFolder(tmp_path, 400)
    folder.store("small", b"x" * 80)
    folder.store("large", b"x" * 400)
    assert names(tmp_path) == {"small.partition"}


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:5], lambda data: data[:-1] + b"?"])
def test_a_damaged_entry_is_dropped(tmp_path, damage):
    folder = CacheFolder(tmp_path, 1000)
    folder.store("key", b"content")
    path = tmp_path / "key.partition"
    path.write_bytes(damage(path.read_bytes()))
    assert folder.load("key") is None
    assert not path.exists()


def test_what_a_killed_process_left_goes_after_a_while(tmp_path):
    folder = CacheFolder(tmp_path, 1000)
    for name, age in ((".a.partition.0123abcd.new", 7200), (".b.partition.0123abcd.new", 0)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    folder.store("key", b"content")
    assert names(tmp_path) == {"key.partition", ".b.partition.0123abcd.new"}


def test_a_folder_that_cannot_be_written_is_a_miss(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    folder = CacheFolder(tmp_path / "file", 1000)
    folder.store("key", b"content")
    assert folder.load("key") is None


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("IRPAR_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CacheFolder.of_environment() == CacheFolder(tmp_path / ".cache" / "irpar", DEFAULT_LIMIT)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert CacheFolder.of_environment() == CacheFolder(tmp_path / "xdg" / "irpar", DEFAULT_LIMIT)
    monkeypatch.setenv("IRPAR_CACHE_DIR", str(tmp_path / "own"))
    assert CacheFolder.of_environment() == CacheFolder(tmp_path / "own", DEFAULT_LIMIT)


@pytest.mark.parametrize(("text", "limit"), [("7", 7), ("2KB", 2048), ("500 MB", 500 << 20), ("3GB", 3 << 30)])
def test_limits(monkeypatch, tmp_path, text, limit):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", text)
    monkeypatch.setenv("IRPAR_CACHE_DIR", str(tmp_path))
    assert CacheFolder.of_environment() == CacheFolder(tmp_path, limit)


def test_no_room_at_all_is_no_cache(monkeypatch):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", "0")
    assert CacheFolder.of_environment() is None


@pytest.mark.parametrize("text", ["much", "-1", "1.5GB", "1TB"])
def test_a_limit_that_cannot_be_read(monkeypatch, text):
    monkeypatch.setenv("IRPAR_CACHE_LIMIT", text)
    with pytest.raises(IrparError, match=f'IRPAR_CACHE_LIMIT is "{text}"'):
        CacheFolder.of_environment()
