"""Model-local functions: kept as functions, whose calls share one body."""

import onnx

from irpar.ir import COMMUNICATION, Function, Graph, Module, Node

from .attributes import AttributeReader
from .device_annotations import DeviceAnnotations
from .errors import OnnxError, text_of
from .external import ExternalFolder
from .graphs import GraphReader, metadata_of
from .types import TypeReader
from .versions import OLDEST_OPSET, opsets_of


def read_functions(
    model: onnx.ModelProto,
    module: Module,
    types: TypeReader,
    external: ExternalFolder,
    devices: DeviceAnnotations | None = None,
) -> None:
    """Read the functions: first what calls need of them, then the bodies, which call each other in any order.

    Raises:
        OnnxError: a function is broken; names it and the node or value in it.
    """
    for proto in model.functions:
        function = _declared(proto, types, external)
        if function.key in module.functions:
            raise OnnxError(
                "the function is defined twice",
                where=_place(function),
                do="give every function a domain, name and overload of its own",
            )
        module.functions[function.key] = function
    for proto, function in zip(model.functions, module.functions.values(), strict=True):
        reader = GraphReader(module, function.opsets, types, external, function.attributes, devices)
        try:
            reader.read_function(proto, function.graph)
        except OnnxError as error:
            raise error.inside(_place(function)) from None


def _declared(proto: onnx.FunctionProto, types: TypeReader, external: ExternalFolder) -> Function:
    """A function without its body."""
    domain = "" if proto.domain == "ai.onnx" else text_of(proto.domain)
    function = Function(domain, text_of(proto.name), Graph(proto.name), overload=text_of(proto.overload))
    try:
        if not proto.name:
            raise OnnxError("a function has no name", do="name every function")
        function.opsets = opsets_of(proto.opset_import)
        function.attributes = AttributeReader(types, external).defaults(proto)
        if function.opsets.get("", OLDEST_OPSET) < OLDEST_OPSET:
            raise OnnxError(
                f"the function follows opset {function.opsets['']}; irpar reads {OLDEST_OPSET} or newer",
                do=f"export the model again with opset {OLDEST_OPSET} or newer",
            )
    except OnnxError as error:
        raise error.inside(_place(function)) from None
    if domain == COMMUNICATION:
        function.graph.view = "local"
    function.doc, function.metadata = text_of(proto.doc_string), metadata_of(proto) or None
    return function


def _place(function: Function) -> str:
    return f"function {function.domain or 'ai.onnx'}.{function.name}"


def check_calls(module: Module) -> None:
    """Check that calls fit their functions, and that no function calls itself, directly or through others.

    Raises:
        OnnxError: naming the call or the circle.
    """
    for graph in module.all_graphs():
        for node in graph:
            if node.callee is not None:
                _check_call(node, node.callee)
    _refuse_recursion(module)


def _check_call(node: Node, callee: Function) -> None:
    inputs, results = len(callee.graph.inputs), len(callee.graph.outputs)
    if len(node.operands) > inputs or len(node.results) > results:
        raise OnnxError(
            f"call of {callee.name} with {len(node.operands)} operands and {len(node.results)} results; "
            f"the function has {inputs} and {results}",
            where=f"node {node.label}",
            do="export the model again; a function and its call do not fit",
        )


def _refuse_recursion(module: Module) -> None:
    if not module.functions:
        return
    import networkx as nx  # slow to import, and few models need it

    calls = nx.DiGraph()
    for function in module.functions.values():
        for node in function.graph.walk():
            if node.callee is not None:
                calls.add_edge(function.key, node.callee.key)
    try:
        cycle = [key for key, _ in nx.find_cycle(calls)] if calls else []
    except nx.NetworkXNoCycle:
        return
    if cycle:
        names = [f"{domain or 'ai.onnx'}.{name}" for domain, name, _ in (*cycle, cycle[0])]
        raise OnnxError(
            f"functions call each other in a circle: {' -> '.join(names)}", do="ONNX has no recursion: use a Loop"
        )
