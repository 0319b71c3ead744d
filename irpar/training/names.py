"""Names of what a training step adds to a model."""

from irpar.ir.state import LOSS
from irpar.passes.add_loss import TARGET
from irpar.passes.autodiff import GRAD
from irpar.passes.optimizer.names import GOOD, LEARNING_RATE, MASTER, NEXT, NORM, SCALE, SKIPPED, STEP
from irpar.passes.training_mode.dropout import COUNT, SEED

_WHOLE = {LOSS, TARGET, LEARNING_RATE, STEP, NORM, SCALE, GOOD, SKIPPED, COUNT, SEED}
_ENDINGS = (".m", ".v", MASTER, NEXT)


def is_added(name: str) -> bool:
    """Whether a name or glob is of a tensor that a step adds: `grad.w`, `w.m`, `target`."""
    return name in _WHOLE or name.startswith(GRAD) or name.endswith(_ENDINGS)
