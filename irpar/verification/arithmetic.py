"""A model in other arithmetic than its own, by irpar's numpy kernels: in float64, or with other roundings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from irpar.ir import DType, Graph, Module, Node, Value, captured_or_read, clone_module, dtype_of_numpy, tensor_type
from irpar.kernels import Kernel, lookup
from irpar.runtime.arrays import Arrays, Reads
from irpar.runtime.bodies import Body, Scope
from irpar.runtime.control_flow import Environment, Operation
from irpar.runtime.engine import EngineSettings
from irpar.runtime.single_nodes import on_ort

from .comparison import Array

_NARROW = frozenset({DType.F16, DType.BF16, DType.F32})
"""Floats that stand for real numbers. Those of 8 bits and less are codes: rounding to them is what a model asks for."""
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision")
"""Attributes that name the dtype to give, or to compute in."""
_DEFAULT_FLOAT = {"stash_type": 1, "output_datatype": 1}
"""Such attributes that name float32 where they are left out."""

_EXACT = frozenset(
    {
        *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "Tile", "Concat"),
        *("Split", "Gather", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "Where", "Pad", "Trilu"),
        *("Max", "Min", "Clip", "Relu", "Neg", "Abs", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "TopK"),
        *("Constant", "ConstantOfShape", "DepthToSpace", "SpaceToDepth", "Floor", "Ceil", "Round", "Sign", "OneHot"),
    }
)
"""Operators that round nothing: their results are elements of their operands, or whole numbers."""


class WideArrays(Arrays):
    """Arrays whose floats are float64, whatever the model says.

    Attributes:
        narrow: operators that were computed in the model's own dtypes, by ONNX Runtime, for want of a kernel.
    """

    name = "numpy"

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.narrow: dict[str, None] = {}
        self._on_ort: Callable[[Node], Operation] = on_ort(EngineSettings(opsets, 1))

    def constant(self, array: Array, reads: Reads) -> Any:
        """A constant, widened."""
        return widen(array)

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any]) -> Operation:
        """A kernel that is told to give and to compute in float64 where the model says a narrower float."""
        compute = super().kernel(node, kernel, _widened_attributes(kernel, attributes))

        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            # Some kernels give statistics in float32 whatever they are of.
            return [widen(array) for array in compute(inputs, environment)]

        return run

    def without_kernel(self, node: Node) -> Operation:
        """The node in ONNX Runtime, on numbers as narrow as the model has them."""
        compute = self._on_ort(node)
        dtypes = [None if value is None else _dtype(value) for value in node.operands]

        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            self.narrow[node.operator] = None
            given = [_narrowed(array, dtype) for array, dtype in zip(inputs, dtypes, strict=True)]
            return [widen(array) for array in compute(given, environment)]

        return run


class NudgedArrays(Arrays):
    """Arrays in the model's own dtypes, of which each float that a node computes is off by a random rounding.

    Runs of different seeds show what rounding can do to the results: Monte Carlo arithmetic (Parker, 1997). Whole
    numbers stay as they are where there is room for fractions beside them: arithmetic on counts and places is exact.
    """

    name = "numpy"

    def __init__(self, opsets: Mapping[str, int], seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._on_ort: Callable[[Node], Operation] = on_ort(EngineSettings(opsets, 1))

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any]) -> Operation:
        """A kernel whose results are nudged, where it computes at all."""
        compute = super().kernel(node, kernel, attributes)
        return compute if node.op_type in _EXACT else self._nudging(compute)

    def without_kernel(self, node: Node) -> Operation:
        """The node in ONNX Runtime, with its results nudged."""
        return self._nudging(self._on_ort(node))

    def _nudging(self, compute: Operation) -> Operation:
        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            return [self.nudge(array) for array in compute(inputs, environment)]

        return run

    def nudge(self, given: Any) -> Any:
        """A tensor (a list of these, None) whose floats are multiplied by 1 - eps, 1 or 1 + eps of their dtype."""
        if isinstance(given, (list, tuple)):
            return [self.nudge(entry) for entry in given]
        if given is None or dtype_of_numpy(np.asarray(given).dtype) not in {*_NARROW, DType.F64}:
            return given
        array = np.asarray(given)
        wide = array.astype(np.float64)
        eps = float(ml_dtypes.finfo(array.dtype).eps)
        is_count = (wide == np.rint(wide)) & (np.abs(wide) < 1 / (16 * eps))
        moved = wide * (1 + eps * self._random.integers(-1, 2, array.shape))
        return np.where(is_count, wide, moved).astype(array.dtype)


def run_float64(module: Module, inputs: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Compute values of a model's main graph in float64.

    Args:
        module: as it was loaded.
        inputs: whole arrays (lists of these, None) by name.
        names: of outputs and other values of the main graph.

    Returns:
        The values by name, and the operators that were computed no wider than the model says.

    Raises:
        IrparError: an operator can be computed neither by irpar's kernels nor alone in ONNX Runtime.
    """
    arrays = WideArrays(module.opsets)
    given = {name: widen(array) for name, array in inputs.items()}
    return _run(module, arrays, given, names), list(arrays.narrow)


def run_nudged(module: Module, inputs: Mapping[str, Any], names: Sequence[str], seed: int) -> dict[str, Any]:
    """As `run_float64`, in the model's own dtypes, with the inputs and what nodes compute off by a rounding."""
    arrays = NudgedArrays(module.opsets, seed)
    return _run(module, arrays, {name: arrays.nudge(array) for name, array in inputs.items()}, names)


def _run(module: Module, arrays: Arrays, inputs: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    from irpar.passes.infer_types import InferTypes

    if any(lookup(node.domain, node.op_type, node.version) is None for graph in module.all_graphs() for node in graph):
        # ONNX Runtime has to know the types of what it computes alone.
        module = clone_module(module)
        InferTypes().run(module)
    graph = module.graph
    known = {value.source_name: value for value in reversed([*graph.values()])}
    known |= dict(zip(graph.output_names, graph.outputs, strict=True))
    outputs = tuple(known[name] for name in names)
    nodes, read = _needed(graph, outputs)
    constants = [value for value in graph.constants if value in read]
    body = Body(nodes, tuple(graph.inputs), outputs, constants, Scope(arrays))
    with np.errstate(all="ignore"):
        results = body.call([inputs[value.source_name] for value in graph.inputs], {})
    return dict(zip(names, results, strict=True))


def _needed(graph: Graph, outputs: Sequence[Value]) -> tuple[list[Node], set[Value]]:
    """The nodes that some values of a graph are made by, in order, and all values that these read."""
    read, needed = set(outputs), []
    for node in reversed([*graph]):
        if not read.isdisjoint(node.results):
            needed.append(node)
            read.update(captured_or_read(node))
    return needed[::-1], read


def widen(given: Any) -> Any:
    """A tensor (a list of these, None) with floats as float64."""
    if isinstance(given, (list, tuple)):
        return [widen(entry) for entry in given]
    if given is None:
        return None
    array = np.asarray(given)
    return array.astype(np.float64) if dtype_of_numpy(array.dtype) in _NARROW else array


def _narrowed(array: Any, dtype: DType | None) -> Any:
    return array if dtype not in _NARROW or array is None else np.asarray(array).astype(dtype.numpy)


def _dtype(value: Value) -> DType | None:
    type_ = tensor_type(value.type)
    return None if type_ is None else type_.dtype


def _widened_attributes(kernel: Kernel, attributes: Mapping[str, Any]) -> dict[str, Any]:
    made = {name: value for name, value in _DEFAULT_FLOAT.items() if name in kernel.signature.attributes}
    made |= attributes
    narrow = {dtype.value for dtype in _NARROW}
    for name, value in made.items():
        if name in _DTYPE_ATTRIBUTES and value in narrow:
            made[name] = DType.F64.value
        elif isinstance(value, np.ndarray):
            made[name] = widen(value)
    return made
