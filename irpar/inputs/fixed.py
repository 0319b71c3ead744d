"""Inputs that are fixed: what depends on them is known before anything runs."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.ir import ArrayTensor, DType, Module, dtype_of_text, tensor_type
from irpar.sharding import option

from .values import Array, InputValueError, fitting, settings, value_of

MOST_ELEMENTS = 4096
"""Fixed inputs are written into plan.json."""


def fix_inputs(module: Module, values: Mapping[str, Any]) -> None:
    """Let inputs have one value each: their readers read that instead, so that passes can fold what depends on it.

    The inputs stay among those of the module, and programs made of it take no other value of them.

    Args:
        module: in global view.
        values: by the input's name: a number, a truth value, a list or an array; one number fills a full tensor.

    Raises:
        IrparError: there is no such input, its shape is not known, or the value does not fit it.
    """
    inputs = {value.source_name: value for value in module.graph.inputs}
    known = _inputs(module)
    arrays = fitting(values, known)
    for name, array in arrays.items():
        _check(name, array, known[name][1])
        if inputs[name] in module.graph.states:
            raise InputValueError(f"input {name} is state, which changes", do="leave it out")
    for name, array in arrays.items():
        value = inputs[name]
        tensor = ArrayTensor(array, known[name][0])
        uses = [(node, place) for node, place in value.uses if not node.is_return]
        if uses:
            constant = module.graph.add_constant(tensor, name)
            for node, place in uses:
                node.set_operand(place, constant)
        module.fixed[name] = tensor


def values_of(module: Module, texts: Sequence[str]) -> dict[str, Array]:
    """The values that `--set NAME=VALUE` gives inputs of a module.

    Raises:
        IrparError: a text cannot be read, or does not fit.
    """
    known = _inputs(module)
    return {name: value_of(name, text, *known[name]) for name, text in settings("--set", texts, known).items()}


def _inputs(module: Module) -> dict[str, tuple[DType | None, Any]]:
    """The dtype and shape of each input by name; None where it is no tensor or that is not known."""
    types = ((value.source_name, tensor_type(value.type)) for value in module.graph.inputs)
    return {name: (type_.dtype, type_.shape) if type_ else (None, None) for name, type_ in types}


def _check(name: str, array: Array, shape: Any) -> None:
    if array.size > MOST_ELEMENTS:
        raise InputValueError(
            f"the value of input {name} has {array.size:,} elements; up to {MOST_ELEMENTS:,} can be fixed",
            do="leave it an input",
        )
    if shape is None or not all(isinstance(dim, int) for dim in shape):
        raise InputValueError(
            f"the shape of input {name} is not known, so that it cannot be fixed",
            do=f"give sizes: {option('bind', {'NAME': 'SIZE'})}",
        )
    if array.dtype.kind in "fc" and not np.isfinite(array).all():
        raise InputValueError(f"the value of input {name} is not finite", do="leave it an input")


def fixed_of_plan(inputs: list[dict[str, Any]]) -> dict[str, Array]:
    """The fixed inputs of a plan, by name.

    Raises:
        IrparError: a value does not fit its input.
    """
    made: dict[str, Array] = {}
    for spec in inputs:
        if spec.get("value") is not None:
            types = {spec["name"]: (dtype_of_text(spec["dtype"] or ""), spec["shape"])}
            made |= fitting({spec["name"]: spec["value"]}, types)
    return made
