"""A model, or some of its nodes, by irpar's numpy kernels: as it is, in float64, or with other roundings."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from irpar.analysis.types.inference import infer_module
from irpar.ir import DType, Module, Node, Value, captured_or_read, clone_module, dtype_of_numpy, tensor_type
from irpar.kernels import Kernel
from irpar.ops import traits
from irpar.ops.updates import write_out, write_out_functions
from irpar.runtime.engines.arrays import Arrays, Reads
from irpar.runtime.engines.base import EngineSettings
from irpar.runtime.engines.bodies import Body, Scope
from irpar.runtime.engines.operation import Environment, Operation
from irpar.runtime.engines.single_nodes import on_ort
from irpar.sharding import IrparError

from .comparison import Array

_NARROW = frozenset({DType.F16, DType.BF16, DType.F32})
"""Floats that stand for real numbers. Those of 8 bits and less are codes: rounding to them is what a model asks for."""
REALS = _NARROW | {DType.F64}
"""Floats that are no codes."""
DTYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "stash_type", "softmax_precision")
"""Attributes that name the dtype to give, or to compute in."""
_DEFAULT_FLOAT = {"stash_type": 1, "output_datatype": 1}
"""Such attributes that name float32 where they are left out."""

_EXACT = frozenset(
    {
        *("Concat", "ScatterND", "ScatterElements", "Where", "Pad", "Trilu"),
        *("Max", "Min", "Clip", "Relu", "Neg", "Abs", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "TopK"),
        *("Constant", "ConstantOfShape", "Floor", "Ceil", "Round", "Sign", "OneHot"),
    }
)
"""Operators that round nothing, beside those that move elements: their results are elements, or whole numbers."""


def _is_exact(node: Node) -> bool:
    """Whether a node rounds nothing; a scatter that adds does."""
    return node.op_type in _EXACT and node.attributes.get("reduction", "none") in ("none", "max", "min")


class WideArrays(Arrays):
    """Arrays whose floats are float64, whatever the model says.

    Attributes:
        narrow: operators that were computed in the model's own dtypes, by ONNX Runtime, for want of a kernel.
        has_constants: they have the constants of the model.
    """

    name = "numpy"
    opens = False  # The original is judged by ONNX Runtime.
    has_constants = True

    def __init__(self, opsets: Mapping[str, int]) -> None:
        self.narrow: dict[str, None] = {}
        settings = EngineSettings(opsets, 1)
        self._on_ort: Callable[[Node], Operation] = on_ort(settings, has_constants=self.has_constants)

    def constant(self, array: Array, reads: Reads) -> Any:
        """A constant, widened."""
        return widen(array)

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> Operation:
        """A kernel that is told to give and to compute in float64 where the model says a narrower float."""
        compute = super().kernel(node, kernel, _widened_attributes(kernel, attributes), on_host)

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


_SUMS = frozenset(
    {
        *("MatMul", "FusedMatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Add", "Sum", "CumSum"),
        *("ReduceSum", "ReduceMean", "Mean", "AveragePool", "GlobalAveragePool"),
    }
)
"""Operators whose results are sums of products of elements of their operands."""


class Nudges:
    """Random roundings: of a tensor (a list of these, None) each float is multiplied by 1 - eps, 1 or 1 + eps.

    Whole numbers stay as they are where there is room for fractions beside them: arithmetic on counts and places is
    exact. So do floats of 8 bits and less, which are codes.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def of(self, given: Any) -> Any:
        """What is given, off by a rounding of its dtype."""
        if isinstance(given, (list, tuple)):
            return [self.of(entry) for entry in given]
        if given is None or dtype_of_numpy(np.asarray(given).dtype) not in REALS:
            return given
        array = np.asarray(given)
        wide = array.astype(np.float64)
        eps = float(ml_dtypes.finfo(array.dtype).eps)
        is_count = (wide == np.rint(wide)) & (np.abs(wide) < 1 / (16 * eps))
        moved = wide * (1 + eps * self._random.integers(-1, 2, array.shape))
        return np.where(is_count, wide, moved).astype(array.dtype)


class MagnitudeArrays(WideArrays):
    """Arrays in float64 without signs: what the terms of a sum make when they do not cancel."""

    has_constants = False  # ONNX Runtime would read them from the model, with their signs.

    def constant(self, array: Array, reads: Reads) -> Any:
        """A constant, widened, without signs where it is of floats."""
        return magnitudes(array)

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> Operation:
        """A kernel whose factors have no signs."""
        factors = {name: abs(value) for name, value in attributes.items() if name in ("alpha", "beta")}
        return super().kernel(node, kernel, {**attributes, **factors}, on_host)


class PlainArrays(Arrays):
    """Arrays in the model's own dtypes; ONNX Runtime computes what there is no kernel of.

    Args:
        opsets: domain to version.
        threads: with which it computes; 0: as many as it chooses.
    """

    name = "numpy"
    opens = False

    def __init__(self, opsets: Mapping[str, int], threads: int = 0) -> None:
        settings = EngineSettings(opsets, 1, threads=threads)
        self._on_ort: Callable[[Node], Operation] = on_ort(settings, has_constants=True)

    def without_kernel(self, node: Node) -> Operation:
        """The node in ONNX Runtime."""
        return self._on_ort(node)


class OrtArrays(PlainArrays):
    """Arrays in the model's own dtypes; ONNX Runtime computes each node alone."""

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> Operation:
        """The node in ONNX Runtime."""
        return self._on_ort(node)


class NudgedArrays(PlainArrays):
    """Arrays in the model's own dtypes, of which each float that a node computes is off by a random rounding.

    Runs of different seeds show what rounding can do to the results: Monte Carlo arithmetic (Parker, 1997).
    """

    def __init__(self, opsets: Mapping[str, int], nudges: Nudges) -> None:
        super().__init__(opsets)
        self._nudges = nudges

    def kernel(self, node: Node, kernel: Kernel, attributes: Mapping[str, Any], on_host: bool) -> Operation:
        """A kernel whose results are nudged, where it computes at all."""
        compute = super().kernel(node, kernel, attributes, on_host)
        return compute if traits(node).moves_elements or _is_exact(node) else self._nudging(compute)

    def without_kernel(self, node: Node) -> Operation:
        """The node in ONNX Runtime, with its results nudged."""
        return self._nudging(super().without_kernel(node))

    def _nudging(self, compute: Operation) -> Operation:
        def run(inputs: list[Any], environment: Environment) -> Sequence[Any]:
            return [self._nudges.of(array) for array in compute(inputs, environment)]

        return run


class Nodes:
    """The nodes of a model's main graph, any of which can be computed from what they read.

    Attributes:
        module: a copy of the model, with types inferred where they can be.
        graph: its main graph.
    """

    def __init__(self, module: Module) -> None:
        module = clone_module(module)
        own = {value.source_name for value in module.graph.values()}
        write_out(module.graph, module.opsets)
        write_out_functions(module)
        self.module = clone_module(module)
        try:
            # ONNX Runtime has to know the types of what it computes alone.
            infer_module(self.module)
        except IrparError:
            self.module = module  # What has a kernel can be computed all the same.
        self.graph = self.module.graph
        # Writing an update out makes names that a partition may have given to other values.
        known = {value.source_name: value for value in reversed([*self.graph.values()]) if value.source_name in own}
        self._known = known | dict(zip(self.graph.output_names, self.graph.outputs, strict=True))
        self._places = {node: place for place, node in enumerate(self.graph)}

    def value(self, name: str) -> Value:
        """The value of a name in the source."""
        return self._known[name]

    def has(self, value: Value, name: str) -> bool:
        """Whether the source calls a value so."""
        return self._known.get(name) is value

    def between(self, cut: Collection[Value], values: Iterable[Value]) -> list[Node]:
        """The nodes that make some values from those of `cut`, constants and inputs, in order."""
        needed, waiting = set(), [*values]
        while waiting:
            node = waiting.pop().node
            if node is not None and node not in needed:
                needed.add(node)
                waiting += [value for value in captured_or_read(node) if value not in cut]
        return sorted(needed, key=self._places.__getitem__)

    def run(self, arrays: Arrays, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
        """Compute values from given ones.

        Args:
            arrays: the arithmetic.
            given: full arrays (lists of these, None) by name: of inputs, or of what nodes make.
            names: of what to compute; the producers of these run also where they are given.

        Raises:
            IrparError: a node cannot be computed.
        """
        outputs = tuple(self.value(name) for name in names)
        known = {self.value(name): array for name, array in given.items()}
        nodes = self.between(known.keys(), outputs)
        read = dict.fromkeys((*outputs, *(value for node in nodes for value in captured_or_read(node))))
        inputs = {value: known[value] for value in read if value in known}
        constants = [value for value in read if value.is_constant and value not in inputs]
        body = Body(nodes, tuple(inputs), outputs, constants, Scope(arrays))
        with np.errstate(all="ignore"):
            results = body.call(list(inputs.values()), Environment())
        return dict(zip(names, results, strict=True))


def run_float64(nodes: Nodes, given: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """As `Nodes.run`, in float64; also the operators that were computed no wider than the model says."""
    arrays = WideArrays(nodes.module.opsets)
    widened = {name: widen(array) for name, array in given.items()}
    return nodes.run(arrays, widened, names), list(arrays.narrow)


def run_magnitudes(nodes: Nodes, given: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """As `Nodes.run`, of sums alone: what their terms make without their signs, in float64; {} of other nodes."""
    cut = {nodes.value(name) for name in given}
    made = nodes.between(cut, map(nodes.value, names))
    if len(made) != 1 or made[0].op_type not in _SUMS:
        return {}
    unsigned = {name: magnitudes(array) for name, array in given.items()}
    return nodes.run(MagnitudeArrays(nodes.module.opsets), unsigned, names)


def run_nudged(nodes: Nodes, given: Mapping[str, Any], names: Sequence[str], seed: int) -> dict[str, Any]:
    """As `Nodes.run`, in the model's own dtypes, with what is given and what nodes compute off by a rounding."""
    nudges = Nudges(seed)
    moved = {name: nudges.of(array) for name, array in given.items()}
    return nodes.run(NudgedArrays(nodes.module.opsets, nudges), moved, names)


def widen(given: Any) -> Any:
    """A tensor (a list of these, None) with floats as float64."""
    if isinstance(given, (list, tuple)):
        return [widen(entry) for entry in given]
    if given is None:
        return None
    array = np.asarray(given)
    return array.astype(np.float64) if dtype_of_numpy(array.dtype) in _NARROW else array


def magnitudes(given: Any) -> Any:
    """A tensor (a list of these, None) with floats as float64, without their signs."""
    if isinstance(given, (list, tuple)):
        return [magnitudes(entry) for entry in given]
    wide = widen(given)
    return np.abs(wide) if wide is not None and wide.dtype == np.float64 else wide


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
        if name in DTYPE_ATTRIBUTES and value in narrow:
            made[name] = DType.F64.value
        elif isinstance(value, np.ndarray):
            made[name] = widen(value)
    return made
