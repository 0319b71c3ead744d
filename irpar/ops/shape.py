"""Operators that move data without computing: shapes, order, joining and cutting."""

from collections.abc import Callable, Sequence
from functools import partial

from irpar.ir import Builder, Dim, Node, Type, Value, with_dim
from irpar.ir.dims import exact_div, product_of
from irpar.sharding import ceil_div

from .facts import (
    CannotTellError,
    axes_of,
    axis_attribute,
    computed_count,
    data_of,
    dims_of,
    int_attribute,
    ints_attribute,
    ints_of,
    needed,
    needed_ints,
    operand,
    result_shape,
    result_shapes,
    shape_of,
    shapes_of,
    tensor_of,
)
from .gradients import shape as gradients
from .gradients.writer import GradientWriter, Of
from .listed_sizes import listed_sizes, target_sizes
from .local import set_target, typed_like
from .local_programs.shape import (
    CONCAT,
    PAD,
    SLICE,
    SPLIT,
    TILE,
    dims_taken_in_full,
    pads_of,
    pieces_in_full,
    pieces_taken_in_full,
    slices,
)
from .neutral import COMBINED
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, moving_rule, reshape_factors, whole

# -- Transpose ------------------------------------------------------------------------------------------------------


def _permutation(node: Node, rank: int) -> tuple[int, ...]:
    found = ints_attribute(node, "perm") or tuple(reversed(range(rank)))
    if sorted(found) != list(range(rank)):
        raise CannotTellError("no permutation of the dims")
    return found


def _infer_transpose(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    return [tensor_of(node, 0).with_shape(tuple(dims[dim] for dim in _permutation(node, len(dims))))]


def _rule_transpose(node: Node) -> FactorRule:
    """Every dim passes."""
    rule = RuleBuilder()
    dims = rule.dims(shape_of(node, 0))
    return rule.done([dims], [[dims[dim] for dim in _permutation(node, len(dims))]])


def _gradient_transpose(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    return gradients.of_transpose(node, of, writer, _permutation(node, len(dims_of(node, 0))))


define(OpDef("", "Transpose", _infer_transpose, _rule_transpose, moves_elements=True, gradient=_gradient_transpose))


# -- Reshape, Flatten, Squeeze, Unsqueeze ---------------------------------------------------------------------------


def _infer_reshape(node: Node) -> Sequence[Type]:
    data = tensor_of(node, 0)
    target = _reshape_target(node)
    copies = not int_attribute(node, "allowzero", 0)
    dims: list[Dim] = []
    for place, size in enumerate(target):
        if size == 0 and copies:
            dims.extend(dims_of(node, 0)[place : place + 1])
        else:
            dims.append(size)
    if len(dims) != len(target):
        raise CannotTellError("0 for a dim that the operand lacks")
    if -1 in target:
        place = target.index(-1)
        dims[place] = _remaining(product_of(dims_of(node, 0)), product_of((*dims[:place], *dims[place + 1 :])))
    return [data.with_shape(tuple(dims))]


def _reshape_target(node: Node) -> list[Dim]:
    """The sizes that a Reshape asks for, as far as they are known; at least how many there are."""
    sizes = needed(node, 1)
    if sizes.data is not None:
        return list(needed_ints(node, 1))
    found = listed_sizes(sizes)
    if found is None:
        raise CannotTellError("the rank of the target")
    return target_sizes(found)


def _remaining(total: Dim, known: Dim) -> Dim:
    """The size that -1 stands for."""
    return None if total is None or known is None or known == 0 else exact_div(total, known)


def _rule_reshape(node: Node) -> FactorRule:
    """Compound factors: `([(ij)])->([i,j])`, `([i,j])->([(ij)])`. Other operands are whole."""
    rule, before, after = reshape_factors(shape_of(node, 0), result_shape(node))
    others = [() if shape is None else whole(len(shape)) for shape in shapes_of(node)[1:]]
    return rule.done([before, *others], [after])


def _localize_reshape(whole_node: Node, local: Node, builder: Builder) -> None:
    """The target is the local shape."""
    target = result_shape(local)
    if 0 in target and local.version >= 14:
        local.set_attribute("allowzero", 1)
    set_target(local, 1, target, builder)


def _infer_flatten(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    axis = int_attribute(node, "axis", 1)
    axis += len(dims) if axis < 0 else 0
    return [tensor_of(node, 0).with_shape((product_of(dims[:axis]), product_of(dims[axis:])))]


def _infer_squeeze(node: Node) -> Sequence[Type]:
    dims = dims_of(node, 0)
    count = computed_count(node, 1)
    if count:
        return [tensor_of(node, 0).with_shape((None,) * (len(dims) - count))]
    axes = _squeezed(node, dims)
    return [tensor_of(node, 0).with_shape(tuple(size for dim, size in enumerate(dims) if dim not in axes))]


def _squeezed(node: Node, dims: Sequence[Dim]) -> tuple[int, ...]:
    axes = ints_of(node, "axes", 1, 13)
    if axes:  # An empty list says nothing, as ONNX Runtime has it.
        return axes_of(axes, len(dims))
    if not all(isinstance(size, int) for size in dims):
        raise CannotTellError("whether a symbolic dim is 1")
    return tuple(dim for dim, size in enumerate(dims) if size == 1)


def _localize_squeeze(whole_node: Node, local: Node, builder: Builder) -> list[Value] | None:
    """Name the axes: without them, or with none, a dim whose block has size 1 would go too."""
    named = operand(whole_node, 1)
    if named is not None and data_of(named) is None:
        return None  # They are named when it runs.
    axes = _squeezed(whole_node, shape_of(whole_node, 0))
    if not axes:
        return [typed_like(local.result, "Identity", local.operands[:1], None, builder)]
    if not ints_of(whole_node, "axes", 1, 13):
        set_target(local, 1, axes, builder)
    return None


def _infer_unsqueeze(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    count = computed_count(node, 1)
    if count is not None:
        return [tensor_of(node, 0).with_shape((None,) * (len(dims) + count))]
    axes = ints_of(node, "axes", 1, 13)
    if axes is None:
        raise CannotTellError("axes")
    for axis in axes_of(axes, len(dims) + len(axes)):
        dims.insert(axis, 1)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


_view = partial(OpDef, "", view=True, moves_elements=True, gradient=gradients.of_view)
define(_view("Reshape", _infer_reshape, _rule_reshape, localize=_localize_reshape))
define(_view("Flatten", _infer_flatten, _rule_reshape))
define(_view("Squeeze", _infer_squeeze, _rule_reshape, localize=_localize_squeeze))
define(_view("Unsqueeze", _infer_unsqueeze, _rule_reshape))


# -- Concat, Split --------------------------------------------------------------------------------------------------


def _infer_concat(node: Node) -> Sequence[Type]:
    shapes = [dims_of(node, index) for index in range(len(node.operands))]
    rank = len(shapes[0])
    axis = axis_attribute(node, rank)
    if any(len(shape) != rank for shape in shapes):
        raise CannotTellError("ranks differ")
    total: Dim = 0
    for shape in shapes:
        size = shape[axis]
        total = None if total is None or size is None else total + size
    dims = [total if dim == axis else _known([shape[dim] for shape in shapes]) for dim in range(rank)]
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _known(dims: Sequence[Dim]) -> Dim:
    """Of dims that must be equal the one that says most."""
    return next((dim for dim in dims if isinstance(dim, int)), next((dim for dim in dims if dim is not None), None))


def _others(dims: Sequence[DimFactors], axis: int) -> list[tuple[DimFactors, DimFactors]]:
    """The dims that may be sharded instead of the axis, where pieces of it that are in full are large."""
    return [(dims[axis], factors) for dim, factors in enumerate(dims) if dim != axis]


def _rule_concat(node: Node) -> FactorRule:
    """Along the axis elements move to other blocks, and pieces of few are in full; the other dims pass."""
    shape = result_shape(node)
    axis = axis_attribute(node, len(shape))
    rule, dims = _factors_along(shape, axis, shape[axis], Kind.PERMUTE)
    pieces = pieces_in_full(node)
    operands = [_piece(dims, axis, is_full) for is_full in pieces]
    return rule.done(operands, [dims], moves=_others(dims, axis) if any(pieces) else ())


def _factors_along(shape: Sequence[int], axis: int, size: int, kind: Kind) -> tuple[RuleBuilder, list[DimFactors]]:
    """A factor for each dim of a shape: along the axis one of another size and kind."""
    rule = RuleBuilder()
    return rule, [
        (rule.factor(size, kind),) if dim == axis else rule.dims([length])[0] for dim, length in enumerate(shape)
    ]


def _piece(dims: Sequence[DimFactors], axis: int, is_full: bool) -> list[DimFactors]:
    """The factors of a piece of the axis."""
    return [() if dim == axis and is_full else factors for dim, factors in enumerate(dims)]


def _split_sizes(node: Node, size: Dim, count: int) -> list[Dim]:
    sizes = ints_of(node, "split", 1, 13)
    if sizes is not None:
        return list(sizes)
    if not isinstance(size, int):
        if size is None or exact_div(size, count) is None:
            raise CannotTellError("sizes of a symbolic dim")
        return [exact_div(size, count)] * count
    # Parts of equal size, the last one smaller where the size does not divide.
    part = ceil_div(size, count)
    return [min(part, max(size - part * index, 0)) for index in range(count)]


def _infer_split(node: Node) -> Sequence[Type]:
    data, dims = tensor_of(node, 0), dims_of(node, 0)
    axis = axis_attribute(node, len(dims), 0)
    if computed_count(node, 1) is not None:
        return [data.with_shape(with_dim(dims, axis, None))] * len(node.results)
    sizes = _split_sizes(node, dims[axis], len(node.results))
    if len(sizes) != len(node.results):
        raise CannotTellError("sizes and results differ")
    return [data.with_shape(with_dim(dims, axis, size)) for size in sizes]


def _rule_split(node: Node) -> FactorRule:
    """Along the axis elements move to other blocks, and pieces of few are sums of parts; the other dims pass."""
    shape, shapes = shape_of(node, 0), result_shapes(node)
    axis = axis_attribute(node, len(shape), 0)
    if any(len(found) != len(shape) for found in shapes):
        raise CannotTellError("results of different rank")
    pieces = pieces_taken_in_full(node)
    rule, dims = _factors_along(shapes[0], axis, shape[axis], Kind.REDUCE if any(pieces) else Kind.PERMUTE)
    operands = [dims, *(whole(1) for _ in node.operands[1:])]
    reduce = COMBINED.get(tensor_of(node, 0).dtype, "sum")
    results = [_piece(dims, axis, is_full) for is_full in pieces]
    return rule.done(operands, results, reduce, moves=_others(dims, axis) if any(pieces) else ())


define(
    OpDef(
        "",
        "Concat",
        _infer_concat,
        _rule_concat,
        local_program=CONCAT.local_program(),
        gradient=gradients.of_concat,
    )
)
define(
    OpDef(
        "",
        "Split",
        _infer_split,
        _rule_split,
        local_program=SPLIT.local_program(),
        moves_elements=True,
        gradient=gradients.of_split,
    )
)


# -- Slice, Pad, Tile, Expand ---------------------------------------------------------------------------------------


def _infer_slice(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    for axis, cut in slices(node, len(dims)).items():
        dims[axis] = _sliced_size(dims[axis], cut)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _sliced_size(size: Dim, cut: tuple[int, int, int]) -> Dim:
    if isinstance(size, int):
        return len(range(*slice(*cut).indices(size))) if cut[2] > 0 else len(_backwards(size, cut))
    if cut[0] == 0 and cut[1] >= 2**31 - 1 and cut[2] == 1:
        return size
    raise CannotTellError("a slice of a symbolic dim")


def _backwards(size: int, cut: tuple[int, int, int]) -> range:
    """The indices of a slice of negative step; ONNX clamps bounds as numpy does, but for an end below -size."""
    start, end, step = cut
    start = min(max(start + size, 0) if start < 0 else start, size - 1)
    end = max(end + size, -1) if end < 0 else end
    return range(start, end, step)


def _is_full(size: int, cut: tuple[int, int, int]) -> bool:
    """True where a slice takes all indices in order."""
    return cut[2] == 1 and range(*slice(*cut).indices(size)) == range(size)


def _rule_slice(node: Node) -> FactorRule:
    """Dims that are taken whole pass; along those that are sliced elements move to other blocks, or few are summed."""
    shape, result = shape_of(node, 0), result_shape(node)
    partial = {axis for axis, cut in slices(node, len(shape)).items() if not _is_full(shape[axis], cut)}
    few = dims_taken_in_full(node)
    return moving_rule(shapes_of(node), result, partial, few, COMBINED.get(tensor_of(node, 0).dtype, "sum"))


def _gradient_slice(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    bounds = (operand(node, index) for index in (1, 2, 3, 4))
    is_known = all(value is None or data_of(value) is not None for value in bounds)
    cuts = slices(node, len(dims_of(node, 0))) if is_known else None
    return gradients.of_slice(node, of, writer, cuts)


define(
    OpDef(
        "",
        "Slice",
        _infer_slice,
        _rule_slice,
        local_program=SLICE.local_program(),
        moves_elements=True,
        gradient=_gradient_slice,
    )
)


def _infer_pad(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    for axis, (before, after) in pads_of(node, len(dims)).items():
        size = dims[axis]
        dims[axis] = size if before + after == 0 or size is None else size + (before + after)
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _rule_pad(node: Node) -> FactorRule:
    """Dims without padding pass, in every mode."""
    return moving_rule(
        shapes_of(node),
        result_shape(node),
        {axis for axis, pads in pads_of(node, len(shape_of(node, 0))).items() if pads != (0, 0)},
    )


def _gradient_pad(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    return gradients.of_pad(node, of, writer, pads_of(node, len(dims_of(node, 0))))


define(OpDef("", "Pad", _infer_pad, _rule_pad, local_program=PAD.local_program(), gradient=_gradient_pad))


def _infer_tile(node: Node) -> Sequence[Type]:
    dims, repeats = dims_of(node, 0), listed_sizes(needed(node, 1))
    if repeats is None or len(dims) != len(repeats):
        raise CannotTellError("repeats of another rank")
    sizes = [None if None in pair else product_of(pair) for pair in zip(dims, repeats, strict=True)]
    return [tensor_of(node, 0).with_shape(tuple(sizes))]


def _rule_tile(node: Node) -> FactorRule:
    """Dims that are not repeated pass."""
    return moving_rule(
        shapes_of(node), result_shape(node), {dim for dim, count in enumerate(needed_ints(node, 1)) if count != 1}
    )


def _gradient_tile(node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
    if data_of(needed(node, 1)) is None:
        return gradients.of_computed_tile(node, of, writer)
    return gradients.of_tile(node, of, writer, needed_ints(node, 1))


define(
    OpDef(
        "",
        "Tile",
        _infer_tile,
        _rule_tile,
        local_program=TILE.local_program(),
        moves_elements=True,
        gradient=_gradient_tile,
    )
)


def _infer_expand(node: Node) -> Sequence[Type]:
    dims, target = dims_of(node, 0), listed_sizes(needed(node, 1))
    if target is None:
        raise CannotTellError("the rank of the target")
    more = len(target) - len(dims)
    pairs = zip((1,) * more + dims, (1,) * -more + tuple(target_sizes(target)), strict=True)
    return [tensor_of(node, 0).with_shape(tuple(_expanded_size(*pair) for pair in pairs))]


def _expanded_size(size: Dim, wanted: Dim) -> Dim:
    if size == 1 or wanted == size:
        return wanted
    if wanted == 1 or (isinstance(size, int) and not isinstance(wanted, int)):
        return size
    if isinstance(size, int):
        raise CannotTellError(f"{size} does not broadcast to {wanted}")
    return wanted if isinstance(wanted, int) else None


def _rule_expand(node: Node) -> FactorRule:
    """Every dim of the result passes; those that are new in it need nothing of the operand."""
    rule = RuleBuilder()
    shape, result = shape_of(node, 0), result_shape(node)
    dims = rule.dims(result)
    start = len(result) - len(shape)
    data = [dims[start + dim] if size == result[start + dim] else () for dim, size in enumerate(shape)]
    return rule.done([data, whole(1)], [dims])


def _localize_target(index: int) -> Callable[[Node, Node, Builder], None]:
    """A hook that sets a shape operand to the local shape."""

    def hook(whole_node: Node, local: Node, builder: Builder) -> None:
        set_target(local, index, result_shape(local), builder)

    return hook


define(
    OpDef(
        "",
        "Expand",
        _infer_expand,
        _rule_expand,
        localize=_localize_target(1),
        moves_elements=True,
        gradient=gradients.of_expand,
    )
)
