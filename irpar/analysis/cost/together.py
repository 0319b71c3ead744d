"""Collectives that are sent together, as one: what that takes, and which of several go together.

a = AllReduce(p)    b = AllReduce(q)    as one: a launch and a latency less; p and q are copied side by side, and the
                                        result is taken apart again

fuse-communication does so; whoever chooses how nodes run prices what will be left of the moves (`Together`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.sharding import Axis, Mesh

from .network import Network

MOST_MB = 25.0
"""Of what is sent at once, and of its result, unless someone says otherwise: both are held beside their parts."""


@dataclass(frozen=True)
class Packed:
    """Bytes of collectives that are sent together, or of one.

    Attributes:
        operand, result: of the largest device.
        turned: of the operands and results whose blocks are not rows of the whole, so that they are transposed.
        transposes: how many these are.
        count: of the collectives.
    """

    operand: int = 0
    result: int = 0
    turned: int = 0
    transposes: int = 0
    count: int = 0

    def with_(self, other: "Packed") -> "Packed":
        """Of both together."""
        return Packed(
            self.operand + other.operand,
            self.result + other.result,
            self.turned + other.turned,
            self.transposes + other.transposes,
            self.count + other.count,
        )


def packed(cut: int | None, joined: int | None, operand: int, result: int) -> Packed:
    """One collective.

    Args:
        cut: the dim of its operand that goes to the members in blocks; None: each gets it in full.
        joined: the dim of its result along which a block comes from each; None: none does.
        operand, result: bytes.
    """
    turned = (operand if cut else 0) + (result if joined else 0)
    return Packed(operand, result, turned, bool(cut) + bool(joined), 1)


@dataclass(frozen=True)
class Together:
    """What collectives of one kind over the same axes take together.

    Attributes:
        network: whose links take time to start.
        mesh: of the axes.
        kind: as plan.json calls it.
        axes: that they run over.
        most_bytes: of what is sent at once, and of its result.
        pairs: of what goes from rank to rank: sources and targets in turn.
    """

    network: Network
    mesh: Mesh
    kind: str
    axes: tuple[Axis, ...]
    most_bytes: int = round(MOST_MB * 1e6)
    pairs: tuple[int, ...] = ()

    def seconds(self, sent: Packed) -> float:
        """Seconds of what is sent at once; of several, with those of the copies of all before and behind it."""
        seconds = self._sending(sent.operand)
        return seconds if sent.count < 2 else seconds + self._copying(sent, copies=2)

    def seconds_more(self, sent: Packed) -> float:
        """Seconds that a collective takes longer than others with which it goes, however many these are."""
        others = self.most_bytes
        return self._sending(others + sent.operand) - self._sending(others) + self._copying(sent, copies=0)

    def _sending(self, operand: int) -> float:
        """Seconds of an operand of so many bytes."""
        if self.pairs:
            return self.network.seconds_of_pairs(self.pairs, operand, self.mesh)
        return self.network.seconds(self.kind, self.axes, operand, self.mesh)

    def _copying(self, sent: Packed, copies: int) -> float:
        """Seconds of the nodes that put operands side by side, and results apart: `copies`, and what turns blocks."""
        device = self.network.device
        if device is None:
            return 0.0
        moved = 2 * (sent.operand + sent.result + sent.turned)
        return moved / device.memory_bandwidth + (copies + sent.transposes) * device.launch

    def buckets(self, each: Sequence[Packed], *, by_size: bool = False) -> list[range]:
        """Which of some collectives that could all be sent together are: in as few as hold them, where that is faster.

        Args:
            each: of them.
            by_size: they are wherever that is not too large.

        Returns:
            Numbers of the collectives in each bucket, in order; a bucket of one is sent alone.
        """
        found: list[range] = []
        start, held = 0, Packed()
        for number, own in enumerate(each):
            if held.count and not (self._fits(held, own) and (by_size or self._is_faster(held, own))):
                found.append(range(start, number))
                start, held = number, Packed()
            held = held.with_(own)
        return [*found, range(start, len(each))] if each else []

    def _is_faster(self, held: Packed, own: Packed) -> bool:
        """Whether a collective goes faster with those that are together already."""
        return self.seconds(held.with_(own)) < self.seconds(held) + self.seconds(own)

    def _fits(self, held: Packed, own: Packed) -> bool:
        """Whether a collective and others make no more than may be sent at once."""
        both = held.with_(own)
        return max(both.operand, both.result) <= self.most_bytes
