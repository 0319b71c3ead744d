"""What can go wrong when a partitioned program runs."""

from irpar.sharding import IrparError


class InputError(IrparError):
    """Inputs that do not fit the program: names, dtypes or shapes."""


class ProgramError(IrparError):
    """A graph that cannot be cut into segments and collectives."""


class EngineError(IrparError):
    """An engine cannot compile a segment: an op or a dtype that it lacks."""


class NodeError(IrparError):
    """An engine failed at one node; the executor adds the rank."""


class RunError(IrparError):
    """A rank failed, and with it the run."""


class MismatchError(RunError):
    """Ranks that should meet in one collective came to different ones, or brought operands that do not fit."""


class ReplicaError(RunError):
    """Ranks that should hold equal copies of a value hold different ones."""
