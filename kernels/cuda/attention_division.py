"""How kernels of attention divide their work over blocks, by its sizes and the device."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .cublas_lt import PRECISION
from .gpu import Gpu
from .programs import Program

WARPGROUPS_ARCH = 90
"""The architecture that has products of warpgroups."""
_GROUP_ROWS, _GROUP_THREADS = 64, 128
_LONGEST_HEAD = 256
_ACCUMULATORS, _MOST_ACCUMULATORS = 160, 192
"""Registers of a thread for scores and sums, which leave enough for the rest; and where scores stay plain."""
_KEYS, _STAGES = 64, 4
"""Keys of a tile that warpgroups multiply, and tiles that a block holds."""
_COLUMNS = 64
"""Of a tile that passes by where gradients are summed by warpgroups."""


@dataclass(frozen=True)
class Sizes:
    """Of one attention: `keys` are those of the past too, `seen` those that a mask reaches."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    past: int
    keys: int
    seen: int
    head: int
    value_head: int

    @property
    def group(self) -> int:
        """Heads of queries that share one of keys."""
        return self.heads // self.key_heads

    @property
    def widest(self) -> int:
        """The longer of the heads of keys and of values."""
        return max(self.head, self.value_head)


@dataclass(frozen=True)
class Division:
    """What is launched, where a block computes some rows of one head.

    Attributes:
        program: what has the function.
        function: its name.
        rows: of a block.
        threads: of a block.
        shared: bytes of shared memory of a block.
    """

    program: Program
    function: str
    rows: int
    threads: int
    shared: int


def division(gpu: Gpu, of: Sizes, defines: dict[str, Any], dtype: "np.dtype[Any]") -> Division:
    """Of attention over tiles of keys; of float32 by tensor cores where it may be rounded to TF32 (`tf32`)."""
    if dtype == np.float32 and not PRECISION.is_tf32:
        return _of_floats(gpu, of, defines)
    if has_warpgroups(gpu, of, dtype):
        return _of_warpgroups(gpu, of, defines)
    return _of_warps(gpu, of, defines, dtype.itemsize)


def has_warpgroups(gpu: Gpu, of: Sizes, dtype: "np.dtype[Any]") -> bool:
    """Whether the device multiplies such tiles by warpgroups."""
    return gpu.arch == WARPGROUPS_ARCH and dtype.itemsize == 2 and {of.head, of.value_head} <= {64, 128}


def padded(size: int, step: int = 16) -> int:
    """The size of a head in shared memory, where it is multiplied in such steps."""
    return -(-size // step) * step


def _of_floats(gpu: Gpu, of: Sizes, defines: dict[str, Any]) -> Division:
    few = of.batch * of.heads * -(-of.queries // 64) < gpu.multiprocessors
    choices = (
        (tiles, keys) for tiles in ((2, 1) if few else (4, 2, 1)) for keys in _keys(64 if of.widest <= 64 else 32)
    )
    sized = ((tiles, keys, _bytes_of_floats(of, 16 * tiles, keys)) for tiles, keys in choices)
    tiles, keys, shared = next(each for each in sized if each[2] <= gpu.shared_bytes)
    program = Program.file("attention_f32.cu", **defines, TILES=tiles, KEYS=keys)
    return Division(program, "attention_f32", 16 * tiles, 256, shared)


def _bytes_of_floats(of: Sizes, rows: int, keys: int) -> int:
    """Shared memory of a block of attention_f32.cu: its queries, their weights, and two tiles of keys and values."""
    return 4 * (rows * (of.head + 4) + rows * (keys + 4) + 2 * keys * (of.head + 4 + of.value_head))


def _keys(most: int) -> list[int]:
    """How many keys a tile may have, where fewer fit too."""
    return [keys for keys in (64, 32, 16) if keys <= most]


@dataclass(frozen=True)
class _Tiles:
    """How attention.cu divides its work."""

    warps: int
    tiles: int
    keys: int

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return self.warps * self.tiles * 16

    def shared_bytes(self, of: Sizes, itemsize: int) -> int:
        """Of a block: its queries, and two tiles of keys and values."""
        chunk = 16 // itemsize
        key, value = (padded(size, 2 * chunk) + chunk for size in (of.head, of.value_head))
        return itemsize * (self.rows * max(key, value) + 2 * self.keys * (key + value))


def _of_warps(gpu: Gpu, of: Sizes, defines: dict[str, Any], itemsize: int) -> Division:
    tiles = _tiles(gpu, of, bool(defines["SHAPED"]), itemsize)
    program = Program.file("attention.cu", **defines, WARPS=tiles.warps, TILES=tiles.tiles, KEYS=tiles.keys)
    return Division(program, "attention", tiles.rows, tiles.warps * 32, tiles.shared_bytes(of, itemsize))


def _tiles(gpu: Gpu, of: Sizes, is_shaped: bool, itemsize: int) -> _Tiles:
    """The largest blocks that give every multiprocessor one."""
    most = _ACCUMULATORS if is_shaped else _MOST_ACCUMULATORS
    wide = padded(of.widest)
    choices = [(4, 2), (4, 1), (2, 1)] if wide <= _LONGEST_HEAD // 2 else [(8, 1), (4, 1), (2, 1)]
    found = None
    for warps, tiles in choices:
        keys = 64 if tiles * (64 + padded(of.value_head)) // 2 <= most else 32
        fitting = (_Tiles(warps, tiles, count) for count in _keys(keys))
        fits = next((each for each in fitting if each.shared_bytes(of, itemsize) <= gpu.shared_bytes), None)
        if fits is None:
            continue
        found = fits
        blocks = of.batch * of.heads * -(-of.queries // found.rows)
        if blocks >= gpu.multiprocessors and found.rows < 2 * of.queries:
            break
    assert found is not None
    return found


def _of_warpgroups(gpu: Gpu, of: Sizes, defines: dict[str, Any]) -> Division:
    """The largest blocks of which a multiprocessor has several warpgroups; one of each where that leaves some idle."""
    groups, blocks = (2, 2) if of.widest <= 64 else (3, 1)
    if of.batch * of.heads * -(-of.queries // (groups * _GROUP_ROWS)) < blocks * gpu.multiprocessors:
        groups, blocks = 1, 3 if of.widest <= 64 else 1
    sizes = {"GROUPS": groups, "BLOCKS": blocks, "KEYS": _KEYS, "STAGES": _STAGES}
    program = Program.file("attention_warpgroups.cu", "a", **defines, **sizes)
    rows = groups * _GROUP_ROWS
    shared = 2 * (rows * of.widest + _STAGES * _KEYS * (of.head + of.value_head)) + 16 * _STAGES
    return Division(program, "attention", rows, groups * _GROUP_THREADS, shared)


def division_of_gradients(of: Sizes, defines: dict[str, Any]) -> Division:
    """Of gradients that warpgroups compute."""
    groups, blocks, stages = (1, 3, 2) if of.widest <= 64 else (2, 1, 2)
    program = Program.file(
        "attention_gradient_warpgroups.cu", "a", **defines, GROUPS=groups, BLOCKS=blocks, STAGES=stages
    )
    rows, width = groups * _GROUP_ROWS, of.head + of.value_head
    shared = 2 * (rows + stages * _COLUMNS) * width + stages * (8 * _COLUMNS + 16)
    return Division(program, "attention_gradient", rows, groups * _GROUP_THREADS, shared)
