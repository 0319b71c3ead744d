"""Compiling ahead what a partition's programs need on a device: kernels are compiled when they are first launched.

Each segment of each part runs once on zeros, one part after the other and without the others: a device is enough that
holds one rank. CuPy keeps what it compiles in a folder on disk, where later processes find it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irpar.ir import DType, Value, tensor_type
from irpar.sharding import IrparError, option

from .engines.base import Constants, Engine, EngineSettings, make_engine
from .engines.cuda import import_cupy
from .instructions import Segment
from .pieces import open_parts
from .program import build_program

ENGINE = "cupy"
"""The engine whose kernels are compiled."""


@dataclass
class Warmed:
    """What ran.

    Attributes:
        parts: how many parts there are.
        segments: how many segments ran.
        left: for each segment that did not, which it is and why.
        notes: the engine's, of how nodes were computed.
    """

    parts: int = 0
    segments: int = 0
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def warm(
    folder: str | os.PathLike[str],
    *,
    tf32: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Warmed:
    """Compile what the parts of a partition need on the device of this machine.

    Args:
        folder: what `irpar partition` wrote.
        tf32: as the runs will have it.
        progress: called with how many segments are done, and of how many.

    Raises:
        NoDeviceError: there is no CuPy, or no device.
        IrparError: the parts cannot be read, or a part has no room on the device.
    """
    # A device that is not there is told before weights are read.
    import_cupy("irpar warm", f"irpar run with {option('engine', 'ort')}, which needs nothing compiled")
    _, _, parts, modules = open_parts(folder)
    programs = [build_program(part.graph, (), {}, writes_over=False) for part in parts]
    on_device = [[one for one in program.segments if one.place == "device"] for program in programs]
    made, total = Warmed(parts=len(parts)), sum(map(len, on_device))
    done = 0
    for part, module, segments in zip(parts, modules, on_device, strict=True):
        engine = make_engine(ENGINE, EngineSettings(module.opsets, 1, tf32=tf32, captures=False))
        constants = Constants(part)
        for segment in segments:
            if progress is not None:
                progress(done, total)
            _run(segment, engine, constants, made)
            done += 1
        made.notes.extend(note for note in engine.notes if note not in made.notes)
    return made


def _run(segment: Segment, engine: Engine, constants: Constants, made: Warmed) -> None:
    """Run a segment on zeros."""
    inputs = [_zeros(value) for value in segment.inputs]
    unknown = next((value for value, given in zip(segment.inputs, inputs, strict=True) if given is None), None)
    if unknown is not None:
        made.left.append(f"{segment.label}: only a run tells what %{unknown.name} is")
        return
    compiled = engine.compile(segment, constants)
    arena = engine.arena(0, compiled.arena_bytes) if compiled.arena_bytes else None
    try:
        compiled.run(inputs, 0, arena)
    except IrparError as error:
        made.left.append(f"{segment.label}: {error.what}")
        return
    made.segments += 1


def _zeros(value: Value) -> Any:
    """What a segment reads, of zeros; None where numbers decide its size, or it is no tensor of numbers."""
    type_ = tensor_type(value.type)
    if type_ is None or not type_.is_static or type_.dtype is DType.STR:
        return None
    return np.zeros(type_.static_shape, type_.dtype.numpy)
