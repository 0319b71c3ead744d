"""What a step trains, and lines about it."""

import math
from collections.abc import Iterable, Iterator, Set

from irpar.errors import IrparError, listed
from irpar.ir import Module, Value, tensor_type
from irpar.sharding import spelled
from irpar.units import count_text

from .masks import masks_among
from .settings import Settings
from .tied import ties_among


class TrainingError(IrparError):
    """A training step that cannot be made."""


def trained_tensors(module: Module, settings: Settings, statistics: Set[Value]) -> list[Value]:
    """What is trained.

    Raises:
        GradientError: a name matches nothing of floats.
        TrainingError: nothing is left, or a statistic is named.
    """
    from irpar.passes.autodiff import GradientError, chosen_tensors

    try:
        chosen = chosen_tensors(module, settings.trainable)
    except GradientError as error:
        if settings.trainable:
            raise
        do = spelled("name inputs of floats that are: --trainable NAME", 'name inputs that are: trainable=["NAME"]')
        raise TrainingError("the model has no initializer of floats to train", do=do) from error
    found = [value for value in chosen if value not in statistics]
    if settings.also_trainable:
        found = list(dict.fromkeys((*found, *chosen_tensors(module, settings.also_trainable))))
    if settings.freeze:
        frozen = set(chosen_tensors(module, settings.freeze))
        found = [value for value in found if value not in frozen]
    if not found:
        do = spelled("name parameters: --trainable GLOB", 'name parameters: trainable=["GLOB"]')
        raise TrainingError("no parameter is left to train", do=f"{do}, or freeze fewer")
    return found


def about_parameters(module: Module, parameters: Iterable[Value], statistics: Set[Value]) -> Iterator[str]:
    """Lines about parameters that may be meant otherwise, and about what may be meant to be one.

    Args:
        module: a model whose weights are lifted.
        parameters: what is trained of it.
        statistics: running statistics, of which nothing is said.
    """
    trained = list(parameters)
    yield from map(_mask_note, masks_among(trained))
    yield from ties_among(trained)
    yield from _computed(trained)
    yield from _untrained(module, {*trained, *statistics})


def _computed(trained: Iterable[Value]) -> Iterator[str]:
    """A line about what is trained, and is computed of parameters: rows of a table, a token for each sample."""
    from irpar.passes.autodiff import folded_from

    made = {value.source_name: names for value in trained if len(names := folded_from(value)) > 1}
    if made:
        of = listed(list(dict.fromkeys(name for names in made.values() for name in names if "." in name)), 3)
        yield (
            f"trained as they are, though the export computed them: {listed(list(made), 3)}, of {of}; with "
            "torch.onnx.export(..., dynamo=True, optimize=False) these are trained"
        )


def _untrained(module: Module, known: Set[Value]) -> Iterator[str]:
    """Lines about buffers, and about single numbers where the model does not say what was a parameter."""
    from irpar.passes.autodiff import PARAMETER, TABLE, kind_in_export
    from irpar.passes.autodiff.dependence import is_real

    given = [value for value in module.graph.constants if value.source is not None and is_real(value.type)]
    rest = [value for value in given if value not in known and value.name not in module.literals]
    kinds = {value: kind_in_export(value) for value in rest if tensor_type(value.type)}
    buffers = [value.source_name for value, kind in kinds.items() if kind not in (None, PARAMETER, TABLE)]
    if buffers:
        yield f"not trained, since the export calls them buffers: {listed(buffers, 3)}"
    tables = [value.source_name for value, kind in kinds.items() if kind == TABLE and value.tensor_type.rank]
    if tables:
        yield f"not trained, since the export computed them of no parameter: {listed(tables, 3)}"
    if all(kind_in_export(value) is None for value in given):
        roots = {_root(value.source_name) for value in known if "." in value.source_name}
        numbers = [value.source_name for value in rest if tensor_type(value.type) and not value.tensor_type.rank]
        named = [name for name in numbers if _is_named(name, roots)]
        if named:
            also = spelled(f"--also-trainable {named[0]}", f'also_trainable=["{named[0]}"]')
            yield f"not trained, since they are single numbers: {listed(named, 3)}; if one is a parameter, {also}"


def _is_named(name: str, roots: Set[str]) -> bool:
    """Whether a single number is named as parameters are, and not as what an exporter made: `m.logit_scale`."""
    return _root(name) in roots if "." in name else name.isidentifier() and not any(map(str.isdigit, name))


def _root(name: str) -> str:
    return name.split(".", 1)[0]


def _mask_note(name: str) -> str:
    """A line about what looks like a mask."""
    freeze = spelled(f"--freeze {name}", f'freeze=["{name}"]')
    return f"%{name} is trained, and only added to what a Softmax takes: if it is a mask, keep it with {freeze}"


def trained_note(module: Module) -> str:
    """A line about how many parameters there are, and of how many numbers as far as their sizes are known."""
    graph = module.graph
    trained = [value for value, state in graph.states.items() if state.is_trained]
    numbers = sum(math.prod(value.tensor_type.static_shape) for value in trained if value.is_static)
    return f"trains {count_text(len(trained), 'tensor')} of {numbers:,} numbers"
