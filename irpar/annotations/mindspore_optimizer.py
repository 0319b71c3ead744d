"""MindSpore's optimizer parallel: `hsdp`, `parallel_optimizer_config`, and `parallel_optimizer` of a parameter."""

from collections.abc import Sequence
from typing import Any

from irpar.analysis.optimizer_parallel import OptimizerParallel, say_optimizer_parallel, say_whole
from irpar.ir import Annotation, AnnotationError, Module
from irpar.sharding import nearest_names

from .devices import SpellingError

_LEVELS = {"level1": False, "level2": False, "level3": True}
"""Whether weights are gathered again in the backward pass. All shard weights and gradients, as that sends no more."""
_KB = 1.024
"""What MindSpore calls a KB, in units of 1,000 bytes."""
_CONFIG = {
    "parallel_optimizer_threshold": "threshold",
    "optimizer_weight_shard_size": "shard_size",
    "optimizer_level": "optimizer_level",
}
"""The entries of parallel_optimizer_config, and what `hsdp` calls them."""


def hsdp(
    module: Module,
    shard_size: int = -1,
    threshold: float = 64,
    optimizer_level: str = "level1",
    *,
    axes: Sequence[str] = ("dp",),
) -> None:
    """Shard weights, their optimizer state and gradients over ranks that would hold the same.

    >>> hsdp(step, shard_size=4, optimizer_level="level3")      # doctest: +SKIP

    The default pipeline then has the pass `zero`, in stage 3. Unlike MindSpore it shards any dim, unevenly if need be.

    Args:
        module: a step of training, or what one is made of.
        shard_size: ranks over which a weight is sharded at most, neighbours along the axes; -1: all; 1: none.
        threshold: weights of which a rank holds fewer KB, of 1,024 bytes, stay as they are.
        optimizer_level: level1 and level2: weights are gathered once a step; level3: again in the backward pass.
        axes: mesh axes along which ranks hold the same weights, major first.

    Raises:
        SpellingError: a size, a threshold, a level or axes that there cannot be.
    """
    if type(shard_size) is not int or (shard_size != -1 and shard_size < 1):
        raise SpellingError(
            f"the shard size is {shard_size!r}", where="hsdp", do="give a number of ranks from 1, or -1 for all"
        )
    is_number = isinstance(threshold, (int, float)) and type(threshold) is not bool
    if not is_number or not 0 <= threshold < float("inf"):
        raise SpellingError(f"the threshold is {threshold!r}", where="hsdp", do="give a number of KB from 0")
    if not isinstance(optimizer_level, str) or optimizer_level not in _LEVELS:
        raise SpellingError(
            f"there is no optimizer level {optimizer_level!r}", where="hsdp", do=f"choose from {', '.join(_LEVELS)}"
        )
    if isinstance(axes, str) or not axes or not all(isinstance(axis, str) for axis in axes):
        raise SpellingError(f"the axes are {axes!r}", where="hsdp", do='name mesh axes: axes=["dp"]')
    said = OptimizerParallel(3, _LEVELS[optimizer_level], shard_size, threshold * _KB, tuple(axes))
    say_optimizer_parallel(module, said)


def say_config(module: Module, enable: Any, config: Any) -> None:
    """What `set_auto_parallel_context` does with its arguments of the optimizer.

    Raises:
        SpellingError: what `hsdp` refuses, or an entry that there is not.
    """
    where = "set_auto_parallel_context"
    if not isinstance(enable, bool):
        raise SpellingError(f"enable_parallel_optimizer is {enable!r}", where=where, do="write True or False")
    if not isinstance(config, dict):
        raise SpellingError(
            f"parallel_optimizer_config is {config!r}, no dict",
            where=where,
            do='write {"parallel_optimizer_threshold": 64}',
        )
    for name in config:
        if name not in _CONFIG:
            raise SpellingError(
                f"parallel_optimizer_config has no entry {name!r}",
                where=where,
                notes=nearest_names(str(name), _CONFIG),
                do=f"choose from {', '.join(_CONFIG)}",
            )
    if enable:
        hsdp(module, **{_CONFIG[name]: said for name, said in config.items()})
    else:
        say_optimizer_parallel(module, OptimizerParallel())


def set_parallel_optimizer(module: Module, parameter: str, parallel_optimizer: bool) -> int:
    """Say whether parameters are sharded with the others: MindSpore's `Parameter(..., parallel_optimizer=False)`.

    >>> set_parallel_optimizer(step, "wte.weight", False)       # doctest: +SKIP

    What is said last of a parameter holds.

    Args:
        module: the module.
        parameter: name or glob of weights.
        parallel_optimizer: whether they are.

    Returns:
        How many weights match.

    Raises:
        IrparError: none matches, or it is said by something else than True or False.
    """
    where = f'set_parallel_optimizer("{parameter}", {parallel_optimizer!r})'
    if not isinstance(parallel_optimizer, bool):
        raise SpellingError(f"parallel_optimizer is {parallel_optimizer!r}", where=where, do="write True or False")
    names = weight_names(module, parameter, where)
    say_whole(module, dict.fromkeys(names, not parallel_optimizer))
    return len(names)


def weight_names(module: Module, pattern: str, where: str) -> list[str]:
    """The names of the weights that a name or glob matches.

    Raises:
        IrparError: there are none.
    """
    try:
        matched = module.named_values.matches(Annotation(pattern, ()))
    except AnnotationError as error:  # Its place would be an entry of --shardings, and nobody wrote one.
        raise SpellingError(error.what, where=where, notes=error.notes, do=error.do) from error
    states = {value for graph in module.graphs for value in graph.states}
    names = [value.source_name for value in matched if value.is_constant or value in states]
    if not names:
        what = "an input" if matched[0].node is None else f"what {matched[0].node.op_type} gives"
        raise SpellingError(
            f'"{pattern}" matches no weight',
            where=where,
            notes=(f"it matches %{matched[0].name}, which is {what}, no weight",),
            do="give the name of a weight, or a glob of several",
        )
    return names
