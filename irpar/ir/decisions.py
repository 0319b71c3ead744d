"""Why a program is as it is: logs that passes write beside it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .annotation import Annotation


@dataclass(frozen=True)
class Decision:
    """Why a value is sharded by some axes: in words, and the name of the value that it follows, if any.

    `axes` names the mesh axes that it is about; empty: the sharding altogether.
    """

    why: str
    follows: str | None = None
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conflict:
    """A value that lies in one way and is needed in another, and what either goes back to.

    Attributes:
        value: its name in the source model.
        lies, because: its sharding, and the annotation behind that.
        node: the first reader that needs it so; the node that gives it where none does.
        needed, needed_because: the sharding that is needed, and why.
        rematerialized: it is gathered and then cut in another way, since no collective leads there.
        avoid: the annotation with which it would not be moved here.
    """

    value: str
    lies: str
    because: str
    node: str
    needed: str
    needed_because: str
    rematerialized: bool
    avoid: str


@dataclass(frozen=True)
class Gone:
    """An annotated value that a pass has taken out of the program.

    Attributes:
        annotation: what was said of it.
        why: what took it out, in words.
    """

    annotation: "Annotation"
    why: str
