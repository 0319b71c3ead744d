"""Dialects: the operators of other runtimes that say what irpar's collectives do, and which runtimes these are.

ONNX Runtime's (`com.microsoft`) are those of its builds for CUDA with NCCL: AllReduce sums, AllGather and AllToAll, all
over all ranks. TensorRT's is DistCollective, of domain "", from TensorRT 10.16, all-to-all from 11: over all ranks or
the group of `groups`, along the first dim. Its broadcast has an operand on the root alone: one program cannot say it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .record import Spelling

MICROSOFT, TENSORRT = "com.microsoft", "tensorrt"
OWN = "irpar"
"""irpar's own operators."""


@dataclass(frozen=True)
class Dialect:
    """The collectives of another runtime.

    Attributes:
        name: what `--collectives` calls it.
        domain, version: of its operators.
        runtime: what runs them.
        has_groups: they may run over some ranks, which the program names; else over all.
        of_all: the attributes of what runs over all.
    """

    name: str
    domain: str
    version: int
    runtime: str
    has_groups: bool
    of_all: Mapping[str, int] = field(default_factory=dict)

    def of_group(self, ranks: Sequence[int]) -> dict[str, int | list[int]]:
        """The attributes of what runs over some ranks, where it has groups."""
        return {"groups": list(ranks), "group_size": len(ranks)}


DIALECTS: Mapping[str, Dialect] = {
    known.name: known
    for known in (
        Dialect(MICROSOFT, "com.microsoft", 1, "ONNX Runtime", has_groups=False),
        Dialect(TENSORRT, "", 1, "TensorRT", has_groups=True, of_all={"group_size": 0}),
    )
}
"""By name."""

FLOATS = frozenset({"f16", "f32", "f64"})
MOVED = FLOATS | {"i64", "bool"}
"""What ONNX Runtime's operators take that reduce, and that move."""
_OF_NCCL = frozenset({"f16", "bf16", "f32", "i8", "u8", "i32", "i64"})
"""The dtypes that both TensorRT and NCCL have."""


def dist_collective(operation: str, *, reduces: bool = False, first: tuple[str, ...] = ()) -> Spelling:
    """TensorRT's one operator, for an operation of its."""
    fixed: dict[str, int | str] = {"collective_operation": operation, "root": -1}
    if not reduces:
        fixed["reduce_op"] = "none"
    return Spelling(
        "DistCollective",
        _OF_NCCL,
        fixed=fixed,
        named={"reduce_op": "reduce"} if reduces else {},
        counted=("nb_rank",),
        reductions=frozenset({"sum", "prod", "max", "min"}) if reduces else frozenset(),
        first=first,
    )
