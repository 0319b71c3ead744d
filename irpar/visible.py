"""Text for people: names come from files of others, and may hold what a terminal takes for a command."""

_LEFT = "\n\t"


def visible(text: str) -> str:
    """The text with control characters, and those that turn the direction of text or cannot be seen, as escapes.

    `"a\\x1b[2Jb"` for an ESC in between: no name clears a screen, moves what stands beside it, or hides itself. Line
    breaks and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in _LEFT else _escaped(character) for character in text
    )


def _escaped(character: str) -> str:
    """As Python writes it between quotes."""
    return character.encode("unicode_escape").decode("ascii")
