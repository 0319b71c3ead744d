"""What can go wrong when a partitioned program runs."""

from functools import partial

from irpar.sharding import IrparError, option


def more_time() -> str:
    """What to do where others are slow."""
    return f"give more time: {option('timeout', 'SECONDS')}"


class InputError(IrparError):
    """Inputs that do not fit the program: names, dtypes or shapes."""


class ProgramError(IrparError):
    """A graph that cannot be sharded into segments and collectives."""


class EngineError(IrparError):
    """An engine cannot compile a segment: an op or a dtype that it lacks."""


class NodeError(IrparError):
    """An engine failed at one node; the executor adds the rank."""


class LaunchError(IrparError):
    """The processes of a run cannot be its ranks as they were started; all of one host find out the same."""


class StorageError(IrparError):
    """What lies on disk during a run cannot be read or written."""


class StateLostError(IrparError):
    """State that a run has let go, and did not replace since it failed."""


class RunError(IrparError):
    """A rank failed, and with it the run."""


class MismatchError(RunError):
    """Ranks that should meet in one collective came to different ones, or brought operands that do not fit."""


class PeerError(RunError):
    """Another rank failed, died, or did not come in time.

    Attributes:
        rank: that rank; the first of several.
    """

    def __init__(self, what: str, *, rank: int, where: str = "", notes: tuple[str, ...] = (), do: str = "") -> None:
        super().__init__(what, where=where, notes=notes, do=do)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return partial(PeerError, rank=self.rank, where=self.where, notes=self.notes, do=self.do), (self.what,)


class ReplicaError(RunError):
    """Ranks that should hold equal copies of a value hold different ones.

    Attributes:
        value: what it is called in the source model.
    """

    def __init__(self, what: str, *, value: str, where: str = "", notes: tuple[str, ...] = (), do: str = "") -> None:
        super().__init__(what, where=where, notes=notes, do=do)
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return partial(ReplicaError, value=self.value, where=self.where, notes=self.notes, do=self.do), (self.what,)
