"""Random ONNX graphs, grown node by node: every node is computed in ONNX Runtime as soon as it is drawn, so that the
next one can be chosen by the numbers (no logarithm of 0, no rounding of what rounding errors may tip over)."""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from irpar.kernels import KernelError, lookup

from .ops.rule_proof import NEWEST

Array = np.ndarray[Any, Any]

F32, F64, I32, I64, BOOL = (np.dtype(name) for name in ("float32", "float64", "int32", "int64", "bool"))
U8, I8 = np.dtype("uint8"), np.dtype("int8")
FLOATS = (F32, F32, F32, F32, F32, F64)
INTS = (I64, I32)

SIZES = (2, 3, 4, 5, 6, 7, 1, 12)
"""Many that the meshes do not divide."""
MOST_ELEMENTS = 2000
LARGEST = 40.0
"""Floats beyond this are not drawn on: sums of such numbers would be right to fewer digits than the tests look at."""
EXACT = frozenset(
    {
        *("Abs", "Add", "Ceil", "Clip", "Concat", "Conv", "CumSum", "Einsum", "Expand", "Flatten", "Floor", "Gather"),
        *("GatherElements", "GatherND", "Gemm", "GlobalMaxPool", "Identity", "Dropout", "If", "MatMul", "Max"),
        *("MaxPool", "Min", "Mul", "Neg", "OneHot", "Pad", "ReduceL1", "ReduceMax", "ReduceMin", "ReduceSum"),
        *("ReduceSumSquare", "Relu", "Reshape", "Round", "ScatterElements", "ScatterND", "Sign", "Slice", "Split"),
        *("Squeeze", "Sub", "Sum", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where"),
        *("DepthToSpace", "SpaceToDepth", "CastLike", "Compress", "ReverseSequence", "Cast"),
    }
)
"""Ops that lose no digit of short dyadic numbers, in whatever order they sum."""


NOT_EMPTY = re.compile(
    r"Reduce|Arg|Norm|Pool|Conv|Attention|Rotary|TopK|Softmax|Hardmax|LRN|SpaceTo|ToSpace|Cum|Einsum"
)
"""Ops on which ONNX Runtime crashes or strays from ONNX where an operand has no elements."""


class UnfitError(Exception):
    """The drawn operator has no operands here, or ONNX Runtime does not run it; another one is drawn."""


@dataclass(eq=False)
class Tensor:
    """A value of the graph, with its numbers.

    Attributes:
        name: in the graph.
        array: its numbers for the inputs of the program.
        kind: what gives it.
        is_exact: its numbers are the same whatever the order of summation.
    """

    name: str
    array: Array
    kind: Literal["input", "weight", "node"]
    is_exact: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return tuple(self.array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""
        return self.array.dtype


def is_short(array: Array) -> bool:
    """True for numbers of which products of two can be summed up without rounding, a hundred at a time."""
    if array.dtype.kind != "f":
        return True
    return bool(np.all(np.abs(array) <= 16) and np.all(array * 16 == np.round(array * 16)))


@dataclass
class GraphMaker:
    """A graph under construction; `random` decides everything.

    Attributes:
        random: what is drawn next.
        opsets: version of the operator set of each domain.
        engine: what must be able to run every node; with "numpy" what ONNX Runtime lacks is computed by irpar's kernels.
        tensors: every value so far.
        nodes: in order.
        weights: constants.
        unrun: operators that ONNX Runtime refused to run, by how often.
        rounds: engines may give other numbers: they round a half to either side, or ONNX Runtime is wrong.
    """

    random: Random
    opsets: Mapping[str, int]
    engine: Literal["ort", "numpy"] = "ort"
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    unrun: Counter[str] = field(default_factory=Counter)
    rounds: bool = False

    @property
    def opset(self) -> int:
        """The version of ONNX's own operator set."""
        return self.opsets[""]

    @property
    def counts(self) -> Counter[str]:
        """Nodes by operator."""
        return Counter(operator_of(node) for node in self.nodes)

    @property
    def has_kernels(self) -> bool:
        """True where irpar's own kernels can run every node so far."""
        return all(self._has_kernel(node) for node in self.nodes)

    def _has_kernel(self, node: onnx.NodeProto) -> bool:
        return node.op_type in ("If", "Loop") or lookup(node.domain, node.op_type, self.opsets[node.domain]) is not None

    def attempt(self, grow: Callable[["GraphMaker"], object]) -> bool:
        """Let something be drawn; False, and nothing is changed, where it does not fit here."""
        lists = (self.tensors, self.weights, self.nodes)
        before = [len(things) for things in lists]
        try:
            grow(self)
        except UnfitError:
            for things, count in zip(lists, before, strict=True):
                del things[count:]
            return False
        return True

    # -- drawing ------------------------------------------------------------------------------------------------

    def number(self, low: int, high: int) -> int:
        """An int from low to high, both included."""
        if low > high:
            raise UnfitError
        return self.random.randint(low, high)

    def one_of(self, choices: Sequence[Any]) -> Any:
        """One of several."""
        if not choices:
            raise UnfitError
        return self.random.choice(choices)

    def coin(self) -> bool:
        """Yes or no."""
        return self.random.random() < 0.5

    def size(self) -> int:
        """The size of a dim."""
        return int(self.one_of(SIZES))

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        """A shape whose rank is between least and most."""
        sizes: list[int] = []
        for _ in range(self.number(max(least, min(1, most)), most) if self.number(0, 9) else least):
            sizes.append(self.size() if math.prod(sizes) < 200 else 2)
        return tuple(sizes)

    def axis(self, rank: int) -> int:
        """An axis, counted from either end."""
        if rank == 0:
            raise UnfitError
        return self.number(-rank, rank - 1)

    def axes(self, rank: int, least: int = 1) -> list[int]:
        """Some axes, in any order, counted from either end."""
        if rank < least:
            raise UnfitError
        chosen = self.random.sample(range(rank), self.number(least, rank))
        return [axis - rank if self.coin() else axis for axis in chosen]

    # -- operands -----------------------------------------------------------------------------------------------

    def fresh(
        self,
        shape: Sequence[int],
        dtype: Any = F32,
        low: float = -2.0,
        high: float = 2.0,
        *,
        weight: bool | None = None,
    ) -> Tensor:
        """A new input or weight: quarters between low and high."""
        if math.prod(shape) > MOST_ELEMENTS:
            raise UnfitError
        random = np.random.default_rng(self.number(0, 9999))
        dtype = np.dtype(dtype)
        if dtype.kind == "f":
            array = random.integers(math.ceil(low * 4), math.floor(high * 4), shape, endpoint=True) / 4
        elif dtype.kind == "b":
            array = random.integers(0, 2, shape)
        else:
            low = max(low, np.iinfo(dtype).min)
            array = random.integers(math.ceil(low), math.floor(high), shape, endpoint=True)
        is_weight = self.coin() if weight is None else weight
        return self.given(np.asarray(array).astype(dtype), is_weight)

    def given(self, array: Array, is_weight: bool) -> Tensor:
        """A new input or weight with these numbers."""
        made = Tensor(f"{'w' if is_weight else 'x'}{len(self.tensors)}", array, "weight" if is_weight else "input")
        if is_weight:
            self.weights.append(onnx.numpy_helper.from_array(array, made.name))
        self.tensors.append(made)
        return made

    def const(self, numbers: Any, dtype: Any = I64) -> Tensor:
        """A constant such as `axes`, which no other node reads."""
        array = np.asarray(numbers, dtype)
        made = Tensor(f"c{len(self.weights)}", array, "weight")
        self.weights.append(onnx.numpy_helper.from_array(array, made.name))
        return made

    def tensor(
        self,
        *,
        dtypes: Sequence[Any] = FLOATS,
        least: int = 0,
        most: int = 4,
        low: float = -LARGEST,
        high: float = LARGEST,
        exact: bool = False,
        fits: Callable[[tuple[int, ...]], bool] = lambda shape: True,
    ) -> Tensor:
        """A value that there is, or a new one: its rank from least to most, its numbers from low to high."""

        def suits(found: Tensor) -> bool:
            array = found.array
            if array.dtype not in dtypes or not least <= array.ndim <= most or not fits(found.shape):
                return False
            if exact and not found.is_exact:
                return False
            return not array.size or bool(array.min() >= low and array.max() <= high)

        known = [found for found in self.tensors if suits(found)]
        results = [found for found in known if found.kind == "node"]
        if known and self.number(0, 5):
            return self.one_of((results if results and self.number(0, 3) else known)[::-1])  # type: ignore[no-any-return]
        shape = self.shape(least, most)
        if not fits(shape):
            raise UnfitError
        return self.fresh(shape, self.one_of(dtypes), max(low, -2), min(high, max(2.0, low + 2)))

    def of_shape(self, shape: Sequence[int], dtype: Any = F32, low: float = -LARGEST, high: float = LARGEST) -> Tensor:
        """A value of this shape and dtype that there is, or a new one."""
        known = [
            found
            for found in self.tensors
            if found.shape == tuple(shape)
            and found.dtype == dtype
            and (not found.array.size or (found.array.min() >= low and found.array.max() <= high))
        ]
        if known and self.number(0, 3):
            return self.one_of(known[::-1])  # type: ignore[no-any-return]
        return self.fresh(shape, dtype, max(low, -2), min(high, 2))

    def broadcasting(
        self, shape: Sequence[int], dtype: Any = F32, low: float = -LARGEST, high: float = LARGEST
    ) -> Tensor:
        """A value that broadcasts with `shape`: leading dims left out, some dims of size 1."""
        known = [
            found
            for found in self.tensors
            if found.dtype == dtype
            and all(a in (1, b) or b == 1 for a, b in zip(found.shape[::-1], shape[::-1], strict=False))
            and (not found.array.size or (found.array.min() >= low and found.array.max() <= high))
        ]
        if known and self.number(0, 3):
            return self.one_of(known[::-1])  # type: ignore[no-any-return]
        kept = shape[self.number(0, len(shape)) :] if self.coin() else shape
        sizes = [1 if self.number(0, 3) == 0 else size for size in kept]
        return self.fresh(sizes, dtype, max(low, -2), min(high, 2))

    # -- nodes --------------------------------------------------------------------------------------------------

    def node(self, op: str, operands: Sequence[Tensor | None], results: int = 1, **attributes: Any) -> list[Tensor]:
        """Append a node, computed at once.

        Raises:
            UnfitError: the opset lacks the op, ONNX Runtime does not run it, or its results are too large.
        """
        try:
            schema = onnx.defs.get_schema(op, self.opset, "")
        except onnx.defs.SchemaError:
            raise UnfitError from None
        if schema.deprecated or any(name not in schema.attributes for name in attributes):
            raise UnfitError
        if NOT_EMPTY.search(op) and not all(found.array.size for found in operands if found is not None):
            raise UnfitError
        names = ["" if found is None else found.name for found in operands]
        proto = helper.make_node(op, names, self.new_names(results), **attributes)
        return self.append(proto, [found for found in operands if found is not None])

    def append(self, proto: onnx.NodeProto, reads: Sequence[Tensor], *, is_limited: bool = True) -> list[Tensor]:
        """Compute a node from the tensors that it reads, its bodies included, and append it.

        Raises:
            UnfitError: no engine runs it; or, `is_limited`, its results are too large.
        """
        arrays = self._compute(proto, reads)
        for array in arrays if is_limited else ():
            if array.size > MOST_ELEMENTS:
                raise UnfitError
            if array.dtype.kind == "f" and not (np.isfinite(array).all() and np.abs(array).max(initial=0) <= LARGEST):
                raise UnfitError
        exact = all(found.is_exact for found in reads)
        is_sharp = exact and not proto.domain and proto.op_type in EXACT
        made = [
            Tensor(name, array, "node", is_short(array) and (array.dtype.kind != "f" or is_sharp))
            for name, array in zip(proto.output, arrays, strict=True)
        ]
        self.nodes.append(proto)
        self.tensors.extend(made)
        return made

    def new_names(self, count: int) -> list[str]:
        """Names for the results of the next node."""
        first = sum(len(node.output) for node in self.nodes)
        return [f"v{first + index}" for index in range(count)]

    def _compute(self, proto: onnx.NodeProto, reads: Sequence[Tensor]) -> list[Array]:
        if self.engine == "numpy" and not self._has_kernel(proto):
            raise UnfitError
        inputs = {found.name: found for found in reads}
        infos = [
            helper.make_tensor_value_info(name, onnx_type(found.dtype), found.shape) for name, found in inputs.items()
        ]
        graph = helper.make_graph([proto], "node", infos, [onnx.ValueInfoProto(name=name) for name in proto.output])
        try:
            return run_model(model_of(graph, self.opsets), {name: found.array for name, found in inputs.items()})
        except Exception as error:
            if self.engine == "numpy" and proto.op_type not in ("If", "Loop"):
                return self._by_kernel(proto, inputs)
            self.unrun[f"{operator_of(proto)}: {str(error)[:100]}"] += 1
            raise UnfitError from error

    def _by_kernel(self, proto: onnx.NodeProto, inputs: Mapping[str, Tensor]) -> list[Array]:
        kernel = lookup(proto.domain, proto.op_type, self.opsets[proto.domain])
        assert kernel is not None
        attributes = {found.name: _plain(helper.get_attribute_value(found)) for found in proto.attribute}
        operands = [inputs[name].array if name else None for name in proto.input]
        try:
            return [np.asarray(array) for array in kernel(np, operands, attributes, len(proto.output))]
        except KernelError as error:
            raise UnfitError from error


def _plain(attribute: Any) -> Any:
    """An attribute as kernels take it."""
    if isinstance(attribute, onnx.TensorProto):
        return onnx.numpy_helper.to_array(attribute)
    if isinstance(attribute, list):
        return [_plain(entry) for entry in attribute]
    return attribute.decode() if isinstance(attribute, bytes) else attribute


def operator_of(node: onnx.NodeProto) -> str:
    """The operator with its domain, as irpar's nodes have it."""
    return f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)


def onnx_type(dtype: np.dtype[Any]) -> int:
    """ONNX's number for an element type."""
    return int(helper.np_dtype_to_tensor_dtype(dtype))


def model_of(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> onnx.ModelProto:
    """A model that ONNX Runtime loads."""
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def run_model(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Array]:
    """The outputs of a model in ONNX Runtime, on one thread.

    Raises:
        Exception: it cannot run it.
    """
    if any(entry.domain == "" and entry.version > NEWEST for entry in model.opset_import):
        raise NotImplementedError("ONNX Runtime does not know the operator set yet")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # Copies: ONNX Runtime writes running statistics of BatchNormalization over the ones that it reads.
    given = {name: array.copy() for name, array in inputs.items()}
    return [np.asarray(array) for array in session.run(None, given)]
