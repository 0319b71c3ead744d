"""What a kernel computes again rather than read: a few elementwise steps of what it reads anyway, or of fewer bytes.

forward: h = Mul(x, 0.5); t = Tanh(x) ...; backward reads x, h and t     both are made of x: no kernel writes them
forward: w = Cast(v); backward reads w                                   backward reads v, which is half of it
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from irpar.ir import Node, Value

from .drafts import Lowered
from .groups import Group

MOST_STEPS = 10
"""Of what takes the place of one operand."""
QUICK = frozenset({"Abs", "Add", "Cast", "Max", "Min", "Mul", "Neg", "Relu", "Sub", "Where"})
"""Steps that take less time than reading the bytes does that they save."""
SMALL_SHARE = 16
"""What an owner writes for that, as a number for each row, has no more than this part of the bytes."""


@dataclass
class _Again:
    """What makes an operand again.

    Attributes:
        nodes: of another group.
        sources: what they read that the group does not.
    """

    nodes: dict[Node, Lowered] = field(default_factory=dict)
    sources: dict[Value, None] = field(default_factory=dict)


def copy_cheap_steps(groups: Sequence[Group]) -> None:
    """Let groups compute what others would have to write for them, where that takes fewer bytes to read."""
    owners = {node: group for group in groups for node in group.members}
    for group in sorted(groups, key=lambda group: group.outer > 0):  # Sums take what their makers take by then.
        for value in reversed(group.operands()):
            owner = owners.get(value.node) if value.node is not None else None
            if owner is None or owner is group:
                continue
            found = _steps_of(value, owner, group)
            if found is not None and group.copy(found.nodes):
                group.stretch.read_again.update(found.sources)


def _steps_of(value: Value, owner: Group, group: Group) -> _Again | None:
    """What makes a value for a group of what it or its owner reads, or its owner writes; None where it is too much."""
    known = {*group.operands()} - {value}
    written, computed = {*owner.results()} - {value}, owner.computed()
    found = _Again()
    waiting = [value]
    while waiting:
        made = waiting.pop()
        node = made.node
        assert node is not None
        if node in found.nodes or node in group.copied:
            continue
        one = computed[node]
        if not _is_cheap(one, value, group):
            if node not in owner.members or made.tensor_type.nbytes * SMALL_SHARE > value.tensor_type.nbytes:
                return None
            found.sources[made] = None
            continue
        found.nodes[node] = one
        for read in one.values():
            if read.node in computed and read not in written | known:
                waiting.append(read)
            elif read not in known:
                found.sources[read] = None
    return found if _is_less(found, value, owner, group) else None


def _is_less(found: _Again, value: Value, owner: Group, group: Group) -> bool:
    """Whether computing a value again takes less than reading it."""
    steps = [step.op_type for one in found.nodes.values() for step in one.steps]
    # What is summed up at once is not written for that, if nothing else reads it.
    is_alone = group.outer > 0 and all(user in group.members or user in owner.members for user in value.users)
    if len(steps) > MOST_STEPS or (found.sources and not is_alone and not QUICK.issuperset(steps)):
        return False
    most = value.tensor_type.nbytes * (2 if is_alone else 1)
    bytes_read = sum(source.tensor_type.nbytes for source in found.sources)
    return bytes_read < most and all(_stays(source, group) for source in found.sources)


def _is_cheap(one: Lowered, value: Value, group: Group) -> bool:
    """Whether a node is worth being computed again for a value.

    What a group repeats along other dims it computes so often too: no more than a Cast is worth that.
    """
    is_repeated = value.shape != group.space
    return (
        not one.reduced
        and not one.outer
        and one.space == value.shape
        and (not is_repeated or one.node.op_type == "Cast")
    )


def _stays(value: Value, group: Group) -> bool:
    """Whether a value is there yet where a group is computed: a state until what is written over it, which follows."""
    stretch = group.stretch
    writers = [made.node for made, state in stretch.over.items() if state is value]
    return all(writer is None or _follows(writer, group) for writer in writers)


def _follows(node: Node, group: Group) -> bool:
    """Whether a node must come after a group."""
    places, before = group.stretch.places, group.stretch.before
    if node not in places:
        return True
    least = min(map(places.__getitem__, group.members))
    seen, waiting = {node}, [node]
    while waiting:
        for producer in before[waiting.pop()]:
            if producer in group.members:
                return True
            if producer not in seen and places[producer] > least:
                seen.add(producer)
                waiting.append(producer)
    return False
