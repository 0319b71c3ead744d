"""MindSpore's `recompute` of a cell."""

from typing import Any

from irpar.analysis.recompute_said import RecomputeSaid, say_recompute
from irpar.globs import matching_names
from irpar.ir import Module
from irpar.sharding import nearest_names

from .devices import SpellingError


def recompute(
    module: Module,
    cell: str,
    mode: bool = True,
    *,
    mp_comm_recompute: bool = True,
    parallel_optimizer_comm_recompute: bool = False,
    recompute_slice_activation: bool = False,
) -> int:
    """Say that the backward pass computes what it reads of a cell again, so that it is not held.

    >>> recompute(module, "h.*/mlp*")                                # doctest: +SKIP
    >>> recompute(module, "h.0/attn*", mp_comm_recompute=False)      # doctest: +SKIP

    The default pipeline then has the pass `recompute`. What is said last of a cell holds.

    Args:
        module: a step of training, or what one is made of.
        cell: its scope, or that of one node; or a glob.
        mode: False: it is held.
        mp_comm_recompute: whether communication of model parallelism in it is repeated.
        parallel_optimizer_comm_recompute: whether weights that are stored sharded are gathered again for it.
        recompute_slice_activation: True is refused: what is held of a cell is a device's own block.

    Returns:
        How many nodes match.

    Raises:
        SpellingError: nothing matches, or an argument cannot be.
    """
    where = f'recompute("{cell}")'
    flags: dict[str, Any] = {
        "mode": mode,
        "mp_comm_recompute": mp_comm_recompute,
        "parallel_optimizer_comm_recompute": parallel_optimizer_comm_recompute,
        "recompute_slice_activation": recompute_slice_activation,
    }
    for name, flag in flags.items():
        if type(flag) is not bool:
            raise SpellingError(f"{name} is {flag!r}", where=where, do="write True or False")
    if recompute_slice_activation:
        raise SpellingError(
            "recompute_slice_activation would cut what is held of a cell over ranks that hold the same",
            where=where,
            do="leave it out, and shard that value: module.shard(NAME, [...])",
        )
    names = [(node.scope, node.source) for node in module.graph]
    known = dict.fromkeys(name for pair in names for name in pair if name)
    found = set(matching_names(cell, known))
    if not found:
        raise SpellingError(
            f'no scope and no node is "{cell}"',
            where=where,
            notes=nearest_names(cell, known),
            do="name a scope of the model, such as h.0/mlp, or a glob",
        )
    say_recompute(module, RecomputeSaid(cell, mp_comm_recompute, parallel_optimizer_comm_recompute), mode)
    return sum(not found.isdisjoint(pair) for pair in names)
