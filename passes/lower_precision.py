"""lower-precision: matmuls and convolutions in bfloat16 or float16, with casts around what needs float32."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from irpar.ir import Builder, DType, Graph, Module, Node, Tensor, TensorType, Value, captured_or_read, tensor_type
from irpar.ops.effects import has_fixed_dtype, schema_of
from irpar.pass_manager import Pass, PassResult

Array = np.ndarray[Any, Any]

_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention"})
"""What computes in the narrow dtype, whatever its operands are."""
_WIDE = frozenset(
    name
    for line in (
        "Softmax LogSoftmax Softplus SoftmaxCrossEntropyLoss NegativeLogLikelihoodLoss Exp Log Pow Sqrt Reciprocal",
        "Erf Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Range CumSum CumProd LRN LSTM GRU RNN",
        "LayerNormalization RMSNormalization BatchNormalization InstanceNormalization GroupNormalization",
        "LpNormalization MeanVarianceNormalization ReduceMean ReduceSum ReduceSumSquare ReduceL1 ReduceL2",
        "ReduceLogSum ReduceLogSumExp ReduceProd GlobalAveragePool AveragePool LpPool GlobalLpPool Det Inverse DFT",
        "STFT QuantizeLinear DequantizeLinear",
    )
    for name in line.split()
)
"""What computes in float32, as sums and powers do not fit the narrow dtypes."""
_DTYPES = {"bf16": DType.BF16, "fp16": DType.F16}
_LOWEST = {DType.F16: 65504.0}


class NarrowedTensor(Tensor):
    """A float32 tensor in a narrower dtype; numbers beyond its ends become those.

    Attributes:
        wide: the float32 numbers.
    """

    __slots__ = ("wide",)

    def __init__(self, wide: Tensor, dtype: DType) -> None:
        super().__init__(dtype, wide.shape)
        self.wide = wide

    @property
    def bases(self) -> tuple[Tensor, ...]:
        """See `Tensor.bases`."""
        return self.wide.bases

    def numpy(self) -> Array:
        """See `Tensor.numpy`."""
        numbers = self.wide.numpy()
        most = _LOWEST.get(self.dtype)
        if most is not None:
            # A mask of -3.4e38 stays a number, whose differences are numbers.
            numbers = np.where(np.isfinite(numbers), np.clip(numbers, -most, most), numbers)
        made = numbers.astype(self.dtype.numpy)
        made.flags.writeable = False
        return made


@dataclass(frozen=True)
class LowerPrecision(Pass):
    """Compute products in a narrow dtype, as automatic mixed precision does (Micikevicius et al., 2018).

    Before: global view, types are inferred, no function is called. After: matmuls, convolutions and attention take and
    give the narrow dtype; sums, powers, exponentials and normalisations float32; what is between takes the wider one of
    what goes in. The initializers that are named are of the narrow dtype. Inputs, results and bodies stay as they were.

    Attributes:
        dtype: bf16 or fp16.
        parameters: names of initializers that become narrow.
    """

    name = "lower-precision"
    dtype: Literal["bf16", "fp16"] = "bf16"
    parameters: tuple[str, ...] = ()

    def run(self, module: Module) -> PassResult:
        """Change the main graph."""
        narrow = _DTYPES[self.dtype]
        graph = module.graph
        wanted = set(self.parameters)
        for value in tuple(graph.constants):
            if value.source_name in wanted and value.dtype is DType.F32:
                assert value.data is not None
                value.data = NarrowedTensor(value.data, narrow)
                value.type = TensorType(narrow, value.tensor_type.shape)
        for value in graph.inputs:
            if value.source_name in wanted and _is(value, DType.F32):
                value.type = TensorType(narrow, value.tensor_type.shape)
        work = _Lowering(graph, module, narrow)
        for node in tuple(graph):
            work.node(node)
        work.results()
        return PassResult(work.count > 0, (), {"narrow": work.count, "casts": work.casts})


class _Lowering:
    """Decides what each node of a graph computes in, in order."""

    def __init__(self, graph: Graph, module: Module, narrow: DType) -> None:
        self.graph = graph
        self.opsets = module.opsets
        self.narrow = narrow
        self.made: dict[tuple[Value, DType], Value] = {}
        self.count = self.casts = 0
        self.before = list(zip(graph.outputs, (value.type for value in graph.outputs), strict=True))

    def node(self, node: Node) -> None:
        """Cast what goes in, and say what comes out."""
        if any(True for _ in node.nested_graphs()):
            self._keep(node)
            return
        operands = list(self._floats(node))
        values = [node.operands[index] for index in operands]
        moving = [value for value in values if value is not None and not value.is_constant]
        is_narrow = node.op_type in _PRODUCTS or (
            bool(values)
            and node.op_type not in _WIDE
            and all(_is(value, self.narrow) for value in moving)
            and (bool(moving) or any(value is not None and _is(value, self.narrow) for value in values))
        )
        if node.domain or node.op_type == "Cast" or (is_narrow and not self._takes(node, 0)):
            is_narrow = False
        if node.op_type == "Cast":
            return
        dtype = self.narrow if is_narrow else DType.F32
        for index in operands:
            value = node.operands[index]
            assert value is not None
            if value.dtype is not dtype:
                node.set_operand(index, self.cast(value, dtype, node))
        if is_narrow:
            self.count += 1
            for index, value in enumerate(node.results):
                if _is(value, DType.F32) and self._follows(node, index):
                    value.type = TensorType(self.narrow, value.tensor_type.shape)

    def results(self) -> None:
        """Let the graph's results have the types that they had."""
        made = []
        for value, type_ in self.before:
            wanted = tensor_type(type_)
            if wanted is not None and wanted.dtype is DType.F32 and _is(value, self.narrow):
                value = self.cast(value, DType.F32, None)
            made.append(value)
        self.graph.set_outputs(made, self.graph.output_names)

    def cast(self, value: Value, dtype: DType, before: Node | None) -> Value:
        """The value in another dtype, made once."""
        key = value, dtype
        if key not in self.made:
            if value.is_constant and dtype is self.narrow:
                assert value.data is not None
                self.made[key] = self.graph.add_constant(NarrowedTensor(value.data, dtype), value.name)
            else:
                builder = Builder(self.graph, self.opsets, before=before, like=before)
                self.made[key] = builder.op(
                    "Cast", [value], {"to": dtype.value}, type=TensorType(dtype, value.tensor_type.shape)
                )
                # What is chosen by scope, to be computed again, is to keep the narrower of what it reads.
                if dtype is self.narrow and value.node is not None:
                    builder.made[0].scope = value.node.scope
                self.made[key].rename(f"{value.name}.{dtype.text}")
                self.casts += 1
        return self.made[key]

    def _keep(self, node: Node) -> None:
        """A node with bodies reads what it read: narrow values are cast for it and for what is in them."""
        for value in dict.fromkeys(captured_or_read(node)):
            if _is(value, self.narrow):
                wide = self.cast(value, DType.F32, node)
                for user, index in tuple(value.uses):
                    if user is node or _is_inside(user, node):
                        user.set_operand(index, wide)

    def _floats(self, node: Node) -> Iterator[int]:
        """The operands whose dtype is the node's to choose; scales of a Resize and what has to be wide are none."""
        for index, value in enumerate(node.operands):
            if value is None or has_fixed_dtype(node, index):
                continue
            if _is(value, self.narrow) or (_is(value, DType.F32) and self._takes(node, index)):
                yield index

    def _takes(self, node: Node, index: int) -> bool:
        """Whether an operand may be narrow."""
        schema = schema_of(node.domain, node.op_type, node.version)
        if schema is None or not schema.inputs:
            return False
        name = "tensor(bfloat16)" if self.narrow is DType.BF16 else "tensor(float16)"
        return name in schema.inputs[min(index, len(schema.inputs) - 1)].types

    def _follows(self, node: Node, index: int) -> bool:
        """Whether a result has the dtype of the operands."""
        schema = schema_of(node.domain, node.op_type, node.version)
        if schema is None or not schema.outputs:
            return True
        formal = schema.outputs[min(index, len(schema.outputs) - 1)]
        return formal.type_str in {each.type_str for each in schema.inputs}


def _is(value: Value, dtype: DType) -> bool:
    found = tensor_type(value.type)
    return found is not None and found.dtype is dtype


def _is_inside(user: Node, node: Node) -> bool:
    """Whether a node stands in a body of another."""
    return any(user.graph is graph for body in node.nested_graphs() for graph in body.graphs())
