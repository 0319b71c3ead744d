"""Running irpar's commands in the process of the tests."""

import pytest

from irpar.cli import main

Capture = pytest.CaptureFixture[str]


def call(capsys: Capture, *words: object) -> tuple[int, str, str]:
    """Run a command; returns (exit code, standard output, standard error)."""
    capsys.readouterr()
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def refused(capsys: Capture, told: str, *words: object) -> str:
    """Check that a command fails with one error that says what is wrong and what to do; returns the error."""
    code, _, err = call(capsys, *words)
    assert code == 2, err
    assert told in err
    assert err.startswith("error: ")
    assert "\n  do: " in err
    assert "Traceback" not in err
    return err
