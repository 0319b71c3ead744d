"""Tensors by name, annotated each by its number of dims."""

from collections.abc import Callable, Sequence

from irpar.ir import Annotation, Module, Value, tensor_type
from irpar.ir.annotate import annotate, apply_to
from irpar.sharding import DimSpec, Mesh

from .devices import SpellingError


def annotate_named(
    module: Module,
    pattern: str,
    spec: Callable[[int], Sequence[DimSpec]],
    said: str,
    mesh: Mesh | None = None,
    where: str = "",
) -> int:
    """Annotate the tensors that a name or glob matches.

    Args:
        module: the module; without a mesh it keeps the annotations until it has one.
        pattern: name or glob.
        spec: gives the annotation of a tensor with that many dims.
        said: what was written, for reasons and messages.
        mesh: the mesh that the annotation is written for; the module gets it once all fits.
        where: file and line; empty where there is none.

    Returns:
        How many tensors match.

    Raises:
        IrparError: none matches, or the annotation does not fit.
    """
    matched = _matched(module, pattern, where)
    if any(rank_of(value) is None for value in matched):
        infer_undeclared_types(module)
        matched = _matched(module, pattern, where)
    by_rank: dict[int, list[Value]] = {}
    written = f"{said}      {where}" if where else said
    for value in matched:
        by_rank.setdefault(_known_rank(value, written), []).append(value)
    specs = {rank: tuple(spec(rank)) for rank in by_rank}
    for rank, dims in specs.items():
        if len(dims) != rank:
            first = by_rank[rank][0]
            raise SpellingError(
                f"the annotation has {len(dims)} dims, but {first.name} is {first.type}",
                where=written,
                do=f"write one entry for each of its {rank} dims",
            )
    if mesh is not None:
        module.set_mesh(mesh)
    for rank, values in by_rank.items():
        place(module, pattern, specs[rank], values, said, where=where, is_alone=len(by_rank) == 1)
    return len(matched)


def _known_rank(value: Value, said: str) -> int:
    rank = rank_of(value)
    if rank is None:
        raise SpellingError(
            f"%{value.name} is {value.type}: only tensors of known rank can be sharded",
            where=said,
            do="annotate a tensor whose number of dims is known",
        )
    return rank


def _matched(module: Module, pattern: str, where: str) -> list[Value]:
    return module.named_values.matches(Annotation(pattern, (), where))


def place(
    module: Module,
    pattern: str,
    spec: tuple[DimSpec, ...],
    values: Sequence[Value],
    said: str,
    *,
    where: str = "",
    is_alone: bool,
    is_implied: bool = False,
) -> None:
    """Annotate tensors of one rank; `is_alone` where these are all that the pattern matches."""
    if module.meshes:
        apply_to(module, Annotation(pattern, spec, where, said, is_implied), module.mesh, values)
        return
    for name in [pattern] if is_alone else [value.source_name for value in values]:
        annotate(module, Annotation(name, spec, where, said, is_implied))


def rank_of(value: Value) -> int | None:
    """Number of dims of a tensor; None where it is not known, or the value is no tensor."""
    type_ = tensor_type(value.type)
    return None if type_ is None or type_.shape is None else len(type_.shape)


def infer_undeclared_types(module: Module) -> None:
    """Infer the types that the model does not declare, so that annotations of intermediate values can be checked."""
    from irpar.analysis.types.inference import infer_module

    infer_module(module)


def infer_where_annotated(module: Module, annotations: Sequence[Annotation]) -> None:
    """The same, where annotations name what nodes make: inputs and constants have their types."""
    named = module.named_values
    if any(value.node is not None for annotation in annotations for value in named.matches(annotation)):
        infer_undeclared_types(module)
