"""What algorithms of collectives cost: messages in a row, and bytes that pass one link in a row.

A collective of n devices then takes messages * latency + bytes / bandwidth, the model of these papers:

* Thakur, Rabenseifner & Gropp, Optimization of collective communication operations in MPICH (2005): ring, recursive
  doubling and halving, pairwise exchange, Bruck's all-to-all; all-reduce as reduce-scatter and all-gather.
* Chan, Heimlich, Purkayastha & van de Geijn, Collective communication: theory, practice, and experience (2007): lower
  bounds, ring algorithms for any n, broadcast as scatter and all-gather.
* Bruck, Ho, Kipnis, Upfal & Weathersby (1997) and Bruck & Ho (1993): any number of devices in ceil(log2 n) messages.

The names are those of NCCL where it has one: `ring` and `tree`. NCCL's own tree (two binary trees; Sanders, Speck &
Träff 2009) sends 2 S where the `tree` here, halving and doubling, sends 2 (n-1)/n S, in as many messages.

What the arithmetic of a reduction takes is not counted: memory is faster than any of the links.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Volume(NamedTuple):
    """What an algorithm costs.

    Attributes:
        messages: how many follow one another on the longest path.
        sent: bytes that follow one another on the busiest link.
    """

    messages: int
    sent: float


Algorithm = Callable[[int, float], Volume]
"""From the number of devices (2 or more) and the bytes of the operand that one of them holds to what it costs."""


def rounds(n: int) -> int:
    """ceil(log2 n): how often a set of known things must double to reach n."""
    return (n - 1).bit_length()


def _ring_all_gather(n: int, size: float) -> Volume:
    """n - 1 times the block that came last goes on to the next device (Thakur et al.)."""
    return Volume(n - 1, (n - 1) * size)


def _tree_all_gather(n: int, size: float) -> Volume:
    """Recursive doubling; where n is no power of two Bruck's way, of equal cost (Thakur et al.)."""
    return Volume(rounds(n), (n - 1) * size)


def _ring_reduce_scatter(n: int, size: float) -> Volume:
    """n - 1 times a block goes on to the next device, which adds its own (Chan et al.)."""
    return Volume(n - 1, (n - 1) / n * size)


def _tree_reduce_scatter(n: int, size: float) -> Volume:
    """Recursive halving (Thakur et al.); for any n Bruck's all-gather backwards (Bruck & Ho)."""
    return Volume(rounds(n), (n - 1) / n * size)


def _ring_all_reduce(n: int, size: float) -> Volume:
    """The ring's reduce-scatter, then its all-gather: 2(n - 1) messages of S / n."""
    return Volume(2 * (n - 1), 2 * (n - 1) / n * size)


def _tree_all_reduce(n: int, size: float) -> Volume:
    """Rabenseifner's: halving, then doubling (Thakur et al.)."""
    return Volume(2 * rounds(n), 2 * (n - 1) / n * size)


def _doubling_all_reduce(n: int, size: float) -> Volume:
    """Recursive doubling: whole operands, the fewest messages (Thakur et al.).

    Where n is no power of two, those beyond it give their operand to a neighbour first, and get the result last.
    """
    folds = 0 if n & (n - 1) == 0 else 2
    messages = n.bit_length() - 1 + folds
    return Volume(messages, messages * size)


def _direct_all_to_all(n: int, size: float) -> Volume:
    """Pairwise exchange: each device sends each other one its block (Thakur et al.)."""
    return Volume(n - 1, (n - 1) / n * size)


def _tree_all_to_all(n: int, size: float) -> Volume:
    """Bruck's: in round k go the blocks whose distance has bit k; few messages, but blocks travel several times."""
    passed = sum(distance.bit_count() for distance in range(n))
    return Volume(rounds(n), passed / n * size)


def _direct_permute(n: int, size: float) -> Volume:
    """Each device sends its operand once."""
    return Volume(1, size)


def _direct_broadcast(n: int, size: float) -> Volume:
    """The root sends the operand to each other device."""
    return Volume(n - 1, (n - 1) * size)


def _tree_broadcast(n: int, size: float) -> Volume:
    """The binomial tree: whoever has it sends it on (Thakur et al.)."""
    return Volume(rounds(n), rounds(n) * size)


def _ring_broadcast(n: int, size: float) -> Volume:
    """A binomial scatter and the ring's all-gather (van de Geijn; Thakur et al., Chan et al.)."""
    return Volume(rounds(n) + n - 1, 2 * (n - 1) / n * size)


ALGORITHMS: Mapping[str, Mapping[str, Algorithm]] = {
    "all_reduce": {"ring": _ring_all_reduce, "tree": _tree_all_reduce, "doubling": _doubling_all_reduce},
    "all_gather": {"ring": _ring_all_gather, "tree": _tree_all_gather},
    "reduce_scatter": {"ring": _ring_reduce_scatter, "tree": _tree_reduce_scatter},
    "all_to_all": {"direct": _direct_all_to_all, "tree": _tree_all_to_all},
    "permute": {"direct": _direct_permute},
    "broadcast": {"ring": _ring_broadcast, "tree": _tree_broadcast, "direct": _direct_broadcast},
}
"""Kind of collective, as plan.json calls it, to its algorithms by name."""


def ring_bytes(kind: str, n: int, operand_bytes: int) -> int:
    """What a device sends by the ring model, rounded up; see docs/plan.md.

    Args:
        kind: as plan.json calls it.
        n: how many devices take part.
        operand_bytes: the operand that one of them holds, of uneven blocks the padded one.
    """
    if n == 1:
        return 0
    match kind:
        case "all_reduce":
            return -(-2 * (n - 1) * operand_bytes // n)
        case "all_gather":
            return (n - 1) * operand_bytes
        case "reduce_scatter" | "all_to_all":
            return -(-(n - 1) * operand_bytes // n)
        case _:
            return operand_bytes


def operand_of_ring_bytes(kind: str, n: int, sent: int) -> float:
    """The (padded) operand of a collective that sends this much: `ring_bytes` backwards."""
    if n == 1:
        return sent
    match kind:
        case "all_reduce":
            return sent * n / (2 * (n - 1))
        case "all_gather":
            return sent / (n - 1)
        case "reduce_scatter" | "all_to_all":
            return sent * n / (n - 1)
        case _:
            return sent
