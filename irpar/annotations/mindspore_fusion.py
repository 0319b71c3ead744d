"""MindSpore's parallel context, with `comm_fusion`, and `set_comm_fusion` of a cell."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from irpar.analysis.communication_fusion import FusionMode, is_size, say_fusion_of_kinds, say_fusion_of_tensors
from irpar.ir import Module
from irpar.ops.collectives import OF_KIND
from irpar.sharding import nearest_names

from .devices import SpellingError
from .mindspore_optimizer import say_config, weight_names

_KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reducescatter": "reduce_scatter"}
"""What MindSpore calls them, and plan.json."""
_OPEN = "openstate"
_AUTO_MB = 64
"""What its mode auto takes together."""
_DO = 'write {"allreduce": {"mode": "auto", "config": None}}, and the same for "allgather" and "reducescatter"'
_MODES = {
    "auto": 'of mode "auto" the config is None',
    "size": 'of mode "size" the config is a number of MB above 0: {"mode": "size", "config": 32}',
    "index": 'of mode "index" the config is a list that ascends from 1: {"mode": "index", "config": [20, 35]}',
}


def set_auto_parallel_context(
    module: Module,
    *,
    comm_fusion: Any = None,
    enable_parallel_optimizer: Any = None,
    parallel_optimizer_config: Any = None,
) -> None:
    """Say how collectives are merged, kind by kind, and how optimizer state is sharded.

    >>> set_auto_parallel_context(module, comm_fusion={"allreduce": {"mode": "size", "config": 32}})  # doctest: +SKIP

    "auto" merges where the network of the partition says that it is faster, up to 64 MB; "size" up to so many MB;
    "index" the all-reduces between two numbers. Kinds that are not named are merged as fuse-communication is told; with
    `"openstate": False` none are. What was said before is forgotten. The optimizer's arguments are those of `hsdp`.

    Args:
        module: the module; fuse-communication reads what is said.
        comm_fusion: kind ("allreduce", "allgather", "reducescatter") to {"mode": ..., "config": ...}.
        enable_parallel_optimizer: whether optimizer state is sharded.
        parallel_optimizer_config: how: "parallel_optimizer_threshold" (KB), "optimizer_weight_shard_size" (ranks) and
            "optimizer_level".

    Raises:
        SpellingError: a kind, a mode, a config or a level that there is not.
    """
    if enable_parallel_optimizer is not None or parallel_optimizer_config is not None:
        enable = True if enable_parallel_optimizer is None else enable_parallel_optimizer
        say_config(module, enable, {} if parallel_optimizer_config is None else parallel_optimizer_config)
        if comm_fusion is None:
            return
    if not isinstance(comm_fusion, dict) or not comm_fusion:
        raise SpellingError(f"comm_fusion is {comm_fusion!r}, no dict of kinds", do=_DO)
    is_open = comm_fusion.get(_OPEN, True)
    if not isinstance(is_open, bool):
        raise SpellingError(f"{_OPEN} is {is_open!r}", where="comm_fusion", do="write True or False")
    found = {_kind(name): _mode(name, said) for name, said in comm_fusion.items() if name != _OPEN}
    say_fusion_of_kinds(module, found if is_open else dict.fromkeys(OF_KIND, FusionMode("off")))


def _kind(name: Any) -> str:
    if name in _KINDS:
        return _KINDS[name]
    raise SpellingError(
        f"comm_fusion has no kind {name!r}",
        notes=nearest_names(str(name), [*_KINDS, _OPEN]),
        do=f"choose from {', '.join(_KINDS)}; for other kinds use fuse-communication{{mode=...}}",
    )


def _mode(name: str, said: Any) -> FusionMode:
    where = f'comm_fusion["{name}"]'
    if not isinstance(said, dict) or not {"mode"} <= said.keys() <= {"mode", "config"}:
        raise SpellingError(f'{said!r} is no {{"mode": ..., "config": ...}}', where=where, do=_DO)
    mode, config = said["mode"], said.get("config")
    if not isinstance(mode, str) or mode not in _MODES:
        raise SpellingError(f"there is no mode {mode!r}", where=where, do=f"choose from {', '.join(_MODES)}")
    if mode == "index" and name != "allreduce":
        raise SpellingError(f'mode "index" is of allreduce, not of {name}', where=where, do='take "auto" or "size"')
    if mode == "auto" and config is None:
        return FusionMode("auto", _AUTO_MB)
    if mode == "size" and is_size(config):
        return FusionMode("size", config)
    if mode == "index" and _ascends(config):
        return FusionMode("index", indices=tuple(config))
    raise SpellingError(f'mode "{mode}" has the config {config!r}', where=where, do=_MODES[mode])


def _ascends(config: Any) -> TypeGuard[Sequence[int]]:
    is_list = isinstance(config, (list, tuple)) and bool(config) and all(type(place) is int for place in config)
    return is_list and config[0] > 0 and list(config) == sorted(set(config))


def set_comm_fusion(module: Module, parameter: str, fusion_type: int) -> int:
    """Say which parameters' collectives are merged with each other: gathers of them, and sums of their gradients.

    >>> set_comm_fusion(module, "h.0.*", 1)          # doctest: +SKIP
    >>> set_comm_fusion(module, "wte.weight", 0)     # doctest: +SKIP

    Those of one number that are alike and do not wait for each other become one, whatever their size; 0: each alone.
    What is said last of a parameter holds. A kind that is off stays so.

    Args:
        module: the module; fuse-communication reads what is said.
        parameter: name or glob of weights.
        fusion_type: the number.

    Returns:
        How many weights match.

    Raises:
        IrparError: none matches, or it is no number from 0.
    """
    where = f'set_comm_fusion("{parameter}", {fusion_type!r})'
    if type(fusion_type) is not int or fusion_type < 0:
        raise SpellingError(f"{fusion_type!r} is no number from 0", where=where, do="give an integer; 0 means alone")
    names = weight_names(module, parameter, where)
    say_fusion_of_tensors(module, dict.fromkeys(names, fusion_type))
    return len(names)
