"""Gradients of a model, as one more model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from irpar.ir import Module, Value

from .api_arguments import check_names
from .arguments import require

if TYPE_CHECKING:
    from irpar.onnx_io import Source
    from irpar.passes.autodiff import Autodiff

OPEN = "inline-functions,raise-opset,infer-types"
"""The passes before the weights are chosen."""
NORMALISE = "fold-constants,cse,simplify-layout,dce"
"""The passes before autodiff, which meet these weights as inputs: no weight is folded."""
CLEAN = "cse,dce"
"""The passes after it, behind infer-types where that may find something."""


def gradients(
    model: "Module | Source",
    *,
    outputs: Sequence[str] = (),
    wrt: Sequence[str] = (),
    keep_outputs: bool = False,
    straight_through: bool = False,
    bind: Mapping[str, int] | None = None,
) -> Module:
    """The gradients of a model's outputs by its weights and inputs, in plain ONNX operators of opset 18 or newer.

    Reverse mode: the sum of each output times its `grad.<output>`, differentiated by each tensor.

    Args:
        model: from `load`, or what `load` takes; it stays as it is.
        outputs: names or globs of the outputs that are differentiated; none: all of floats.
        wrt: names or globs of weights and inputs by which; none: all initializers of floats that have dims (a single
            number is nearly always a constant of the exporter).
        keep_outputs: whether the results of the model itself come too, before the gradients.
        straight_through: whether gradients pass QuantizeLinear as if it did not round, where it does not saturate.
        bind: sizes for symbolic dims, as for `load`; without, they stay symbolic.

    Returns:
        A module with the model's inputs and `grad.<output>` for each output, and results `grad.<tensor>`, each of
        shape and dtype of its tensor. `irpar.partition` takes it; `irpar.onnx_io.save` writes it.

    Raises:
        GradientError: a name matches nothing of floats, or an operator on the way has no gradient.
        IrparError: the model is no valid one.
        ArgumentError: an argument has the wrong type.
    """
    from irpar.api import module_of
    from irpar.ir import clone_module
    from irpar.ir.collector import collector_off
    from irpar.pass_manager import without_copies
    from irpar.passes.autodiff import Autodiff

    check_names("outputs", outputs)
    check_names("wrt", wrt)
    for name, given in (("keep_outputs", keep_outputs), ("straight_through", straight_through)):
        require(name, given, bool, "give True or False")
    with collector_off():
        module = module_of(model, bind)
        autodiff = Autodiff(tuple(outputs), (), keep_outputs, straight_through)
        return without_copies(lambda: _gradients(clone_module(module), wrt, autodiff))


def _gradients(module: Module, wrt: Sequence[str], autodiff: "Autodiff") -> Module:
    from irpar.pass_manager import PassManager
    from irpar.passes.autodiff import chosen_tensors

    PassManager.parse(OPEN).run(module)
    lift_weights(module)
    wanted = chosen_tensors(module, wrt)
    normalise(module, wanted)
    names = tuple(value.source_name for value in wanted)
    PassManager([replace(autodiff, wrt=names)]).run(module)
    clean(module)
    module.source = None  # What is partitioned and verified is this model, and in no file yet.
    return module


def normalise(module: Module, wanted: Sequence[Value]) -> None:
    """Fold and simplify, but for what depends on some weights."""
    from irpar.pass_manager import PassManager

    weights = {value: value.data for value in wanted if value.data is not None}
    for value in weights:
        module.graph.constant_to_input(value)
    PassManager.parse(NORMALISE).run(module)
    module.graph.inputs_to_constants(weights)


def clean(module: Module) -> None:
    """Infer types, merge and delete what is written twice or for nothing, and forget what nothing needs.

    What writes nodes gives them the types that their operands tell: where all of them are static, infer-types can only
    find the same.
    """
    from irpar.pass_manager import PassManager

    is_known = all(value.is_static for graph in module.all_graphs() for value in graph.values())
    PassManager.parse(CLEAN if is_known else f"infer-types,{CLEAN}").run(module)
    forget_domains(module)


def forget_domains(module: Module) -> None:
    """Leave out the operator sets of which no node is left: what ran in ONNX Runtime alone is plain ONNX now."""
    used = {node.domain for graph in module.graphs for node in graph.walk()}
    for domain in [domain for domain in module.opsets if domain and domain not in used]:
        del module.opsets[domain]


def lift_weights(module: Module) -> None:
    """Give the main graph the initializers of bodies: there they are weights like others.

    Bodies that stand beside each other may call theirs the same: all but the first are told apart.
    """
    for name, value in weights_by_name(module).items():
        if value.graph is not module.graph and value.is_constant:
            module.graph.lift_constant(value)
            if value.source_name != name:
                value.source = name


def weights_by_name(module: Module) -> dict[str, Value]:
    """The inputs and initializers of a module, those of bodies too, as gradients and training call them."""
    main = module.graph
    found = {value.source_name: value for value in (*main.inputs, *main.constants)}
    for graph in main.graphs():
        if graph is not main:
            for value in graph.constants:
                if value.name not in module.literals:
                    found[value.source_name if value.source_name not in found else value.name] = value
    return found
