"""What a program takes and gives, and whether given inputs fit."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irpar.inputs.values import same_numbers, shown
from irpar.ir import Dim, Expr, Graph, OptionalType, SequenceType, Type, Value, dtype_of_numpy, tensor_type
from irpar.ops.coords import COORDS
from irpar.sharding import option, spelled

from .errors import InputError
from .layout import Array, TensorSpec


def spec_of(value: Value, name: str) -> TensorSpec:
    """The full tensor that a value of a local (or global) graph stands for."""
    type_ = tensor_type(value.type)
    if type_ is None:
        return TensorSpec(name, None, None, other=value.type)
    shape: tuple[Dim, ...] | None = type_.shape if value.global_shape is None else value.global_shape
    return TensorSpec(name, type_.dtype, shape, value.sharding)


def program_inputs(graph: Graph) -> dict[str, Value]:
    """The inputs of a graph that a user gives, by the name that the source model has for them."""
    return {value.source_name: value for value in graph.inputs if value.name != COORDS}


def input_specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """What a graph takes."""
    return tuple(spec_of(value, name) for name, value in program_inputs(graph).items())


def output_specs(graph: Graph) -> tuple[TensorSpec, ...]:
    """What a graph gives."""
    return tuple(spec_of(value, name) for name, value in zip(graph.output_names, graph.outputs, strict=True))


def check_inputs(
    specs: Sequence[TensorSpec], inputs: Mapping[str, Any], device_array: type | None = None
) -> dict[str, Any]:
    """The inputs as read-only arrays (sequences, and arrays of a device, as they are).

    Args:
        specs: what is expected.
        inputs: what is given, by name.
        device_array: the type of arrays of a device that are taken; None: there is none.

    Raises:
        InputError: names are missing or unknown, or dtypes or shapes do not fit; it lists all that is wrong, and what
            is expected.
    """
    known = {spec.name for spec in specs}
    problems = [f"{spec.name} is missing" for spec in specs if spec.name not in inputs]
    for name in inputs:
        if name not in known:
            nearest = difflib.get_close_matches(name, known - set(inputs), n=1)
            problems.append(f"there is no input {name}" + (f"; did you mean {nearest[0]}?" if nearest else ""))
    found: dict[str, Any] = {}
    bound: dict[str, tuple[int, str]] = {}
    for spec in specs:
        if spec.name in inputs:
            given = inputs[spec.name]
            is_there = device_array is not None and spec.dtype is not None and isinstance(given, device_array)
            found[spec.name], problem = (_checked_array if is_there else _checked)(spec, given, bound)
            problems.extend(problem)
    if problems:
        expected = "; ".join(map(str, specs)) or "no inputs"
        sizes = spelled("--bind sizes", "sizes: bind={...}")
        raise InputError(
            "the inputs do not fit the program",
            notes=(*problems, f"expected: {expected}"),
            do=f"give what is expected; for other sizes partition the model again with other {sizes}",
        )
    return found


def with_fixed(fixed: Mapping[str, Array], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs with those that are fixed.

    Raises:
        InputError: one of these is given with another value.
    """
    for name, value in fixed.items():
        if name in inputs and not same_numbers(inputs[name], value):
            given = np.asarray(inputs[name])
            raise InputError(
                f"input {name} is {shown(given) if given.dtype.kind in 'biuf' else given.dtype}, and was fixed to be "
                f"{shown(value)} when the model was partitioned",
                notes=(f"expected: {value.dtype}{list(value.shape)}, or nothing",),
                do=f"leave it out, or partition the model again with another {option('set', {name: 'VALUE'})}",
            )
    return {**inputs, **fixed}


def _checked(spec: TensorSpec, given: Any, bound: dict[str, tuple[int, str]]) -> tuple[Any, list[str]]:
    """An input as an array (a list of these, None), and what is wrong with it."""
    if isinstance(spec.other, SequenceType):
        return _checked_sequence(spec, spec.other.elem, given, bound)
    if isinstance(spec.other, OptionalType):
        return (None, []) if given is None else _checked(_element(spec.other.elem, spec.name), given, bound)
    if spec.dtype is None:
        return given, []
    if given is None:
        return given, [f"{spec.name} is None, expected {spec}"]
    try:
        array = np.asarray(given)
    except ValueError:
        return given, [f"{spec.name} is a sequence, expected {spec}"]
    array, problems = _checked_array(spec, array, bound)
    if array.dtype == spec.dtype.numpy:
        array = array.view()
        array.flags.writeable = False
    return array, problems


def _checked_array(spec: TensorSpec, array: Any, bound: dict[str, tuple[int, str]]) -> tuple[Any, list[str]]:
    """An array of any module as one of the input's dtype, and what is wrong with it."""
    assert spec.dtype is not None
    try:
        dtype = dtype_of_numpy(array.dtype)
    except TypeError:
        return array, [f"{spec.name} is {array.dtype}, which ONNX does not have"]
    if dtype is not spec.dtype:
        return array, [f"{spec.name} is {dtype}{list(array.shape)}, expected {spec.dtype}"]
    shape_problem = _shape_problem(spec, array, bound)
    return array.astype(spec.dtype.numpy, copy=False), [shape_problem] if shape_problem else []


def _checked_sequence(
    spec: TensorSpec, type_: Type, given: Any, bound: dict[str, tuple[int, str]]
) -> tuple[Any, list[str]]:
    if not isinstance(given, list | tuple):
        return given, [
            f"{spec.name} is {'None' if given is None else 'a tensor'}, expected a sequence: a list of arrays"
        ]
    entries = [_checked(_element(type_, f"{spec.name}[{n}]"), entry, bound) for n, entry in enumerate(given)]
    return [entry for entry, _ in entries], [problem for _, problems in entries for problem in problems]


def _element(type_: Type, name: str) -> TensorSpec:
    """What a sequence or an optional holds; its symbols are its own."""
    inner = tensor_type(type_)
    if inner is None:
        return TensorSpec(name, None, None, other=type_)
    shape = None if inner.shape is None else tuple(dim if isinstance(dim, int) else None for dim in inner.shape)
    return TensorSpec(name, inner.dtype, shape)


def _shape_problem(spec: TensorSpec, array: Array, bound: dict[str, tuple[int, str]]) -> str:
    if spec.shape is None:
        return ""
    wrong = f"{spec.name} has shape {list(array.shape)}, expected {_dims(spec.shape)}"
    if len(spec.shape) != array.ndim:
        return wrong
    for dim, size in zip(spec.shape, array.shape, strict=True):
        if isinstance(dim, int) and dim != size:
            return wrong
        if isinstance(dim, Expr):
            other, name = bound.setdefault(str(dim), (size, spec.name))
            if other != size:
                return f"{spec.name} has {dim} = {size}, but {name} has {dim} = {other}"
    return ""


def _dims(shape: Sequence[Dim]) -> str:
    return f"[{', '.join('_' if dim is None else str(dim) for dim in shape)}]"
