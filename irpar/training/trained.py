"""What a step trains, and lines about it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

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
        TrainingError: nothing is left.
    """
    from irpar.passes.autodiff import GradientError, chosen_tensors

    try:
        chosen = chosen_tensors(module, settings.trainable)
    except GradientError as error:
        if settings.trainable:
            raise
        do = spelled("name inputs of floats that are: --trainable NAME", 'name inputs that are: trainable=["NAME"]')
        raise TrainingError("the model has no initializer of floats to train", do=do) from error
    more = chosen_tensors(module, settings.also_trainable) if settings.also_trainable else ()
    left_out = statistics | _frozen(module, settings)
    found = [value for value in dict.fromkeys((*chosen, *more)) if value not in left_out]
    if not found:
        do = spelled("name parameters: --trainable GLOB", 'name parameters: trainable=["GLOB"]')
        raise TrainingError("no parameter is left to train", do=f"{do}, or freeze fewer")
    return found


def _frozen(module: Module, settings: Settings) -> set[Value]:
    from irpar.passes.autodiff import chosen_tensors

    return set(chosen_tensors(module, settings.freeze)) if settings.freeze else set()


def trained_note(module: Module) -> str:
    """A line about how many parameters there are, and of how many numbers as far as their sizes are known."""
    graph = module.graph
    trained = [value for value, state in graph.states.items() if state.is_trained]
    numbers = sum(math.prod(value.tensor_type.static_shape) for value in trained if value.is_static)
    return f"trains {count_text(len(trained), 'tensor')} of {numbers:,} numbers"


def about_parameters(
    module: Module, parameters: Iterable[Value], statistics: Set[Value], settings: Settings
) -> Iterator[str]:
    """Lines about parameters that may be meant otherwise, and about what may be meant to be one.

    Args:
        module: a model whose weights are lifted.
        parameters: what is trained of it.
        statistics: running statistics, of which nothing is said.
        settings: what was asked for; of what it names nothing is said either.
    """
    from irpar.passes.autodiff.dependence import is_real

    trained = list(parameters)
    yield from map(_mask_note, masks_among(trained))
    yield from ties_among(trained)
    yield from _computed(trained)
    if settings.trainable:
        return
    known = {*trained, *statistics, *_frozen(module, settings)}
    given = [value for value in module.graph.constants if value.source is not None and is_real(value.type)]
    given = [value for value in given if tensor_type(value.type) and value.name not in module.literals]
    rest = [value for value in given if value not in known]
    yield from _tables(rest)
    yield from _computed_numbers(rest)
    yield from _plain_numbers(given, rest, trained)


def _computed(trained: Iterable[Value]) -> Iterator[str]:
    """A line about what is trained, and is computed of parameters: rows of a table, a token for each sample."""
    from irpar.passes.autodiff import folded_from

    made = {value.source_name: names for value in trained if len(names := folded_from(value)) > 1}
    if made:
        yield f"trained as they are, though the export computed them: {_of(made)}"


def _computed_numbers(rest: Iterable[Value]) -> Iterator[str]:
    """A line about single numbers that are computed of parameters: exp(logit_scale)."""
    from irpar.passes.autodiff import folded_from, weights_of

    numbers = ((value.source_name, folded_from(value)) for value in rest if not value.tensor_type.rank)
    made = {name: names for name, names in numbers if weights_of(names)}
    if made:
        yield f"not trained, since they are single numbers that the export computed: {_of(made)}"


def _of(made: Mapping[str, Sequence[str]]) -> str:
    """Of which parameters an export computed something, and how to export these."""
    from irpar.passes.autodiff import weights_of

    of = list(dict.fromkeys(name for names in made.values() for name in weights_of(names)))
    export = "torch.onnx.export(..., dynamo=True, optimize=False)"
    return f"{listed(list(made), 3)}, of {listed(of, 3)}; with {export} these are trained"


def _tables(rest: Iterable[Value]) -> Iterator[str]:
    """Lines about what the export says is no parameter."""
    from irpar.passes.autodiff import PARAMETER, TABLE, kind_in_export

    kinds = {value: kind_in_export(value) for value in rest}
    buffers = [value.source_name for value, kind in kinds.items() if kind not in (None, PARAMETER, TABLE)]
    if buffers:
        yield f"not trained, since the export calls them buffers: {listed(buffers, 3)}"
    tables = [value.source_name for value, kind in kinds.items() if kind == TABLE and value.tensor_type.rank]
    if tables:
        yield f"not trained, since the export computed them of no parameter: {listed(tables, 3)}"


def _plain_numbers(given: Iterable[Value], rest: Iterable[Value], trained: Iterable[Value]) -> Iterator[str]:
    """A line about single numbers that are named like parameters, where the model does not say what was one."""
    from irpar.passes.autodiff import kind_in_export

    if any(kind_in_export(value) is not None for value in given):
        return
    roots = {_root(value.source_name) for value in trained if "." in value.source_name}
    numbers = [value.source_name for value in rest if not value.tensor_type.rank]
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
