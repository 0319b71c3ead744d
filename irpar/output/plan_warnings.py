"""What a plan should make its reader think twice about: slower than one device, too large for one, idle ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from irpar.sharding import Region, Sharding, all_regions
from irpar.units import bytes_text, count_text, seconds_text, sharding_text

from .plan_record import BYTES_ALONE

if TYPE_CHECKING:
    from .plan_record import Plan


def warnings(plan: "Plan") -> list[str]:
    """One line for each thing that a plan is worse at than people expect of a partition; none is an error."""
    return [*_slower(plan), *_too_large(plan), *_idle(plan)]


def _slower(plan: "Plan") -> Iterator[str]:
    step, alone = (plan.predicted or {}).get("step_seconds"), plan.original.get("step_seconds")
    if step is not None and alone is not None and step > alone and len(plan.ranks) > 1:
        yield f"predicted {seconds_text(step)} a step, which one device does in {seconds_text(alone)}"


def _too_large(plan: "Plan") -> Iterator[str]:
    most = max(rank["peak_bytes"] for rank in plan.ranks)
    if plan.memory_limit is not None and most > plan.memory_limit:
        held, limit = bytes_text(most), bytes_text(plan.memory_limit)
        yield f"a rank needs {held} at its peak, more than the memory limit of {limit}; irpar explain OUT --memory"
    if plan.network == BYTES_ALONE:
        return
    from irpar.analysis.cost.network_lookup import network_of

    network = network_of(plan.network)
    disk = None if network.disk is None else network.disk.capacity
    for what, field, room in (
        ("a device has", "peak_bytes", None if network.device is None else network.device.memory),
        ("its share of the host is", "host_bytes", None if network.host is None else network.host.memory),
        ("its share of the disk is", "disk_bytes", disk),
    ):
        most = max(rank.get(field, 0) for rank in plan.ranks)
        if room is not None and most > room:
            yield f"a rank needs {bytes_text(most)} at its peak, and {what} {bytes_text(room)}"


def _idle(plan: "Plan") -> Iterator[str]:
    """Ranks whose blocks of all tensors that are sharded are empty, and ranks that hold the same blocks as another."""
    cuts = _cuts(plan)
    if not cuts:
        return
    by_rank = list(zip(*(cut.blocks for cut in cuts), strict=True))
    ranks = count_text(len(by_rank), "rank")
    filled = [blocks for blocks in by_rank if any(block is not None for block in blocks)]
    empty, same = len(by_rank) - len(filled), len(filled) - len(set(filled))
    if empty:
        yield f"{empty} of {ranks} hold no elements of any tensor that is sharded"
    elif short := [cut for cut in cuts if cut.is_short]:
        most = max(short, key=lambda cut: cut.empty)
        what = f"{most.empty} of {ranks} hold no elements of {most.name}"
        yield f"{what}, which has fewer than there are ranks to shard it"
    if same:
        yield f"{same} of {ranks} hold the same blocks as another, and do the same work"


@dataclass(frozen=True)
class _Cut:
    """One way in which tensors are sharded.

    Attributes:
        name: the first of them, with its shape.
        blocks: of each rank; None for one without elements.
        is_short: a dim has fewer elements than it is sharded into.
    """

    name: str
    blocks: tuple[Region | None, ...]
    is_short: bool

    @property
    def empty(self) -> int:
        """How many ranks have no elements."""
        return self.blocks.count(None)


def _cuts(plan: "Plan") -> list[_Cut]:
    """Each way in which tensors are sharded once."""
    mesh = plan.mesh_of_ranks
    found: dict[tuple[Sharding, tuple[int, ...]], _Cut] = {}
    distinct = {(str(value["sharding"]), tuple(value["shape"])): value for value in reversed(plan.values)}
    for (_, shape), value in reversed(distinct.items()):
        if None in shape or 0 in shape:
            continue
        sharding = Sharding.of_spec(mesh, value["sharding"]).canonical
        if sharding.is_replicated or (sharding, shape) in found:
            continue
        regions = all_regions(sharding, shape)
        blocks = tuple(None if any(start >= stop for start, stop in region) else region for region in regions)
        # A cut of a single element is how one rank is told to hold it.
        is_short = any(1 < size < sharding.dim_parts(dim) for dim, size in enumerate(shape))
        name = f"{value['source']} {sharding_text(value['sharding'], shape)}"
        found[sharding, shape] = _Cut(name, blocks, is_short)
    return list(found.values())
