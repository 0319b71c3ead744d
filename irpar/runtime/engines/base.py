"""What an engine must do, and the engines by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from irpar.ir import Graph, Tensor, Value
from irpar.output.parts import Part
from irpar.process import import_native
from irpar.runtime.instructions import Program, Segment
from irpar.runtime.launch.environment import World
from irpar.runtime.memory import AddsInPlace
from irpar.sharding import IrparError

from .arena import Arena, ArenaLayout
from .arrays import Arrays

if TYPE_CHECKING:
    from irpar.runtime.communication import Communication

Array = np.ndarray[Any, Any]
Results = Literal["host", "owned", "borrowed"]
"""What a run gives: numpy arrays; arrays of a device, the caller's to keep; or those that the next run writes over."""


class BoundWork(NamedTuple):
    """What computes a segment again and again, from arrays into arrays that stay where they are.

    Attributes:
        run: computes, on behalf of any rank, as long as this lives.
        failure: what `CompiledSegment.run` would raise, where `run` raised an error.
        held: what `run` has addresses of.
    """

    run: Callable[[], object]
    failure: Callable[[Exception], Exception]
    held: object


Bind = Callable[[Sequence[Array], Sequence[Array]], BoundWork]
"""Takes C-contiguous arrays of the types of a segment's inputs, and of its outputs."""


class Constants:
    """The constants of one part: read when a segment first needs them, then shared by all segments and ranks."""

    def __init__(self, part: Part) -> None:
        self._part = part
        self._tensors: dict[Value, Tensor] = {}
        self._arrays: dict[Value, Array] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the part."""
        return self._part.ranks

    @property
    def graph(self) -> Graph:
        """The part's program."""
        return self._part.graph

    def tensor(self, value: Value) -> Tensor:
        """The part's block of a constant, lazy."""
        found = self._tensors.get(value)
        if found is None:
            found = self._tensors[value] = self._part.tensor(value)
        return found

    def array(self, value: Value) -> Array:
        """The part's block of a constant as a read-only array (memory-mapped where it lies in a file)."""
        found = self._arrays.get(value)
        if found is None:
            found = self._arrays[value] = self.tensor(value).numpy()
        return found


class CompiledSegment(Protocol):
    """A segment made ready for one part; may run on several threads at once.

    Attributes:
        arena_bytes: what a run needs of an arena, where places are those of the segment alone.
        bind: makes it compute from arrays into arrays that stay where they are; None: it takes others each time.
    """

    @property
    def arena_bytes(self) -> int: ...

    @property
    def bind(self) -> Bind | None: ...

    def run(self, inputs: list[Any], rank: int = 0, arena: Arena | None = None, writes_over: bool = False) -> list[Any]:
        """Compute `segment.outputs` from values for `segment.inputs`, on behalf of a rank.

        Tensors are numpy arrays, sequences lists of them, an absent optional None. An engine with a device also takes
        arrays of it, and gives them where `EngineSettings.keep_on_device` says so. Results may share memory with
        inputs, which are not written to, but for state that is replaced.

        Args:
            inputs: those values. The list may be emptied, so that what nothing reads any more is freed underway.
            rank: that rank.
            arena: from `Engine.arena`, where results inside the segment lie; of its outputs those that have a place by
                `Engine.layout`. None: they lie anywhere.
            writes_over: whether results may be written over the state that they replace (`Segment.over`).

        Raises:
            NodeError: naming the node that failed, where the engine knows it.
        """
        ...


class Engine(Protocol):
    """Runs the compute between two collectives.

    Attributes:
        name: what `--engine` calls it.
        is_parallel: whether several segments gain from running on several threads (the GIL is let go).
        writes_over: whether segments can write what replaces state over it.
        adds_in_place: which loops write the sums that they carry over what a trip finds.
        keeps: whether its kernels keep what they make of constants (`Kernel.kept_bytes`).
        device_array: the type of the arrays of its device; None: it has none.
        notes: what the user should know of how nodes were computed, so far; a line each.
    """

    name: str
    is_parallel: bool
    writes_over: bool
    adds_in_place: AddsInPlace
    keeps: bool
    device_array: type | None

    @property
    def notes(self) -> tuple[str, ...]: ...

    def check_memory(self, needed: int, what: str, processes: int = 1) -> None:
        """Refuse a run that needs more memory than there is where its arrays lie.

        Args:
            needed: estimated bytes of this process.
            what: what needs them, as the message begins.
            processes: how many of the run share the host, each of which needs about as much.

        Raises:
            OutOfMemoryError: with both figures.
        """
        ...

    def edge(self, rank: int) -> Arrays:
        """Where the arrays lie that a rank holds between segments."""
        ...

    def arena(self, rank: int, nbytes: int) -> Arena:
        """Memory for the segments that a rank runs, one after the other."""
        ...

    def layout(self, program: Program, compiled: Mapping[Segment, CompiledSegment]) -> ArenaLayout | None:
        """Where results lie in the arena over all segments of a program; None: each segment has places of its own.

        Args:
            program: it.
            compiled: its segments as this engine, or another one that computes on the host, has compiled them.
        """
        ...

    def compile(self, segment: Segment, constants: Constants) -> CompiledSegment:
        """Make a segment ready for one part.

        Raises:
            EngineError: the engine cannot compute an op or hold a dtype of it; says which, and what to do.
        """
        ...


class EngineSettings:
    """What an engine may want to know.

    Attributes:
        opsets: domain to opset version of the module.
        ranks: how many ranks run in this process.
        strict: refuse a node that an engine with a device would compute on the host.
        tf32: let an engine with a device multiply float32 with operands rounded to TF32.
        keep_on_device: let segments give arrays of the device, where the engine has one.
        from_host: inputs of programs come as arrays of the host.
        local_rank: the place of this process among those of its machine, which chooses the device.
        captures: let an engine with a device capture in CUDA graphs what it runs again and again.
        lends: let results that stay on a device lie where the next run of the rank writes, so that they need not be
            copied; what replaces state never does.
        talks: how segments of an engine with a device communicate; None: they do not.
        threads: threads of the processor that each segment of a program cut over ranks computes with; 0: the program is
            whole, and the engine chooses.
    """

    def __init__(
        self,
        opsets: Mapping[str, int],
        ranks: int,
        *,
        strict: bool = False,
        tf32: bool = False,
        keep_on_device: bool = False,
        from_host: bool = True,
        local_rank: int = 0,
        captures: bool = True,
        lends: bool = False,
        talks: "Communication | None" = None,
        threads: int = 0,
    ) -> None:
        self.opsets = dict(opsets)
        self.ranks = ranks
        self.strict = strict
        self.tf32 = tf32
        self.keep_on_device = keep_on_device
        self.from_host = from_host
        self.local_rank = local_rank
        self.captures = captures
        self.lends = lends
        self.talks = talks
        self.threads = threads


ENGINES: dict[str, str] = {
    "ort": "ort:OrtEngine",
    "numpy": "numpy:NumpyEngine",
    "cupy": "cupy:CupyEngine",
}
"""Name to module and class; loaded when asked for, so that nobody waits for an engine that is not used."""


def make_engine(name: str, settings: EngineSettings) -> Engine:
    """The engine of that name.

    Raises:
        IrparError: there is none.
    """
    if name not in ENGINES:
        raise IrparError(f'there is no engine "{name}"', do=f"use one of {', '.join(ENGINES)}")
    module, _, kind = ENGINES[name].partition(":")
    make: Callable[[EngineSettings], Engine] = getattr(import_native(f"{__package__}.{module}"), kind)
    return make(settings)


def default_engine(peaks: Sequence[int | None], world: World | None = None) -> Literal["ort", "cupy"]:
    """The engine where none is asked for: `cupy` where CuPy finds devices on which the ranks fit, else `ort`.

    Args:
        peaks: bytes that each rank holds at most; None where nobody knows.
        world: of processes that run one rank each, on a device each; None: this process runs them all, on one device.
    """
    from .cuda import device_count, free_bytes, is_bound

    devices, known = device_count(), [peak or 0 for peak in peaks]
    if not devices:
        return "ort"
    if world is None:
        return "cupy" if sum(known) <= free_bytes(0) else "ort"
    # A launcher may show each process its own device alone.
    has_own = is_bound() or devices >= max(world.local_size or 1, world.local_rank + 1)
    return "cupy" if has_own and max(known, default=0) <= free_bytes(world.local_rank % devices) else "ort"
