"""Convolutions of images with channels last, by products whose operand is read where windows lie: none is laid out.

float32 is summed as it is; 16 bits are multiplied by tensor cores and summed in float32. What follows (a bias, a
residual, an activation) is computed before the result is rounded, once.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..channels_last import check_addends, windows_of
from ..channelwise import WEIGHT
from ..depthwise import MOST_SPATIAL_DIMS, geometry
from ..fused_matmul import fused_matmul
from ..operands import contiguous_result, is_view
from ..registry import Array, Kept
from ..windows import Windows
from .copies import in_order
from .gpu import COUNTERS, STATIC_SHARED_BYTES, Gpu
from .indexing import ELEMENTS
from .programs import Program
from .registry import cuda_kernel

Ints = tuple[int, ...]

NUMBERS = {name: number for number, name in enumerate(("", "Relu", "Clip", "Sigmoid", "HardSwish", "Silu"))}
"""What activations are in the sources."""
_THREADS, _CHUNK_BYTES, _STEP_BYTES, _LEAST_BYTES = 256, 16, 128, 4
_STRIP = 4
"""Places that a thread computes of a convolution of single channels."""
_MOST_LANES = 16
_MOST_ELEMENTS, _LONGEST = 2**30, 2**14
_WARPGROUPS_ARCH = 90
"""The architecture that has products of warpgroups."""
_NONE = np.uint64(0)


class Tile(NamedTuple):
    """What a block computes: places times features; its share of what a multiprocessor can do at once."""

    rows: int
    features: int
    efficiency: float

    def shared_bytes(self, spatial: int) -> int:
        """Of a block: where windows begin; steps that are copied ahead, or the sums.

        Launches that follow each other take as much: to divide a multiprocessor's memory anew takes longer than most.
        """
        stages = 3 if self.rows * self.features > 64 * 64 else 4
        staged = stages * (self.rows + self.features) * _STEP_BYTES
        begins = -(-self.rows * (16 if spatial == 3 else 8) // 1024) * 1024
        return begins + max(staged, self.rows * (self.features + 8) * 4)

    def threads(self, element: int, has_warpgroups: bool) -> int:
        """Of a block."""
        if has_warpgroups:
            return self.rows * 2
        return 256 if element == 0 or self.rows * self.features > 128 * 64 else 128


TILES = (Tile(128, 128, 1.0), Tile(128, 64, 0.85), Tile(64, 128, 0.85), Tile(64, 64, 0.7))

_PRODUCTS = {True: 1024, False: 128}
"""Products of 16 bits, and of float32, of a multiprocessor in a cycle."""
_BLOCK_CYCLES, _JOIN_CYCLES, _LEAST_STEP_CYCLES = 2500, 1500, 350
"""What a block takes beside its steps, what the last of a tile waits for, and what a step takes at least."""
_JOINED = 16
"""Sums that the last block reads in a cycle."""
_MOST_SPLITS = 32


class Plan(NamedTuple):
    """How a convolution is divided: a tile, and how many parts of how many steps its sums have."""

    tile: Tile
    splits: int
    steps: int


@lru_cache(4096)
def plan_of(rows: int, features: int, groups: int, steps: int, is_narrow: bool, multiprocessors: int) -> Plan:
    """The way that is expected to take the least time.

    Args:
        rows: places of the result.
        features: of a group.
        groups: how many there are.
        steps: in which all is summed up.
        is_narrow: of 16 bits.
        multiprocessors: of the device.
    """
    found: list[tuple[float, Plan]] = []
    for tile in TILES:
        blocks = -(-rows // tile.rows) * -(-features // tile.features) * groups
        products = tile.rows * tile.features * (64 if is_narrow else 32)
        cycles = max(_LEAST_STEP_CYCLES, products / (_PRODUCTS[is_narrow] * tile.efficiency))
        for wanted in range(1, min(_MOST_SPLITS, steps) + 1 if blocks <= COUNTERS else 2):
            each = -(-steps // wanted)
            splits = -(-steps // each)
            waves = -(-blocks * splits // multiprocessors)
            join = 0 if splits == 1 else _JOIN_CYCLES + tile.rows * tile.features * (splits + 1) / _JOINED
            found.append((waves * (_BLOCK_CYCLES + each * cycles) + join, Plan(tile, splits, each)))
    return min(found)[1]


class _Call(NamedTuple):
    """One convolution, all of whose arrays but x lie in order."""

    gpu: Gpu
    x: Array
    weight: Array
    y: Array
    group: int
    windows: Windows
    following: list[Any]

    @property
    def element(self) -> int:
        """As the sources number it."""
        return ELEMENTS[self.x.dtype]

    @property
    def depth(self) -> int:
        """Channels of a group."""
        return int(self.weight.shape[-1])

    def is_whole(self, features: int) -> bool:
        """Whether so many features are whole chunks of 16 bytes of the result and what is added to it."""
        arrays = [self.y, *(x for x in self.following[:2] if x is not _NONE)]
        return features * self.x.itemsize % _CHUNK_BYTES == 0 and _are_aligned(self.gpu, arrays, _CHUNK_BYTES)

    def geometry(self) -> list[Any]:
        """As the launches take it."""
        return [np.int32(number) for number in geometry(self.x.shape[1:-1], self.windows)]

    def copied(self) -> int:
        """How many elements can be copied to shared memory at once; 0 where not even 4 bytes can."""
        itemsize = self.x.itemsize
        for count in (16 // itemsize, 8 // itemsize, 4 // itemsize):
            if self.depth % count == 0 and _are_aligned(self.gpu, [self.x, self.weight], count * itemsize):
                return int(count)
        return 0


@cuda_kernel("ConvChannelsLast", since=1, domain="irpar")
def conv_channels_last(
    gpu: Gpu,
    x: Array,
    weight: Array,
    bias: Array | None = None,
    residual: Array | None = None,
    *,
    activation: str = "",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    max: float = math.inf,
    min: float = -math.inf,
    pads: Ints | None = None,
    strides: Ints | None = None,
    out: Array | None = None,
    kept: Kept | None = None,
) -> Array | None:
    """activation(convolution + bias + residual), of up to three spatial dims."""
    given = [x, weight, *(each for each in (bias, residual) if each is not None)]
    if ELEMENTS.get(x.dtype, 3) == 3 or any(each.dtype != x.dtype for each in given) or activation not in NUMBERS:
        return None
    try:
        windows = windows_of(x.shape, weight.shape, group, kernel_shape, strides, dilations, pads)
        shape = (len(x), *windows.counts, len(weight))
        check_addends(bias, residual, shape)
    except ValueError:
        return None
    if not _is_fit(x, weight, shape, windows):
        return None
    y = contiguous_result(out, shape, x.dtype, gpu)
    weight = in_order(gpu, weight)
    addends = [_NONE if each is None else in_order(gpu, each) for each in (bias, residual)]
    following = [*addends, np.int32(NUMBERS[activation]), np.float32(min), np.float32(max)]
    call = _Call(gpu, x, weight, y, group, windows, following)
    if group == 1 and not _is_product(call):
        _convolve(_with_even_channels(call, kept or Kept()))
        return y
    call = call._replace(x=in_order(gpu, x))
    if group == 1:
        _multiply(call, bias, residual)
    elif call.depth >= 8 and call.copied():
        _convolve(call)
    else:
        _convolve_groups(call)
    return y


def _is_fit(x: Array, weight: Array, shape: Ints, windows: Windows) -> bool:
    """Whether sizes are such as the kernels count them."""
    reaches = [(k - 1) * d + 1 for k, d in zip(windows.kernel, windows.dilations, strict=True)]
    far = [*x.shape[1:-1], *reaches, *(abs(before) for before, _ in windows.pads)]
    elements = (math.prod(x.shape), math.prod(weight.shape), math.prod(shape))
    return x.ndim - 2 <= MOST_SPATIAL_DIMS and all(elements) and max(elements) <= _MOST_ELEMENTS and max(far) < _LONGEST


def _are_aligned(gpu: Gpu, arrays: list[Array], nbytes: int) -> bool:
    return not any(gpu.address(x) % nbytes for x in arrays)


def _is_product(call: _Call) -> bool:
    """Whether windows are single places, one after the other, and nothing follows that takes a pass over 16 bits."""
    windows = call.windows
    is_plain = {*windows.kernel, *windows.strides} == {1} and not any(map(any, windows.pads))
    return is_plain and (call.x.itemsize > 2 or not call.following[2])


def _multiply(call: _Call, bias: Array | None, residual: Array | None) -> None:
    """Write the convolution as a product of two matrices."""
    rows, y = (x.reshape(-1, x.shape[-1]) for x in (call.x, call.y))
    added = None if residual is None else residual.reshape(y.shape)
    found = fused_matmul(call.gpu.module, rows, call.weight.reshape(len(call.weight), call.depth).T, bias, added, out=y)
    if found is not y:
        y[...] = found
    if call.following[2]:
        _follow(call, call.y, [_NONE, _NONE, *call.following[2:]])


def _with_even_channels(call: _Call, kept: Kept) -> _Call:
    """The call with x in order, with channels of zeros where else single elements would be copied."""
    if call.depth * call.x.itemsize % _LEAST_BYTES == 0:
        call = call._replace(x=in_order(call.gpu, call.x))
        if call.copied():
            return call
    channels = {1: 2, 2: 2, 3: 4}.get(call.depth, -(-call.depth // 8) * 8)
    together = _neighbours(call.windows, channels, call.x.itemsize)
    lead = call.windows.pads[-1][0] % together
    weight = kept.of(WEIGHT, "padded", lambda: _padded(call.gpu, call.weight, channels, together, 0))
    x = _padded(call.gpu, call.x, channels, together, lead)
    return call._replace(x=x, weight=weight, windows=_of_neighbours(call.windows, together, lead))


def _neighbours(windows: Windows, channels: int, itemsize: int) -> int:
    """How many pixels of a line can be channels of one: as many as a copy has, where windows begin with whole ones.

    Windows of 7 pixels of 4 channels, 2 pixels apart, are windows of 4 pixels of 8 channels, 1 pixel apart, the last of
    which has a kernel of zeros in its second half.
    """
    together = max(1, _CHUNK_BYTES // itemsize // channels)
    is_fit = windows.strides[-1] % together == 0 and windows.dilations[-1] == 1 < windows.kernel[-1]
    return together if is_fit else 1


def _of_neighbours(windows: Windows, together: int, lead: int) -> Windows:
    """The windows over lines with `lead` pixels more in front, of which some are one."""
    (before, behind), step = windows.pads[-1], windows.strides[-1]
    return replace(
        windows,
        kernel=(*windows.kernel[:-1], -(-windows.kernel[-1] // together)),
        strides=(*windows.strides[:-1], step // together),
        pads=(*windows.pads[:-1], ((before - lead) // together, behind)),
    )


def _padded(gpu: Gpu, x: Array, channels: int, together: int, lead: int) -> Array:
    """Images in order, with so many channels, and `lead` pixels in front of each line, of which some are one: zeros."""
    images, lines, width = len(x), math.prod(x.shape[1:-2]), x.shape[-2]
    if not is_view(x[..., 0, 0], (images, lines)):
        x = in_order(gpu, x)
    pixels = -(-(lead + width) // together)
    made = gpu.empty((*x.shape[:-2], pixels, together * channels), x.dtype)
    steps = [step // x.itemsize for step in (*x[..., 0, 0].reshape(images, lines).strides, *x.strides[-2:])]
    numbers = (images, lines, width, x.shape[-1], *steps, lead, pixels * together, channels)
    blocks = min(-(-math.prod(made.shape) // (4 * _THREADS)), 32 * gpu.multiprocessors)
    arguments = (x, made, *(np.int32(number) for number in numbers))
    gpu.launch(_direct(ELEMENTS[x.dtype]), "pad_channels", blocks, _THREADS, arguments)
    return made


def _convolve(call: _Call) -> None:
    """Write a convolution by products of tiles."""
    gpu, total = call.gpu, len(call.weight)
    rows, features, itemsize = math.prod(call.y.shape[:-1]), total // call.group, call.x.itemsize
    steps = -(-math.prod(call.weight.shape[1:]) * itemsize // _STEP_BYTES)
    plan = plan_of(rows, features, call.group, steps, itemsize == 2, gpu.multiprocessors)
    spatial = max(2, call.x.ndim - 2)
    blocks = -(-rows // plan.tile.rows) * -(-features // plan.tile.features) * call.group
    shape = (blocks, plan.splits, plan.tile.rows, plan.tile.features)
    joined = [gpu.empty(shape, np.dtype(np.float32)), gpu.counters()] if plan.splits > 1 else [_NONE, _NONE]
    is_whole = call.is_whole(features)
    sizes = [np.int32(size) for size in (rows, call.x.shape[-1], call.depth, features, total, plan.steps, is_whole)]
    arguments = (call.x, call.weight, call.y, *joined, *call.following, *sizes, *call.geometry())
    has_warpgroups = itemsize == 2 and gpu.arch == _WARPGROUPS_ARCH
    program = _tiles(call.element, plan.tile, call.copied(), spatial, has_warpgroups)
    threads, shared = plan.tile.threads(call.element, has_warpgroups), plan.tile.shared_bytes(spatial)
    gpu.launch(program, "convolve", (blocks, plan.splits), threads, arguments, shared)


def _follow(call: _Call, sums: Array, following: list[Any]) -> None:
    """Write what follows on sums in float32, which may be the result."""
    count, total = math.prod(call.y.shape), call.y.shape[-1]
    is_whole = call.is_whole(total)
    each = _CHUNK_BYTES // call.x.itemsize if is_whole else 1
    numbers = [np.int32(number) for number in (count, total, is_whole)]
    blocks = -(-count // (each * _THREADS))
    call.gpu.launch(_direct(call.element), "follow", blocks, _THREADS, (sums, call.y, *following, *numbers))


def _convolve_groups(call: _Call) -> None:
    """Write a convolution of small groups."""
    gpu, channels, total = call.gpu, call.x.shape[-1], len(call.weight)
    images, width = np.int32(len(call.x)), _CHUNK_BYTES // call.x.itemsize
    window, lines = math.prod(call.windows.kernel), math.prod(call.y.shape[:-2])
    lanes = min(channels // width, _MOST_LANES, STATIC_SHARED_BYTES // (window * width * 4))
    arguments = (call.x, call.weight, call.y, *call.following, images, np.int32(channels))
    is_whole = call.is_whole(channels) and _are_aligned(gpu, [call.x], _CHUNK_BYTES)
    if call.depth == 1 and total == channels and lanes and is_whole:
        strips = lines * -(-call.y.shape[-2] // _STRIP)
        grid = -(-strips // (_THREADS // lanes)), -(-channels // (lanes * width))
        shared = window * lanes * width * 4
        numbers = (np.int32(lanes), *call.geometry())
        gpu.launch(_direct(call.element), "depthwise", grid, _THREADS, (*arguments, *numbers), shared)
        return
    numbers = (np.int32(call.depth), np.int32(total // call.group), np.int32(total), *call.geometry())
    blocks = min(-(-math.prod(call.y.shape) // _THREADS), 64 * gpu.multiprocessors)
    gpu.launch(_direct(call.element), "grouped", blocks, _THREADS, (*arguments, *numbers))


def _tiles(element: int, tile: Tile, copied: int, spatial: int, has_warpgroups: bool) -> Program:
    sizes: dict[str, Any] = {"ROWS": tile.rows, "FEATURES": tile.features, "COPIED": copied, "SPATIAL": spatial}
    if has_warpgroups:
        return Program.file("convolution_tiles.cu", "a", ELEMENT=element, WARPGROUPS=1, **sizes)
    return Program.file("convolution_tiles.cu", ELEMENT=element, **sizes)


def _direct(element: int) -> Program:
    return Program.file("convolution_direct.cu", ELEMENT=element)


def all_programs() -> Iterator[Program]:
    """Programs that are launched here, each kind of element, tile and copy once at least."""
    for element in (0, 1, 2):
        yield _direct(element)
    for tile in TILES:
        yield _tiles(0, tile, 4, 2, False)
        yield _tiles(1, tile, 8, 2, False)
        yield _tiles(1, tile, 8, 2, True)
    yield _tiles(2, TILES[1], 8, 2, False)
    yield _tiles(2, TILES[2], 8, 2, True)
    yield _tiles(1, TILES[3], 4, 3, True)
    yield _tiles(0, TILES[3], 1, 2, False)
