"""What a process group must do: collectives among the ranks of a mesh."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from irpar.ir import Attribute, Node, dtype_of_numpy, tensor_type
from irpar.ops.collectives import COLLECTIVES, KINDS, STARTED
from irpar.ops.collectives.record import Partners, Settings
from irpar.sharding import REDUCTIONS, Axis, Mesh

from ..errors import ProgramError

Array = np.ndarray[Any, Any]

REQUIRED = {
    name: (
        "id",
        *(("axes",) if COLLECTIVES[name].over_axes else ()),
        *COLLECTIVES[name].dims,
        *COLLECTIVES[name].others,
    )
    for name in KINDS
}
"""The collectives, and the attributes that each must have."""

_DIMS = frozenset(name for op in COLLECTIVES.values() for name in op.dims)


@dataclass(frozen=True)
class Collective(Settings):
    """A collective as a program's node calls for it; see `Settings`."""

    @classmethod
    def of(cls, node: Node, call: Node | None = None) -> "Collective":
        """Read a node of the domain `irpar`, in its started form too.

        Args:
            node: that.
            call: of the function that it stands in, which has its id; None: it stands in a graph.

        Raises:
            ProgramError: it is no collective that can be executed, or an attribute is missing or cannot be.
        """
        kind = STARTED.get(node.op_type, node.op_type)
        required = REQUIRED.get(kind)
        if required is None:
            raise ProgramError(
                f"irpar.{node.op_type} cannot be executed",
                where=node.label,
                do=f"run localize first; the runtime executes {', '.join(REQUIRED)}",
            )
        op = COLLECTIVES[kind]
        missing = [name for name in required if name not in node.attributes]
        has_all = None not in node.operands and (len(node.operands), len(node.results)) == (op.operands, op.results)
        if missing or not has_all:
            raise ProgramError(
                f"irpar.{node.op_type} needs {_count(op.operands, 'operand')}, {_count(op.results, 'result')} "
                f"and {', '.join(required)}",
                where=node.label,
                notes=(f"missing: {', '.join(missing)}",) if missing else (),
                do="let insert-redistribution make the collective, or add what it lacks",
            )
        axes = tuple(Axis.parse(str(axis)) for axis in _tuple(node.attributes.get("axes")))
        known = {f.name for f in fields(cls)} - {"axes", "kind", "label"}
        settings: dict[str, Any] = {
            name: _plain(value, name, node) for name, value in node.attributes.items() if name in known
        }
        if call is not None:
            settings["id"] = call.attributes["id"]
        return cls(kind=kind, axes=axes, label=_label(call or node, node.op_type), **settings)

    def __str__(self) -> str:
        return f"{self.kind} id={self.id}" + (f" over {','.join(map(str, self.axes))}" if self.axes else "")

    def partners(self, rank: int) -> Partners | None:
        """What a rank does, where this goes from rank to rank; None for a collective."""
        known = COLLECTIVES[self.kind].partners
        return None if known is None else known(self, rank)

    def blank(self) -> Array:
        """What stands for the operand where there is none."""
        made = COLLECTIVES[self.kind].blank
        assert made is not None
        return made(self)


def _count(number: int, what: str) -> str:
    return f"one {what}" if number else f"no {what}"


def _tuple(value: Attribute | None) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else ()


def _plain(value: Attribute, name: str, node: Node) -> Any:
    if name == "reduce" and value not in REDUCTIONS:
        raise ProgramError(
            f"irpar.{node.op_type} has an unknown reduction {value!r}",
            where=node.label,
            do=f"use one of {', '.join(REDUCTIONS)}",
        )
    if name in _DIMS and isinstance(value, int) and value < 0:
        operand = node.operands[0]
        type_ = tensor_type(operand.type) if operand is not None else None
        rank = type_.rank if type_ is not None else None
        return value + rank if rank is not None else value
    return tuple(value) if isinstance(value, tuple) else value


def _label(node: Node, operator: str) -> str:
    given = ", ".join(f"%{operand.name}" for operand in node.operands if operand is not None)
    made = "".join(f"%{result.name} = " for result in node.results)
    text = f"{made}{operator}({given})"
    return f"{text}: {node.doc}" if node.doc else text


@dataclass(eq=False, slots=True)
class Call:
    """A rank that has come to a collective, with its operand.

    Attributes:
        into: where the result may be written; a group may give an array of its own all the same.
    """

    rank: int
    coords: tuple[int, ...]
    collective: Collective
    operand: Array
    into: Array | None = None

    def describe(self, mesh: Mesh) -> str:
        """The rank and what it came to, as one line of a message."""
        label = f"    {self.collective.label}" if self.collective.label else ""
        return f"{rank_text(mesh, self.rank)} is at {self.collective} with {_type_text(self.operand)}{label}"


def difference_of(sent: Array, receiver: Call) -> str | None:
    """How what was sent to a rank differs in dtype or shape from what it takes; None where it does not."""
    taken = receiver.operand
    if sent.dtype == taken.dtype and sent.shape == taken.shape:
        return None
    return f"{_type_text(sent)} was sent, where rank {receiver.rank} takes {_type_text(taken)}"


def _type_text(array: Array) -> str:
    return f"{dtype_of_numpy(array.dtype)}{list(array.shape)}"


def rank_text(mesh: Mesh, rank: int) -> str:
    """A rank and its coordinates: `rank 3 (dp=1, tp=1)`."""
    coords = zip(mesh.axis_names, mesh.coords(rank), strict=True)
    return f"rank {rank} ({', '.join(f'{axis}={coordinate}' for axis, coordinate in coords)})"


class Group(Protocol):
    """Moves data between ranks. A process may run one rank, or several that this one call serves together.

    Attributes:
        ranks: the ranks that run in this process, in order.
        takes_device_arrays: whether operands and results are arrays on the device of their rank.
    """

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def takes_device_arrays(self) -> bool: ...

    def begin_run(self) -> None:
        """A run of the program begins, of which nothing is part that one rank sent another in an earlier one."""
        ...

    def start(self, call: Call) -> None:
        """Let a collective begin that the rank comes back for: `exchange` finishes it, given the same call.

        A group may wait here until all members have come to it (`nccl` does): what the rank computes next overlaps
        with the data that moves then, not with waiting for the others.

        Raises:
            MismatchError: as `exchange`; a group may find it only there.
            PeerError: as `exchange`; a group may find it only there.
        """
        ...

    def exchange(self, waiting: Mapping[int, Call]) -> dict[int, Array]:
        """Execute collectives that the ranks of this process wait at.

        Args:
            waiting: rank to call, for all ranks of this process that have come to a collective; the others are done.

        Returns:
            The results of at least one rank; ranks without one go on waiting. Members may share a result, which nobody
            writes to then.

        Raises:
            MismatchError: the ranks of a group came to different collectives, or brought operands that do not fit.
            PeerError: another rank failed, or did not come in time.
        """
        ...

    def close(self) -> None:
        """Let go of what the group holds."""
        ...


class RepeatingGroup(Group, Protocol):
    """A group of one rank to a process that finds what is the same each time before a collective is executed."""

    def repeat(self, call: Call) -> Callable[[], Array]:
        """What executes a collective again and again, and gives its result; the operand stays where it is.

        Raises:
            MismatchError: as `Group.exchange`, whatever the others bring.
        """
        ...


class Messenger(Protocol):
    """What carries messages between the processes of a run, beside its collectives.

    Attributes:
        seconds: how long a rank waits for others at a collective.
    """

    seconds: float

    def send(self, rank: int, message: bytes) -> None:
        """Send to the process of a rank; does not wait for it to receive, or waits at most the group's bound.

        Raises:
            PeerError: it is gone.
        """
        ...

    def receive(self, rank: int) -> bytes | bytearray | memoryview:
        """The next message of a rank, in order of sending; waits as long as that process lives.

        Raises:
            PeerError: that rank, or another, failed.
        """
        ...

    def abort(self, reason: str) -> None:
        """Tell all other processes that this rank failed: what they wait for raises `PeerError`."""
        ...
