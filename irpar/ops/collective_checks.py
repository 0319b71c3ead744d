"""What the verifier asks of irpar's collectives: attributes, and how each changes the sharding."""

from collections.abc import Callable, Iterator, Sequence

from irpar.ir import DOMAIN, Module, Node, Strings, register_check, tensor_type
from irpar.sharding import REDUCTIONS, Axis, Sharding, ShardingError, check_disjoint, common_atoms, is_permutation

from .collectives import COLLECTIVES, FREE, collective_axes
from .facts import ints_attribute, text_attribute
from .op_def import definition

Atoms = tuple[Axis, ...]
State = tuple[tuple[Atoms, ...], frozenset[Axis]]
"""The axes of each dim, major first, and the partial ones, all split into parts that compare."""

REDUCING = frozenset(name for name, op in COLLECTIVES.items() if "reduce" in op.others)


def check_collective(module: Module, node: Node) -> Iterator[str]:
    """What is wrong with a collective."""
    problems = list(_attribute_problems(node))
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
    if node.op_type == "CollectivePermute":
        yield from _permutation_problems(node, before, after)
    else:
        yield from _sharding_problems(node, before, after)
    yield from _type_problems(node)


def _attribute_problems(node: Node) -> Iterator[str]:
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
    if node.op_type not in FREE and not isinstance(node.attributes.get("id"), int):
        yield "has no attribute id, a number"
    if node.op_type in REDUCING and node.attributes.get("reduce") not in REDUCTIONS:
        yield f"has no attribute reduce, one of {', '.join(REDUCTIONS)}"
    rank = None if type_ is None else type_.rank
    for name in COLLECTIVES[node.op_type].dims:
        dim = node.attributes.get(name)
        if not isinstance(dim, int) or dim < 0 or (rank is not None and dim >= rank):
            yield f"has {name} {dim!r}, which is no dim of {'its operand' if type_ is None else type_}"


def _sharding_problems(node: Node, before: Sharding, after: Sharding) -> Iterator[str]:
    axes = collective_axes(node)
    atoms = common_atoms(before.mesh, (*before.all_axes, *after.all_axes, *axes))

    def refine(some: Sequence[Axis]) -> Atoms:
        return tuple(atom for axis in some for atom in atoms[axis])

    def state(sharding: Sharding) -> State:
        return tuple(map(refine, sharding.axes)), frozenset(refine(sharding.partial))

    expected = _AFTER[node.op_type](node, state(before), refine(axes))
    if expected is None:
        yield f"cannot run over {', '.join(map(str, axes))} on an operand that lies as {before}"
    elif expected != state(after):
        yield f"takes {before} over {', '.join(map(str, axes))} to another sharding than {after}"
    elif before.partial and expected[1] and after.reduce != before.reduce:
        yield f"leaves partial values of {before.reduce}, not of {after.reduce}"
    if node.op_type in REDUCING and before.partial and node.attributes["reduce"] != before.reduce:
        yield f"reduces by {text_attribute(node, 'reduce')} what is partial({before.reduce})"


def _permutation_problems(node: Node, before: Sharding, after: Sharding) -> Iterator[str]:
    """Blocks may move within one sharding (to a neighbour, as for a halo), or to where another one has them."""
    axes, pairs = collective_axes(node), ints_attribute(node, "pairs") or ()
    count, targets = before.mesh.group_size(axes), pairs[1::2]
    if len(pairs) % 2 or len(set(targets)) < len(targets) or not all(0 <= place < count for place in pairs):
        yield f"has pairs {list(pairs)}, which are no senders and receivers in turn among {count} devices"
    elif before != after and not is_permutation(before, after, axes, pairs):
        yield f"does not take {before} over {', '.join(map(str, axes))} to {after} by the pairs {list(pairs)}"


def _dim(node: Node, name: str = "dim") -> int:
    value = node.attributes[name]
    assert isinstance(value, int)
    return value


def _with(dims: tuple[Atoms, ...], dim: int, axes: Atoms) -> tuple[Atoms, ...]:
    return (*dims[:dim], axes, *dims[dim + 1 :])


def _gained(state: State, dim: int, axes: Atoms) -> State:
    return _with(state[0], dim, state[0][dim] + axes), state[1]


def _lost(state: State, dim: int, axes: Atoms) -> State | None:
    present = state[0][dim]
    if present[len(present) - len(axes) :] != axes:
        return None
    return _with(state[0], dim, present[: len(present) - len(axes)]), state[1]


def _reduced(state: State, axes: Atoms) -> State | None:
    return (state[0], state[1] - frozenset(axes)) if state[1] >= frozenset(axes) else None


def _all_reduce(node: Node, state: State, axes: Atoms) -> State | None:
    return _reduced(state, axes)


def _all_gather(node: Node, state: State, axes: Atoms) -> State | None:
    return _lost(state, _dim(node), axes)


def _reduce_scatter(node: Node, state: State, axes: Atoms) -> State | None:
    reduced = _reduced(state, axes)
    return None if reduced is None else _gained(reduced, _dim(node), axes)


def _all_to_all(node: Node, state: State, axes: Atoms) -> State | None:
    rest = _lost(state, _dim(node, "concat_dim"), axes)
    return None if rest is None else _gained(rest, _dim(node, "split_dim"), axes)


def _all_slice(node: Node, state: State, axes: Atoms) -> State | None:
    held = {axis for dim in state[0] for axis in dim} | state[1]
    return None if held & set(axes) else _gained(state, _dim(node), axes)


def _make_partial(node: Node, state: State, axes: Atoms) -> State | None:
    held = {axis for dim in state[0] for axis in dim} | state[1]
    return None if held & set(axes) else (state[0], state[1] | frozenset(axes))


def _unchanged(node: Node, state: State, axes: Atoms) -> State | None:
    return state


_AFTER: dict[str, Callable[[Node, State, Atoms], State | None]] = {
    "AllReduce": _all_reduce,
    "AllGather": _all_gather,
    "ReduceScatter": _reduce_scatter,
    "AllToAll": _all_to_all,
    "AllSlice": _all_slice,
    "MakePartial": _make_partial,
    "Broadcast": _unchanged,
}
"""The sharding after a collective; None where it cannot run on such an operand."""


def _type_problems(node: Node) -> Iterator[str]:
    found = definition(node)
    types = None if found is None or found.infer is None else found.infer(node)
    known = tensor_type(node.results[0].type)
    if types is not None and known is not None and known.is_static and types[0] != known:
        yield f"gives {types[0]}, but its result is {known}"


for _name in COLLECTIVES:
    register_check(DOMAIN, _name, check_collective)
