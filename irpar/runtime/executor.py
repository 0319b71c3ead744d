"""Running the program of every rank in one process, in lockstep."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from irpar.analysis.engines import unknown_nodes
from irpar.analysis.parts import Part, parts_of
from irpar.ir import Module, Node, Value, tensor_type
from irpar.ops.coords import COORDS
from irpar.sharding import IrparError, Mesh

from .control_flow import TRIPS, Trip, Trips
from .engine import CompiledSegment, EngineSettings, make_engine
from .errors import EngineError, NodeError, ProgramError, RunError
from .groups import Call, Group, make_group, rank_text
from .layout import TensorSpec, check_replicas, gather, scatter
from .log import CollectiveLog
from .memory import check_memory, run_bytes
from .prepared import Prepared, PreparedPart, Preparer, check_parts
from .program import BodiesStep, CollectiveStep, ComputeStep, Program
from .specs import check_inputs, input_specs, output_specs, program_inputs, spec_of

PARALLEL_SECONDS = 2e-4
"""Segments that take longer run on a thread each; handing work to a thread takes about a quarter of that."""

_CHECK_ORIGINAL = (
    "check the numbers in the inputs, and whether the original runs on them in ONNX Runtime: "
    "`irpar verify OUT --inputs FILE` tells; if only the partition fails, report it"
)


class Executor:
    """Runs all ranks of a partitioned program in this process.

    with Executor(module, mesh) as executor:
        outputs = executor.run({"x": x})

    Args:
        module: a local module; or a global one without collectives, on a mesh of one device.
        mesh: the mesh of its ranks.
        engine: what computes: "ort" or "numpy".
        group: what communicates: "threads", or a group of one's own.
        parts: the parts of the module; None: those that `parts_of` finds.

    Attributes:
        inputs: what `run` takes.
        outputs: what `run` gives.
        log: the collectives of the last run.

    Raises:
        IrparError: the program cannot be run; says what to do.
    """

    def __init__(
        self,
        module: Module,
        mesh: Mesh,
        *,
        engine: str = "ort",
        group: str | Group = "threads",
        parts: Sequence[Part] | None = None,
    ) -> None:
        self.mesh = mesh
        self.parts = tuple(parts if parts is not None else _parts(module, mesh))
        check_parts(self.parts, mesh.size)
        _check_operators(self.parts)
        graph = self.parts[0].graph
        self.inputs: tuple[TensorSpec, ...] = input_specs(graph)
        self.outputs: tuple[TensorSpec, ...] = output_specs(graph)
        self._check_parts_agree()
        self.log = CollectiveLog()
        self._engine = make_engine(engine, EngineSettings(module.opsets, mesh.size))
        self._group = make_group(group, mesh) if isinstance(group, str) else group
        self._threads = min(mesh.size, os.cpu_count() or 1) if self._engine.is_parallel else 1
        check_memory(run_bytes(self.parts, self._threads), f"a run of all ranks of mesh {mesh} in this process")
        self._preparer = Preparer(self.parts, self._engine)
        self._prepared = self._preparer.prepare()
        self._fetched: tuple[tuple[str, ...], Prepared] | None = None
        self._seconds: dict[CompiledSegment, float] = {}
        self._pool = ThreadPoolExecutor(self._threads, "irpar-rank") if self._threads > 1 else None

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, engine: str = "ort", group: str = "threads") -> "Executor":
        """The program that `irpar partition` wrote to a folder.

        Raises:
            IrparError: plan.json or a part cannot be read, or they do not fit each other.
        """
        from irpar.analysis.plan import read_plan
        from irpar.onnx_io import load

        from .pieces import check_pieces

        folder = Path(folder)
        plan = read_plan(folder)
        mesh = plan.mesh_of_ranks
        modules = [load(folder / entry["model"]) for entry in plan.parts]
        check_pieces(folder, plan, modules)
        ranks: dict[int, list[int]] = {}
        for entry in plan.ranks:
            ranks.setdefault(entry["part"], []).append(entry["rank"])
        parts = [
            Part(index, modules[index].graph, tuple(members), mesh.coords(members[0]))
            for index, members in sorted(ranks.items())
        ]
        executor = cls(modules[0], mesh, engine=engine, group=group, parts=parts)
        executor._check_plan(folder, plan.inputs, plan.outputs)
        return executor

    def run(
        self, inputs: Mapping[str, Any], *, fetch: Iterable[str] = (), check_replicas: bool = False
    ) -> dict[str, Any]:
        """Compute the outputs from whole inputs.

        Args:
            inputs: name to whole array (a list of arrays for a sequence).
            fetch: source names of further values to give back whole.
            check_replicas: compare what several ranks hold of one result.

        Returns:
            Name to whole array: the outputs, then what was fetched.

        Raises:
            InputError: inputs that do not fit, or a name to fetch that there is not.
            RunError: a rank failed; all ranks have stopped.
            MismatchError: ranks came to different collectives.
            ReplicaError: with `check_replicas`, ranks hold different copies.
        """
        given = check_inputs(self.inputs, inputs)
        outputs = {spec.name for spec in self.outputs}
        prepared = self._for_fetch(tuple(name for name in dict.fromkeys(fetch) if name not in outputs))
        self.log = CollectiveLog()
        states = self._start(prepared, given)
        self._lockstep(states)
        return self._results(prepared, states, check_replicas)

    def close(self) -> None:
        """Stop the threads; the executor cannot run any more."""
        if self._pool is not None:
            self._pool.shutdown()
        self._group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- a run --------------------------------------------------------------------------------------------------

    def _for_fetch(self, names: tuple[str, ...]) -> Prepared:
        if not names:
            return self._prepared
        if self._fetched is None or self._fetched[0] != names:
            self._fetched = None  # Let go of the last variant before the next one is made.
            self._fetched = names, self._preparer.prepare_fetch(names)
        return self._fetched[1]

    def _start(self, prepared: Prepared, given: Mapping[str, Any]) -> list["_RankState"]:
        states = [_RankState(rank, self.mesh.coords(rank), part) for part in prepared.parts for rank in part.part.ranks]
        states.sort(key=lambda state: state.rank)
        for state in states:
            state.start(given)
        return states

    def _lockstep(self, states: Sequence["_RankState"]) -> None:
        """Compute up to the next collective on every rank, execute those that are complete, and so on."""
        waiting: dict[int, Call] = {}
        while True:
            while computing := [state for state in states if state.rank not in waiting and state.compute is not None]:
                self._compute(computing)
            for state in states:
                if state.rank not in waiting and state.step is not None:
                    waiting[state.rank] = state.call()
            if not waiting:
                return
            for rank, result in self._group.exchange(waiting).items():
                self.log.add(waiting.pop(rank))
                states[rank].receive(result)

    def _compute(self, states: Sequence["_RankState"]) -> None:
        """Run the segment that each rank has come to, on threads where the segments are long enough."""
        if self._pool is None or len(states) < 2 or not self._is_long(states):
            for state in states:
                self._run_segment(state)
            return
        futures = [self._pool.submit(self._run_segment, state) for state in states[1:]]
        errors: list[BaseException | None] = []
        try:
            self._run_segment(states[0])
        except Exception as error:
            errors.append(error)
        # Every rank comes to an end before an error is told: nothing runs on behind the caller's back.
        errors.extend(future.exception() for future in futures)
        for failed in errors:
            if failed is not None:
                raise failed

    def _is_long(self, states: Sequence["_RankState"]) -> bool:
        known = self._seconds
        return any(known.get(state.compiled, PARALLEL_SECONDS) >= PARALLEL_SECONDS for state in states)

    def _run_segment(self, state: "_RankState") -> None:
        start = time.perf_counter()
        compiled = state.compiled
        try:
            state.compute_step()
        except Exception as error:
            raise self._rank_error(state, error) from error
        seconds = time.perf_counter() - start
        # The shortest time seen: a thread that waited for a core says little about the segment.
        self._seconds[compiled] = min(seconds, self._seconds.get(compiled, seconds))

    def _rank_error(self, state: "_RankState", error: Exception) -> RunError:
        who = rank_text(self.mesh, state.rank)
        step = state.compute
        label = step.segment.label if step is not None else ""
        if isinstance(error, IrparError):
            do = error.do or _CHECK_ORIGINAL
            return RunError(f"{who}: {error.what}", where=error.where, notes=(*error.notes, label), do=do)
        return RunError(
            f"{who}: {type(error).__name__}: {error}",
            where=label,
            do="this is a bug of the engine: report it, and try --engine numpy (or ort)",
        )

    def _results(self, prepared: Prepared, states: Sequence["_RankState"], with_check: bool) -> dict[str, Any]:
        results: dict[str, Any] = {}
        for index, spec in enumerate(self.outputs):
            blocks = {state.rank: state.read(state.graph.outputs[index]) for state in states}
            results[spec.name] = self._whole(spec, blocks, with_check)
        for name, values in prepared.fetched.items():
            blocks = {state.rank: state.read(values[state.graph]) for state in states if state.graph in values}
            spec = spec_of(next(iter(values.values())), name)
            results[name] = self._whole(spec, blocks, with_check)
        return results

    def _whole(self, spec: TensorSpec, blocks: Mapping[int, Any], with_check: bool) -> Any:
        if with_check:
            check_replicas(spec.name, blocks, spec.sharding)
        shape = spec.shape
        static = None if shape is None or not all(isinstance(dim, int) for dim in shape) else shape
        result = gather(blocks, spec.sharding, static)  # type: ignore[arg-type]
        if isinstance(result, np.ndarray) and not result.flags.writeable:
            return result.copy()  # It is (a view of) an input or a constant.
        return result

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_parts_agree(self) -> None:
        for part in self.parts[1:]:
            if input_specs(part.graph) != self.inputs or output_specs(part.graph) != self.outputs:
                raise ProgramError(
                    f"parts {self.parts[0].index} and {part.index} have different inputs or outputs",
                    do="partition the model again",
                )

    def _check_plan(
        self, folder: Path, inputs: Sequence[Mapping[str, Any]], outputs: Sequence[Mapping[str, Any]]
    ) -> None:
        for listed, specs in ((inputs, self.inputs), (outputs, self.outputs)):
            planned = [(entry["name"], entry["dtype"], entry["shape"], entry["sharding"]) for entry in listed]
            found = [
                (
                    spec.name,
                    None if spec.dtype is None else spec.dtype.text,
                    None if spec.shape is None else [dim if isinstance(dim, int) else None for dim in spec.shape],
                    None if spec.sharding is None else spec.sharding.spec(),
                )
                for spec in specs
            ]
            if planned != found:
                raise ProgramError(
                    "plan.json and the parts have different inputs or outputs",
                    where=str(folder),
                    notes=(f"plan: {planned}", f"parts: {found}"),
                    do="partition the model again; a file of this folder was changed",
                )


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
            "irpar.kernels.register and run the partition from Python with engine='numpy'",
        )


def _parts(module: Module, mesh: Mesh) -> list[Part]:
    if module.is_local:
        return parts_of(module, mesh)
    if mesh.size > 1:
        raise ProgramError(f"the module is in global view, which {mesh.size} ranks cannot run", do="run localize first")
    return [Part(0, module.graph, (0,), mesh.coords(0))]


class _RankState:
    """Where one rank is in its program, and the values that it holds.

    Attributes:
        step: the step that comes next; None at the end.
    """

    def __init__(self, rank: int, coords: tuple[int, ...], prepared: PreparedPart) -> None:
        self.rank = rank
        self.coords = coords
        self.graph = prepared.part.graph
        self._prepared = prepared
        self._values: dict[Value, Any] = {}
        self._steps = self._walk(prepared.program)
        self.step: ComputeStep | CollectiveStep | None = None

    @property
    def compute(self) -> ComputeStep | None:
        """The step that comes next, where it is a segment."""
        return self.step if isinstance(self.step, ComputeStep) else None

    @property
    def compiled(self) -> CompiledSegment:
        """The compiled segment that comes next."""
        assert isinstance(self.step, ComputeStep)
        return self._prepared.compiled[self.step.segment]

    def read(self, value: Value) -> Any:
        """A value that the rank holds."""
        return self._prepared.constants.array(value) if value.is_constant else self._values[value]

    def start(self, given: Mapping[str, Any]) -> None:
        """Take this rank's blocks of the whole inputs, and its coordinates, and come to the first step.

        Raises:
            RunError: a block does not have the shape that the program says.
        """
        for name, value in program_inputs(self.graph).items():
            whole = given[name]
            block = scatter(whole, value.sharding, self.coords) if isinstance(whole, np.ndarray) else whole
            type_ = tensor_type(value.type)
            if type_ is not None and type_.is_static and block.shape != type_.static_shape:
                raise RunError(
                    f"the block of {name} on rank {self.rank} is {list(block.shape)}, the program takes {type_}",
                    do="partition the model again",
                )
            self._values[value] = block
        for value in self.graph.inputs:
            if value.name == COORDS:
                self._values[value] = np.asarray(self.coords, np.int64)
        self.step = next(self._steps, None)

    def compute_step(self) -> None:
        """Run the segment that comes next."""
        step = self.compute
        assert step is not None
        inputs = [self._values[value] for value in step.segment.inputs]
        results = self.compiled.run(inputs)
        self._values.update(zip(step.segment.outputs, results, strict=True))
        self.step = next(self._steps, None)

    def call(self) -> Call:
        """The collective that comes next, with this rank's operand."""
        step = self.step
        assert isinstance(step, CollectiveStep)
        return Call(self.rank, self.coords, step.collective, self.read(step.operand))

    def receive(self, result: Any) -> None:
        """Take the result of that collective."""
        step = self.step
        assert isinstance(step, CollectiveStep)
        self._values[step.result] = result
        self.step = next(self._steps, None)

    def _walk(self, program: Program) -> Iterator[ComputeStep | CollectiveStep]:
        """The steps of a program, those of bodies as often as these run; each has been done when the next is asked."""
        for step in program.steps:
            if isinstance(step, BodiesStep):
                yield from self._bodies(step)
            else:
                yield step
            for value in step.frees:
                self._values.pop(value, None)

    def _bodies(self, step: BodiesStep) -> Iterator[ComputeStep | CollectiveStep]:
        operands = [None if value is None else self.read(value) for value in step.node.operands]
        trips = TRIPS[step.node.op_type](step.node, operands)
        asked = _next_trip(trips, step.node, None)
        while isinstance(asked, Trip):
            self._values.update(zip(asked.body.inputs, asked.inputs, strict=True))
            yield from self._walk(step.bodies[asked.body])
            asked = _next_trip(trips, step.node, [self.read(value) for value in asked.body.outputs])
        for body in step.bodies:
            for value in (*body.inputs, *(output for output in body.outputs if output.owner is body)):
                self._values.pop(value, None)
        self._values.update(zip(step.node.results, asked, strict=True))


def _next_trip(trips: Trips, node: Node, results: Sequence[Any] | None) -> Trip | Sequence[Any]:
    """The next run of a body that a node asks for; at the end its results.

    Raises:
        NodeError: the node cannot be run with its operands, or with what came out of its body.
    """
    try:
        return trips.send(results)  # type: ignore[arg-type]  # None starts it.
    except StopIteration as end:
        found: Sequence[Any] = end.value
        return found
    except ValueError as error:
        raise NodeError(
            f"{node.operator} failed: {error}",
            where=f"node {node.label}",
            do="check what the node reads, and whether the original runs on these inputs in ONNX Runtime",
        ) from error
