"""Values in SSA form, with use lists that keep every rewrite O(1) per use; and the table of their names."""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from irpar.sharding import Sharding

from .tensor import Tensor
from .types import UNKNOWN, TensorType, Type

if TYPE_CHECKING:
    from .graph import Graph, Node

Memory = Literal["device", "host", "disk"]
Use = tuple["Node", int]

NUMBERED = re.compile(r"(.*)_([0-9]+)", re.DOTALL)
"""A name as `Names.fresh` makes them: what it was made of, and its number."""


class Value:
    """One SSA value: a graph input, a constant, or a result of a node.

    Attributes:
        name: unique in its graph and all graphs nested in it, once it belongs to one.
        type: its type. In a local graph the per-device one.
        node: the node that produces it; None for inputs and constants.
        index: its place among the results of `node`, or among the graph's inputs.
        graph: for inputs and constants the graph that owns it.
        data: the numbers, for constants.
        sharding: how it is sharded on the mesh, or None where that is not decided.
        global_shape: in a local graph the shape of the full tensor; else None.
        memory: where it is kept.
        doc, metadata: as in ONNX.
    """

    __slots__ = (
        "_source",
        "_uses",
        "data",
        "doc",
        "global_shape",
        "graph",
        "index",
        "memory",
        "metadata",
        "name",
        "node",
        "sharding",
        "type",
    )

    def __init__(self, name: str = "", type: Type = UNKNOWN, source: str | None = None) -> None:
        self.name = name
        self.type = type
        self._source = source
        self.node: Node | None = None
        self.index = 0
        self.graph: Graph | None = None
        self.data: Tensor | None = None
        self.sharding: Sharding | None = None
        self.global_shape: tuple[int, ...] | None = None
        self.memory: Memory = "device"
        self.doc = ""
        self.metadata: dict[str, str] | None = None
        self._uses: dict[Use, None] = {}

    @property
    def source(self) -> str | None:
        """Name of the value in the imported model that it stands for, through every rewrite."""
        return self._source

    @source.setter
    def source(self, source: str | None) -> None:
        self._source = source
        owner = self.owner
        if owner is not None:
            owner.names.changes += 1

    @property
    def source_name(self) -> str:
        """What the source model calls this value; its own name where it has none there."""
        return self._source or self.name

    @property
    def uses(self) -> tuple[Use, ...]:
        """All (node, operand index) that read this value; graph results count as uses by the graph's return node."""
        return tuple(self._uses)

    @property
    def users(self) -> tuple["Node", ...]:
        """The nodes that read this value, each once, in order of first use."""
        if len(self._uses) == 1:
            return (next(iter(self._uses))[0],)
        return tuple(dict.fromkeys(node for node, _ in self._uses))

    @property
    def use_count(self) -> int:
        """How many uses there are: O(1)."""
        return len(self._uses)

    @property
    def has_uses(self) -> bool:
        """True where something reads this value."""
        return bool(self._uses)

    @property
    def is_constant(self) -> bool:
        """True where the numbers are known before anything runs."""
        return self.data is not None

    @property
    def is_input(self) -> bool:
        """True for inputs of a graph."""
        return self.node is None and self.data is None

    @property
    def is_output(self) -> bool:
        """True where a graph returns this value."""
        return any(node.is_return for node, _ in self._uses)

    @property
    def owner(self) -> "Graph | None":
        """The graph that the value is defined in."""
        return self.node.graph if self.node is not None else self.graph

    @property
    def tensor_type(self) -> TensorType:
        """The type, which must be a tensor's.

        Raises:
            TypeError: it is a sequence, an optional, in flight, or unknown.
        """
        if type(self.type) is not TensorType:
            raise TypeError(f"%{self.name} is {self.type}, not a tensor")
        return self.type

    @property
    def is_static(self) -> bool:
        """True for tensors whose dims are all ints."""
        return type(self.type) is TensorType and self.type.is_static

    @property
    def dtype(self) -> Any:
        """Element type of a tensor value."""
        return self.tensor_type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The static shape of a tensor value, in a local graph the per-device one.

        Raises:
            TypeError, ValueError: not a tensor, or not static.
        """
        return self.tensor_type.static_shape

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The static shape of the full tensor, in global and local graphs alike."""
        return self.shape if self.global_shape is None else self.global_shape

    def rename(self, name: str) -> None:
        """Take another name, made unique where something has it."""
        owner = self.owner
        if owner is None:
            self.name = name
            return
        owner.names.release(self)
        if name and name != self.name:
            owner.names.take_back(self.name)
        self.name = name
        owner.names.claim(self)

    def replace_uses(self, other: "Value", only: Iterable[Use] | None = None) -> None:
        """Make all uses (or those in `only`) read `other` instead: O(1) per use."""
        for node, index in tuple(self._uses) if only is None else tuple(only):
            node.set_operand(index, other)

    def __repr__(self) -> str:
        return f"%{self.name} : {self.type}"


def refuse_uses(value: Value) -> None:
    """Refuse to take away a value that something reads.

    Raises:
        ValueError: naming a reader.
    """
    if value._uses:
        reader = next(iter(value._uses))[0]
        raise ValueError(f"%{value.name} is still used, by {reader!r}")


def made_of(name: str) -> Iterator[str]:
    """A name, and those that it may have been made of, one of another: `a_1_2`, `a_1`, `a`."""
    yield name
    while (match := NUMBERED.fullmatch(name)) is not None:
        name = match[1]
        yield name


class Names:
    """The value names of a graph and of all graphs nested in it.

    Attributes:
        table: name to value.
        changes: how often a value came, went, or got another name, here or in the imported model; what was made of
            the names is still right while this number stays.
    """

    __slots__ = ("_counters", "_gone", "_last", "changes", "table")

    def __init__(self) -> None:
        self.table: dict[str, Value] = {}
        self.changes = 0
        self._counters: dict[str, int] = {}
        self._last: tuple[str, str] | None = None
        """The last new name, and what it was made of."""
        self._gone: set[str] = set()

    def heir(self) -> "Names":
        """A table for a copy of the graph: each of its values may take its name over, and no new value gets one."""
        made = Names()
        made._gone = self._gone | self.table.keys()
        return made

    def claim(self, value: Value) -> None:
        """Register a value, with a new name where its own is empty or taken."""
        self.changes += 1
        name = value.name
        if not name or self.table.setdefault(name, value) is not value:
            value.name = self.fresh(name or "v")
            self.table[value.name] = value

    def release(self, value: Value) -> None:
        """Forget a value; its name is given to others only where they ask for that very name."""
        self.changes += 1
        if self.table.get(value.name) is value:
            del self.table[value.name]
            self._gone.add(value.name)

    def fresh(self, hint: str) -> str:
        """A name that nothing has or had: `hint_1`, `hint_2` ... So no new value passes for one of the model."""
        number = self._counters.get(hint, 0) + 1
        while self.had(name := f"{hint}_{number}"):
            number += 1
        self._counters[hint] = number
        self._last = name, hint
        return name

    def take_back(self, name: str) -> None:
        """Let the next new value have a name that was the last new one, and that its value has not kept."""
        if self._last is not None and self._last[0] == name:
            self._counters[self._last[1]] -= 1
            self._gone.discard(name)
            self._last = None

    def counted(self, hint: str) -> int:
        """The last number that `fresh` has given with that, here; 0: none."""
        return self._counters.get(hint, 0)

    def had(self, name: str) -> bool:
        """Whether something has a name, or had it."""
        return name in self.table or name in self._gone
