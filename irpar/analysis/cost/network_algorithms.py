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

from irpar.ops.collectives import ALGORITHMS, OF_KIND
from irpar.ops.collectives.record import Algorithm, Volume, rounds

__all__ = ["ALGORITHMS", "Algorithm", "Volume", "operand_of_ring_bytes", "ring_bytes", "rounds"]


def ring_bytes(kind: str, n: int, operand_bytes: int) -> int:
    """What a device sends by the ring model, rounded up; see docs/plan.md.

    Args:
        kind: as plan.json calls it.
        n: how many devices take part.
        operand_bytes: the operand that one of them holds, of uneven blocks the padded one.
    """
    if n == 1:
        return 0
    count, divisor = OF_KIND[kind].share(n)
    return -(-count * operand_bytes // divisor)


def operand_of_ring_bytes(kind: str, n: int, sent: int) -> float:
    """The (padded) operand of a collective that sends this much: `ring_bytes` backwards."""
    if n == 1:
        return sent
    count, divisor = OF_KIND[kind].share(n)
    return sent * divisor / count
