"""The IR as text. `docs/text.md` gives the grammar; `parser.py` reads what this module writes."""

import io
from collections.abc import Iterable, Mapping, Sequence

from irpar.ir.annotation import Annotation
from irpar.ir.attributes import Attribute, Floats, Graphs, Ints, RefAttribute, Strings, Tensors, Types
from irpar.ir.function import Function
from irpar.ir.graph import Graph, Node
from irpar.ir.module import DEFAULT_NETWORK, Module
from irpar.ir.state import State
from irpar.ir.tensor import Tensor
from irpar.ir.value import Value
from irpar.sharding import Mesh

from .defaults import REFERENCE_KINDS, default_call_version, default_version
from .lexer import qualified, quote, quote_bytes, symbol_reference, value_reference, word
from .tensors import Store, float_text, literal_text
from .types import clause_text

DEFAULT_IR_VERSION = Module().ir_version


class Printer:
    """Prints one module.

    Args:
        module: what to print.
        store: where the tensors go that the text does not hold.
    """

    def __init__(self, module: Module, store: Store) -> None:
        self.module = module
        self.store = store
        meshes = tuple(module.meshes.values())
        self.only_mesh: Mesh | None = meshes[0] if len(meshes) == 1 else None
        self.out = io.StringIO()

    def print(self) -> str:
        """The whole text."""
        module, write = self.module, self.out.write
        facts = self._module_facts()
        if facts:
            write(f"module {{{', '.join(facts)}}}\n")
        for mesh in module.meshes.values():
            write(mesh_text(mesh) + "\n")
        for annotation in module.annotations:
            write(_annotation_text(annotation) + "\n")
        for function in module.functions.values():
            self._function(function)
        for graph in module.graphs:
            write(self._graph_head(graph))
            write(_opsets_text(module.opsets))
            self._graph_facts(graph)
            self._body(graph, "", module.opsets)
            write("\n")
        return self.out.getvalue()

    def _module_facts(self) -> list[str]:
        module = self.module
        facts = []
        if module.ir_version != DEFAULT_IR_VERSION:
            facts.append(f"ir_version={module.ir_version}")
        if module.producer != ("", ""):
            facts.append(f"producer=[{', '.join(map(quote, module.producer))}]")
        if module.doc:
            facts.append(f"doc={quote(module.doc)}")
        if module.network != DEFAULT_NETWORK:
            facts.append(f"network={quote(module.network)}")
        if module.memory_limit is not None:
            facts.append(f"memory_limit={module.memory_limit}")
        if module.fixed:
            entries = (f"{quote(name)}: {self._tensor(tensor)}" for name, tensor in module.fixed.items())
            facts.append(f"fixed={{{', '.join(entries)}}}")
        if module.metadata:
            facts.append(f"meta={_metadata_text(module.metadata)}")
        return facts

    def _tensor(self, tensor: Tensor) -> str:
        return f"tensor({tensor.type} {literal_text(tensor, self.store)})"

    # -- graphs -----------------------------------------------------------------------------------------------------

    def _function(self, function: Function) -> None:
        write, graph = self.out.write, function.graph
        overload = f":{word(function.overload)}" if function.overload else ""
        write(f"function {_function_reference(function)}{overload}{self._signature(graph)}")
        if function.attributes:
            write(" attributes {")
            for count, (name, default) in enumerate(function.attributes.items()):
                write(f"{', ' if count else ''}{word(name)}")
                if default is not None:
                    write("=")
                    self._attribute(default, "", function.opsets)
            write("}")
        write(_opsets_text(function.opsets))
        write(_documentation(function.doc, function.metadata))
        if graph.name != function.name or graph.doc or graph.metadata or graph.view != "global" or graph.ranks:
            local = " local" if graph.view == "local" else ""
            write(f" body{local} {symbol_reference(graph.name)}")
            self._graph_facts(graph)
        self._body(graph, "", function.opsets)
        write("\n")

    def _graph_head(self, graph: Graph) -> str:
        local = " local" if graph.view == "local" else ""
        name = f" {symbol_reference(graph.name)}" if graph.name else " " if local else ""
        return f"graph{local}{name}{self._signature(graph)}"

    def _signature(self, graph: Graph) -> str:
        names = [*graph.output_names, *(value.name for value in graph.outputs[len(graph.output_names) :])]
        outputs = [
            value_reference(value.name) + ("" if name == value.name else f" as {quote(name)}")
            for value, name in zip(graph.outputs, names, strict=False)
        ]
        for value, state in graph.states.items():
            if state.output is not None and state.output < len(outputs):
                outputs[state.output] += f" replaces {value_reference(value.name)}"
        inputs = (self._input(value, graph.states.get(value)) for value in graph.inputs)
        return f"({', '.join(inputs)}) -> ({', '.join(outputs)})"

    def _input(self, value: Value, state: State | None) -> str:
        clause = clause_text(value, self.only_mesh) + _value_facts(value)
        text = value_reference(value.name) + ("" if clause == "?" else f": {clause}")
        if state is not None:
            of = "" if state.parameter is None else f" of {quote(state.parameter)}"
            text = f"state {state.kind}{of} {text}"
            if state.data is not None:
                text += f" = {self._placed_literal(value, state.data)}"
        return text if value.source is None else f"{text} from {quote(value.source)}"

    def _graph_facts(self, graph: Graph) -> None:
        if graph.ranks:
            self.out.write(f" ranks [{', '.join(map(str, graph.ranks))}]")
        self.out.write(_documentation(graph.doc, graph.metadata))

    def _body(self, graph: Graph, indent: str, opsets: Mapping[str, int]) -> None:
        write = self.out.write
        write(" {\n")
        inner = indent + "  "
        for value in graph.constants:
            write(f"{inner}{self._constant(value)}\n")
        for node in graph:
            write(inner)
            self._node(node, inner, opsets)
            write("\n")
        write(indent + "}")

    # -- constants and nodes ----------------------------------------------------------------------------------------

    def _constant(self, value: Value) -> str:
        assert value.data is not None
        text = f"{value_reference(value.name)} = constant : {clause_text(value, self.only_mesh)}"
        text += f" {self._placed_literal(value, value.data)}{_value_facts(value)}"
        return text if value.source is None else f"{text} from {quote(value.source)}"

    def _placed_literal(self, value: Value, data: Tensor) -> str:
        """The numbers of a constant, with what is needed where the value's own type is not the tensor's."""
        if value.type == data.type:
            return literal_text(data, self.store)
        dtype = getattr(value.type, "dtype", None)
        if value.global_shape == data.shape and dtype is data.dtype:
            return f"whole {literal_text(data, self.store)}"
        return self._tensor(data)

    def _node(self, node: Node, indent: str, opsets: Mapping[str, int]) -> None:
        write = self.out.write
        results = node.results
        if results:
            write(", ".join([value_reference(value.name) for value in results]))
            write(" = ")
        write(_operator_text(node, opsets))
        operands = ["_" if value is None else value_reference(value.name) for value in node.operands]
        write(f"({', '.join(operands)})")
        facts = _node_facts(node, opsets)
        if node.attributes or facts:
            self._attributes(node, facts, indent, opsets)
        if results:
            write(" : ")
            write(", ".join([clause_text(value, self.only_mesh) + _value_facts(value) for value in results]))
        write(_provenance(node))

    def _attributes(self, node: Node, facts: Sequence[str], indent: str, opsets: Mapping[str, int]) -> None:
        write = self.out.write
        write(" {")
        for count, (name, value) in enumerate(node.attributes.items()):
            write(f"{', ' if count else ''}{word(name)}=")
            self._attribute(value, indent, opsets)
        if facts:
            write(f"{' ' if node.attributes else ''}| {', '.join(facts)}")
        write("}")

    def _attribute(self, value: Attribute, indent: str, opsets: Mapping[str, int]) -> None:
        write = self.out.write
        if isinstance(value, Graph):
            write(self._graph_head(value))
            self._graph_facts(value)
            self._body(value, indent, opsets)
        elif isinstance(value, (Ints, Floats, Strings, Tensors, Types, Graphs)):
            write("[" if value else f"{type(value).__name__.lower()}[")
            for count, item in enumerate(value):
                write(", " if count else "")
                self._attribute(
                    float(item) if isinstance(item, int) and isinstance(value, Floats) else item, indent, opsets
                )
            write("]")
        elif isinstance(value, Tensor):
            write(self._tensor(value))
        else:
            write(_scalar_text(value))


def _scalar_text(value: object) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, bytes):
        return quote_bytes(value)
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, RefAttribute):
        return f"ref({quote(value.name)}, {REFERENCE_KINDS.get(value.kind, str(value.kind))})"
    return str(value)


def mesh_text(mesh: Mesh) -> str:
    """`mesh @m = ["dp"=2, "tp"=4] devices [0, 2, 1, 3, ...]`."""
    axes = ", ".join(f"{quote(name)}={size}" for name, size in mesh.axes.items())
    devices = f" devices [{', '.join(map(str, mesh.devices))}]" if mesh.devices is not None else ""
    return f"mesh {symbol_reference(mesh.name)} = [{axes}]{devices}"


def _annotation_text(annotation: Annotation) -> str:
    dims = []
    for dim in annotation.spec:
        if dim is None:
            dims.append("null")
        else:
            dims.append(quote(dim) if isinstance(dim, str) else f"[{', '.join(map(quote, dim))}]")
    place = f" at {quote(annotation.where)}" if annotation.where else ""
    return f"annotate {quote(annotation.pattern)} [{', '.join(dims)}]{place}"


def _metadata_text(metadata: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{quote(key)}: {quote(value)}" for key, value in metadata.items()) + "}"


def _documentation(doc: str, metadata: Mapping[str, str] | None) -> str:
    text = f" doc {quote(doc)}" if doc else ""
    return f"{text} meta {_metadata_text(metadata)}" if metadata else text


def _value_facts(value: Value) -> str:
    if not value.doc and not value.metadata:
        return ""
    facts = [f"doc={quote(value.doc)}"] if value.doc else []
    if value.metadata:
        facts.append(f"meta={_metadata_text(value.metadata)}")
    return f" {{{', '.join(facts)}}}"


def _opsets_text(opsets: Mapping[str, int]) -> str:
    if not opsets:
        return ""
    items = [f"{opsets['']}"] if "" in opsets else []
    items.extend(f"{quote(domain)} {version}" for domain, version in opsets.items() if domain)
    return f" opset {', '.join(items)}"


def _function_reference(function: Function) -> str:
    text = qualified(function.domain, function.name)
    return f"@{text}"


def _operator_text(node: Node, opsets: Mapping[str, int]) -> str:
    callee = node.callee
    if callee is not None:
        return f"call {_function_reference(callee)}" + (f":{word(callee.overload)}" if callee.overload else "")
    version = "" if node.version == default_version(opsets, node.domain) else f":{node.version}"
    return qualified(node.domain, node.op_type) + version


def _node_facts(node: Node, opsets: Mapping[str, int]) -> list[str]:
    facts = []
    if node.phase is not None:
        facts.append(f"phase={node.phase}")
    if node.stage is not None:
        facts.append(f"stage={node.stage}")
    if node.place is not None:
        facts.append(f"place={node.place}")
    if node.callee is not None and node.version != default_call_version(opsets, node.domain):
        facts.append(f"version={node.version}")
    return facts


def _provenance(node: Node) -> str:
    """Where a node comes from.

    `from "s"` is an imported node, named "s", whose results stand for the imported values of their own names; `for "s"`
    is a node that was made for one: without a name, its results stand for nothing. `name` and `as` say it otherwise.
    """
    own_name, sources = "", [None] * len(node.results)
    parts = []
    if node.source is not None:
        is_made = not node.name and node.source != ""
        parts.append(f" {'for' if is_made else 'from'} {quote(node.source)}")
        if not is_made:
            own_name, sources = node.source, [value.name for value in node.results]  # type: ignore[misc]
    if [value.source for value in node.results] != sources:
        parts.append(f" as {_sources_text(value.source for value in node.results)}")
    if node.scope is not None:
        parts.append(f" scope {quote(node.scope)}")
    if node.name != own_name:
        parts.append(f" name {quote(node.name)}")
    parts.append(_documentation(node.doc, node.metadata))
    return "".join(parts)


def _sources_text(sources: Iterable[str | None]) -> str:
    return ", ".join("_" if source is None else quote(source) for source in sources)
