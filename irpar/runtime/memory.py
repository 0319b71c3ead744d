"""Whether a run fits into memory: estimated before it begins, since a machine out of memory ends programs unasked."""

import heapq
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from irpar.analysis.memory.liveness import bytes_at_rest, bytes_in, peak, uses_of
from irpar.analysis.memory.replaced import written_over
from irpar.analysis.memory.scratch import most_scratch
from irpar.analysis.memory.sums import sums_of
from irpar.ir import Graph, Memory, Node, plain_attribute, tensor_type
from irpar.kernels import lookup
from irpar.ops import holds_collectives
from irpar.output.parts import Part
from irpar.sharding import IrparError, option

LIMIT = "IRPAR_MEMORY_LIMIT"
"""The environment variable that sets the limit: bytes, or "none"."""
_GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""What a container may use at most, on Linux."""


AddsInPlace = Literal["all", "within segments", "none"]
"""Which loops write sums over what a trip finds: all, those of which no trip communicates, or none."""


class OutOfMemoryError(IrparError):
    """A run would need more memory than there is."""


def check_memory(needed: int, what: str, processes: int = 1) -> None:
    """Refuse what needs more bytes than there are.

    Args:
        needed: estimated bytes.
        what: what needs them, as the message begins.
        processes: how many on this host need as much, this one included.

    Raises:
        OutOfMemoryError: with both figures.
    """
    limit = memory_limit()
    if limit is not None and needed * processes > limit:
        shared = f" for {processes} such processes" if processes > 1 else ""
        raise OutOfMemoryError(
            f"{what} needs about {needed:,} bytes of memory, there are {limit:,}{shared}",
            do=f"use a machine with more memory or a smaller batch; {LIMIT}=none tries it all the same",
        )


def check_device_memory(needed: int, what: str, free: int) -> None:
    """Refuse what needs more bytes than a device has free.

    Args:
        needed: estimated bytes.
        what: what needs them, as the message begins.
        free: what the device has.

    Raises:
        OutOfMemoryError: with both figures.
    """
    limit = memory_limit(free)
    if limit is not None and needed > limit:
        raise OutOfMemoryError(
            f"{what} needs about {needed:,} bytes of device memory, there are {limit:,}",
            do=f"shard the model over more devices, use a smaller batch, or {option('engine', 'ort')}; "
            f"{LIMIT}=none tries it all the same",
        )


def memory_limit(free: int | None = None) -> int | None:
    """Bytes that a run may use; None where nobody knows or wants to know.

    Args:
        free: what a device has; None: that of the host is meant.

    Raises:
        IrparError: IRPAR_MEMORY_LIMIT is neither a number of bytes nor "none".
    """
    given = os.environ.get(LIMIT, "")
    if given == "none":
        return None
    if given:
        if not given.isascii() or not given.isdigit():
            raise IrparError(f'{LIMIT} is "{given}"', do=f"give a number of bytes, or none: {LIMIT}=none")
        return int(given)
    if free is not None:
        return free
    found = [size for size in (_physical(), _group_limit()) if size is not None]
    return min(found, default=None)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None  # Not on this system.


def _group_limit() -> int | None:
    try:
        text = _GROUP_LIMIT.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def run_bytes(
    parts: Sequence[Part],
    threads: int,
    writes_over: bool,
    keeps: bool = False,
    memory: Memory = "device",
    adds_in_place: AddsInPlace = "all",
) -> int:
    """What all ranks hold at once of a memory in this process, estimated by liveness.

    Ranks of a part share its weights. All ranks hold what they have while they wait for each other, and as many as
    there are threads compute, each of which may be where it holds the most.

    Args:
        parts: theirs.
        threads: how many there are.
        writes_over: whether what replaces state is written over it; else a second copy is there meanwhile.
        keeps: whether kernels keep what they make of constants, once for all ranks of a part, and take scratch, once
            for each that computes.
        memory: that of the device, or of the host.
        adds_in_place: which loops write sums over what a trip finds; of others there are three copies beside meanwhile:
            what a sum begins as, as a trip finds it, and as it leaves it.
    """
    total = 0
    extra: list[int] = []
    scratch = 0
    for part in parts:
        uses = uses_of(part.graph)
        most, rest = peak(part.graph, uses, memory), bytes_at_rest(part.graph, uses, memory)
        total += most.constant_bytes + rest * len(part.ranks)
        if keeps:
            total += kept_bytes(part.graph)
            scratch = max(scratch, most_scratch(part.graph))
        extra.extend([most.activation_bytes - rest] * len(part.ranks))
        if not writes_over:
            total += sum(bytes_in(value, memory) for value in written_over(part.graph)) * len(part.ranks)
        copied = (node for node in part.graph.walk() if _copies_sums(node, adds_in_place))
        sums = (each for node in copied for each in sums_of(node) if each.before.memory == memory)
        total += sum(3 * each.nbytes for each in sums) * len(part.ranks)
    return total + scratch * threads + sum(heapq.nlargest(threads, (size for size in extra if size > 0)))


def _copies_sums(node: Node, adds_in_place: AddsInPlace) -> bool:
    """Whether trips of a loop, if a node is one, make sums anew."""
    return adds_in_place == "none" or (adds_in_place == "within segments" and holds_collectives(node))


def kept_bytes(graph: Graph) -> int:
    """What kernels keep at most of constants from run to run, such as kernels of convolutions in another form."""
    called = dict.fromkeys(node.callee.graph for node in graph.walk() if node.callee is not None)
    return sum(_kept_by(node) for inner in (graph, *called) for node in inner.walk())


def _kept_by(node: Node) -> int:
    kernel = None if node.callee is not None else lookup(node.domain, node.op_type, node.version)
    if kernel is None or kernel.kept_bytes is None:
        return 0
    constants = [value if value is not None and value.is_constant else None for value in node.operands]
    if not any(constants):
        return 0
    types = [None if value is None else tensor_type(value.type) for value in constants]
    shapes = [type_.static_shape if type_ is not None and type_.is_static else None for type_ in types]
    attributes = {name: plain_attribute(value) for name, value in node.attributes.items()}
    # Kernels compute floats that are narrower than f32 in f32.
    itemsize = max((type_.dtype.nbytes(1) for type_ in types if type_ is not None), default=0)
    return kernel.kept_bytes(shapes, attributes, max(itemsize, np.dtype(np.float32).itemsize))
