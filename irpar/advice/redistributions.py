"""The redistributions of a local module: what is moved, between which two sides, and what a device sends for it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from irpar.ir import Conflict, Module, Node, Value
from irpar.ops.collectives import KINDS, REDUCING, sends
from irpar.ops.effects import is_collective
from irpar.sharding import Sharding
from irpar.units import bytes_text

MEGABYTE = 10**6


@dataclass
class Redistribution:
    """The collectives of one redistribution.

    Attributes:
        value: what is moved, as it lies at first.
        conflict: the two sides that it stands between; None where no annotation is in the way of another.
        entries: of the plan, one for each collective.
        nodes: the collectives, in their order.
    """

    value: Value
    conflict: Conflict | None
    entries: list[dict[str, Any]]
    nodes: list[Node]

    @property
    def sent_bytes(self) -> int:
        """That a device sends, each time that the tensor is moved."""
        return sum(entry["sent_bytes"] for entry in self.entries)

    @property
    def title(self) -> str:
        """What is moved, and how large it is."""
        type_ = self.value.tensor_type.with_shape(self.value.whole_shape)
        size = -(-self.value.dtype.bits * math.prod(self.value.whole_shape) // 8)
        return f"{self.value.source_name} {type_}, {bytes_text(size)}"

    @property
    def target(self) -> Sharding | None:
        """How the value lies in the end."""
        return self.nodes[-1].results[0].sharding

    @property
    def how(self) -> str:
        """Its collectives, in words."""
        return ", then ".join(f"{entry['kind']} over {','.join(entry['axes'])}" for entry in self.entries)


def redistributions_of(module: Module, collectives: Sequence[dict[str, Any]]) -> list[Redistribution]:
    """The redistributions of a local module, those that send most first, equal ones in the program's order.

    The reduction of partial values is none; of a value that is reduced and then moved on, the rest counts.

    Args:
        module: after localize, with its log.
        collectives: of its plan.
    """
    entries = {entry["id"]: entry for entry in collectives}
    found: dict[object, Redistribution] = {}
    for graph in module.graphs:
        for node in graph.walk():
            if not sends(node):
                continue
            entry = entries.pop(node.attributes["id"], None)  # type: ignore[arg-type]
            if entry is None or entry["kind"] in REDUCING:
                continue
            conflict = module.conflicts.get(node.results[0].name)
            move = found.setdefault(_key(node, conflict), Redistribution(node.inputs[0], conflict, [], []))
            move.entries.append(entry)
            move.nodes.append(node)
    return sorted(found.values(), key=lambda move: -move.sent_bytes)


def _key(node: Node, conflict: Conflict | None) -> object:
    """What the steps of one redistribution have in common."""
    if conflict is not None:
        return conflict.value, conflict.lies, conflict.node, conflict.needed
    value = node.inputs[0]
    while value.node is not None and is_collective(value.node) and KINDS[value.node.op_type] not in REDUCING:
        value = value.node.inputs[0]
    return value
