"""Operators that have no gradient, and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpar.ir import Node, Value

from .writer import GradientWriter, NoGradientError, Of


@dataclass(frozen=True)
class Refused:
    """In the place of a gradient: says why there is none.

    Attributes:
        why: as part of a sentence, from "because" on.
    """

    why: str

    def __call__(self, node: Node, of: Of, writer: GradientWriter) -> Sequence[Value | None]:
        """See `OpDef.gradient`.

        Raises:
            NoGradientError: always.
        """
        raise NoGradientError(self.why)


ROUNDS = Refused("because it rounds floats to integers as it computes; differentiate the model before it was quantised")
"""Of operators that quantise their operands by themselves."""
PACKED = Refused("because its weights are packed integers; differentiate the model before it was quantised")
"""Of operators on quantised weights, which no plain operators replace yet."""
PARTITIONED = Refused("because the program is partitioned already; derive gradients before it is")
"""Of communication."""
OPTIMIZER = Refused("because it is a step of an optimizer, not of a model")
CLASSIFIER = Refused("because a derivative by what a classic classifier or kernel regressor reads is not written yet")
ROUNDED_REGIONS = Refused("because its regions are rounded to elements; export the model with RoiAlign")
EXPERTS = Refused("because it is not replaced by plain operators yet; export the model with its experts as plain nodes")
RANDOM_MASK = Refused("because its mask is drawn inside; export the model with plain Dropout")
"""Of com.microsoft's fused forms of Dropout."""
