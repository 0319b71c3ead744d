"""raise-opset: nodes of ONNX's older operator sets, said in opset 18."""

from collections.abc import Callable
from dataclasses import dataclass

from irpar.ir import Builder, Ints, Module, Node
from irpar.ops.gradients.writer import OLDEST_OPSET
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import IrparError

_REDUCTIONS = (
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSumSquare",
)


@dataclass(frozen=True)
class RaiseOpset(Pass):
    """Bring ONNX's operators of opsets 13 to 17 to opset 18; newer ones stay, and so do weights.

    Before: global view, no function is called. After: no node of ONNX's own domain is older than opset 18, and each
    computes what it did.
    """

    name = "raise-opset"

    def run(self, module: Module) -> PassResult:
        """Rewrite all graphs.

        Raises:
            IrparError: a node has no form in opset 18.
        """
        rewritten = 0
        for graph in module.all_graphs():
            for node in graph:
                if node.domain == "" and node.callee is None and 0 < node.version < OLDEST_OPSET:
                    rewrite = _REWRITES.get(node.op_type)
                    rewritten += rewrite is not None and rewrite(node)
                    node.version = OLDEST_OPSET
        known = module.opsets.get("", OLDEST_OPSET)
        if known >= OLDEST_OPSET:
            return PassResult(rewritten > 0, statistics={"rewritten": rewritten})
        module.opsets[""] = OLDEST_OPSET
        return PassResult(
            True,
            (f"opset {known} became {OLDEST_OPSET}: {rewritten} nodes are written otherwise, no weight is touched",),
            {"rewritten": rewritten},
        )


def _axes_as_operand(node: Node) -> bool:
    """Reductions: axes are an operand; a list of none still means all."""
    axes = node.attributes.get("axes")
    if not isinstance(axes, Ints):
        return False
    if axes:
        assert node.graph is not None
        made = Builder(node.graph, {}, before=node).constant(list(axes), f"{node.results[0].name}_axes")
        node.set_operands([node.operands[0], made])
    node.set_attribute("axes", None)
    return True


def _number_of_results(node: Node) -> bool:
    """Split into equal parts says how many."""
    if len(node.inputs) > 1:
        return False
    node.set_attribute("num_outputs", len(node.results))
    return True


def _old_places(node: Node) -> bool:
    """RoiAlign took pixels to lie at whole numbers."""
    if node.version >= 16:
        return False
    node.set_attribute("coordinate_transformation_mode", "output_half_pixel")
    return True


def _without_saved_statistics(node: Node) -> bool:
    """BatchNormalization gave more results up to opset 13, which only training read.

    Raises:
        IrparError: something reads them.
    """
    if node.version >= 14 or len(node.results) == 1:
        return False
    if any(value.has_uses for value in node.results[1:]):
        raise IrparError(
            "BatchNormalization of opset 13 whose mean and variance are read, which opset 18 has otherwise",
            where=f"node {node.label}",
            do="export the model again with opset 18 or newer",
        )
    node.set_results(node.results[:1])
    return True


_REWRITES: dict[str, Callable[[Node], bool]] = {
    **dict.fromkeys(_REDUCTIONS, _axes_as_operand),
    "BatchNormalization": _without_saved_statistics,
    "RoiAlign": _old_places,
    "Split": _number_of_results,
}
"""Operators that opset 18 says otherwise: each mends a node, and tells whether it had to."""
