"""A program that fails, made small: what is left out until nothing can be left out any more."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import onnx
from onnx import helper

from .random_graphs import onnx_type
from .random_programs import Program


def smallest(program: Program, fails: Callable[[Program], bool]) -> Program:
    """The program with annotations, outputs and nodes left out as long as it fails."""
    while True:
        found = next((smaller for smaller in _smaller(program) if fails(smaller)), None)
        if found is None:
            return program
        program = found


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less."""
    graph = program.model.graph
    if len(graph.output) > 1:
        for output in graph.output:
            yield _of(program, graph.node, [output])
    for name in program.annotations:
        kept = {other: spec for other, spec in program.annotations.items() if other != name}
        yield replace(program, annotations=kept)
    for node in graph.node:
        outputs = [output for output in graph.output if output.name not in node.output]
        if outputs and all(not name or name in program.steady for name in node.output):
            yield _of(program, [other for other in graph.node if other is not node], outputs)


def _of(program: Program, nodes: Iterable[onnx.NodeProto], outputs: Iterable[onnx.ValueInfoProto]) -> Program:
    """The program of some nodes and outputs; what these read of other nodes are inputs."""
    needed = {output.name for output in outputs}
    kept: list[onnx.NodeProto] = []
    for node in reversed(list(nodes)):
        if needed.intersection(node.output):
            kept.insert(0, node)
            needed.update(node.input)
            needed.update(name for body in _bodies(node) for inner in body.node for name in inner.input)
    graph = program.model.graph
    made = {name for node in kept for name in node.output}
    inputs = {name: array for name, array in program.inputs.items() if name in needed}
    inputs |= {name: array for name, array in program.steady.items() if name in needed - made}
    model = onnx.ModelProto()
    model.CopyFrom(program.model)
    infos = [helper.make_tensor_value_info(name, onnx_type(array.dtype), array.shape) for name, array in inputs.items()]
    weights = [entry for entry in graph.initializer if entry.name in needed]
    model.graph.CopyFrom(helper.make_graph(kept, graph.name, infos, list(outputs), weights))
    known = {*made, *inputs, *(entry.name for entry in weights)}
    return replace(
        program,
        model=model,
        inputs=inputs,
        annotations={name: spec for name, spec in program.annotations.items() if name in known},
        steady={name: array for name, array in program.steady.items() if name in made},
    )


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]
