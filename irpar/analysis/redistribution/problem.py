"""A redistribution with its names taken away: atoms instead of axes, dims in a fixed order.

    [@dp, _, @tp] -> [@tp, _, @dp] of [64, 1, 32] on dp=2, tp=4        the same problem as
    [@y, @x] -> [@x, @y] of [32, 64] on x=2, y=4                       32@0, 64@1 -> 32@1, 64@0, sizes 4 and 2

So a model of many layers asks each problem once. Atoms are the axes and sub-axes that both shardings are made of, and
after these the axes that neither uses: a tensor may be sharded over them on its way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from irpar.analysis.cost.network import Network
from irpar.sharding import Axis, Mesh, Sharding, are_disjoint, common_atoms

from .space import State, prime_factors

Levels = tuple[tuple[int, int], ...]
"""The links that an atom runs over, as `Network.levels` has them."""


@dataclass(frozen=True)
class Problem:
    """What the search sees.

    Attributes:
        sizes: devices along each atom; those of unused axes come last.
        used: how many atoms the two shardings are made of.
        shape: the full tensor's.
        bits: of an element.
        start, goal: where it lies, and where it should.
        levels: of each atom the links of its prime parts; empty for a network without links.
    """

    sizes: tuple[int, ...]
    used: int
    shape: tuple[int, ...]
    bits: int
    start: State
    goal: State
    levels: tuple[tuple[Levels, ...], ...]


@dataclass(frozen=True)
class Names:
    """What the atoms and dims of a problem are called.

    Attributes:
        mesh: the mesh.
        axes: the axis or sub-axis of each atom.
        dims: the dim of the tensor behind each dim of the problem.
        rank: dims of the tensor, those that nothing can cut included.
    """

    mesh: Mesh
    axes: tuple[Axis, ...]
    dims: tuple[int, ...]
    rank: int

    def of_dims(self, dims: Sequence[Sequence[int]]) -> list[tuple[Axis, ...]]:
        """The axes of each dim of the tensor."""
        found: list[tuple[Axis, ...]] = [()] * self.rank
        for dim, atoms in zip(self.dims, dims, strict=True):
            found[dim] = self.of_atoms(atoms)
        return found

    def of_atoms(self, atoms: Iterable[int]) -> tuple[Axis, ...]:
        """The axes that atoms are called."""
        return tuple(self.axes[atom] for atom in atoms)


def common_axes(source: Sharding, target: Sharding) -> dict[Axis, tuple[Axis, ...]] | None:
    """The axes of both, each as a run of sub-axes that both are made of; None where they have none such.

    Of an axis of 6, one cut by 2 and one cut by 3 meet only in the whole axis.
    """
    atoms = common_atoms(source.mesh, (*source.all_axes, *target.all_axes))
    distinct = list(dict.fromkeys(atom for run in atoms.values() for atom in run))
    return atoms if are_disjoint(source.mesh, distinct) else None


def problem_of(
    source: Sharding,
    target: Sharding,
    runs: dict[Axis, tuple[Axis, ...]],
    shape: Sequence[int],
    bits: int,
    network: Network,
) -> tuple[Problem, Names]:
    """The problem, and what its atoms and dims are called.

    Args:
        source, target: of one mesh.
        runs: from `common_axes`.
        shape: the full tensor's.
        bits: of an element.
        network: whose links tell axes apart.
    """
    mesh = source.mesh

    def refined(axes: Iterable[Axis]) -> tuple[Axis, ...]:
        return tuple(atom for axis in axes for atom in runs[axis])

    cuts = [(refined(old), refined(new)) for old, new in zip(source.axes, target.axes, strict=True)]

    def order(dim: int) -> tuple[object, ...]:
        old, new = cuts[dim]
        return shape[dim], tuple(map(mesh.axis_size, old)), tuple(map(mesh.axis_size, new))

    dims = sorted((dim for dim in range(len(shape)) if shape[dim] > 1 or any(cuts[dim])), key=order)
    partial, wanted = refined(source.partial), refined(target.partial)
    in_order = [atom for dim in dims for cut in cuts[dim] for atom in cut]
    used = list(dict.fromkeys((*in_order, *partial, *wanted)))
    axes = (*used, *sorted(_unused(mesh, used), key=mesh.axis_size))
    number = {axis: n for n, axis in enumerate(axes)}

    def numbered(cut: Iterable[Axis]) -> tuple[int, ...]:
        return tuple(number[axis] for axis in cut)

    problem = Problem(
        sizes=tuple(map(mesh.axis_size, axes)),
        used=len(used),
        shape=tuple(shape[dim] for dim in dims),
        bits=bits,
        start=(tuple(numbered(cuts[dim][0]) for dim in dims), tuple(sorted(numbered(partial)))),
        goal=(tuple(numbered(cuts[dim][1]) for dim in dims), tuple(sorted(numbered(wanted)))),
        levels=tuple(
            tuple(network.levels((part,), mesh) for part in parts_of(axis, mesh.axis_size(axis))) for axis in axes
        )
        if network.knows_seconds
        else (),
    )
    return problem, Names(mesh, axes, tuple(dims), len(shape))


def parts_of(axis: Axis, size: int) -> tuple[Axis, ...]:
    """An axis as sub-axes of prime size, major first; one of prime size is itself."""
    factors = prime_factors(size)
    if len(factors) < 2:
        return (axis,)
    parts, pre = [], axis.pre
    for factor in factors:
        parts.append(Axis(axis.name, pre, factor))
        pre *= factor
    return tuple(parts)


def _unused(mesh: Mesh, used: Sequence[Axis]) -> list[Axis]:
    """What of the mesh's axes no atom covers: whole axes, and the sub-axes between and around those in use."""
    found = []
    for name, size in mesh.axes.items():
        taken = sorted((atom for atom in used if atom.name == name), key=lambda atom: atom.pre)
        if not taken:
            if size > 1:
                found.append(Axis(name))
            continue
        end = 1
        for atom in (*taken, None):
            start = size if atom is None else atom.pre
            if start > end:
                found.append(Axis(name, end, start // end))
            end = start if atom is None else atom.pre * mesh.axis_size(atom)
    return found


def refined(problem: Problem, names: Names, with_unused: bool) -> tuple[Problem, Names]:
    """The same problem with atoms of prime size; `with_unused`: those of axes that neither sharding uses as well."""
    count = len(problem.sizes) if with_unused else problem.used
    runs: list[tuple[int, ...]] = []
    axes: list[Axis] = []
    for atom in range(count):
        parts = parts_of(names.axes[atom], problem.sizes[atom])
        runs.append(tuple(range(len(axes), len(axes) + len(parts))))
        axes.extend(parts)

    def split(state: State) -> State:
        dims, partial = state
        return (
            tuple(tuple(part for atom in cut for part in runs[atom]) for cut in dims),
            tuple(sorted(part for atom in partial for part in runs[atom])),
        )

    mesh = names.mesh
    finer = replace(
        problem,
        sizes=tuple(map(mesh.axis_size, axes)),
        used=sum(len(run) for run in runs[: problem.used]),
        start=split(problem.start),
        goal=split(problem.goal),
        levels=tuple((levels,) for run in problem.levels[:count] for levels in run),
    )
    return finer, replace(names, axes=tuple(axes))
