"""Who asked, where commands overlap."""

from irpar.sharding import asked_by_command, option


def test_commands_that_overlap_leave_pythons_spelling() -> None:
    """In threads the first may end before the second."""
    first, second = asked_by_command(), asked_by_command()
    assert option("engine", "ort") == 'engine="ort"'
    first.__enter__()
    second.__enter__()
    assert option("engine", "ort") == "--engine ort"
    first.__exit__(None, None, None)
    assert option("engine", "ort") == "--engine ort"
    second.__exit__(None, None, None)
    assert option("engine", "ort") == 'engine="ort"'
