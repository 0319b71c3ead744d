"""The operators of the model families and of the committed exports, and the kernels that they need."""

from collections.abc import Iterator
from pathlib import Path

from irpar import models
from irpar.analysis.engines import has_kernel
from irpar.ir import Module, Node
from irpar.onnx_io import load, to_module
from irpar.runtime.engines.control_flow import CONTROL_FLOW
from irpar.runtime.engines.sequences import SEQUENCE_OPS
from tests.test_families import CASES

FIXTURES = Path(__file__).parents[1] / "fixtures"


def family_modules() -> Iterator[tuple[str, Module]]:
    """Every family with its default settings and those that are verified, and every export of the fixtures."""
    for name in models.FAMILIES:
        yield name, to_module(models.build(name))
    for case in CASES:
        yield str(case), to_module(models.build(case.family, **dict(case.settings)))
    for path in sorted(FIXTURES.glob("**/*.onnx")):
        yield path.name, load(path)


def operators() -> dict[str, dict[str, Node]]:
    """Operator and version to the models that have it, each with its first node."""
    found: dict[str, dict[str, Node]] = {}
    for name, module in family_modules():
        for graph in module.all_graphs():
            for node in graph.walk():
                if node.callee is None:
                    found.setdefault(f"{node.operator}-{node.version}", {}).setdefault(name, node)
    return found


def lacking(found: dict[str, dict[str, Node]]) -> dict[str, list[str]]:
    """Operators that the numpy engine cannot run, with the models that have them."""
    return {
        operator: list(places) for operator, places in found.items() if not all(_runs(node) for node in places.values())
    }


def _runs(node: Node) -> bool:
    is_composed = not node.domain and (node.op_type in CONTROL_FLOW or node.op_type in SEQUENCE_OPS)
    return is_composed or has_kernel(node.domain, node.op_type, node.version)
