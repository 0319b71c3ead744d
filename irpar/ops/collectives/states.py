"""How collectives change how a tensor is sharded: the axes of its dims, and the partial ones."""

from irpar.ir import Node, with_dim

from .record import Atoms, State


def dim_of(node: Node, name: str = "dim") -> int:
    """An attribute that names a dim."""
    value = node.attributes[name]
    assert isinstance(value, int)
    return value


def gained(state: State, dim: int, axes: Atoms) -> State:
    """A dim is sharded further."""
    return with_dim(state[0], dim, state[0][dim] + axes), state[1]


def lost(state: State, dim: int, axes: Atoms) -> State | None:
    """A dim is sharded less; None where it is not sharded so."""
    present = state[0][dim]
    if present[len(present) - len(axes) :] != axes:
        return None
    return with_dim(state[0], dim, present[: len(present) - len(axes)]), state[1]


def reduced(state: State, axes: Atoms) -> State | None:
    """Axes are partial no more; None where they are not."""
    return (state[0], state[1] - frozenset(axes)) if state[1] >= frozenset(axes) else None


def unchanged(node: Node, state: State, axes: Atoms) -> State | None:
    """All stays sharded as it was."""
    return state


def is_replicated(state: State, axes: Atoms) -> bool:
    """Whether nothing is sharded by these axes, or partial over them."""
    held = {axis for dim in state[0] for axis in dim} | state[1]
    return not held & set(axes)
