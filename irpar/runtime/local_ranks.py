"""The ranks of a program that run in this process: what they are made of, and what they compute from their blocks."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

from irpar.analysis.engines import unknown_nodes
from irpar.analysis.memory.liveness import memories_of
from irpar.analysis.store_said import PATH
from irpar.ir import Module, Value
from irpar.ops.effects import is_compute
from irpar.output.parts import Part, parts_of
from irpar.sharding import Mesh, option

from .bound_steps import Bindings, Bound
from .checkpointing import load_blocks, save_blocks
from .communication import CapturingGroup, Communication
from .driver import Request
from .engines.arena import Arenas
from .engines.base import Engine, EngineSettings, Results, make_engine
from .errors import EngineError, ProgramError, StorageError
from .groups import Group
from .held_state import BorrowedState, HeldState, state_specs
from .launch.environment import World, threads_of_rank
from .layout import TensorSpec
from .lockstep import Lockstep
from .log import CollectiveLog
from .memory import LIMIT, check_memory, run_bytes
from .prepared import Prepared, Preparer, check_parts, check_spaces
from .rank_state import RankState
from .spaces import CopyThread, Spaces
from .specs import input_specs, output_specs
from .storage.disk import ELSEWHERE, OFFLOAD_PATH, Disk
from .storage.disk_array import DiskArray


class LocalRanks:
    """The ranks of a program that its group has in this process.

    Args:
        module, mesh, engine, parts, strict, tf32, results: see `Executor`.
        group: what the ranks meet in.
        beside: the ranks of another program, which are the same: these read the state that they hold.

    Attributes:
        mesh: of all ranks.
        parts: the parts of these ranks.
        inputs, outputs, states, log, read_bytes: see `Executor`.
        is_strict, is_tf32: as `strict` and `tf32` were given.

    Raises:
        IrparError: the program cannot be run; says what to do.
    """

    def __init__(
        self,
        module: Module,
        mesh: Mesh,
        group: Group,
        *,
        engine: str,
        parts: Sequence[Part] | None,
        strict: bool,
        tf32: bool,
        results: Results,
        beside: "LocalRanks | None",
    ) -> None:
        self.mesh = mesh
        self.is_strict, self.is_tf32 = strict, tf32
        self._group = group
        self._results = results
        self._beside = beside
        self._offload_path = os.environ.get(OFFLOAD_PATH) or module.metadata.get(PATH)
        self._disk = Disk(self._offload_path)
        self._prepare(module, engine, parts)

    def _prepare(self, module: Module, engine: str, parts: Sequence[Part] | None) -> None:
        mesh, ranks = self.mesh, self._group.ranks
        listed = parts if parts is not None else _parts(module, mesh)
        self.parts = tuple(part for part in listed if not set(part.ranks).isdisjoint(ranks))
        check_parts(self.parts, ranks)
        check_spaces(self.parts)
        _check_operators(self.parts)
        self._memories = dict.fromkeys(memory for part in self.parts for memory in memories_of(part.graph))
        if "disk" in self._memories:
            _check_folder(self._offload_path)
        graph = self.parts[0].graph
        self.inputs: tuple[TensorSpec, ...] = input_specs(graph)
        self.outputs: tuple[TensorSpec, ...] = output_specs(graph)
        self.states = state_specs(graph)
        self._check_parts_agree()
        self.log = CollectiveLog()
        self.read_bytes: dict[int, int] = {}
        if self._beside is None:
            coords = {rank: mesh.coords(rank) for rank in ranks}
            self._held: HeldState = HeldState(self.parts, coords, self._disk.tensor)
        else:
            names = [state.spec.name for state in self.states]
            on_disk = [value.source_name for value in graph.states if value.memory == "disk"]
            self._held = BorrowedState(self._beside._held, names, on_disk, self._beside._read)
        world = World.of_environment() if len(ranks) < mesh.size else None
        self._talks = _communication(self._group, mesh) if engine == "cupy" else None
        settings = EngineSettings(
            module.opsets,
            len(ranks),
            strict=self.is_strict,
            tf32=self.is_tf32,
            keep_on_device=self._results != "host"
            or self._group.takes_device_arrays
            or _keeps_state_alone(mesh, self.parts)
            or (mesh.size == 1 and len(self._memories) > 1),
            from_host=self._results == "host" and len(self._memories) == 1,
            local_rank=0 if world is None else world.local_rank,
            talks=self._talks,
            # A run reads what the host gets before it gives back the arena.
            lends=self._results != "owned",
            threads=0 if mesh.size == 1 else 1 if len(ranks) > 1 else threads_of_rank(),
        )
        self._engine = make_engine(engine, settings)
        self._hosts = self._for_host(settings) if len(self._memories) > 1 else ()
        self._device_array = self._engine.device_array if self._results != "host" else None
        if self._results != "host" and (self._device_array is None or mesh.size > 1):
            raise ProgramError(
                f"results stay on the device with the engine cupy and one rank, not with {engine} and {mesh.size}",
                do=f"leave out {option('results', self._results)}, or partition for one device",
            )
        self._threads = min(len(ranks), os.cpu_count() or 1) if self._engine.is_parallel else 1
        what = "all ranks" if len(ranks) == mesh.size else f"rank {', '.join(map(str, ranks))}"
        processes = (world and world.local_size) or 1
        self._check_memory(f"a run of {what} of mesh {mesh} in this process", processes)
        self._arenas = Arenas(self._engine.arena)
        joins = None if self._talks is None else self._talks.joins
        self._preparer = Preparer(self.parts, self._engine, self._hosts, joins)
        self._prepared = self._preparer.prepare()
        self._fetched: tuple[tuple[str, ...], Prepared] | None = None
        self._lockstep = Lockstep(self._group, mesh, self._threads)
        self._bindings = Bindings(mesh, self._group, self._lockstep.long_seconds)
        self._hold_weights()
        self._copying = {rank: CopyThread(rank) for rank in ranks if len(self._memories) > 1}
        self._spaces = {
            rank: Spaces(rank, self._engine.edge(rank), thread, self._disk) for rank, thread in self._copying.items()
        }

    def _check_parts_agree(self) -> None:
        for part in self.parts[1:]:
            if input_specs(part.graph) != self.inputs or output_specs(part.graph) != self.outputs:
                raise ProgramError(
                    f"parts {self.parts[0].index} and {part.index} have different inputs or outputs",
                    do="partition the model again",
                )

    def _for_host(self, settings: EngineSettings) -> tuple[Engine, ...]:
        """What computes on the host, whatever computes on the device: ONNX Runtime, and what it lacks irpar's kernels.

        Raises:
            ProgramError: the engine has no memory of its own for what lies on the device.
        """
        if self._engine.device_array is not None and not settings.keep_on_device:
            raise ProgramError(
                f"{self.mesh.size} ranks in one process do not keep values apart on device and host by the engine "
                f"{self._engine.name}",
                do=f"run each rank in a process of its own, {option('group', 'nccl')}, or use "
                f"{option('engine', 'numpy')}, for which both are accounts of one memory",
            )
        own = EngineSettings(settings.opsets, settings.ranks, threads=settings.threads)
        return make_engine("ort", own), make_engine("numpy", own)

    def _check_memory(self, what: str, processes: int) -> None:
        """Refuse a run that does not fit into memory: that of the device and that of the host, each by itself.

        Where both are accounts of one memory, this has to have room for both, whatever limit each is given.

        Raises:
            OutOfMemoryError: with both figures.
        """
        engine = self._engine
        in_place = engine.adds_in_place
        needed = run_bytes(self.parts, self._threads, engine.writes_over, engine.keeps, adds_in_place=in_place)
        self._engine.check_memory(needed, what, processes)
        if "host" in self._memories:
            on_host = run_bytes(self.parts, self._threads, True, memory="host")
            check_memory(on_host, f"{what}, on the host,", processes)
            if engine.device_array is None and not os.environ.get(LIMIT):
                check_memory(needed + on_host, f"{what}, on device and host together,", processes)

    def _hold_weights(self) -> None:
        """Open the files from which weights are read while a program runs."""
        graphs = [part.graph for part in self.parts]
        constants = (value for graph in graphs for value in graph.constants if value.memory == "disk")
        if found := [value.data for value in constants if value.data is not None]:
            self._disk.hold(found)

    def _read(self, block: DiskArray) -> Any:
        """What lies on disk."""
        return self._disk.begin_read(block).wait()

    def _outside(self, rank: int, blocks: Mapping[str, Any]) -> dict[str, Any]:
        """What a rank holds, as numpy arrays."""
        edge = self._spaces.get(rank) or self._engine.edge(rank)
        return {name: edge.outside(block) for name, block in blocks.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of how nodes were computed, so far; a line each."""
        return (*self._engine.notes, *self._disk.notes)

    # -- a run --------------------------------------------------------------------------------------------------

    def _for_fetch(self, names: tuple[str, ...]) -> Prepared:
        if not names:
            return self._prepared
        if self._fetched is None or self._fetched[0] != names:
            self._fetched = None  # Let go of the last variant before the next one is made.
            self._arenas.clear()
            self._fetched = names, self._preparer.prepare_fetch(names)
        return self._fetched[1]

    def _taken_by(self, session: int) -> Sequence[TensorSpec]:
        """The inputs of a run: in a session those that are no state."""
        return self._stateless[0] if session else self.inputs

    def _given_by(self, session: int) -> Sequence[TensorSpec]:
        """The outputs of a run: in a session those that replace no state."""
        return self._stateless[1] if session else self.outputs

    @cached_property
    def _stateless(self) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """The inputs that are no state, and the outputs that replace none."""
        names, replacing = {state.spec.name for state in self.states}, {state.output for state in self.states}
        inputs = [spec for spec in self.inputs if spec.name not in names]
        return inputs, [spec for spec in self.outputs if spec.name not in replacing]

    def _run_ranks(
        self, prepared: Prepared, blocks: Mapping[int, Mapping[str, Any]], session: int, log: CollectiveLog
    ) -> list[RankState]:
        """Bring the ranks of this process to the end of a program."""
        prepared = self._settled(prepared)
        bound = self._bindings.take(prepared)
        try:
            states = self._start(prepared, bound, blocks, session, log)
            self._lockstep.run(states, log)
        finally:
            self._bindings.give_back(prepared, bound)
        return states

    def _start(
        self,
        prepared: Prepared,
        bound: Bound,
        blocks: Mapping[int, Mapping[str, Any]],
        session: int,
        log: CollectiveLog,
    ) -> list[RankState]:
        spaces = {rank: own.of_run(log.copies) for rank, own in self._spaces.items()}
        states = [
            RankState(
                rank,
                self.mesh.coords(rank),
                part,
                self._group.start,
                self._engine.edge(rank),
                self._lockstep.long_seconds,
                self._arenas.take(rank, part.tape.arena_bytes, part.tape.layout),
                partial(self._held.let_go, session, rank) if session else None,
                bound.steps[rank],
                spaces.get(rank),
            )
            for part in prepared.parts
            for rank in part.part.ranks
            if rank in blocks
        ]
        states.sort(key=lambda state: state.rank)
        for state in states:
            state.start(blocks[state.rank], self._held.begin(session, state.rank) if session else None)
        return states

    def _settled(self, prepared: Prepared) -> Prepared:
        """A program as it is run: with communication in its segments where that is alike on all ranks.

        The ranks tell each other when they first run; what differs, such as stages of a pipeline, is prepared without.
        """
        talks = self._talks
        if talks is None:
            return prepared
        talks.log = self.log
        if talks.is_settled or talks.settle(
            segment for part in self._prepared.parts for segment in part.program.segments
        ):
            return prepared
        self._talks, is_own = None, prepared is self._prepared
        self._preparer = Preparer(self.parts, self._engine, self._hosts)
        self._prepared, self._fetched = self._preparer.prepare(), None
        return self._prepared if is_own else prepared

    def _computed(self, prepared: Prepared, state: RankState, session: int) -> dict[str, Any]:
        """A rank's blocks of the outputs and of what is fetched, by name; state stays with the rank.

        Others may use its memory from then on.
        """
        kept: dict[str, Any] = {}
        if session:
            kept = state.next_states()
            self._held.replace(session, state.rank, kept)
        wanted = {spec.name: state.outputs[spec.name] for spec in self._given_by(session)}
        wanted |= {name: values[state.graph] for name, values in prepared.fetched.items() if state.graph in values}
        if self._results == "host":
            found = {name: state.read_on_host(value) for name, value in wanted.items()}
        else:
            found = self._on_device(state, wanted, list(kept.values()))
        self._arenas.give_back(state.rank, state.arena)
        return found

    def _on_device(self, state: RankState, wanted: Mapping[str, Value], kept: Sequence[Any]) -> dict[str, Any]:
        """What a rank holds as arrays of its device, where there can be such; copies of what it keeps as state."""
        edge = self._engine.edge(state.rank)
        found = {name: edge.operand(state.read(value)) for name, value in wanted.items()}
        return {name: array.copy() if any(array is one for one in kept) else array for name, array in found.items()}

    # -- state and its end --------------------------------------------------------------------------------------

    def _with_loaded(self, rank: int, request: Request) -> Request:
        """A request to load a checkpoint as one to write what it has; others as they are."""
        if request.what != "load":
            return request
        return replace(request, what="write", inputs=load_blocks(request.path, self.states, self.mesh.coords(rank)))

    def _do_with_state(self, rank: int, request: Request) -> Mapping[str, Any]:
        if request.what == "drop":
            self._held.drop(request.session)
            return {}
        if request.what == "write":
            self._held.write(request.session, rank, request.inputs)
            return {}
        if request.what == "undo":
            self._held.undo(request.session, rank)
            return {}
        if request.what == "save":
            held = self._held.read(request.session, rank, [state.spec.name for state in self.states])
            return save_blocks(request.path, rank, self.states, self.mesh, self._outside(rank, held))
        return self._outside(rank, self._held.read(request.session, rank, request.fetch))

    def _close_spaces(self) -> None:
        """Let copies end; what lies on disk is gone."""
        for thread in self._copying.values():
            thread.close()
        self._disk.close()


def _check_folder(path: str | None) -> None:
    """Refuse a folder for what is evicted to disk before the first step wants to write there.

    Raises:
        StorageError: there is none, or nothing can be written in it.
    """
    if path is None or (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        return
    what = "cannot be written" if os.path.isdir(path) else "is no folder"
    raise StorageError(
        f"what goes to disk has no place: {path} {what}",
        where=path,
        do=f"make it, or name another one: {ELSEWHERE}; the system's own for temporary files if not given",
    )


def _keeps_state_alone(mesh: Mesh, parts: Sequence[Part]) -> bool:
    """Whether one rank runs a program with state: nobody else asks for that, and it may stay on a device."""
    graphs = [part.graph for part in parts]
    sends = (node for graph in graphs for node in graph.walk() if not is_compute(node) and not node.is_return)
    return mesh.size == 1 and any(graph.states for graph in graphs) and next(sends, None) is None


def _communication(group: Group, mesh: Mesh) -> Communication | None:
    """How segments communicate that may be captured with their collectives; None: the group does not capture."""
    if not getattr(group, "captures", False):
        return None
    (rank,) = group.ranks
    return Communication(cast(CapturingGroup, group), mesh.coords(rank))


def _check_operators(parts: Sequence[Part]) -> None:
    """Refuse what no engine can run, before one of them advises another.

    Raises:
        EngineError: naming the first such operator.
    """
    for operator, nodes in unknown_nodes(part.graph for part in parts).items():
        raise EngineError(
            f"no engine can run {operator}: neither ONNX Runtime nor irpar's kernels know it",
            where=f"node {nodes[0].label}",
            do="define it in the model as a function of known operators, or register a kernel with "
            "irpar.kernels.register and run the partition from Python by the engine numpy",
        )


def _parts(module: Module, mesh: Mesh) -> list[Part]:
    if module.is_local:
        return parts_of(module, mesh)
    if mesh.size > 1:
        raise ProgramError(f"the module is in global view, which {mesh.size} ranks cannot run", do="run localize first")
    return [Part(0, module.graph, (0,), mesh.coords(0))]
