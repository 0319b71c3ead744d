"""Functions: named graphs that calls share."""

from collections.abc import Mapping, Sequence
from typing import Any

from .attributes import Attribute
from .graph import Graph, Node
from .value import Value

COMMUNICATION = "irpar.communication"
"""The domain of functions that hold one collective with what packs it; each call of one has the attribute id."""


class Function:
    """A named graph that calls share, as ONNX's model-local functions.

    Attributes:
        domain, name, overload: what calls it by.
        graph: the body.
        attributes: attribute names that a call must give (default None) or may give.
        opsets: the opset versions that the body follows.
    """

    __slots__ = ("attributes", "doc", "domain", "graph", "metadata", "name", "opsets", "overload")

    def __init__(self, domain: str, name: str, graph: Graph, *, overload: str = "") -> None:
        self.domain = domain
        self.name = name
        self.overload = overload
        self.graph = graph
        self.attributes: dict[str, Attribute | None] = {}
        self.opsets: dict[str, int] = {}
        self.doc = ""
        self.metadata: dict[str, str] | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """(domain, name, overload)."""
        return self.domain, self.name, self.overload

    def call(
        self, operands: Sequence[Value | None], attributes_: Mapping[str, Any] | None = None, **facts: Any
    ) -> Node:
        """A node that calls this function."""
        facts.setdefault("results", len(self.graph.outputs))
        node = Node(self.name, operands, attributes_, domain=self.domain, **facts)
        node.callee = self
        return node

    def __repr__(self) -> str:
        return f"<function @{self.domain}.{self.name}>"
