"""What a partition asks of the rank that has most, in the units of plan.json, and what one is worth beside another.

Where no device is known, so that nothing has seconds, FLOPs and weights are weighed against sent bytes by fixed rates;
this is what suggestions rank annotations by.
"""

from dataclasses import astuple, dataclass

FLOPS_PER_BYTE = 4
"""How many FLOPs are worth sending a byte for; devices of today do 100 and more while their links send one."""
HELD_PER_SENT = 2
"""How many bytes of weights that a device no longer holds are worth sending a byte for in each step."""
_SLACK = 0.01
"""By how much a figure may be worse for an entry not to be worth a line."""


def worth(flops: float, held_bytes: float, sent_bytes: float) -> float:
    """What is saved minus what is sent more, in sent bytes."""
    return flops / FLOPS_PER_BYTE + held_bytes / HELD_PER_SENT - sent_bytes


@dataclass(frozen=True)
class Figures:
    """What one rank has to do and to hold: that of the most.

    Attributes:
        weight_bytes: of its weights.
        flops: that it computes in each step.
        sent_bytes: that it sends in each step.
        collectives: in each step.
    """

    weight_bytes: int
    flops: int
    sent_bytes: int
    collectives: int

    def gain(self, flops: int, weight_bytes: int) -> float:
        """What it is worth to cut so a model that has these in all."""
        return worth(flops - self.flops, weight_bytes - self.weight_bytes, self.sent_bytes)

    def is_as_good(self, other: "Figures") -> bool:
        """Whether no figure is worse than another's by more than a hundredth."""
        return all(mine <= (1 + _SLACK) * its for mine, its in zip(astuple(self), astuple(other), strict=True))
