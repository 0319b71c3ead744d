"""Nodes as records: each protobuf field read once, and put in an order in which every operand is defined first."""

import heapq
from collections.abc import Callable, Container, Iterator
from typing import Any

import onnx

from irpar.ir import Attribute
from irpar.sharding import nearest_names

from .attributes import AttributeReader, Bodies
from .errors import OnnxError, text_of

MAX_NESTING = 40
"""Graphs nested deeper than this are refused; protobuf itself reads about 33 levels."""


class Record:
    """What one NodeProto says."""

    __slots__ = ("attributes", "bodies", "domain", "inputs", "name", "op_type", "outputs", "proto")

    def __init__(self, proto: onnx.NodeProto) -> None:
        self.proto = proto
        self.name: str = proto.name
        self.op_type: str = proto.op_type
        self.domain: str = proto.domain
        self.inputs: list[str] = list(proto.input)
        self.outputs: list[str] = list(proto.output)
        if type(self.name) is not str or type(self.op_type) is not str or type(self.domain) is not str:
            for text in (self.name, self.op_type, self.domain):
                text_of(text)
        self.attributes: dict[str, Attribute] = {}
        self.bodies: Bodies = []

    @property
    def label(self) -> str:
        """What messages call the node."""
        if self.name:
            return f"node {self.name}"
        results = ", ".join(map(str, self.outputs))  # Names may be bytes, until they are looked at.
        return f"{self.op_type or 'node'} of {results or 'nothing'}"

    def reads(self) -> Iterator[str]:
        """Names that the node reads, those that its bodies capture included."""
        yield from self.inputs
        for _, graphs, _ in self.bodies:
            for graph in graphs:
                yield from captured(graph)


def read_records(protos: Any, attributes: AttributeReader, parameters: Container[str]) -> list[Record]:
    """The records of a graph's nodes, in the order of the file.

    Raises:
        OnnxError: a node without operator, or with an attribute that cannot be read.
    """
    records = []
    for proto in protos:
        record = Record(proto)
        records.append(record)
        if not record.op_type:
            raise OnnxError("a node has no operator", where=record.label, do="export the model again")
        if record.domain == "ai.onnx":
            record.domain = ""
        listed = proto.attribute
        if len(listed):
            try:
                record.attributes, record.bodies = attributes.read(listed, parameters)
            except OnnxError as error:
                raise error.inside(record.label) from None
    return records


def captured(graph: onnx.GraphProto, depth: int = 1) -> Iterator[str]:
    """Names that a graph reads and does not define itself.

    Raises:
        OnnxError: graphs are nested too deep.
    """
    if depth > MAX_NESTING:
        raise OnnxError(
            f"graphs nested more than {MAX_NESTING} deep",
            where=f"graph {graph.name}",
            do="flatten the model's branches",
        )
    defined = {value.name for value in graph.input}
    defined.update(tensor.name for tensor in graph.initializer)
    defined.update(tensor.values.name for tensor in graph.sparse_initializer)
    defined.update(name for node in graph.node for name in node.output)
    for node in graph.node:
        yield from (name for name in node.input if name and name not in defined)
        for attribute in node.attribute:
            for nested in (attribute.g, *attribute.graphs) if attribute.HasField("g") else attribute.graphs:
                yield from (name for name in captured(nested, depth + 1) if name not in defined)
    yield from (value.name for value in graph.output if value.name not in defined)


def in_order(
    records: list[Record], defined: set[str], is_outer: Callable[[str], bool], known: Callable[[], Iterator[str]]
) -> list[Record]:
    """The records so that every name is defined before it is read; the order of the file where it is one.

    Args:
        records: all nodes of a graph.
        defined: names of its inputs and initializers; gets those of all results.
        is_outer: whether a name is defined in a graph around this one.
        known: all names there are, for messages.

    Raises:
        OnnxError: a name is defined twice or not at all, or the nodes form a cycle.
    """
    early = []
    for record in records:
        for name in record.reads() if record.bodies else record.inputs:
            if name and name not in defined and not is_outer(name):
                early.append((record, name))
        for name in record.outputs:
            if name:
                if type(name) is not str:
                    text_of(name)
                if name in defined:
                    raise OnnxError(
                        f'"{name}" is defined twice', where=record.label, do="give every result a name of its own"
                    )
                defined.add(name)
    if not early:
        return records
    for record, name in early:
        if text_of(name) not in defined:
            raise OnnxError(
                f'"{name}" is read, but nothing defines it',
                where=record.label,
                notes=nearest_names(name, (*defined, *known())),
                do="export the model again; a node or an initializer is missing",
            )
    return _sorted(records)


def _sorted(records: list[Record]) -> list[Record]:
    """A stable topological order."""
    producer = {name: number for number, record in enumerate(records) for name in record.outputs if name}
    needs = [{producer[name] for name in record.reads() if name in producer} for record in records]
    readers: list[list[int]] = [[] for _ in records]
    for number, sources in enumerate(needs):
        for source in sources:
            readers[source].append(number)
    missing = [len(sources) for sources in needs]
    ready = [number for number, count in enumerate(missing) if not count]
    order = []
    while ready:
        number = heapq.heappop(ready)
        order.append(records[number])
        for reader in readers[number]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, reader)
    if len(order) < len(records):
        raise _cycle(records, needs, [number for number, count in enumerate(missing) if count])
    return order


def _cycle(records: list[Record], needs: list[set[int]], stuck: list[int]) -> OnnxError:
    import networkx as nx  # slow to import, and few models need it

    inside = set(stuck)
    graph = nx.DiGraph((source, number) for number in stuck for source in needs[number] if source in inside)
    places = [source for source, _ in nx.find_cycle(graph)]
    first = places.index(min(places))
    cycle = [records[place] for place in places[first:] + places[:first]]
    shown = [record.name or record.label for record in cycle[:8]] + ["..."] * (len(cycle) > 8)
    return OnnxError(
        f"the nodes form a cycle: {' -> '.join([*shown, shown[0]])}",
        where=cycle[0].label,
        do="no order computes them; export the model again",
    )
