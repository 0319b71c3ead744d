"""How messages spell an option: as the command line does where a command runs, else as the Python interface does."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class _Asked:
    """Who asked: how many commands run in this process, in threads of which one may begin before another ends."""

    commands = 0


@contextmanager
def asked_by_command() -> Iterator[None]:
    """In here messages name options as the command line spells them."""
    _Asked.commands += 1
    try:
        yield
    finally:
        _Asked.commands -= 1


def spelled(command: str, python: str) -> str:
    """What to do, in the words of whoever asked."""
    return command if _Asked.commands else python


def option(name: str, value: str | float | Mapping[str, str] | None = None) -> str:
    """An option as whoever asked writes it: `--engine ort`, or `engine="ort"`.

    Args:
        name: as Python has it.
        value: None for a flag; a number; a text, which in capitals stands for what the user puts there; or names with
            texts.
    """
    flag = f"--{name.replace('_', '-')}"
    if value is None:
        return spelled(flag, f"{name}=True")
    if isinstance(value, int | float):
        return spelled(f"{flag} {value}", f"{name}={value}")
    if isinstance(value, str):
        return spelled(f"{flag} {value}", f"{name}={value}" if value.isupper() else f'{name}="{value}"')
    named = ", ".join(f'"{key}": {text}' for key, text in value.items())
    return spelled(" ".join(f"{flag} {key}={text}" for key, text in value.items()), f"{name}={{{named}}}")
