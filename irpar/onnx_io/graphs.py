"""Graphs: ONNX's GraphProto and FunctionProto to the IR's graphs."""

from collections.abc import Iterator, Mapping
from typing import Any

import onnx

from irpar.ir import (
    UNKNOWN,
    Attribute,
    DType,
    Function,
    Graph,
    Graphs,
    Module,
    Names,
    Node,
    RefAttribute,
    Tensor,
    TensorType,
    Value,
)
from irpar.sharding import nearest_names

from .attributes import AttributeReader
from .device_annotations import DeviceAnnotations
from .errors import OnnxError, text_of
from .external import ExternalFolder
from .facts import INPUT_DEFAULT, take_node_facts, take_value_facts
from .quantization import read_quantization
from .records import MAX_NESTING, Record, in_order, read_records
from .scopes import scope_of
from .tensors import read_sparse, read_tensor, scalar_tensor
from .types import TypeReader

_CONSTANT_FORMS: dict[str, tuple[DType, int]] = {
    "value_int": (DType.I64, 0),
    "value_ints": (DType.I64, 1),
    "value_float": (DType.F32, 0),
    "value_floats": (DType.F32, 1),
    "value_string": (DType.STR, 0),
    "value_strings": (DType.STR, 1),
}
"""The short forms of a Constant node: dtype and rank."""


class Scope:
    """Names of values that a graph can see: its own, then those of the graphs around it."""

    __slots__ = ("parent", "values")

    def __init__(self, parent: "Scope | None" = None) -> None:
        self.parent = parent
        self.values: dict[str, Value | None] = {"": None}

    def find(self, name: str) -> Value | None:
        """The value, or None for the empty name.

        Raises:
            KeyError: no such name here.
        """
        scope: Scope | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            scope = scope.parent
        raise KeyError(name)

    def sees(self, name: str) -> bool:
        """Whether `find` finds it."""
        return name in self.values or (self.parent is not None and self.parent.sees(name))

    def names(self) -> Iterator[str]:
        """All names, own first."""
        yield from self.values
        if self.parent is not None:
            yield from self.parent.names()


class GraphReader:
    """Reads the graphs that follow one set of opset imports: the main one and those nested in it, or a function's.

    Args:
        module: the module that they will belong to; its functions are what nodes may call.
        opsets: domain to version.
        types: reads types.
        external: gives external tensors.
        parameters: the attribute names of the function that is read.
        devices: collects what nodes say of devices; None: that is not read.
    """

    def __init__(
        self,
        module: Module,
        opsets: Mapping[str, int],
        types: TypeReader,
        external: ExternalFolder,
        parameters: Mapping[str, Attribute | None] | None = None,
        devices: DeviceAnnotations | None = None,
    ) -> None:
        self.module = module
        self.opsets = opsets
        self.types = types
        self.external = external
        self.attributes = AttributeReader(types, external)
        self.parameters = parameters or {}
        self.devices = devices
        self.depth = 0

    def read(self, proto: onnx.GraphProto, graph: Graph, scope: Scope) -> None:
        """Fill `graph` from a GraphProto.

        Raises:
            OnnxError: the graph is broken; names the node or value.
        """
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise OnnxError(f"graphs nested more than {MAX_NESTING} deep", do="flatten the model's branches")
        infos = {info.name: info for info in proto.value_info}
        self._inputs(proto, graph, scope, self._initializers(proto, graph, scope, infos))
        self._nodes(proto.node, graph, scope, infos)
        self._outputs(proto.output, graph, scope)
        read_quantization(proto, scope.values)
        graph.doc = text_of(proto.doc_string)
        graph.metadata = metadata_of(proto) or None
        self.depth -= 1

    def read_function(self, proto: onnx.FunctionProto, graph: Graph) -> None:
        """Fill `graph` from the body of a FunctionProto.

        Raises:
            OnnxError: the body is broken; names the node or value.
        """
        scope = Scope()
        infos = {info.name: info for info in proto.value_info}
        for name in proto.input:
            if not text_of(name) or name in scope.values:
                raise _name_error("function input", name)
            value = scope.values[name] = graph.add_input(name, UNKNOWN, name)
            self._inform(value, infos.pop(name, None))
        self._nodes(proto.node, graph, scope, infos)
        graph.set_outputs([_lookup(scope, name, "function result") for name in proto.output], list(proto.output))

    # -- inputs, initializers, results -----------------------------------------------------------------------------

    def _initializers(
        self, proto: onnx.GraphProto, graph: Graph, scope: Scope, infos: dict[str, onnx.ValueInfoProto]
    ) -> set[str]:
        """Add the initializers as constants; returns their names."""
        for tensor in proto.initializer:
            name = tensor.name
            try:
                value = self._constant(graph, scope, name, read_tensor(tensor, self.external))
            except OnnxError as error:
                raise error.inside(f"initializer {name}") from None
            if tensor.doc_string:
                value.doc = text_of(tensor.doc_string)
            if len(tensor.metadata_props):
                take_value_facts(value, metadata_of(tensor), self.module)
        for sparse in proto.sparse_initializer:
            name = sparse.values.name
            try:
                self._constant(graph, scope, name, read_sparse(sparse, self.external))
            except OnnxError as error:
                raise error.inside(f"sparse initializer {name}") from None
        names = {name for name in scope.values if name}
        for name in infos.keys() & names:
            self._inform(scope.values[name], infos.pop(name))
        return names

    def _constant(self, graph: Graph, scope: Scope, name: str, tensor: Tensor) -> Value:
        if not text_of(name) or name in scope.values:
            raise _name_error("constant", name)
        value = graph.add_constant(tensor, name, name)
        scope.values[name] = value
        return value

    def _inputs(self, proto: onnx.GraphProto, graph: Graph, scope: Scope, constants: set[str]) -> None:
        """Add the inputs; those with a default become the constant that the default is."""
        for info in proto.input:
            name = info.name
            if name in constants:
                constants.discard(name)
                constant = scope.values[name]
                assert constant is not None
                self._inform(constant, info)
                # Before IR version 4 every initializer had to be an input as well: there it says nothing.
                if self.module.ir_version >= 4:
                    constant.metadata = {**(constant.metadata or {}), INPUT_DEFAULT: "true"}
                continue
            if not text_of(name) or name in scope.values:
                raise _name_error("graph input", name)
            value = graph.add_input(name, UNKNOWN, name)
            scope.values[name] = value
            self._inform(value, info)

    def _outputs(self, infos: Any, graph: Graph, scope: Scope) -> None:
        values = []
        names = []
        for info in infos:
            name = info.name
            value = _lookup(scope, name, "graph output")
            if value.owner is graph:
                self._inform(value, info)
            values.append(value)
            # The results of a body have places alone; those of the model are called by their names.
            if scope.parent is None and name in names:
                raise _name_error("graph output", name)
            names.append(name)
        graph.set_outputs(values, names)

    def _inform(self, value: Value | None, info: onnx.ValueInfoProto | None) -> None:
        """Give a value the type, doc and metadata of a ValueInfoProto."""
        if info is None or value is None:
            return
        try:
            type_ = self.types.read(info.type)
            if isinstance(type_, TensorType) and type_.is_too_large:
                raise OnnxError(
                    f"the tensor {type_} has more than 2^63 bytes", do="correct its dims, or export the model again"
                )
            if value.data is not None:
                _check_constant(value, type_)
            elif value.type is UNKNOWN:
                value.type = type_
            if info.doc_string:
                value.doc = text_of(info.doc_string)
            if len(info.metadata_props):
                take_value_facts(value, metadata_of(info), self.module)
        except OnnxError as error:
            raise error.inside(f"value {info.name}") from None

    # -- nodes -----------------------------------------------------------------------------------------------------

    def _nodes(self, protos: Any, graph: Graph, scope: Scope, infos: dict[str, onnx.ValueInfoProto]) -> None:
        records = read_records(protos, self.attributes, self.parameters)
        outer = scope.parent
        records = in_order(
            records, set(scope.values), (lambda name: False) if outer is None else outer.sees, scope.names
        )
        values = scope.values
        holders = []
        for record in records:
            if record.op_type == "Constant" and not record.domain and self._constant_node(record, graph, scope, infos):
                continue
            node = self._node(record, scope)
            if record.bodies:
                holders.append((node, record))
            for name, value in zip(record.outputs, node.results, strict=False):
                if name:
                    values[name] = value
                    if name in infos:
                        self._inform(value, infos[name])
            graph.append(node)
        # Bodies come last, so that where names repeat (bodies may reuse names) the outer values keep theirs.
        for node, record in holders:
            self._bodies(node, record, graph.names, scope)

    def _node(self, record: Record, scope: Scope) -> Node:
        """The node of a record, not in the graph yet, its bodies not read."""
        values = scope.values
        try:
            operands = [values[name] for name in record.inputs]
        except KeyError:
            operands = [scope.find(name) for name in record.inputs]
        outputs = record.outputs
        # A result left out at the end is as good as none; one left out in between keeps its place, without a source.
        # The results of a node with bodies are as many as theirs.
        while outputs and not outputs[-1] and not record.bodies:
            outputs.pop()
        proto = record.proto
        functions = self.module.functions
        callee = functions.get((record.domain, record.op_type, proto.overload)) if functions else None
        version = self.opsets.get(record.domain)
        if version is None:
            version = self._missing_domain(record, callee)
        name = record.name
        node = Node(
            record.op_type,
            operands,
            domain=record.domain,
            version=version,
            name=name,
            source=name or None,
            results=[Value(output, UNKNOWN, output or None) for output in outputs],
        )
        node.attributes = record.attributes
        node.callee = callee
        node.doc = text_of(proto.doc_string)
        if len(proto.metadata_props):
            try:
                take_node_facts(node, metadata_of(proto))
            except OnnxError as error:
                raise error.inside(record.label) from None
        elif name:
            node.scope = scope_of(name, None)
        if self.devices is not None and len(proto.device_configurations):
            results = zip(outputs, node.results, strict=False)
            self._take_devices(record, node, {**dict(zip(record.inputs, operands, strict=True)), **dict(results)})
        return node

    def _take_devices(self, record: Record, node: Node | None, values: Mapping[str, Value | None]) -> None:
        assert self.devices is not None
        named = {name: value for name, value in values.items() if value is not None}
        place = "" if self.depth == 1 else "a function" if self.depth == 0 else "a body"
        self.devices.take(record.proto, named, node, record.label, place)

    def _missing_domain(self, record: Record, callee: Function | None) -> int:
        if callee is not None:
            return 1
        raise OnnxError(
            f'{record.op_type} is of domain "{record.domain or "ai.onnx"}", which the model does not import',
            where=record.label,
            notes=(f"imported: {', '.join(domain or 'ai.onnx' for domain in self.opsets) or 'none'}",),
            do="add the domain to opset_import, or export the model again",
        )

    def _bodies(self, node: Node, record: Record, names: Names, scope: Scope) -> None:
        for attribute, protos, is_list in record.bodies:
            graphs = []
            for proto in protos:
                graph = Graph(text_of(proto.name), names=names)
                try:
                    self.read(proto, graph, Scope(scope))
                except OnnxError as error:
                    raise error.inside(f"{record.label}, {attribute}") from None
                graph.parent = node
                graphs.append(graph)
            node.attributes[attribute] = Graphs(graphs) if is_list else graphs[0]

    def _constant_node(self, record: Record, graph: Graph, scope: Scope, infos: dict[str, onnx.ValueInfoProto]) -> bool:
        """Add a Constant node's value as a constant; False for one that takes it from a function's attribute."""
        if any(isinstance(value, RefAttribute) for value in record.attributes.values()):
            return False
        if len(record.attributes) != 1 or len(record.outputs) != 1 or not record.outputs[0] or record.bodies:
            raise OnnxError("a Constant needs one value and one result", where=record.label, do="export it again")
        ((form, given),) = record.attributes.items()
        name = record.outputs[0]
        value = self._constant(graph, scope, name, _constant_tensor(form, given, record))
        self.module.literals.add(value.name)
        value.doc = text_of(record.proto.doc_string)
        self._inform(value, infos.pop(name, None))
        if len(record.proto.metadata_props):
            take_value_facts(value, metadata_of(record.proto), self.module)
        if self.devices is not None and len(record.proto.device_configurations):
            self._take_devices(record, None, {name: value})
        return True


def metadata_of(proto: Any) -> dict[str, str]:
    """The metadata_props of a protobuf as a dict."""
    return {text_of(entry.key): text_of(entry.value) for entry in proto.metadata_props}


def _constant_tensor(form: str, given: Attribute, record: Record) -> Tensor:
    if form == "value" and isinstance(given, Tensor):
        return given
    if form in _CONSTANT_FORMS and not isinstance(given, Tensor):
        dtype, rank = _CONSTANT_FORMS[form]
        try:
            return scalar_tensor(given, dtype, rank)
        except (TypeError, ValueError):
            pass
    raise OnnxError(f'a Constant cannot take its value from "{form}"', where=record.label, do="export the model again")


def _check_constant(value: Value, type_: object) -> None:
    """Refuse a stated type that the numbers of a constant contradict."""
    stated = getattr(type_, "shape", None)
    actual = value.tensor_type
    dtype = getattr(type_, "dtype", actual.dtype)
    fits = stated is None or (
        len(stated) == len(actual.static_shape)
        and all(not isinstance(dim, int) or dim == size for dim, size in zip(stated, actual.static_shape, strict=True))
    )
    if dtype is not actual.dtype or not fits:
        raise OnnxError(
            f"the model states the type {type_}, but the constant is {actual}",
            do="correct the value_info or the initializer",
        )


def _lookup(scope: Scope, name: str, role: str) -> Value:
    try:
        value = scope.find(text_of(name))
    except KeyError:
        value = None
    if value is None:
        raise OnnxError(
            f'{role} "{name}" is not defined' if name else f"a {role} has no name",
            notes=nearest_names(name, scope.names()),
            do="export the model again; the node that makes it is missing",
        )
    return value


def _name_error(role: str, name: str) -> OnnxError:
    if not name:
        return OnnxError(f"a {role} has no name", do="give every value a name")
    return OnnxError(f'{role} "{name}" is defined twice', do="give every value a name of its own")
