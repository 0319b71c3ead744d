"""Single nodes on ONNX Runtime, for engines that have no kernel of them."""

from collections.abc import Callable, Sequence
from typing import Any

from irpar.ir import Node
from irpar.ops.facts import is_told
from irpar.output.parts import Part
from irpar.runtime.errors import EngineError
from irpar.runtime.instructions import Segment
from irpar.sharding import option

from .base import Constants, EngineSettings
from .operation import Environment, Operation
from .ort import OrtEngine


def on_ort(settings: EngineSettings, *, has_constants: bool = False) -> Callable[[Node], Operation]:
    """What computes a single node with ONNX Runtime, on numpy arrays.

    Args:
        settings: of the engine.
        has_constants: the graph is a whole model, whose constants are read from it, not from the operands that are
            given: ONNX Runtime packs weights ahead that it knows, and may compute with them otherwise (MatMulNBits
            with an accuracy level).
    """

    def operation(node: Node) -> Operation:
        _check(node)
        graph = node.graph
        assert graph is not None
        read = tuple(dict.fromkeys(value for value in node.operands if value is not None))
        constants = tuple(value for value in read if has_constants and value.is_constant)
        operands = tuple(value for value in read if value not in constants)
        results = tuple(value for value in node.results if value.has_uses)
        segment = Segment(0, graph, (node,), operands, constants, results)
        compiled = OrtEngine(settings).compile(segment, Constants(Part(0, graph, (0,), ())))

        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            given = {value: array for value, array in zip(node.operands, inputs, strict=True) if value is not None}
            found = dict(zip(results, compiled.run([given[value] for value in operands]), strict=True))
            return [found.get(value) for value in node.results]

        return run

    return operation


def _check(node: Node) -> None:
    """Refuse what cannot run outside of its graph.

    Raises:
        EngineError: the node reads more than its operands, or nobody knows their dtypes.
    """
    if not is_told(node) or next(iter(node.nested_graphs()), None) is not None:
        raise EngineError(
            f"irpar has no kernel for {node.operator}, opset {node.version}, and cannot run it alone in ONNX Runtime",
            where=f"node {node.label}",
            do=f"use {option('engine', 'ort')}, or register a kernel with irpar.kernels.register",
        )
