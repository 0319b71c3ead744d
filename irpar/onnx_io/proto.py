"""IR to ModelProto: one graph of a module, with the functions that it calls."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, defs

from irpar.ir import (
    DOMAIN,
    IRPAR_OPSET,
    UNKNOWN,
    DType,
    Function,
    Graph,
    InflightType,
    Ints,
    Module,
    Node,
    OptionalType,
    SequenceType,
    Strings,
    Tensor,
    TensorType,
    Type,
    Value,
    clone_module,
)
from irpar.ir.collector import collector_off
from irpar.ops.updates import hold_such, write_out, write_out_functions

from .attributes import write_attribute
from .errors import OnnxError
from .facts import QUANTIZATION, beginnings, model_facts, node_facts, node_origin, source_fact, state_facts, value_facts
from .quantization import write_quantization
from .tensors import write_tensor
from .types import write_type
from .versions import MAX_PROTOBUF, ir_version

Beginning = Callable[[Tensor, TensorProto], None]
"""Fills the TensorProto of what a state begins with; its name is set after that."""
Constant = Callable[[Value], TensorProto]
"""Gives the TensorProto of a constant: its numbers, or where they lie. Name, doc and metadata are added to it."""

_FALLBACK_OPSET = 21
_PLAIN = frozenset({int, str, bytes, Ints, Strings})
"""Attributes of these types that are equal are written alike; of floats, 0.0 and -0.0 are not."""


class Output(NamedTuple):
    """One result of a graph: the value, its name outside, and whether it takes an Identity to give it that name."""

    value: Value
    name: str
    is_copy: bool


def to_proto(
    module: Module, graph: Graph | None = None, *, constant: Constant | None = None, state: Beginning | None = None
) -> onnx.ModelProto:
    """A module as an ONNX model.

    What state begins with is the default of its input, in a model of its own.

    Args:
        module: the module.
        graph: which of its graphs; its first by default.
        constant: gives the tensors of constants (function bodies excepted); by default all numbers go into the model.
        state: fills the tensors of what state begins with, zeros included; None: those that are no zeros go into the
            model where all numbers do, else none.

    Raises:
        OnnxError: the module has no form in ONNX: names that clash, constants that are not cut to their local type, or
            more than 2 GB of numbers.
        TensorError: the bytes of a constant cannot be read.
    """
    graph = module.graph if graph is None else graph
    if constant is None:
        _refuse_large(graph)
    with collector_off():
        if hold_such((graph, *(function.graph for function in module.functions.values()))):
            place, whole = module.graphs.index(graph), graph
            module = clone_module(module)
            graph = module.graphs[place]
            if constant is not None:
                constant = _of_copies(constant, whole, graph)
            write_out(graph, module.opsets)
            write_out_functions(module)
        return _to_proto(module, graph, constant, state)


def _of_copies(constant: Constant, graph: Graph, copy: Graph) -> Constant:
    """What gives the tensors of a graph's constants, for a copy of the graph."""
    pairs = zip(copy.graphs(), graph.graphs(), strict=True)
    known = {
        made: value for after, before in pairs for made, value in zip(after.constants, before.constants, strict=True)
    }
    return lambda value: constant(known.get(value, value))


def _to_proto(module: Module, graph: Graph, constant: Constant | None, state: Beginning | None) -> onnx.ModelProto:
    writer = ModelWriter(module, constant or embedded)
    model = onnx.ModelProto()
    writer.graph(graph, model.graph)
    for function in module.functions.values():
        body = FunctionWriter(module, writer.dtypes)
        body.function(function, model.functions.add())
        writer.has_metadata = writer.has_metadata or body.has_metadata or bool(function.overload)
    model.producer_name, model.producer_version = module.producer
    model.doc_string = module.doc
    set_metadata(model, module.metadata | model_facts(module, graph) | state_facts(graph))
    if constant is None or state is not None:
        for value, data in beginnings(graph, zeros=state is not None).items():
            proto = model.graph.initializer.add()
            (state or write_tensor)(data, proto)
            proto.name = writer.name(value)
    opsets = _opsets(module, graph)
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version)
    model.ir_version = ir_version(
        module.ir_version,
        opsets,
        writer.dtypes,
        functions=bool(module.functions),
        metadata=writer.has_metadata,
    )
    return model


def embedded(value: Value) -> TensorProto:
    """The TensorProto of a constant with all its numbers.

    Raises:
        OnnxError: the constant holds the whole tensor of a local value, which only a part can cut.
    """
    assert value.data is not None
    type_ = value.type
    if isinstance(type_, TensorType) and type_.is_static and type_.shape != value.data.shape:
        raise OnnxError(
            f"the constant holds the full tensor {value.data.type}, its block is {type_}",
            where=f"value {value.name}",
            do="write the module as parts (irpar partition), or pass constant= to to_proto",
        )
    proto = TensorProto()
    write_tensor(value.data, proto)
    return proto


def _refuse_large(graph: Graph) -> None:
    total = sum(value.data.nbytes for inner in graph.graphs() for value in inner.constants if value.data is not None)
    if total > MAX_PROTOBUF:
        raise OnnxError(
            f"the constants take {total} bytes; a protobuf holds at most 2 GB",
            do="write the model with irpar.onnx_io.save, or pass constant= to to_proto",
        )


def _opsets(module: Module, graph: Graph) -> dict[str, int]:
    opsets = dict(module.opsets)
    for inner in graph.graphs():
        for node in inner:
            if node.domain not in opsets:
                opsets[node.domain] = IRPAR_OPSET if node.domain == DOMAIN else max(node.version, 1)
    for function in module.functions.values():
        opsets.setdefault(function.domain, 1)
        for domain, version in function.opsets.items():
            opsets.setdefault(domain, version)
    opsets.setdefault("", _FALLBACK_OPSET)
    return opsets


def set_metadata(proto: Any, metadata: Mapping[str, str] | None) -> None:
    """Append metadata_props."""
    for key, text in (metadata or {}).items():
        proto.metadata_props.add(key=key, value=text)


def replace_metadata(proto: Any, metadata: Mapping[str, str]) -> None:
    """Set metadata_props, in place of those of the same key."""
    kept = {entry.key: entry.value for entry in proto.metadata_props}
    del proto.metadata_props[:]
    set_metadata(proto, {**kept, **metadata})


def replace_data(proto: TensorProto, other: TensorProto) -> None:
    """Let a tensor hold the numbers of another, or lie where that lies; it keeps its name, doc and metadata."""
    assert (proto.data_type, proto.dims) == (other.data_type, other.dims), proto.name
    made = TensorProto()
    made.CopyFrom(other)
    made.name = proto.name
    if proto.doc_string:
        made.doc_string = proto.doc_string
    made.metadata_props.extend(proto.metadata_props)
    proto.CopyFrom(made)


class ModelWriter:
    """Writes a graph and the graphs nested in it.

    Attributes:
        dtypes: all element types that it met.
        has_metadata: whether it wrote any metadata_props below the model.
    """

    def __init__(self, module: Module, constant: Constant, dtypes: set[DType] | None = None) -> None:
        self.module = module
        self.constant = constant
        self.dtypes: set[DType] = set() if dtypes is None else dtypes
        self.has_metadata = False
        self._renamed: dict[Value, str] = {}
        self._added: set[str] = set()
        self._types: dict[Type, onnx.TypeProto] = {}
        # A copy of what was made before takes a third of the time of making it: nodes and values alike but for names.
        self._nodes: dict[Hashable, onnx.NodeProto] = {}
        self._infos: dict[Hashable, onnx.ValueInfoProto] = {}

    def name(self, value: Value | None) -> str:
        """What the model calls a value; "" for a left-out operand."""
        return "" if value is None else self._renamed.get(value, value.name)

    def names(self, values: Iterable[Value | None]) -> list[str]:
        """The name of each value."""
        renamed = self._renamed
        return ["" if value is None else renamed.get(value, value.name) for value in values]

    def graph(self, graph: Graph, proto: onnx.GraphProto) -> None:
        """Fill a GraphProto."""
        proto.name = graph.name or "main"
        proto.doc_string = graph.doc
        self.metadata(proto, graph.metadata)
        names = graph.output_names if graph.parent is None else self.names(graph.outputs)
        outputs = self.bind_outputs(graph, names)
        for value in graph.inputs:
            self.value_info(value, proto.input.add())
        for value in graph.constants:
            self._initializer(value, proto)
        bound = {output.value for output in outputs if not output.is_copy}
        self.nodes(graph, proto.node, bound, proto.value_info)
        self._outputs(outputs, proto)
        if any(value.metadata and QUANTIZATION in value.metadata for value in graph.values()):
            write_quantization(graph.values(), proto, graph.names.table, self.name)

    def metadata(self, proto: Any, metadata: Mapping[str, str] | None) -> None:
        """Append metadata_props below the model."""
        if metadata:
            self.has_metadata = True
            set_metadata(proto, metadata)

    # -- results ---------------------------------------------------------------------------------------------------

    def bind_outputs(self, graph: Graph, names: Sequence[str]) -> list[Output]:
        """Give the returned values the names that the graph returns them by.

        Inputs, constants, captured values, and values returned before under another name need a copy instead.

        Raises:
            OnnxError: a result has the name of an input or of another result.
        """
        self._added.update(names)
        outputs: list[Output] = []
        holders: dict[str, Value | None] = {}
        bound: set[Value] = set()
        nested = graph.parent is not None
        for value, name in zip(graph.outputs, names, strict=True):
            is_result = value.node is not None and value.owner is graph
            if not nested and name in holders:
                raise OnnxError(f'two results have the name "{name}"', do="return each value under a name of its own")
            if is_result and value not in bound:
                self._renamed[value] = name
                bound.add(value)
            elif nested or value.owner is not graph or self.name(value) != name:
                name = self._fresh(graph, f"{name}_out") if nested else name
                outputs.append(Output(value, name, is_copy=True))
                holders[name] = None
                continue
            outputs.append(Output(value, name, is_copy=False))
            holders[name] = value
        for name, holder in holders.items():
            self._free(graph, name, holder)
        return outputs

    def _free(self, graph: Graph, name: str, holder: Value | None) -> None:
        """Rename what else is called as a result of the graph is."""
        other = graph.names.table.get(name)
        if other is None or other is holder or self.name(other) != name:
            return
        if other.is_input and other.owner is graph:
            raise OnnxError(
                f'"{name}" is the name of both an input and a result', do="rename one of the two in the source model"
            )
        self._renamed[other] = self._fresh(graph, name)

    def _fresh(self, graph: Graph, hint: str) -> str:
        name = graph.names.fresh(hint)
        while name in self._added:
            name = graph.names.fresh(hint)
        self._added.add(name)
        return name

    def _outputs(self, outputs: list[Output], proto: onnx.GraphProto) -> None:
        """Write the results in order, with an Identity for each copy."""
        for output in outputs:
            info = proto.output.add()
            self.value_info(output.value, info)
            if output.is_copy:
                self.copy(output, proto.node)
                info.name = output.name

    def copy(self, output: Output, protos: Any) -> None:
        """Append the Identity that makes a copy."""
        made = protos.add(op_type="Identity", input=[self.name(output.value)], output=[output.name])
        if output.value.memory == "host":
            self.metadata(made, {"irpar.place": "host"})

    # -- values ----------------------------------------------------------------------------------------------------

    def _facts(self, value: Value, name: str) -> dict[str, str]:
        facts = value_facts(value, name, self.module)
        return {**value.metadata, **facts} if value.metadata else facts

    def value_info(self, value: Value, proto: onnx.ValueInfoProto) -> None:
        """Fill a ValueInfoProto; those alike but for the name are made once."""
        name = self.name(value)
        if value.metadata or value.doc or value.data is not None:
            self._value_info(value, name, proto)
        else:
            source = source_fact(value, name, self.module)
            alike = value.type, value.sharding, value.global_shape, value.memory, source
            made = self._infos.get(alike)
            if made is None:
                made = self._infos[alike] = onnx.ValueInfoProto()
                self._value_info(value, name, made)
            proto.CopyFrom(made)
        proto.name = name

    def _value_info(self, value: Value, name: str, proto: onnx.ValueInfoProto) -> None:
        """Fill a ValueInfoProto but for the name."""
        if value.type is not UNKNOWN:
            self.type(value.type, proto.type)
        if value.doc:
            proto.doc_string = value.doc
        self.metadata(proto, self._facts(value, name))

    def type(self, type_: Type, proto: onnx.TypeProto) -> None:
        """Fill a TypeProto; equal types are made once."""
        made = self._types.get(type_)
        if made is None:
            made = self._types[type_] = onnx.TypeProto()
            write_type(type_, made)
            while isinstance(type_, (SequenceType, OptionalType, InflightType)):
                type_ = type_.elem
            if isinstance(type_, TensorType):
                self.dtypes.add(type_.dtype)
        proto.CopyFrom(made)

    def _initializer(self, value: Value, proto: onnx.GraphProto) -> None:
        tensor = self.constant(value)
        name = tensor.name = self.name(value)
        if value.doc:
            tensor.doc_string = value.doc
        self.dtypes.add(value.dtype)
        self.metadata(tensor, value.metadata)
        proto.initializer.append(tensor)
        facts = value_facts(value, name, self.module)
        if facts:
            info = proto.value_info.add(name=name)
            write_type(value.type, info.type)
            self.metadata(info, facts)

    # -- nodes -----------------------------------------------------------------------------------------------------

    def nodes(self, graph: Graph, protos: Any, bound: set[Value], infos: Any) -> None:
        """Append the nodes of a graph, and the types of their results but those in `bound`."""
        for node in graph:
            results = [None if is_left_out(value) else value for value in node.results]
            self.node(node, results, protos.add())
            for value in results:
                if value is not None and value not in bound and self.says_more_than_name(value):
                    self.value_info(value, infos.add())

    def says_more_than_name(self, value: Value) -> bool:
        """Whether a ValueInfoProto of the value holds anything but its name."""
        return value.type is not UNKNOWN or bool(value.doc or self._facts(value, self.name(value)))

    def node(self, node: Node, results: Iterable[Value | None], proto: onnx.NodeProto) -> None:
        """Fill a NodeProto; those alike but for their names and where they come from are made once.

        Args:
            node: the node.
            results: its results, None in place of those left out.
            proto: an empty one.
        """
        origin, facts = node_origin(node), node_facts(node)
        alike = _alike(node, origin, facts)
        if alike is None:
            self._node(node, origin | facts, proto)
        else:
            made = self._nodes.get(alike)
            if made is None:
                made = self._nodes[alike] = onnx.NodeProto()
                self._node(node, origin | facts, made)
            proto.CopyFrom(made)
            if origin:
                for entry, text in zip(proto.metadata_props, origin.values(), strict=False):
                    entry.value = text
        if node.name:
            proto.name = node.name
        proto.input.extend(self.names(node.operands))
        proto.output.extend(self.names(results))

    def _node(self, node: Node, facts: Mapping[str, str], proto: onnx.NodeProto) -> None:
        """Fill a NodeProto but for its name and those of operands and results."""
        proto.op_type = node.op_type
        if node.domain:
            proto.domain = node.domain
        if node.doc:
            proto.doc_string = node.doc
        if node.callee is not None and node.callee.overload:
            proto.overload = node.callee.overload
        for name, value in node.attributes.items():
            write_attribute(name, value, proto.attribute.add(), self.graph)
        self.metadata(proto, node.metadata)
        self.metadata(proto, facts)


def _alike(node: Node, origin: Mapping[str, str], facts: Mapping[str, str]) -> Hashable:
    """The same for nodes that are written alike but for names and the texts of their origin; None: nothing tells."""
    if node.metadata or node.doc or node.callee is not None:
        return None
    attributes = tuple([(name, type(value), value) for name, value in node.attributes.items()])
    for _, kind, _ in attributes:
        if kind not in _PLAIN:
            return None
    return node.op_type, node.domain, attributes, tuple(origin), tuple(facts.items())


def is_left_out(value: Value) -> bool:
    """Whether a result need not be named: nothing reads it, it stands for nothing, and it is optional.

    ONNX Runtime refuses a Loop whose collected results have no name.
    """
    if value.has_uses or value.source is not None or value.node is None or any(value.node.nested_graphs()):
        return False
    if any(True for _ in value.node.nested_graphs()):
        return False  # ONNX Runtime crashes on a Loop whose final state is left out.
    option = _option(value.node, value.index)
    if value.type is UNKNOWN:
        return option is not defs.OpSchema.FormalParameterOption.Single
    return option is defs.OpSchema.FormalParameterOption.Optional


def _option(node: Node, index: int) -> "defs.OpSchema.FormalParameterOption | None":
    """Whether a result of an operator is optional; None where ONNX does not know."""
    if not node.version or not defs.has(node.op_type, node.domain):
        return None
    outputs = defs.get_schema(node.op_type, node.version, node.domain).outputs
    return outputs[index].option if index < len(outputs) else None


class FunctionWriter(ModelWriter):
    """Writes function bodies, whose constants are Constant nodes."""

    def __init__(self, module: Module, dtypes: set[DType]) -> None:
        super().__init__(module, embedded, dtypes)

    def function(self, function: Function, proto: onnx.FunctionProto) -> None:
        """Fill a FunctionProto."""
        proto.domain, proto.name = function.domain, function.name
        if function.overload:
            proto.overload = function.overload
        proto.doc_string = function.doc
        self.metadata(proto, function.metadata)
        for domain, version in function.opsets.items():
            proto.opset_import.add(domain=domain, version=version)
        for name, default in function.attributes.items():
            if default is None:
                proto.attribute.append(name)
            else:
                write_attribute(name, default, proto.attribute_proto.add(), self.graph)
        self._body(function.graph, proto)

    def _body(self, graph: Graph, proto: onnx.FunctionProto) -> None:
        outputs = self.bind_outputs(graph, graph.output_names)
        for value in graph.inputs:
            proto.input.append(self.name(value))
        self._constants(graph.constants, proto)
        self.nodes(graph, proto.node, set(), proto.value_info)
        for output in outputs:
            proto.output.append(output.name)
            if output.is_copy:
                self.copy(output, proto.node)
        for value in graph.inputs:
            if self.says_more_than_name(value):
                self.value_info(value, proto.value_info.add())
        # Functions have value_info, like metadata, since IR version 10.
        self.has_metadata = self.has_metadata or bool(len(proto.value_info))

    def _constants(self, constants: Iterable[Value], proto: onnx.FunctionProto) -> None:
        for value in constants:
            tensor, name = self.constant(value), self.name(value)
            node = proto.node.add(op_type="Constant", output=[name])
            attribute = node.attribute.add(name="value", type=onnx.AttributeProto.TENSOR)
            attribute.t.CopyFrom(tensor)
            node.doc_string = value.doc
            self.metadata(node, self._facts(value, name))
