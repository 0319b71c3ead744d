"""docs/models.md says what the program does."""

import re

import pytest

from tools import models_table

DIFFERENCE = re.compile(r"\| \d+e[-+]\d+ \|")


@pytest.mark.slow
def test_the_page_is_up_to_date() -> None:
    told, found = (DIFFERENCE.sub("| |", text) for text in (models_table.DOCUMENT.read_text(), models_table.document()))
    assert told == found, "run python tools/models_table.py"
