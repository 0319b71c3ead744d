"""State of a program: what stays on its rank from one run to the next."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from irpar.errors import IrparError

if TYPE_CHECKING:
    from .tensor import Tensor

StateKind = Literal["parameter", "master", "moment", "statistic", "cache", "counter", "scale", "seed"]
STATE_KINDS: tuple[str, ...] = get_args(StateKind)
MODEL_KINDS: tuple[StateKind, ...] = ("parameter", "statistic")
"""What a model computes with: its initializers, and inputs that are trained."""
OPTIMIZER_KINDS: tuple[StateKind, ...] = ("master", "moment", "scale")
"""What an optimizer keeps beside the parameters."""
LOSS = "loss"
"""The result of a step of training: where it is not finite, the state stays as it was."""


class StateError(IrparError):
    """A state that cannot be."""


@dataclass(frozen=True)
class State:
    """What a graph input is where its value outlives a run.

    Attributes:
        kind: parameter; master (a parameter in higher precision); moment (of an optimizer); statistic (a running mean);
            cache (keys and values); counter; scale (of a loss); seed.
        output: which result of the graph replaces it after a run; None: it stays as it is.
        data: the numbers before the first run, of the full tensor; None: zeros.
        parameter: the name of the parameter that a master, a moment or a scale belongs to.
    """

    kind: StateKind
    output: int | None = None
    data: "Tensor | None" = None
    parameter: str | None = None

    @property
    def is_trained(self) -> bool:
        """True for a parameter that the graph replaces."""
        return self.kind == "parameter" and self.output is not None
