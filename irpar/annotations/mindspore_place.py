"""MindSpore's `primitive_target` of an operator: on the host or on the device."""

from irpar.analysis.place_said import say_place
from irpar.globs import matching_names
from irpar.ir import Module, Place
from irpar.sharding import nearest_names

from .devices import SpellingError

_PLACES: dict[str, Place] = {"CPU": "host", "GPU": "device", "Ascend": "device"}


def primitive_target(module: Module, operator: str, target: str) -> int:
    """Say where an operator runs, as `operator.add_prim_attr("primitive_target", "CPU")` and `set_device` do.

    >>> primitive_target(module, "tables.*", "CPU")                  # doctest: +SKIP

    The default pipeline then has the pass `place`, which leaves on the device what nothing is said of. What is said
    last of an operator holds.

    Args:
        module: a model, or a step of training.
        operator: a node of the model, or a scope: all operators of a cell; or a glob.
        target: "CPU": on the host; "GPU" or "Ascend": on the device.

    Returns:
        How many nodes match.

    Raises:
        SpellingError: nothing matches, or there is no such target.
    """
    where = f'primitive_target("{operator}")'
    place = _PLACES.get(target)
    if place is None:
        raise SpellingError(f"target is {target!r}", where=where, do=f"write one of {', '.join(map(repr, _PLACES))}")
    names = [(node.scope, node.source) for node in module.graph]
    known = dict.fromkeys(name for pair in names for name in pair if name)
    found = set(matching_names(operator, known))
    if not found:
        raise SpellingError(
            f'no scope and no node is "{operator}"',
            where=where,
            notes=nearest_names(operator, known),
            do="name a scope of the model, such as tables.0, or a glob",
        )
    say_place(module, operator, place)
    return sum(not found.isdisjoint(pair) for pair in names)
