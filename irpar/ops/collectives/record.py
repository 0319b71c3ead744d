"""What one kind of collective is: the record that its file fills, and what all of these records stand on."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np

from irpar.ir import Module, Node, Shape, Type
from irpar.sharding import Axis, Reduction

Array = np.ndarray[Any, Any]
Sizes = tuple[int, ...]

Atoms = tuple[Axis, ...]
State = tuple[tuple[Atoms, ...], frozenset[Axis]]
"""The axes of each dim, major first, and the partial ones, all split into parts that compare."""


# -- attributes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """One collective of a program; two are equal where all that their participants must agree on is equal.

    Attributes:
        kind: its operator, such as AllReduce or Send.
        id: unique in the program, equal on all participants.
        axes: mesh axes, major first; a group is the ranks that differ only in these.
        reduce: the reduction of AllReduce and ReduceScatter.
        dim: the dim of AllGather and ReduceScatter.
        split_dim, concat_dim: the dims of AllToAll.
        pairs: source and target positions of CollectivePermute, alternating.
        root: the position that Broadcast sends from.
        sizes: block sizes along `dim` where they differ.
        split_sizes, concat_sizes: block sizes of AllToAll where they differ.
        shapes: shapes of the operands of CollectivePermute where they differ, one after the other.
        channel: what Send sends, Recv takes by the same number; their `pairs` are of ranks.
        dtype, shape: what Recv takes.
        label: what messages call it: its source, the operand, the reason.
    """

    kind: str
    id: int
    axes: tuple[Axis, ...]
    reduce: Reduction = "sum"
    dim: int = 0
    split_dim: int = 0
    concat_dim: int = 0
    pairs: tuple[int, ...] = ()
    root: int = 0
    sizes: tuple[int, ...] | None = None
    split_sizes: tuple[int, ...] | None = None
    concat_sizes: tuple[int, ...] | None = None
    shapes: tuple[int, ...] | None = None
    channel: int = 0
    dtype: str = ""
    shape: tuple[int, ...] = ()
    label: str = field(default="", compare=False)


class Attribute(NamedTuple):
    """What an ONNX reader is told of an attribute.

    Attributes:
        kind: of its values, by ONNX's name.
        is_required: every such node has it.
        text: what it says.
    """

    kind: Literal["STRINGS", "INT", "STRING", "INTS"]
    is_required: bool
    text: str


ATTRIBUTES: Mapping[str, Attribute] = {
    "axes": Attribute("STRINGS", True, "mesh axes or sub-axes, major first"),
    "id": Attribute("INT", True, "unique in the program, equal on all participants"),
    "reduce": Attribute("STRING", True, "sum, max, min, prod, and, or"),
    "dim": Attribute("INT", True, "the dim that is gathered, scattered or sliced"),
    "split_dim": Attribute("INT", True, "the dim whose blocks are sent"),
    "concat_dim": Attribute("INT", True, "the dim along which received blocks are joined"),
    "pairs": Attribute("INTS", True, "source and target positions in the group (of Send and Recv: ranks), in turn"),
    "channel": Attribute("INT", True, "what a Send sends, the Recv of the same channel takes"),
    "dtype": Attribute("STRING", True, "dtype of what is taken, as irpar's text has it, such as f32"),
    "shape": Attribute("INTS", True, "shape of what is taken"),
    "shapes": Attribute("INTS", False, "shapes of the members' operands, one after the other, where they differ"),
    "root": Attribute("INT", True, "position in the group"),
    "sizes": Attribute("INTS", False, "block size of each member along dim, where they differ"),
    "split_sizes": Attribute("INTS", False, "block size of each member along split_dim, where they differ"),
    "concat_sizes": Attribute("INTS", False, "block size of each member along concat_dim, where they differ"),
}
"""By name."""

Uneven = Mapping[str, tuple[str, Literal["operand", "result"]] | None]
"""The attributes of a collective whose members' blocks differ: each tells the block sizes of a dim, which another
attribute names, of the operand or of the result; None: it tells global shape."""


# -- what is sent, and how long that takes ----------------------------------------------------------------------------


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


class Share(NamedTuple):
    """What a device sends by the ring model, as a fraction: of elements, or of the operand that it holds."""

    numerator: int
    divisor: int


class Nested(NamedTuple):
    """A collective over links within links, of which this is the innermost.

    Attributes:
        inside: seconds of a kind over the innermost link, for an operand of so many bytes.
        outside: seconds of this kind over all other links, likewise.
        n: devices that the innermost link joins.
        across: devices that the others join.
    """

    inside: Callable[[str, float], float]
    outside: Callable[[float], float]
    n: int
    across: int


# -- execution --------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that goes on, a step each time it is asked for, as far as what has arrived allows."""


class Link(Protocol):
    """Carries the rounds of one collective."""

    def round(self, sends: Sequence[Array | None], receives: Sequence[Array | None]) -> Steps[None]:
        """Send to each other member, and fill arrays with what each sends; by position, one's own is passed over.

        Args:
            sends: C-contiguous arrays; None: nothing.
            receives: C-contiguous arrays of the sizes that come; None where nothing does.
        """
        ...


class Member(Protocol):
    """One member of a collective, with its operand.

    Attributes:
        collective: its attributes.
        position: the member's.
        shapes: of the operands of all members, in order of position.
        operand: the member's.
    """

    @property
    def collective(self) -> Settings: ...

    @property
    def position(self) -> int: ...

    @property
    def shapes(self) -> Sequence[Sizes]: ...

    @property
    def operand(self) -> Array: ...


@dataclass(frozen=True)
class Movement:
    """What one member gives and gets, where nothing is computed.

    Attributes:
        result: its result; what it gets of itself is there already.
        sends: views of its operand, each with the positions of the members that get it.
        receives: places in the result, each with the position of the member that it comes from.
    """

    result: Array
    sends: Sequence[tuple[Sequence[int], Array]]
    receives: Sequence[tuple[int, Array]]


Empty = Callable[[Sizes], Array]
"""Makes an array of the operand's dtype and module."""


@dataclass(frozen=True)
class Execution:
    """How a kind is executed.

    Attributes:
        result: from the operands of a group in order of position, what the member at a position gets: the reference.
        shapes: the operand shapes that members must have, given those that they have.
        is_shared: all members get the same.
        reads_all: every member needs every operand.
        gives_operands: what a member gets is the operand of one, or zeros: in one memory no data move.
        moves: of a kind that only moves, what goes where.
        pieces: of a kind that reduces, the piece of a member's operand that each member reduces.
        returns_pieces: what a member has reduced goes to all members, which join it in order; else it is its result.
        exchange: a faster way than `moves` by rounds in which each member sends to each other.
    """

    result: Callable[[Settings, Sequence[Array], int], Array]
    shapes: Callable[[Settings, Sequence[Sizes]], list[Sizes]]
    _: KW_ONLY
    is_shared: bool = False
    reads_all: bool = False
    gives_operands: bool = False
    moves: Callable[[Member, Empty], Movement] | None = None
    pieces: Callable[[Member], list[Array]] | None = None
    returns_pieces: bool = False
    exchange: Callable[[Member, Link], Steps[Array]] | None = None


@dataclass(frozen=True)
class Partners:
    """What one rank does in communication from rank to rank; with neither targets nor a source, nothing.

    Attributes:
        channel: what is sent is taken by the same number.
        targets: the ranks to which the operand goes.
        source: the rank from which the result comes.
    """

    channel: int
    targets: tuple[int, ...] = ()
    source: int | None = None


# -- other runtimes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spelling:
    """How an operator of another runtime says a kind.

    Attributes:
        op_type: theirs.
        dtypes: that it takes, as irpar's text has them.
        fixed: attributes of theirs that are always so.
        named: attributes of theirs that say what one of ours does.
        counted: attributes of theirs that say how many members there are.
        reductions: those of ours that it has, of a kind that reduces.
        first: those of ours that name dims, which it has as the first one alone.
    """

    op_type: str
    dtypes: frozenset[str]
    _: KW_ONLY
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    reductions: frozenset[str] = frozenset()
    first: tuple[str, ...] = ()


# -- the record -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CollectiveOp:
    """One of irpar's operators between devices.

    Attributes:
        kind: what plan.json calls it; None: it sends nothing, has no id, and stands in global view only.
        does: what it does.
        shape: the local shape of the result.
        after: the axes of each dim of the result and its partial ones, from those of the operand and the axes it runs
            over; None where it cannot run on such an operand.
        elements: how many elements a member sends, as a fraction.
        share: the same of the operand, for devices that hold equal blocks.
        algorithms: by name, those of NCCL where it has one.
        calibrated: the one of them whose times `irpar calibrate` takes the links' speed from.
        nested: seconds over links within links, for an operand of so many bytes, link after link; None: the whole
            operand goes over each.
        execution: None where it sends nothing.
        dims: the attributes that name dims of its operand; of one that sends, their sizes change in local view.
        others: the attributes that it must have besides, and beside `axes` and `id`.
        uneven: the attributes that it has where the members' blocks differ.
        operands, results: how many it has, 0 or 1.
        over_axes: it runs over mesh axes, in groups; else it names the ranks that take part.
        partners: from rank to rank, what a rank does; None: it is a collective, of all ranks of a group.
        blank: of one without operands, what a rank gets to which nothing is sent.
        types: the types of its results, where they are not its operand's with `shape`.
        problems: what is wrong with a node, where that is not what is wrong with a collective.
        moves_blocks: it may keep the sharding or take blocks to where another sharding has them, by `pairs`.
        spellings: how other runtimes say it, by the names of `DIALECTS`; those that are not there cannot.
    """

    kind: str | None
    does: str
    shape: Callable[[Node], Shape]
    after: Callable[[Node, State, Atoms], State | None]
    elements: Callable[[Node, int], Share]
    share: Callable[[int], Share] = lambda n: Share(0, 1)
    algorithms: Mapping[str, Algorithm] = field(default_factory=dict)
    calibrated: str = "direct"
    nested: Callable[[Nested, float], float] | None = None
    execution: Execution | None = None
    dims: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    uneven: Uneven = field(default_factory=dict)
    operands: int = 1
    results: int = 1
    over_axes: bool = True
    partners: Callable[[Settings, int], Partners] | None = None
    blank: Callable[[Settings], Array] | None = None
    types: Callable[[Node], Sequence[Type]] | None = None
    problems: Callable[[Module, Node], Iterator[str]] | None = None
    moves_blocks: bool = False
    spellings: Mapping[str, Spelling] = field(default_factory=dict)
