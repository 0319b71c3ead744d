"""What a rank has of its share of a model's FLOPs: the check, and the tables of exceptions that tests give it."""

from collections.abc import Mapping
from math import prod

import irpar

MESHES = ({"dp": 2}, {"tp": 2}, {"dp": 2, "tp": 2})
EXCESS = 1.1
"""How much more than its share of the FLOPs a rank may have."""

Exceptions = Mapping[tuple[str, str], tuple[float, str]]
"""Case and mesh axes ("dp", "tp" or "dp,tp") -> what a rank has of its share of the FLOPs, at most, and why."""


def check_share(partition: irpar.Partition, case: str, exceptions: Exceptions) -> None:
    """Fail where a rank has more than `EXCESS` of its share, or than its exception; or where an exception is none."""
    mesh = partition.plan.mesh["axes"]
    share = partition.plan.totals["flops_per_rank"] / partition.plan.original["flops"]
    excess = share * prod(mesh.values())
    allowed, why = exceptions.get((case, ",".join(mesh)), (EXCESS, "the work is divided"))
    told = f"{case} over {mesh}: a rank does {share:.1%} of the FLOPs, {excess:.3f} of its share"
    assert excess <= allowed, f"{told}; at most {allowed} is expected: {why}"
    if (case, ",".join(mesh)) in exceptions:
        assert excess > EXCESS, f"{told}: no exception any more, take it out of the table"


def check_exceptions(exceptions: Exceptions, cases: list[str]) -> None:
    """Fail where an exception is of a case or mesh that does not exist."""
    assert set(exceptions) <= {(case, ",".join(mesh)) for case in cases for mesh in MESHES}
