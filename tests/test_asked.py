"""Options are spelled as whoever asked writes them."""

import pytest

from irpar.sharding import asked_by_command, option, spelled


@pytest.mark.parametrize(
    ("name", "value", "command", "python"),
    [
        ("force", None, "--force", "force=True"),
        ("max_redistribution_mb", "MB", "--max-redistribution-mb MB", "max_redistribution_mb=MB"),
        ("micro_batches", 4, "--micro-batches 4", "micro_batches=4"),
        ("engine", "ort", "--engine ort", 'engine="ort"'),
        ("bind", {"batch": "8", "seq": "..."}, "--bind batch=8 --bind seq=...", 'bind={"batch": 8, "seq": ...}'),
    ],
)
def test_an_option(name: str, value: str | float | dict[str, str] | None, command: str, python: str) -> None:
    assert option(name, value) == python
    with asked_by_command():
        assert option(name, value) == command
    assert option(name, value) == python


def test_what_fails_in_a_command_leaves_the_spelling_as_it_was() -> None:
    with pytest.raises(KeyError), asked_by_command():
        raise KeyError
    assert spelled("command", "python") == "python"


def test_commands_that_overlap_leave_pythons_spelling() -> None:
    """In threads the first may end before the second."""
    first, second = asked_by_command(), asked_by_command()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert spelled("command", "python") == "command"
    second.__exit__(None, None, None)
    assert spelled("command", "python") == "python"
