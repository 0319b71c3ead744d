"""Random modules for round-trip tests: every fact of the IR may occur, whether or not the program makes sense."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from irpar.ir import (
    UNKNOWN,
    Annotation,
    ArrayTensor,
    DType,
    ExternalTensor,
    Floats,
    Function,
    Graph,
    Graphs,
    InflightType,
    Ints,
    Module,
    Node,
    OptionalType,
    RefAttribute,
    SequenceType,
    SlicedTensor,
    Strings,
    Tensor,
    Tensors,
    TensorType,
    Type,
    Types,
    Value,
    symbol,
)
from irpar.ir.dims import ceildiv, floordiv, maximum, modulo
from irpar.ir.tensor import unpack
from irpar.sharding import REDUCTIONS, Axis, DimSharding, Mesh, Sharding

Draw = Callable[[st.SearchStrategy[Any]], Any]

texts = st.one_of(
    st.sampled_from(["x", "y", "from", "h.0/w:0", "onnx::Add_1", "a b", "//", "_", "", "é\n"]), st.text(max_size=4)
)
names = texts.filter(bool)
maybe_text = st.none() | texts
metadata = st.none() | st.dictionaries(texts, texts, min_size=1, max_size=2)
integers = st.integers(-(2**63), 2**63 - 1)
floats = st.floats()

MESHES = (
    Mesh({"dp": 2, "tp": 8}),
    Mesh({"x": 4}, (3, 2, 1, 0), "other mesh"),
    Mesh({}, name="none"),
)
_SPLITS: dict[str, tuple[tuple[Axis, ...], ...]] = {
    "dp": ((Axis("dp"),),),
    "tp": ((Axis("tp"),), (Axis("tp", 1, 2), Axis("tp", 2, 4)), (Axis("tp", 4, 2), Axis("tp", 2, 2))),
    "x": ((Axis("x"),), (Axis("x", 1, 2), Axis("x", 2, 2))),
}


@st.composite
def dims(draw: Draw) -> Any:
    kind = draw(st.integers(0, 3))
    if kind < 2:
        return draw(st.integers(0, 9)) if kind else None
    a = symbol(draw(st.sampled_from(["batch", "s.0", "a b", "", "it's", "_", "max", "a@b]", "\n"])))
    b = symbol(draw(st.sampled_from(["seq", "batch"])))
    number = draw(st.integers(-3, 3))
    made = (a * b + number, a * number + b, ceildiv(a + 1, b), floordiv(a, 2), modulo(b, 3) + maximum(a, number), a)
    return draw(st.sampled_from(made))


@st.composite
def tensor_types(draw: Draw) -> TensorType:
    shape = draw(st.none() | st.lists(dims(), max_size=3))
    return TensorType(draw(st.sampled_from(DType)), None if shape is None else tuple(shape))


types: st.SearchStrategy[Type] = st.recursive(
    tensor_types() | st.just(UNKNOWN),
    lambda inner: st.builds(SequenceType, inner) | st.builds(OptionalType, inner) | st.builds(InflightType, inner),
    max_leaves=3,
)


@st.composite
def shardings(draw: Draw, rank: int, meshes: tuple[Mesh, ...]) -> Sharding:
    mesh = draw(st.sampled_from(meshes))
    places: list[list[Axis]] = [[] for _ in range(rank + 1)]
    for name in mesh.axes:
        for axis in draw(st.sampled_from(_SPLITS[name])):
            if draw(st.booleans()):
                places[draw(st.integers(0, rank))].append(axis)
    dims_ = tuple(
        DimSharding(tuple(axes), draw(st.booleans()), draw(st.sampled_from((0, 0, 0, 1, 12)))) for axes in places[:rank]
    )
    return Sharding(mesh, dims_, tuple(places[rank]), draw(st.sampled_from(REDUCTIONS)))


@st.composite
def tensors(draw: Draw) -> Tensor:
    kind = draw(st.integers(0, 9))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    dtype = draw(st.sampled_from(DType))
    count = int(np.prod(shape))
    if dtype is DType.STR:
        items = draw(st.lists(st.text(max_size=3) | st.binary(max_size=3), min_size=count, max_size=count))
        array = np.empty(count, object)
        array[:] = items
        return ArrayTensor(array.reshape(shape), dtype)
    if kind == 0:
        file = draw(st.sampled_from(["w.bin", "#1", "a/ü.bin"]))
        path = draw(st.sampled_from([Path("/one"), Path("/two")])) / file
        return ExternalTensor(dtype, shape, path, file, draw(st.integers(0, 9)), dtype.nbytes(count))
    data = draw(st.binary(min_size=dtype.nbytes(count), max_size=dtype.nbytes(count)))
    if dtype is DType.BOOL:
        data = bytes(byte & 1 for byte in data)
    whole = ArrayTensor(unpack(data, dtype, shape), dtype)
    if kind > 1:
        return whole
    return SlicedTensor(whole, tuple((draw(st.integers(0, size)), size) for size in shape))


class _Maker:
    """Makes one module; `draw` decides everything."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.module = Module()
        self.module.graphs = []
        self.meshes = tuple(MESHES[: draw(st.integers(0, 3))])
        self.module.meshes = {mesh.name: mesh for mesh in self.meshes}
        self.module.opsets = draw(st.dictionaries(st.sampled_from(["", "com.microsoft", "a b"]), st.integers(0, 30)))

    def make(self) -> Module:
        draw, module = self.draw, self.module
        module.ir_version = draw(st.integers(3, 13))
        module.network = draw(st.sampled_from(["bytes", "a100-pcie", '{"links":[]}']))
        module.producer = (draw(texts), draw(texts))
        module.doc = draw(texts)
        module.metadata = draw(metadata) or {}
        module.fixed = draw(st.dictionaries(texts, tensors(), max_size=2))
        spec = st.lists(st.none() | texts | st.lists(texts, max_size=2), max_size=3).map(tuple)
        module.annotations = draw(st.lists(st.builds(Annotation, texts, spec, texts), max_size=2))
        for key in draw(st.lists(st.tuples(texts, names, texts), max_size=2, unique=True)):
            domain, name, overload = key
            module.functions[key] = Function(domain, name, Graph(draw(texts)), overload=overload)
        for function in module.functions.values():
            function.attributes = draw(st.dictionaries(names, st.none() | self.attributes(), max_size=2))
            function.opsets = draw(st.dictionaries(texts, st.integers(0, 30), max_size=2))
            function.doc, function.metadata = draw(texts), draw(metadata)
            self.fill(function.graph, [], 2)
        for _ in range(draw(st.integers(1, 2))):
            module.graphs.append(Graph(draw(texts)))
            self.fill(module.graphs[-1], [], 4)
        return module

    def attributes(self) -> st.SearchStrategy[Any]:
        plain_types = tensor_types() | st.builds(SequenceType, tensor_types())
        return st.one_of(
            integers,
            floats,
            texts,
            st.binary(max_size=3),
            tensors(),
            plain_types,
            st.builds(RefAttribute, texts, st.integers(0, 20)),
            st.lists(integers, max_size=3).map(Ints),
            st.lists(floats, max_size=3).map(Floats),
            st.lists(texts | st.binary(max_size=2), max_size=3).map(Strings),
            st.lists(tensors(), max_size=2).map(Tensors),
            st.lists(plain_types, max_size=2).map(Types),
            st.just(Graphs()),
        )

    def value(self, value: Value) -> Value:
        draw = self.draw
        value.source = draw(maybe_text | st.just(value.name))
        value.memory = draw(st.sampled_from(["device", "device", "host", "disk"]))
        value.doc, value.metadata = draw(texts), draw(metadata)
        if draw(st.integers(0, 3)) == 0:
            value.global_shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        if self.meshes and draw(st.booleans()):
            tensor = value.type
            while isinstance(tensor, (SequenceType, OptionalType, InflightType)):
                tensor = tensor.elem
            rank = tensor.rank if isinstance(tensor, TensorType) and draw(st.integers(0, 4)) else None
            value.sharding = draw(shardings(draw(st.integers(0, 3)) if rank is None else rank, self.meshes))
        return value

    def fill(self, graph: Graph, visible: list[Value], budget: int) -> None:
        draw = self.draw
        visible = list(visible)
        graph.view = draw(st.sampled_from(["global", "local"]))
        graph.ranks = tuple(draw(st.lists(st.integers(0, 9), max_size=2)))
        graph.doc, graph.metadata = draw(texts), draw(metadata)
        for _ in range(draw(st.integers(0, 2))):
            visible.append(self.value(graph.add_input(draw(texts), draw(types))))
        for _ in range(draw(st.integers(0, 2))):
            data = draw(tensors())
            made = graph.add_constant(data, draw(texts))
            made.type = draw(st.sampled_from([made.type, made.type, TensorType(data.dtype, (3,)), UNKNOWN]))
            visible.append(self.value(made))
            if draw(st.booleans()):
                made.global_shape = data.shape
        for _ in range(draw(st.integers(0, budget))):
            visible.extend(graph.append(self.node(graph, visible, budget)).results)
        for value in visible:
            # Sources that agree with the names that the values have in the end are the usual case.
            if value.node is not None and draw(st.booleans()):
                value.source = value.name
        outputs = draw(st.lists(st.sampled_from(visible), max_size=3)) if visible else []
        graph.set_outputs(
            outputs, draw(st.just([value.name for value in outputs]) | st.just([draw(texts) for _ in outputs]))
        )

    def node(self, graph: Graph, visible: list[Value], budget: int) -> Node:
        draw = self.draw
        operands = draw(st.lists(st.none() | st.sampled_from(visible), max_size=3)) if visible else []
        results = [Value(draw(texts), draw(types)) for _ in range(draw(st.integers(0, 3)))]
        functions = list(self.module.functions.values())
        if functions and draw(st.integers(0, 3)) == 0:
            callee = draw(st.sampled_from(functions))
            node: Node = callee.call(operands, results=results)
        else:
            domain = draw(st.sampled_from(["", "", "irpar", "com.microsoft"]) | texts)
            node = Node(draw(names), operands, domain=domain, results=results)
        node.version = draw(st.sampled_from([0, 1, 13, self.module.opsets.get(node.domain, 1)]))
        node.attributes = draw(st.dictionaries(names, self.attributes(), max_size=2))
        for value in results:
            self.value(value)
        node.source, node.scope = draw(maybe_text), draw(maybe_text)
        node.name = draw(st.sampled_from([node.source or "", ""]) | texts)
        node.phase = draw(st.sampled_from([None, "forward", "backward", "optimizer"]))
        node.stage = draw(st.none() | st.integers(-1, 3))
        node.place = draw(st.sampled_from([None, "device", "host"]))
        node.doc, node.metadata = draw(texts), draw(metadata)
        if budget > 1 and draw(st.integers(0, 3)) == 0:
            bodies = [Graph(draw(texts), names=graph.names) for _ in range(draw(st.integers(1, 2)))]
            for body in bodies:
                self.fill(body, visible, budget // 2)
            node.set_attribute("bodies", Graphs(bodies) if draw(st.booleans()) else bodies[0])
        return node


@st.composite
def modules(draw: Draw) -> Module:
    """A module that prints and parses; the verifier would refuse most of them."""
    return _Maker(draw).make()
