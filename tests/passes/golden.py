"""Golden tests: IR text in, pipeline, IR text out; every module on the way goes through its text and the verifier."""

import textwrap

from irpar.ir import Module
from irpar.ir.compare import same_module
from irpar.ir.text.files import parse_module, print_module
from irpar.ir.verifier import verify
from irpar.pass_manager import Instrumentation, PassManager, PassRecord


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


def run_pipeline(pipeline: str, module: Module) -> list[PassRecord]:
    """Run a pipeline; each pass must say truly whether it changed something, and leave what prints and parses back."""
    records: list[PassRecord] = []
    for pass_ in PassManager.parse(pipeline).passes:
        before = str(module)
        records += PassManager([pass_], Instrumentation(verify_each=True, reproducer=None)).run(module).records
        assert records[-1].changed == (str(module) != before), f"{pass_} says changed={records[-1].changed}"
        through_text(module)
    return records


def run(pipeline: str, text: str) -> Module:
    """The module after a pipeline."""
    module = read(text)
    run_pipeline(pipeline, module)
    return module


def body(module: Module) -> str:
    """The text of a module."""
    return str(module).strip()


def check(pipeline: str, before: str, after: str) -> Module:
    """Run a pipeline and compare the text of the result, line by line."""
    module = run(pipeline, before)
    assert body(module) == textwrap.dedent(after).strip()
    return module
