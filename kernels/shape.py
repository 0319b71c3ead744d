"""Operators that move, cut and join elements without computing on them."""

import math

import numpy as np

from .operands import (
    check_same_dtype,
    contiguous_result,
    narrow,
    normalize_axes,
    normalize_axis,
    one_of,
    to_int,
    to_ints,
    written,
)
from .registry import Array, ArrayModule, HostArray, ShapeArray, kernel
from .temporaries import arrays_like

Ints = tuple[int, ...]


@kernel("Identity", since=1, gives_views=True)
def identity(xp: ArrayModule, x: Array) -> Array:
    """x itself."""
    return x


@kernel("Reshape", since=5)
def reshape(xp: ArrayModule, x: Array, shape: HostArray, *, allowzero: int = 0) -> Array:
    """New shape; -1 is inferred, 0 copies the dim of x unless `allowzero`."""
    target = list(to_ints(shape))
    if allowzero and 0 in target and -1 in target:
        raise ValueError(f"shape {target} has both 0 and -1, which allowzero=1 forbids")
    if not allowzero:
        for axis, size in enumerate(target):
            if size == 0 and axis >= x.ndim:
                raise ValueError(f"shape {target} copies dim {axis} of an operand of rank {x.ndim}")
            target[axis] = x.shape[axis] if size == 0 else size
    if -1 in target and x.size == 0:
        target[target.index(-1)] = _inferred_dim(x.shape, target)
    return x.reshape(target)


def _inferred_dim(shape: Ints, target: list[int]) -> int:
    """What -1 stands for when the operand is empty, which array modules cannot tell.

    Where the other dims are empty too, the dims that are not decide: (0, 4, 8) as [0, -1] is (0, 32).
    """
    known = [size for size in target if size != -1]
    if 0 not in known:
        return 0
    count, rest = divmod(math.prod(n for n in shape if n), math.prod(n for n in known if n))
    if rest:
        raise ValueError(f"shape {target} does not fit an operand of shape {shape}")
    return count


@kernel("Transpose", since=1, gives_views=True)
def transpose(xp: ArrayModule, x: Array, *, perm: Ints | None = None) -> Array:
    """Dims permuted, reversed by default."""
    if perm is not None and sorted(perm) != list(range(x.ndim)):
        raise ValueError(f"attribute perm={list(perm)} is no permutation of the {x.ndim} dims")
    return x.transpose(perm)


@kernel("Flatten", since=1)
def flatten(xp: ArrayModule, x: Array, *, axis: int = 1) -> Array:
    """A matrix: dims before `axis` times dims from it on."""
    if not -x.ndim <= axis <= x.ndim:
        raise ValueError(f"attribute axis={axis} is outside [{-x.ndim}, {x.ndim}]")
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@kernel("Concat", since=4)
def concat(xp: ArrayModule, *operands: Array, axis: int, out: Array | None = None) -> Array:
    """Operands joined along one axis."""
    check_same_dtype(*operands)
    axis = normalize_axis(axis, operands[0].ndim)
    if out is not None and (out.dtype != operands[0].dtype or out.shape != _joined_shape(operands, axis)):
        out = None
    return xp.concatenate(operands, axis=axis, out=out)


def _joined_shape(operands: tuple[Array, ...], axis: int) -> Ints:
    shape = operands[0].shape
    return (*shape[:axis], sum(operand.shape[axis] for operand in operands), *shape[axis + 1 :])


@kernel("JoinHeads", since=1, domain="irpar")
def join_heads(xp: ArrayModule, *parts: Array, out: Array | None = None) -> Array:
    """Heads (batch, places, heads, size) of all parts behind each other: (batch, places, all heads * size)."""
    check_same_dtype(*parts)
    batch, places, _, size = parts[0].shape
    heads = sum(part.shape[2] for part in parts)
    made = None
    if out is not None and out.dtype == parts[0].dtype and out.shape == (batch, places, heads * size):
        made = out.reshape(batch, places, heads, size)
    return xp.concatenate(parts, axis=2, out=made).reshape(batch, places, heads * size)


def _split(x: Array, axis: int, sizes: Ints, n_outputs: int) -> tuple[Array, ...]:
    if len(sizes) != n_outputs or sum(sizes) != x.shape[axis] or min(sizes, default=0) < 0:
        raise ValueError(f"split {list(sizes)} does not cut {x.shape[axis]} elements into {n_outputs} results")
    parts, start = [], 0
    for size in sizes:
        parts.append(x[(slice(None),) * axis + (slice(start, start + size),)])
        start += size
    return tuple(parts)


def _equal_sizes(length: int, parts: int) -> Ints:
    if length % parts:
        raise ValueError(f"{length} elements do not divide into {parts} equal parts; the node must say how")
    return (length // parts,) * parts


@kernel("Split", since=2, gives_views=True)
def split_by_attribute(
    xp: ArrayModule, x: Array, *, axis: int = 0, split: Ints | None = None, n_outputs: int
) -> tuple[Array, ...]:
    """Cut along an axis, sizes given as an attribute (before version 13)."""
    axis = normalize_axis(axis, x.ndim)
    return _split(x, axis, split or _equal_sizes(x.shape[axis], n_outputs), n_outputs)


@kernel("Split", since=13, gives_views=True)
def split_by_operand(
    xp: ArrayModule, x: Array, split: HostArray | None = None, *, axis: int = 0, n_outputs: int
) -> tuple[Array, ...]:
    """Cut along an axis, sizes given as an operand, or equal."""
    axis = normalize_axis(axis, x.ndim)
    sizes = _equal_sizes(x.shape[axis], n_outputs) if split is None else to_ints(split)
    return _split(x, axis, sizes, n_outputs)


@kernel("Split", since=18, gives_views=True)
def split(
    xp: ArrayModule,
    x: Array,
    split: HostArray | None = None,
    *,
    axis: int = 0,
    num_outputs: int | None = None,
    n_outputs: int,
) -> tuple[Array, ...]:
    """Cut along an axis into given sizes, or into `num_outputs` parts of ceil size with a smaller last one."""
    axis = normalize_axis(axis, x.ndim)
    if split is not None:
        return _split(x, axis, to_ints(split), n_outputs)
    count, length = num_outputs or n_outputs, x.shape[axis]
    block = -(-length // count)
    sizes = tuple(max(0, min(block, length - index * block)) for index in range(count))
    return _split(x, axis, sizes, n_outputs)


def _slice_bounds(length: int, start: int, end: int, step: int) -> slice:
    """ONNX's clamped bounds as a Python slice."""
    if step == 0:
        raise ValueError("a step of 0 is not allowed")
    start = start + length if start < 0 else start
    end = end + length if end < 0 else end
    if step > 0:
        return slice(min(max(start, 0), length), min(max(end, 0), length), step)
    # The greatest integers mean the end backwards too, as ONNX Runtime takes them.
    is_end = end in (2**31 - 1, 2**63 - 1)
    start, end = min(max(start, 0), length - 1), -1 if is_end else min(max(end, -1), length - 1)
    return slice(start, None if end < 0 else end, step) if length else slice(0, 0)


def _slice(x: Array, starts: Ints, ends: Ints, axes: Ints | None, steps: Ints | None) -> Array:
    axes = normalize_axes(axes if axes is not None else range(len(starts)), x.ndim)
    steps = steps or (1,) * len(starts)
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise ValueError(
            f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes and {len(steps)} steps do not match"
        )
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        index[axis] = _slice_bounds(x.shape[axis], start, end, step)
    return x[tuple(index)]


@kernel("Slice", since=1, gives_views=True)
def slice_by_attributes(xp: ArrayModule, x: Array, *, starts: Ints, ends: Ints, axes: Ints | None = None) -> Array:
    """Cut out a block, bounds given as attributes (before version 10)."""
    return _slice(x, starts, ends, axes, None)


@kernel("Slice", since=10, gives_views=True)
def slice_(
    xp: ArrayModule,
    x: Array,
    starts: HostArray,
    ends: HostArray,
    axes: HostArray | None = None,
    steps: HostArray | None = None,
) -> Array:
    """Cut out a block; negative bounds count from the end, negative steps walk backwards, bounds are clamped."""
    chosen = None if axes is None else to_ints(axes)
    return _slice(x, to_ints(starts), to_ints(ends), chosen, None if steps is None else to_ints(steps))


def _squeeze(x: Array, axes: Ints | None) -> Array:
    if axes is None:
        axes = tuple(axis for axis, size in enumerate(x.shape) if size == 1)
    axes = normalize_axes(axes, x.ndim)
    wide = [axis for axis in axes if x.shape[axis] != 1]
    if wide:
        raise ValueError(f"cannot drop dim {wide[0]}, which has {x.shape[wide[0]]} elements")
    return x.reshape([size for axis, size in enumerate(x.shape) if axis not in axes])


@kernel("Squeeze", since=1, gives_views=True)
def squeeze_by_attribute(xp: ArrayModule, x: Array, *, axes: Ints | None = None) -> Array:
    """Drop dims of size 1 named by an attribute (before version 13)."""
    return _squeeze(x, axes)


@kernel("Squeeze", since=13, gives_views=True)
def squeeze(xp: ArrayModule, x: Array, axes: HostArray | None = None) -> Array:
    """Drop the named dims of size 1; where none is named, all of them."""
    return _squeeze(x, None if axes is None else to_ints(axes) or None)


def _unsqueeze(x: Array, axes: Ints) -> Array:
    rank = x.ndim + len(axes)
    new = normalize_axes(axes, rank)
    sizes = iter(x.shape)
    return x.reshape([1 if axis in new else next(sizes) for axis in range(rank)])


@kernel("Unsqueeze", since=1, gives_views=True)
def unsqueeze_by_attribute(xp: ArrayModule, x: Array, *, axes: Ints) -> Array:
    """Insert dims of size 1 named by an attribute (before version 13)."""
    return _unsqueeze(x, axes)


@kernel("Unsqueeze", since=13, gives_views=True)
def unsqueeze(xp: ArrayModule, x: Array, axes: HostArray) -> Array:
    """Insert dims of size 1 at places in the result."""
    return _unsqueeze(x, to_ints(axes))


@kernel("Expand", since=8, gives_views=True)
def expand(xp: ArrayModule, x: Array, shape: HostArray) -> Array:
    """Broadcast x and `shape` against each other."""
    return xp.broadcast_to(x, np.broadcast_shapes(x.shape, to_ints(shape)))


@kernel("Tile", since=6, temporaries=arrays_like(0, results=1.5))
def tile(xp: ArrayModule, x: Array, repeats: HostArray, *, out: Array | None = None) -> Array:
    """Repeat x along each dim."""
    counts = to_ints(repeats)
    if len(counts) != x.ndim:
        raise ValueError(f"{len(counts)} repeats given for rank {x.ndim}")
    return written(xp, xp.tile(x, counts), out)


@kernel("Shape", since=1)
def shape_of(xp: ArrayModule, x: ShapeArray, *, start: int = 0, end: int | None = None) -> Array:
    """The shape, or a piece of it, as int64."""
    return xp.asarray(x.shape[_slice_bounds(x.ndim, start, x.ndim if end is None else end, 1)], dtype=np.int64)


@kernel("Size", since=1)
def size_of(xp: ArrayModule, x: ShapeArray) -> Array:
    """The number of elements, a scalar int64."""
    return xp.asarray(x.size, dtype=np.int64)


@kernel("DepthToSpace", since=1)
def depth_to_space(xp: ArrayModule, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Move blocks of channels into height and width."""
    one_of("mode", mode, ("DCR", "CRD"))
    batch, channels, height, width = x.shape
    depth = channels // blocksize**2
    if mode == "DCR":
        blocks = x.reshape(batch, blocksize, blocksize, depth, height, width).transpose(0, 3, 4, 1, 5, 2)
    else:
        blocks = x.reshape(batch, depth, blocksize, blocksize, height, width).transpose(0, 1, 4, 2, 5, 3)
    return blocks.reshape(batch, depth, height * blocksize, width * blocksize)


@kernel("SpaceToDepth", since=1)
def space_to_depth(xp: ArrayModule, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    """Move blocks of height and width into channels."""
    one_of("mode", mode, ("DCR", "CRD"))
    batch, depth, height, width = x.shape
    rows, columns = height // blocksize, width // blocksize
    blocks = x.reshape(batch, depth, rows, blocksize, columns, blocksize)
    blocks = blocks.transpose((0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return blocks.reshape(batch, depth * blocksize**2, rows, columns)


@kernel("Trilu", since=14, temporaries=arrays_like(0.25, 0))
@kernel("Trilu", since=1, domain="com.microsoft", temporaries=arrays_like(0.25, 0))
def trilu(xp: ArrayModule, x: Array, k: HostArray | None = None, *, upper: int = 1, out: Array | None = None) -> Array:
    """The upper or lower triangle of the matrices in the last two dims, zeros elsewhere."""
    diagonal = 0 if k is None else to_int(k)
    column, first = xp.arange(x.shape[-1]), xp.arange(x.shape[-2])[:, None] + diagonal
    outside = column < first if upper else column > first
    if xp.__name__ != "numpy":
        return narrow(xp.where(outside, xp.zeros_like(x), x), x.dtype)
    y = contiguous_result(out, x.shape, x.dtype)
    np.copyto(y, x)
    np.copyto(y, x.dtype.type(0), where=outside)
    return y
