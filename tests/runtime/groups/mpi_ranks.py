"""What the ranks of test_mpi.py run, one process each: `mpiexec -n N python -m tests.runtime.groups.mpi_ranks NAME ...`."""

import sys

from irpar.runtime.groups import make_group
from irpar.runtime.groups.mpi import MpiGroup
from irpar.runtime.groups.mpi_parcels import Parcels
from irpar.sharding import IrparError, Mesh

from .collective_cases import cases, check

MESHES = {2: {"x": 2}, 3: {"x": 3}, 4: {"a": 2, "b": 2}, 8: {"a": 4, "b": 2}}


def join(mesh: Mesh, seconds: float = 20.0) -> MpiGroup:
    group = make_group("mpi", mesh, seconds)
    assert isinstance(group, MpiGroup)
    return group


def collectives(count: str, chunk: str = "") -> None:
    """All kinds; first one after the other, then begun together and waited for in another order on each rank."""
    if chunk:
        Parcels.chunk = int(chunk)
    mesh = Mesh(MESHES[int(count)])
    group = join(mesh)
    rank = group.rank
    done = 0
    for seed, rows in ((0, 3), (1, 3), (5, 20_000 if not chunk else 2000)):
        listed = list(cases(mesh, rows=rows, seed=seed))
        for case in listed:
            check(case, mesh, rank, group.exchange({rank: case.call(mesh, rank)})[rank])
        for start in range(0, len(listed), 6):
            some = listed[start : start + 6]
            calls = [case.call(mesh, rank) for case in some]
            for call in calls:
                group.start(call)
            turned = [(place + rank) % len(some) for place in range(len(some))]
            for place in turned:
                check(some[place], mesh, rank, group.exchange({rank: calls[place]})[rank])
        done += 2 * len(listed)
    group.close()
    if rank == 0:
        print(f"{done} collectives are right")


if __name__ == "__main__":
    try:
        globals()[sys.argv[1]](*sys.argv[2:])
    except IrparError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
