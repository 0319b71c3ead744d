"""The secret of a run: where it comes from, and who may read it."""

import os

import pytest

from irpar.runtime.launch.token import TokenError, made_token, token_of_environment

SECRET = "correct horse battery staple"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    return path


def test_none_is_needed_so_far():
    assert token_of_environment({}) == token_of_environment({"IRPAR_TOKEN": " ", "IRPAR_TOKEN_FILE": ""}) == ""


def test_the_variable_comes_before_the_file(file):
    assert token_of_environment({"IRPAR_TOKEN_FILE": str(file)}) == SECRET
    other = made_token()
    assert token_of_environment({"IRPAR_TOKEN": other, "IRPAR_TOKEN_FILE": str(file)}) == other
    assert other != made_token()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_read_or_write_holds_no_secret(file, mode):
    file.chmod(mode)
    with pytest.raises(TokenError, match=rf"can be read or written by others \(mode {mode:04o}\)") as failure:
        token_of_environment({"IRPAR_TOKEN_FILE": str(file)})
    assert failure.value.do.startswith(f"chmod 600 {file}")
    assert SECRET not in str(failure.value)


def test_a_file_is_read_to_its_end(file, monkeypatch):
    read = os.read
    monkeypatch.setattr(os, "read", lambda handle, count: read(handle, min(count, 5)))
    assert token_of_environment({"IRPAR_TOKEN_FILE": str(file)}) == SECRET


def test_a_file_that_is_longer_than_a_secret_is_refused(file):
    file.write_text("x" * 4096)
    assert token_of_environment({"IRPAR_TOKEN_FILE": str(file)}) == "x" * 4096
    file.write_text("x" * 4097)
    with pytest.raises(TokenError, match="has more than 4096 bytes"):
        token_of_environment({"IRPAR_TOKEN_FILE": str(file)})


def test_the_file_is_of_whom_the_process_acts_for(file, monkeypatch):
    owner = os.stat(file).st_uid
    if owner == 0:  # Whose files everybody believes.
        os.chown(file, 1, -1)
    owner = os.stat(file).st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner)
    assert token_of_environment({"IRPAR_TOKEN_FILE": str(file)}) == SECRET
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(TokenError, match="belongs to another user"):
        token_of_environment({"IRPAR_TOKEN_FILE": str(file)})


def test_a_file_that_is_none(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)
    for path, told in ((fifo, "is no file"), (tmp_path, "is no file"), (tmp_path / "gone", "No such file")):
        with pytest.raises(TokenError, match=told):
            token_of_environment({"IRPAR_TOKEN_FILE": str(path)})


@pytest.mark.parametrize("name", ["IRPAR_TOKEN", "IRPAR_TOKEN_FILE"])
def test_a_secret_that_could_be_guessed(file, name):
    file.write_text("short")
    with pytest.raises(TokenError, match="has 5 characters, and needs 16"):
        token_of_environment({name: "short" if name == "IRPAR_TOKEN" else str(file)})
