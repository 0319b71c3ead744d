"""Splitting and joining of sub-axes."""

import itertools
from collections.abc import Iterable, Sequence

from .mesh import Axis, Mesh


def split_axis(mesh: Mesh, axis: Axis, major: int) -> tuple[Axis, Axis]:
    """An axis of n devices as two: `major` outer blocks, and n / major inside each."""
    size = mesh.axis_size(axis)
    return Axis(axis.name, axis.pre, major), Axis(axis.name, axis.pre * major, size // major)


def join_axes(mesh: Mesh, axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The same axes with neighbours joined: `tp:(1)2, tp:(2)4` of an axis of 8 is `tp`."""
    joined: list[Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.name == axis.name
            and last.size is not None
            and axis.size is not None
            and last.pre * last.size == axis.pre
        ):
            axis = Axis(axis.name, last.pre, last.size * axis.size)
            joined.pop()
        joined.append(_whole_if_possible(mesh, axis))
    return tuple(joined)


def _whole_if_possible(mesh: Mesh, axis: Axis) -> Axis:
    return Axis(axis.name) if axis.pre == 1 and axis.size == mesh.axes[axis.name] else axis


def common_atoms(mesh: Mesh, axes: Iterable[Axis]) -> dict[Axis, tuple[Axis, ...]]:
    """Each axis as a run of the smallest sub-axes that all of `axes` are made of.

    `[tp, tp:(1)2]` of an axis of 8 gives `{tp: (tp:(1)2, tp:(2)4), tp:(1)2: (tp:(1)2,)}`; an axis of one device is made
    of none.
    """
    axes = tuple(axes)
    if all(axis.size is None and mesh.axis_size(axis) > 1 for axis in axes):
        return {axis: (axis,) for axis in axes}
    cuts: dict[str, set[int]] = {}
    for axis in axes:
        found = cuts.setdefault(axis.name, set())
        if axis.size is not None:
            found.update((axis.pre, axis.pre * axis.size))
    return {axis: _atoms(mesh, axis, cuts[axis.name]) for axis in axes}


def _atoms(mesh: Mesh, axis: Axis, cuts: set[int]) -> tuple[Axis, ...]:
    end = axis.pre * mesh.axis_size(axis)
    bounds = sorted({axis.pre, end, *(cut for cut in cuts if axis.pre < cut < end)})
    if len(bounds) == 2:
        return (axis,)
    # Cuts that do not divide each other cannot be told apart as sub-axes; the axis then stays replicated.
    if any(high % low for low, high in itertools.pairwise(bounds)):
        return (axis,)
    return tuple(Axis(axis.name, low, high // low) for low, high in itertools.pairwise(bounds))
