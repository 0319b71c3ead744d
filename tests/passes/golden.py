"""Golden tests: IR text in, pipeline, IR text out; every module on the way goes through its text and the verifier."""

import textwrap

from irpar.ir import Module
from irpar.ir.compare import same_module
from irpar.ir.text import parse_module, print_module
from irpar.ir.verifier import verify
from irpar.pass_manager import PassManager


def read(text: str) -> Module:
    """Parse and verify."""
    module = parse_module(textwrap.dedent(text))
    verify(module)
    return module


def through_text(module: Module) -> None:
    """Check that the text form gives the module back."""
    printed = print_module(module)
    difference = same_module(module, parse_module(printed.text, resources=printed.resources))
    assert difference is None, difference


def run(pipeline: str, text: str) -> Module:
    """Run a pipeline pass by pass over a module given as text."""
    module = read(text)
    for pass_ in PassManager.parse(pipeline).passes:
        PassManager([pass_]).run(module)
        verify(module)
        through_text(module)
    return module


def body(module: Module) -> str:
    """The text of a module, without common indentation."""
    return str(module).strip()


def check(pipeline: str, before: str, after: str) -> Module:
    """Run a pipeline and compare the text of the result, line by line."""
    module = run(pipeline, before)
    assert body(module) == textwrap.dedent(after).strip()
    return module
