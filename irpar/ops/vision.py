"""Sampling of images: batch, channels and what is sampled may be sharded; places of the image are whole."""

from collections.abc import Sequence
from math import prod

from irpar.ir import Builder, Node, Type

from .facts import (
    CannotTellError,
    dims_of,
    int_attribute,
    ints_attribute,
    needed,
    needed_ints,
    result_shape,
    same_type,
    shape_of,
    shapes_of,
    tensor_of,
    text_attribute,
)
from .gradients.matrices import decompose_inverse, of_center_crop_pad, of_col2im, of_det
from .gradients.refused import ROUNDED_REGIONS
from .gradients.sampling import decompose_crop_and_resize, decompose_grid_sample, decompose_roi_align, of_affine_grid
from .listed_sizes import listed_sizes, target_sizes
from .local import set_target
from .local_programs.shape import CENTER_CROP_PAD, crop_targets
from .microsoft import microsoft
from .op_def import OpDef
from .registry import define
from .rule import DimFactors, FactorRule, Kind, RuleBuilder, moving_rule, whole

# -- AffineGrid, GridSample -----------------------------------------------------------------------------------------


def _infer_affine_grid(node: Node) -> Sequence[Type]:
    sizes = listed_sizes(needed(node, 1))
    if sizes is None:
        raise CannotTellError("the rank of the grid")
    batch, _, *places = target_sizes(sizes)
    return [tensor_of(node, 0).with_shape((batch, *places, len(places)))]


def _rule_affine_grid(node: Node) -> FactorRule:
    """`([b,i,j],[.])->([b,h,w,2])`: b passes; a place of the grid is where it is in the whole."""
    needed_ints(node, 1)  # the local program has another batch
    rule = RuleBuilder()
    batch, *inside = shape_of(node, 0)
    dims = [*rule.dims([batch]), *rule.dims(inside, Kind.REPLICATE)]
    return rule.done([dims, whole(1)], [[dims[0], *[()] * (len(result_shape(node)) - 1)]])


def _localize_affine_grid(whole_node: Node, local: Node, builder: Builder) -> None:
    """The batch is that of the block."""
    set_target(local, 1, [result_shape(local)[0], *needed_ints(whole_node, 1)[1:]], builder)


def _cost_affine_grid(node: Node) -> int:
    """A multiply and an add for each coordinate that goes in."""
    return 2 * prod(result_shape(node)) * shape_of(node, 0)[-1]


TAPS = {"nearest": 1, "bilinear": 2, "linear": 2, "bicubic": 4, "cubic": 4}
"""Elements that count into a sample along one dim."""


def _infer_grid_sample(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape((*dims_of(node, 0)[:2], *dims_of(node, 1)[1:-1]))]


def _rule_grid_sample(node: Node) -> FactorRule:
    """`([b,c,h,w],[b,i,j,2])->([b,c,i,j])`: b, c, i and j pass; a sample may lie anywhere in the image."""
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    batch, channels = rule.dims(shape[:2])
    places = rule.dims(shape[2:], Kind.REPLICATE)
    samples = rule.dims(shape_of(node, 1)[1:-1])
    return rule.done([[batch, channels, *places], [batch, *samples, ()]], [[batch, channels, *samples]])


def _cost_grid_sample(node: Node) -> int:
    taps = TAPS.get(text_attribute(node, "mode", "linear"), 1)
    return 2 * prod(result_shape(node)) * prod([taps] * (len(shape_of(node, 0)) - 2))


define(
    OpDef(
        "",
        "AffineGrid",
        _infer_affine_grid,
        _rule_affine_grid,
        _cost_affine_grid,
        _localize_affine_grid,
        gradient=of_affine_grid,
    )
)
define(
    OpDef("", "GridSample", _infer_grid_sample, _rule_grid_sample, _cost_grid_sample, decompose=decompose_grid_sample)
)
microsoft("GridSample", _infer_grid_sample, _rule_grid_sample, _cost_grid_sample, decompose=decompose_grid_sample)


# -- RoiAlign, MaxRoiPool, CropAndResize ----------------------------------------------------------------------------


def _region_size(node: Node) -> tuple[int, int]:
    if node.op_type == "RoiAlign":
        return int_attribute(node, "output_height", 1), int_attribute(node, "output_width", 1)
    found = needed_ints(node, 3) if node.op_type == "CropAndResize" else ints_attribute(node, "pooled_shape")
    if found is None or len(found) != 2:
        raise CannotTellError("the size of a region")
    return found[0], found[1]


def _infer_regions(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape((dims_of(node, 1)[0], dims_of(node, 0)[1], *_region_size(node)))]


def _rule_regions(node: Node) -> FactorRule:
    """`([b,c,h,w],[r,4],[r])->([r,c,i,j])`: regions r and channels c pass; a region may lie in any image."""
    shape = shape_of(node, 0)
    rule = RuleBuilder()
    (channels,) = rule.dims(shape[1:2])
    images = rule.dims(shape[:1], Kind.REPLICATE)
    places = rule.dims(shape[2:], Kind.REPLICATE)
    (regions,) = rule.dims(shape_of(node, 1)[:1])
    data: list[DimFactors] = [*images, channels, *places]
    others: list[Sequence[DimFactors]] = [[regions, ()], [regions], whole(1)]
    return rule.done([data, *others[: len(node.operands) - 1]], [[regions, channels, (), ()]])


def _cost_regions(node: Node) -> int:
    return 8 * prod(result_shape(node))


define(OpDef("", "RoiAlign", _infer_regions, _rule_regions, _cost_regions, decompose=decompose_roi_align))
define(OpDef("", "MaxRoiPool", _infer_regions, _rule_regions, _cost_regions, gradient=ROUNDED_REGIONS))
microsoft("CropAndResize", _infer_regions, _rule_regions, _cost_regions, decompose=decompose_crop_and_resize)


# -- Col2Im, CenterCropPad, Det -------------------------------------------------------------------------------------


def _infer_col2im(node: Node) -> Sequence[Type]:
    batch, columns, _ = dims_of(node, 0)
    block = prod(needed_ints(node, 2))
    if not isinstance(columns, int):
        raise CannotTellError("symbolic channels")
    return [tensor_of(node, 0).with_shape((batch, columns // block, *needed_ints(node, 1)))]


def _rule_col2im(node: Node) -> FactorRule:
    """`([b,(ck),l],[.],[.])->([b,c,h,w])`: b and c pass; the k elements and the l places of blocks are whole."""
    batch_size, columns, count = shape_of(node, 0)
    block = prod(needed_ints(node, 2))
    rule = RuleBuilder()
    batch, channels = rule.dims([batch_size, columns // block])
    inside, places = rule.dims([block, count], Kind.REPLICATE)
    others = [whole(1), whole(1)]
    rank = len(result_shape(node))
    return rule.done([[batch, (*channels, *inside), places], *others], [[batch, channels, *[()] * (rank - 2)]])


define(OpDef("", "Col2Im", _infer_col2im, _rule_col2im, lambda node: prod(shape_of(node, 0)), gradient=of_col2im))


def _infer_center_crop_pad(node: Node) -> Sequence[Type]:
    dims = list(dims_of(node, 0))
    for axis, size in crop_targets(node, len(dims)).items():
        dims[axis] = size
    return [tensor_of(node, 0).with_shape(tuple(dims))]


def _rule_center_crop_pad(node: Node) -> FactorRule:
    """Dims that keep their size pass, along others elements move."""
    shape = shape_of(node, 0)
    changed = {dim for dim, size in crop_targets(node, len(shape)).items() if size != shape[dim]}
    return moving_rule(shapes_of(node), result_shape(node), changed)


def _localize_center_crop_pad(whole_node: Node, local: Node, builder: Builder) -> None:
    """The target is the local shape."""
    shape = result_shape(local)
    set_target(local, 1, [shape[axis] for axis in crop_targets(whole_node, len(shape))], builder)


define(
    OpDef(
        "",
        "CenterCropPad",
        _infer_center_crop_pad,
        _rule_center_crop_pad,
        localize=_localize_center_crop_pad,
        local_program=CENTER_CROP_PAD.local_program(),
        gradient=of_center_crop_pad,
    )
)


def _infer_det(node: Node) -> Sequence[Type]:
    return [tensor_of(node, 0).with_shape(dims_of(node, 0)[:-2])]


def rule_matrices(node: Node) -> FactorRule:
    """Matrices are whole, dims before them pass; so do those of a result of fewer dims."""
    rule = RuleBuilder()
    shape = shape_of(node, 0)
    batch, matrix = rule.dims(shape[:-2]), rule.dims(shape[-2:], Kind.REPLICATE)
    result: list[DimFactors] = batch if node.op_type == "Det" else [*batch, *matrix]
    others = [() if other is None else whole(len(other)) for other in shapes_of(node)[1:]]
    return rule.done([[*batch, *matrix], *others], [result])


def _cost_matrices(node: Node) -> int:
    """2/3 n^3 for a factorisation, by irpar's convention in whole numbers."""
    *batch, size, _ = shape_of(node, 0)
    return prod(batch) * (2 * size**3 // 3)


define(OpDef("", "Det", _infer_det, rule_matrices, _cost_matrices, gradient=of_det))
# By cofactors, which takes far longer than elimination, and rounds more.
microsoft("Inverse", same_type, rule_matrices, _cost_matrices, decompose=decompose_inverse, runs_decomposed=False)
