"""Examples in docstrings are run."""

import doctest
import importlib
from pathlib import Path

import pytest

import irpar
import irpar.passes

_ROOTS = {package.__name__: Path(package.__path__[0]) for package in (irpar, irpar.passes)}
_EXAMPLES = sorted(
    ".".join((package, *file.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
    for package, root in _ROOTS.items()
    for file in root.rglob("*.py")
    if ">>> " in file.read_text()
)


@pytest.mark.parametrize("module", _EXAMPLES)
def test_an_example(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_some_are_not_skipped() -> None:
    finder, skipped = doctest.DocTestFinder(), doctest.SKIP
    examples = [
        one for name in _EXAMPLES for test in finder.find(importlib.import_module(name)) for one in test.examples
    ]
    assert any(skipped not in one.options for one in examples)
