"""What the verifier asks of irpar's collectives: attributes, and how each changes the sharding."""

from collections.abc import Iterator, Sequence

from irpar.ir import Node, RefAttribute, Strings, tensor_type
from irpar.ops.facts import ints_attribute, text_attribute
from irpar.ops.op_def import definition
from irpar.sharding import REDUCTIONS, Axis, Sharding, ShardingError, check_disjoint, common_atoms, is_permutation

from .local import collective_axes, is_local
from .record import Atoms, CollectiveOp, State


def problems_of(op: CollectiveOp, node: Node) -> Iterator[str]:
    """What is wrong with a node of a kind."""
    if op.kind is None and is_local(node):
        yield "is in a local graph; localize turns it into plain ONNX operators"
    problems = list(_attribute_problems(op, node))
    yield from problems
    if problems:
        return
    operand, result = node.operands[0], node.results[0]
    assert operand is not None
    before, after = operand.sharding, result.sharding
    if before is None or after is None or before.mesh != after.mesh:
        return
    try:
        check_disjoint(before.mesh, collective_axes(node))
    except ShardingError as error:
        yield f"runs over axes that cannot be: {error.what}"
        return
    if op.moves_blocks:
        yield from _permutation_problems(node, before, after)
    else:
        yield from _sharding_problems(op, node, before, after)
    yield from _type_problems(node)


def _attribute_problems(op: CollectiveOp, node: Node) -> Iterator[str]:
    if len(node.operands) != 1 or node.operands[0] is None or len(node.results) != 1:
        yield "has not one operand and one result"
        return
    type_ = tensor_type(node.operands[0].type)
    axes = node.attributes.get("axes")
    if not isinstance(axes, Strings) or not axes:
        yield "has no attribute axes, a list of mesh axes"
    else:
        try:
            collective_axes(node)
        except ShardingError as error:
            yield f"runs over axes that cannot be: {error.what}"
    if op.kind is not None and not isinstance(node.attributes.get("id"), int | RefAttribute):
        yield "has no attribute id, a number"
    if "reduce" in op.others and node.attributes.get("reduce") not in REDUCTIONS:
        yield f"has no attribute reduce, one of {', '.join(REDUCTIONS)}"
    rank = None if type_ is None else type_.rank
    for name in op.dims:
        dim = node.attributes.get(name)
        if not isinstance(dim, int) or dim < 0 or (rank is not None and dim >= rank):
            yield f"has {name} {dim!r}, which is no dim of {'its operand' if type_ is None else type_}"


def _sharding_problems(op: CollectiveOp, node: Node, before: Sharding, after: Sharding) -> Iterator[str]:
    axes = collective_axes(node)
    atoms = common_atoms(before.mesh, (*before.all_axes, *after.all_axes, *axes))

    def refine(some: Sequence[Axis]) -> Atoms:
        return tuple(atom for axis in some for atom in atoms[axis])

    def state(sharding: Sharding) -> State:
        return tuple(map(refine, sharding.axes)), frozenset(refine(sharding.partial))

    expected = op.after(node, state(before), refine(axes))
    if expected is None:
        yield f"cannot run over {', '.join(map(str, axes))} on an operand that is sharded as {before}"
    elif expected != state(after):
        yield f"takes {before} over {', '.join(map(str, axes))} to another sharding than {after}"
    elif before.partial and expected[1] and after.reduce != before.reduce:
        yield f"leaves partial values of {before.reduce}, not of {after.reduce}"
    if "reduce" in op.others and before.partial and node.attributes["reduce"] != before.reduce:
        yield f"reduces by {text_attribute(node, 'reduce')} what is partial({before.reduce})"


def _permutation_problems(node: Node, before: Sharding, after: Sharding) -> Iterator[str]:
    """Blocks may move within one sharding (to a neighbour, as for a halo), or to where another one has them."""
    axes, pairs = collective_axes(node), ints_attribute(node, "pairs") or ()
    count, targets = before.mesh.group_size(axes), pairs[1::2]
    if len(pairs) % 2 or len(set(targets)) < len(targets) or not all(0 <= place < count for place in pairs):
        yield f"has pairs {list(pairs)}, which are no senders and receivers in turn among {count} devices"
    elif before != after and not is_permutation(before, after, axes, pairs):
        yield f"does not take {before} over {', '.join(map(str, axes))} to {after} by the pairs {list(pairs)}"


def _type_problems(node: Node) -> Iterator[str]:
    found = definition(node)
    types = None if found is None or found.infer is None else found.infer(node)
    known = tensor_type(node.results[0].type)
    if types is not None and known is not None and known.is_static and types[0] != known:
        yield f"produces {types[0]}, but its result is {known}"
