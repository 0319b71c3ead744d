"""Small ONNX models of the operators that step times are made of, with numbers to run them on."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from irpar.models.weights import NUMPY_DTYPES

from .cases import SHORT

Array = np.ndarray[Any, Any]
_OPSET = 23
_ELEMENTS = {np.dtype(np.int64): TensorProto.INT64}
FULL, HALF, BRAIN = "float32", "float16", "bfloat16"
_TYPES = {FULL: TensorProto.FLOAT, HALF: TensorProto.FLOAT16, BRAIN: TensorProto.BFLOAT16}
SMALL = 64
"""What sizes are divided by without a GPU."""


@dataclass(frozen=True)
class Operator:
    """One operator, or a chain, on inputs of some shapes.

    Attributes:
        name: as the table calls it.
        nodes: (operator, operands, results, attributes); operands are inputs, or results of earlier nodes.
        inputs: name to shape; token ids are called "ids", and number the rows of "table", or the columns of "scores";
            weights of a few bits are called "packed".
        result: the name of what comes out last.
        dtype: of all floats.
        is_causal: whether half of its products are masked.
        tiny: the same in sizes for development, where attributes name sizes.
    """

    name: str
    nodes: Sequence[tuple[str, Sequence[str], Sequence[str], Mapping[str, Any]]]
    inputs: Mapping[str, tuple[int, ...]]
    dtype: str
    results: tuple[str, ...] = ("y",)
    domain: str = ""
    constants: Mapping[str, float] = field(default_factory=dict)
    is_causal: bool = False
    tiny: "Operator | None" = None

    @property
    def label(self) -> str:
        """With shapes and dtype."""
        shapes = " ".join("x".join(map(str, shape)) for shape in self.inputs.values() if len(shape))
        return f"{self.name} {SHORT[self.dtype]} {shapes}"

    def arrays(self) -> dict[str, Array]:
        """Numbers for the inputs."""
        random = np.random.default_rng(0)
        return {name: self._array(random, name, shape) for name, shape in self.inputs.items()}

    def _array(self, random: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
        if name == "ids":
            count = self.inputs["table"][0] if "table" in self.inputs else self.inputs["scores"][1]
            return random.integers(0, count, shape)
        if name == "packed":
            return random.integers(0, 256, shape, np.uint8)
        numbers = random.standard_normal(shape, np.float32)
        # What is squared sums must not be negative.
        return (np.abs(numbers) if name == "variance" else numbers).astype(NUMPY_DTYPES[self.dtype])

    def model(self) -> onnx.ModelProto:
        """The model."""
        kind = _TYPES[self.dtype]
        others = {"ids": TensorProto.INT64, "packed": TensorProto.UINT8}
        inputs = [
            helper.make_tensor_value_info(name, others.get(name, kind), shape) for name, shape in self.inputs.items()
        ]
        outputs = [helper.make_tensor_value_info(name, kind, None) for name in self.results]
        constants = [
            onnx.numpy_helper.from_array(np.asarray(value, NUMPY_DTYPES[self.dtype]), name)
            for name, value in self.constants.items()
        ]
        nodes = [
            helper.make_node(op, operands, results, domain=self.domain, **attributes)
            for op, operands, results, attributes in self.nodes
        ]
        opsets = [helper.make_opsetid("", _OPSET), *([helper.make_opsetid(self.domain, 1)] if self.domain else [])]
        graph = helper.make_graph(nodes, "operator", inputs, outputs, constants)
        return helper.make_model(graph, ir_version=11, opset_imports=opsets)

    @property
    def masked_flops(self) -> int:
        """FLOPs of products above the diagonal."""
        if not self.is_causal:
            return 0
        batch, heads, seq, head_dim = self.inputs["q"]
        return 4 * batch * heads * head_dim * (seq * (seq - 1) // 2)

    def small(self) -> "Operator":
        """The same in sizes for development."""
        if self.tiny is not None:
            return self.tiny
        inputs = {name: tuple(max(2, size // SMALL) for size in shape) for name, shape in self.inputs.items()}
        return Operator(
            self.name, self.nodes, inputs, self.dtype, self.results, self.domain, self.constants, self.is_causal
        )


def product(dtype: str, m: int, k: int, n: int, *batch: int) -> Operator:
    """A MatMul."""
    return Operator("MatMul", [("MatMul", ("a", "b"), ("y",), {})], {"a": (*batch, m, k), "b": (*batch, k, n)}, dtype)


def operators() -> Iterator[Operator]:
    """All, what tells most first."""
    for dtype in (HALF, FULL, BRAIN):
        yield product(dtype, 4096, 4096, 4096)
    for dtype in (HALF, FULL):
        yield product(dtype, 8192, 768, 3072)
        yield product(dtype, 1024, 768, 768)
        yield product(dtype, 1024, 64, 1024, 96)
        yield product(dtype, 1024, 1024, 64, 96)
    yield product(BRAIN, 1, 4096, 14336)
    yield product(BRAIN, 2048, 4096, 14336)
    for rows in (1, 8, 2048):
        yield _quantized(HALF, rows, 4096, 14336, 32)
    for dtype in (HALF, FULL):
        yield _one("Softmax", dtype, {"x": (96, 1024, 1024)}, axis=-1)
        yield _one("LayerNormalization", dtype, {"x": (8192, 768), "scale": (768,), "bias": (768,)}, axis=-1)
        yield _gelu(dtype)
    yield _one("RMSNormalization", BRAIN, {"x": (8192, 4096), "scale": (4096,)}, axis=-1)
    yield _attention("Attention, causal", HALF, (8, 12, 1024, 64), (8, 12, 1024, 64), is_causal=1)
    yield _attention("Attention, causal", FULL, (8, 12, 1024, 64), (8, 12, 1024, 64), is_causal=1)
    yield _attention("Attention, causal", BRAIN, (1, 32, 2048, 128), (1, 8, 2048, 128), is_causal=1)
    yield _attention("Attention, one query", BRAIN, (1, 32, 1, 128), (1, 8, 2048, 128))
    yield _attention("Attention, one query", BRAIN, (16, 32, 1, 128), (16, 8, 2048, 128))
    tables = {"cos": (1, 2048, 128), "sin": (1, 2048, 128)}
    yield _one("RotaryEmbedding", BRAIN, {"x": (1, 32, 2048, 256), **tables})
    yield _adamw()
    for dtype in (HALF, FULL):
        yield _one("Gather", dtype, {"table": (50257, 768), "ids": (8192,)}, axis=0)
        yield _one("SoftmaxCrossEntropyLoss", dtype, {"scores": (8192, 50257), "ids": (8192,)})
        yield _one("Transpose", dtype, {"x": (8, 1024, 12, 64)}, perm=(0, 2, 1, 3))
        yield _one("Add", dtype, {"x": (8192, 3072), "bias": (3072,)})
        yield _one("ReduceSum", dtype, {"x": (8192, 3072)}, keepdims=0)
    for dtype in (HALF, FULL):
        yield _one("Conv", dtype, {"x": (16, 64, 56, 56), "w": (64, 64, 3, 3)}, pads=(1, 1, 1, 1))
        yield _one("Conv", dtype, {"x": (16, 256, 56, 56), "w": (64, 256, 1, 1)})
        yield _one("Conv", dtype, {"x": (16, 512, 7, 7), "w": (512, 512, 3, 3)}, pads=(1, 1, 1, 1))
    for dtype in (HALF, FULL):
        around = {"pads": (1, 1, 1, 1), "activation": "Relu"}
        yield _last("ConvChannelsLast", dtype, {"x": (16, 56, 56, 64), "w": (64, 3, 3, 64)}, **around)
        yield _last("ConvChannelsLast", dtype, {"x": (16, 7, 7, 512), "w": (512, 3, 3, 512)}, **around)
    windows = {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}
    yield _last("PoolChannelsLast", HALF, {"x": (16, 112, 112, 64)}, mode="max", **windows)
    yield _last("PoolChannelsLast", HALF, {"x": (16, 56, 56, 256)}, mode="average", kernel_shape=(56, 56))
    rows = {"scale": (320,), "bias": (320,)}
    yield _last("GroupNormChannelsLast", HALF, {"x": (8, 64, 64, 320), **rows}, num_groups=5, activation="Silu")


def _one(op: str, dtype: str, inputs: Mapping[str, tuple[int, ...]], **attributes: Any) -> Operator:
    return Operator(op, [(op, tuple(inputs), ("y",), attributes)], inputs, dtype)


def _quantized(dtype: str, rows: int, depth: int, columns: int, block: int) -> Operator:
    """A product with weights of 4 bits."""
    blocks = depth // block
    inputs = {"x": (rows, depth), "packed": (columns, blocks, block // 2), "scales": (columns, blocks)}
    sizes = {"K": depth, "N": columns, "block_size": block, "bits": 4}
    nodes = [("MatMulNBits", tuple(inputs), ("y",), sizes)]
    tiny = None if blocks == 1 else _quantized(dtype, min(rows, 3), block, 8, block)
    return Operator("MatMulNBits", nodes, inputs, dtype, domain="com.microsoft", tiny=tiny)


def _last(op: str, dtype: str, inputs: Mapping[str, tuple[int, ...]], **attributes: Any) -> Operator:
    """One of images with channels last, which engines put in the place of others."""
    return Operator(op, [(op, tuple(inputs), ("y",), attributes)], inputs, dtype, domain="irpar")


def _gelu(dtype: str) -> Operator:
    """The tanh-Gelu, op by op as GPT-2 exports have it."""
    nodes = (
        ("Pow", ("x", "three"), ("cube",), {}),
        ("Mul", ("cube", "cubic"), ("part",), {}),
        ("Add", ("x", "part"), ("inner",), {}),
        ("Mul", ("inner", "scale"), ("scaled",), {}),
        ("Tanh", ("scaled",), ("tanh",), {}),
        ("Mul", ("x", "half"), ("halved",), {}),
        ("Add", ("tanh", "one"), ("shifted",), {}),
        ("Mul", ("halved", "shifted"), ("y",), {}),
    )
    numbers = {"three": 3.0, "cubic": 0.044715, "scale": math.sqrt(2 / math.pi), "half": 0.5, "one": 1.0}
    return Operator("tanh-Gelu in 8 operators", nodes, {"x": (8192, 3072)}, dtype, constants=numbers)


def _attention(name: str, dtype: str, query: tuple[int, ...], key: tuple[int, ...], **attributes: Any) -> Operator:
    nodes = [("Attention", ("q", "k", "v"), ("y",), attributes)]
    return Operator(name, nodes, {"q": query, "k": key, "v": key}, dtype, is_causal="is_causal" in attributes)


def _adamw() -> Operator:
    """The update of one large parameter, as a step of training has it."""
    numbers = {"size": 1e-3, "floor": 1e-8, "first": 0.1, "second": 0.999, "rest": 0.001, "left": 0.99}
    names = ("w", "gradient", "mean", "variance")
    nodes = [("AdamW", (*names, *numbers), ("y", "mean.next", "variance.next"), {})]
    inputs = dict.fromkeys(names, (8192, 4096))
    return Operator("AdamW", nodes, inputs, FULL, ("y", "mean.next", "variance.next"), "irpar", numbers)
