"""A small graph builder over `onnx.helper` that names nodes, values and weights by scope.

with b.scope("h.0", "attn", "q"):
    w = b.weight("weight", (64, 64), std=0.1)     # h.0.attn.q.weight
    y = b.op("MatMul", x, w)                      # node /h.0/attn/q/MatMul, value /h.0/attn/q/MatMul_output_0
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import helper, numpy_helper

from .config import ModelConfig, lowest_ir_version
from .weights import NUMPY_DTYPES, ONNX_DTYPES, WeightStore

Dim = int | str
"""A dim while building: a known size, or the name of an int64 scalar value computed in the graph."""

Typed = tuple[str, int, Sequence[int | str]]
"""Name, ONNX element type and shape of a value; a str in the shape is a symbolic dim."""


class GraphBuilder:
    """Collects nodes, initializers, inputs and outputs of one graph.

    Operands and results are value names. Nothing is checked here: the model families know their shapes, and their
    tests run the ONNX checker with full shape inference over what they build.
    """

    def __init__(self, name: str, config: ModelConfig, weights: WeightStore) -> None:
        self.name = name
        self.config = config
        self.weights = weights
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._scope: tuple[str, ...] = ()
        self._taken: Counter[str] = Counter()  # how often a name was asked for
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    @contextmanager
    def scope(self, *names: str) -> Iterator[None]:
        """Name everything made inside by the current scope extended with `names`."""
        outer = self._scope
        self._scope = (*outer, *names)
        try:
            yield
        finally:
            self._scope = outer

    def input(self, name: str, elem_type: int, shape: Sequence[int | str]) -> str:
        """Add a graph input; a str in `shape` is a symbolic dim."""
        self._inputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))
        return name

    def output(self, name: str, value: str, elem_type: int, shape: Sequence[int | str]) -> None:
        """Make `value` the graph output `name`: whatever writes or reads it does so under that name from now on."""
        for node in self._nodes:
            for names in (node.input, node.output):
                for i, operand in enumerate(names):
                    if operand == value:
                        names[i] = name
        self._outputs.append(helper.make_tensor_value_info(name, elem_type, list(shape)))

    def weight(self, name: str, shape: Sequence[int], *, mean: float = 0.0, std: float) -> str:
        """Add a weight of normally distributed values in the model's dtype, named by scope; returns its name."""
        full_name = ".".join((*self._scope, name))
        self._initializers.append(self.weights.tensor(full_name, shape, self.config.dtype, mean, std))
        return full_name

    def constant(self, hint: str, value: ArrayLike) -> str:
        """Add a constant; equal ones are shared. An int becomes int64, a float the model's dtype, an array stays."""
        array = value if isinstance(value, np.ndarray) else self._typed(value)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._unique(f"constants.{hint}")
            self._initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    def _typed(self, value: ArrayLike) -> NDArray[np.generic]:
        array = np.asarray(value)
        return array.astype(np.int64 if array.dtype.kind == "i" else NUMPY_DTYPES[self.config.dtype])

    def op(self, op_type: str, *operands: str, **attributes: object) -> str:
        """Add a node with one result; returns the result's name."""
        return self.ops(op_type, 1, *operands, **attributes)[0]

    def ops(self, op_type: str, results: int, *operands: str, **attributes: object) -> list[str]:
        """Add a node with several results; returns their names."""
        name = self._unique("/" + "/".join((*self._scope, op_type)))
        outputs = [f"{name}_output_{i}" for i in range(results)]
        self._nodes.append(helper.make_node(op_type, operands, outputs, name=name, **attributes))
        return outputs

    def body(
        self, name: str, inputs: Sequence[Typed], build: Callable[..., Sequence[str]], outputs: Sequence[Typed]
    ) -> onnx.GraphProto:
        """Return a graph for an attribute of If, Loop or Scan.

        Args:
            name: of the graph.
            inputs: what the operator gives to the body; the names are made unique.
            build: called with the names of the inputs; adds nodes, which may read any value outside, and returns what
                the body gives: values that its own nodes make.
            outputs: types of these; their names do not count.
        """
        taken = [(self._unique(f"{name}.{value}"), elem_type, shape) for value, elem_type, shape in inputs]
        outside, self._nodes = self._nodes, []
        try:
            made = build(*(value for value, _, _ in taken))
            nodes = self._nodes
        finally:
            self._nodes = outside
        given = [(value, elem_type, shape) for value, (_, elem_type, shape) in zip(made, outputs, strict=True)]
        types = ([helper.make_tensor_value_info(*typed) for typed in side] for side in (taken, given))
        return helper.make_graph(nodes, name, *types)

    def size(self, value: str, axis: int) -> Dim:
        """Return the size of a dim at run time, as an exporter writes it: Shape, then Gather with a scalar index."""
        return self.op("Gather", self.op("Shape", value), self.constant("index", axis), axis=0)

    def shape(self, dims: Sequence[Dim]) -> str:
        """Return an int64 vector of `dims`: a constant if all are known, else a Concat of computed and known ones."""
        if all(isinstance(dim, int) for dim in dims):
            return self.constant("shape", np.array(dims, np.int64))
        zero = self.constant("axes", np.array([0], np.int64))
        parts = [
            self.constant("dim", np.array([dim], np.int64)) if isinstance(dim, int) else self.op("Unsqueeze", dim, zero)
            for dim in dims
        ]
        return self.op("Concat", *parts, axis=0)

    def reshape(self, value: str, dims: Sequence[Dim]) -> str:
        """Reshape `value` to `dims`."""
        return self.op("Reshape", value, self.shape(dims))

    def unsqueeze(self, value: str, *axes: int) -> str:
        """Insert dims of size 1 at `axes` of the result."""
        return self.op("Unsqueeze", value, self.constant("axes", np.array(axes, np.int64)))

    def _unique(self, name: str) -> str:
        """Return `name`, or `name_1`, `name_2`, ... the second, third, ... time it is asked for."""
        taken = self._taken[name]
        self._taken[name] += 1
        return f"{name}_{taken}" if taken else name

    @property
    def elem_type(self) -> int:
        """The ONNX element type of weights and activations."""
        return ONNX_DTYPES[self.config.dtype]

    def model(self, metadata: Mapping[str, str]) -> onnx.ModelProto:
        """Return the finished model; `metadata` goes to its metadata_props."""
        graph = helper.make_graph(self._nodes, self.name, self._inputs, self._outputs, self._initializers)
        opset = helper.make_opsetid("", self.config.opset)
        ir_version = self.config.ir_version or lowest_ir_version(self.config.opset)
        model = helper.make_model(graph, opset_imports=[opset], ir_version=ir_version, producer_name="irpar.models")
        helper.set_model_props(model, dict(metadata))
        return model
