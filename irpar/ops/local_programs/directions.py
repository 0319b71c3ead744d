"""RNN, GRU and LSTM of two directions, one on each of two devices: the second reads the steps in reverse.

x : [9, 4, 16], w : [2@tp, 128, 16]      each device has the weights of its direction; the one that has the second turns
                                         x around, runs forward as the first does, and turns what it gives around again
"""

from collections.abc import Mapping, Sequence

import numpy as np

from irpar.ir import Node, Strings, Value

from ..facts import int_attribute, operand, shape_of, text_attribute
from .program import Cuts, LocalProgram, ProgramWriter, Sent, Shape

_WEIGHTS = 1


def is_in_both_directions(node: Node) -> bool:
    """Whether a node has two directions that do the same, over all steps of every row."""
    if text_attribute(node, "direction", "forward") != "bidirectional" or operand(node, 4) is not None:
        return False
    if "activation_alpha" in node.attributes or "activation_beta" in node.attributes:
        return False
    names = node.attributes.get("activations")
    return names is None or (isinstance(names, Strings) and names[: len(names) // 2] == names[len(names) // 2 :])


def _dims(node: Node) -> Sequence[int] | None:
    return (0,) if is_in_both_directions(node) else None


def _sends(node: Node, blocks: Sequence[Shape | None], cuts: Cuts) -> Sequence[Sent]:
    return ()


def _write(program: ProgramWriter) -> list[Value]:
    node = program.local
    batch_first = int_attribute(node, "layout", 0) if not node.domain else 0
    time = 1 if batch_first else 0
    steps = shape_of(program.whole, 0)[time]
    forward = np.arange(steps, dtype=np.int64)
    order = program.of_place(np.stack([forward, forward[::-1]]), 0, "steps")
    data, *others = node.operands
    assert data is not None
    turned = program.op("Gather", [data, order], {"axis": time}, shape=data.shape)
    attributes: Mapping[str, object] = {
        name: _first_half(value) if name == "activations" else value
        for name, value in node.attributes.items()
        if name != "direction"
    }
    made = program.builder.node(
        node.op_type, [turned, *others], attributes, domain=node.domain, results=len(node.results)
    )
    for value, result in zip(made.results, node.results, strict=True):
        value.type = result.type
    sequence, *states = made.results
    return [program.op("Gather", [sequence, order], {"axis": time}, shape=sequence.shape), *states]


def _first_half(value: object) -> object:
    return Strings(value[: len(value) // 2]) if isinstance(value, Strings) else value


DIRECTIONS = LocalProgram(_sends, _write, _dims, operand=_WEIGHTS, manner="one direction on each device")
