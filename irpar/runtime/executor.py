"""Running a program: all its ranks in this process, in lockstep, or one of them."""

import atexit
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from irpar.analysis.training_facts import facts_of
from irpar.inputs.dataset import Batch
from irpar.inputs.targets import check_targets, limits_of_runs
from irpar.ir import Module
from irpar.output.parts import Part
from irpar.output.plan_record import Plan
from irpar.output.target import EVALUATION
from irpar.sharding import Mesh

from .driver import DRIVER, Answer, Driver, Request, StateRequest, abort, serve
from .engines.base import Results
from .errors import ProgramError
from .given import Given
from .groups import Group, Messenger, make_group
from .held_state import first_states
from .layout import TensorSpec, check_replicas, gather, is_first_holder
from .local_ranks import LocalRanks
from .log import CollectiveLog
from .prepared import Prepared, holds
from .specs import check_inputs, with_fixed


class Executor(LocalRanks):
    """Runs the ranks of a partitioned program that its group has in this process.

    with Executor(module, mesh) as executor:
        outputs = executor.run({"x": x})

    Where the ranks run in several processes, each makes an executor: that of rank 0 is the driver, on which `run` is
    called; the others `serve` it until it closes.

    Args:
        module: a local module; or a global one without collectives, on a mesh of one device.
        mesh: the mesh of its ranks.
        engine: what computes: "ort", "numpy" or "cupy".
        group: what communicates, by name (see `irpar.runtime.groups.GROUPS`), or a group of one's own.
        parts: the parts of the module, those of this process's ranks at least; None: those that `parts_of` finds.
        timeout: seconds that a rank waits for others at a collective; None: `irpar.runtime.groups.TIMEOUT`.
        strict: refuse nodes that an engine with a device would compute on the host.
        tf32: let an engine with a device multiply float32 with operands rounded to TF32 (10 bits of mantissa).
        results: "host": numpy arrays; "owned": arrays of the device of a single rank, the caller's to keep; "borrowed":
            arrays there that the next run writes over, which therefore need not be copied. Where they are arrays of the
            device, inputs may be such.
        fixed: arrays by name of inputs that take no other value, and may be left out.
        beside: the executor of a program of the same ranks: this one has its group, and reads the state that it holds.

    Attributes:
        inputs: what `run` takes.
        outputs: what `run` gives.
        log: the collectives of the last run, of all ranks; on other ranks than the driver, of their own.
        is_driver: whether `run` can be called here; else `serve`.
        is_open: it has not been closed.
        is_strict, is_tf32: as `strict` and `tf32` were given.
        states: the inputs that may stay on their ranks from run to run.
        read_bytes: what each rank read of the batch of the last run.

    Raises:
        IrparError: the program cannot be run; says what to do.
    """

    _beside: "Executor | None"

    def __init__(
        self,
        module: Module,
        mesh: Mesh,
        *,
        engine: str = "ort",
        group: str | Group = "threads",
        parts: Sequence[Part] | None = None,
        timeout: float | None = None,
        strict: bool = False,
        tf32: bool = False,
        results: Results = "host",
        fixed: Mapping[str, Any] | None = None,
        beside: "Executor | None" = None,
    ) -> None:
        self._folder: Path | None = None
        self._evaluation: Executor | None = None
        self.fixed = dict(fixed or {})
        self._targets = limits_of_runs(facts_of(module.metadata))
        self.is_open = True
        self._process = os.getpid()
        self._has_served = False
        self._partition = ""
        joined = make_group(group, mesh, timeout) if isinstance(group, str) else group
        self.is_driver = DRIVER in joined.ranks
        self._sessions = itertools.count(1)
        options: dict[str, Any] = {"strict": strict, "tf32": tf32, "results": results, "beside": beside}
        with _left_when_failing(joined, mesh):
            super().__init__(module, mesh, joined, engine=engine, parts=parts, **options)
            self._meet()

    def _meet(self) -> None:
        """Wait for the ranks of other processes, where this is the driver."""
        mesh, ranks = self.mesh, self._group.ranks
        self._driver: Driver | None
        self._turn: AbstractContextManager[Any]
        if self._beside is not None:
            self._driver, self._turn = self._beside._driver, self._beside._turn
            return
        others = [rank for rank in range(mesh.size) if rank not in ranks]
        self._driver = Driver(self._messenger, others) if self.is_driver and others else None
        # Threads that share a driver take turns: the other ranks run one thing at a time.
        self._turn = threading.Lock() if self._driver is not None else nullcontext()
        if self._driver is not None:
            self._driver.meet()
            # The others are let go also where a program ends without closing.
            atexit.register(self.close)

    @property
    def _messenger(self) -> Messenger:
        """The group, where it joins several processes."""
        return cast(Messenger, self._group)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        engine: str = "ort",
        group: str | Group = "threads",
        timeout: float | None = None,
        strict: bool = False,
        tf32: bool = False,
        results: Results = "host",
        plan: Plan | None = None,
        beside: "Executor | None" = None,
    ) -> "Executor":
        """The program that `irpar partition` wrote to a folder; only the parts of this process's ranks are opened.

        Args:
            folder: that.
            engine, group, timeout, strict, tf32, results, beside: as the class has them.
            plan: its plan.json, where that was read.

        Raises:
            IrparError: plan.json or a part cannot be read, they do not fit each other, or the others cannot be met.
        """
        from irpar.inputs.fixed import fixed_of_plan

        from .pieces import open_parts, plan_of

        plan = plan or plan_of(Path(folder))
        mesh = plan.mesh_of_ranks
        joined = make_group(group, mesh, timeout) if isinstance(group, str) else group
        with _left_when_failing(joined, mesh):
            own = None if len(joined.ranks) == mesh.size else joined.ranks
            _, _, parts, modules = open_parts(folder, own, plan)
            fixed = fixed_of_plan(plan.inputs)
        options: dict[str, Any] = {"engine": engine, "group": joined, "strict": strict, "tf32": tf32}
        options["results"] = results
        executor = cls(modules[0], mesh, parts=parts, fixed=fixed, beside=beside, **options)
        executor._partition = str(plan.id)
        executor._folder = Path(folder)
        return executor

    @property
    def evaluation(self) -> "Executor":
        """Runs the evaluation program of a training step, on the state that this executor holds.

        Raises:
            ProgramError: there is none.
        """
        if self._evaluation is None:
            folder = None if self._folder is None else self._folder / EVALUATION
            if folder is None or not folder.is_dir():
                raise ProgramError(
                    "the partition has no evaluation program",
                    where="" if folder is None else str(folder),
                    do="make the training step with irpar train, which writes one beside it",
                )
            engine = self._engine.name
            self._evaluation = Executor.open(
                folder,
                engine=engine,
                group=self._group,
                strict=self.is_strict,
                tf32=self.is_tf32,
                beside=self,
            )
        return self._evaluation

    def run(
        self,
        inputs: Mapping[str, Any],
        *,
        fetch: Iterable[str] = (),
        check_replicas: bool = False,
        session: int = 0,
        batch: Batch | None = None,
    ) -> dict[str, Any]:
        """Compute the outputs from full inputs.

        Args:
            inputs: name to full array (a list of arrays for a sequence). State that is left out begins as the program
                says.
            fetch: source names of further values to give back whole.
            check_replicas: compare what several ranks hold of one result.
            session: from `new_session`: its state is read and kept, and is neither input nor output.
            batch: further inputs, of which each rank reads its own block.

        Returns:
            Name to full array: the outputs, then what was fetched.

        Raises:
            ProgramError: this is not the process of rank 0, or the executor is closed.
            InputError: inputs that do not fit, or a name to fetch that there is not.
            DataError: a target of a training step that is no class.
            RunError: a rank failed; all ranks have stopped.
            MismatchError: ranks came to different collectives.
            ReplicaError: with `check_replicas`, ranks hold different copies.
        """
        self._check_driver()
        wanted = self._taken_by(session)
        if batch is not None:
            wanted = [spec for spec in wanted if spec.name not in batch.names]
        begun = inputs if session else {**first_states(self.parts[0].graph, inputs), **inputs}
        given = check_inputs(wanted, with_fixed(self.fixed, begun), self._device_array)
        check_targets(self._targets, given)
        with self._turn:
            if self._driver is not None:
                self._driver.check_open()
            return self._run_whole(Given(given, batch), fetch, check_replicas, session)

    def _check_driver(self) -> None:
        """Refuse what only rank 0 may ask for.

        Raises:
            ProgramError: this is another rank's process, or the executor is closed.
        """
        if not self.is_driver:
            raise ProgramError(
                f"rank {self._group.ranks[0]} runs what rank 0 asks for",
                do="run, and begin sessions, where executor.is_driver; else call partition.executor(...).serve()",
            )
        self._check_open()

    def _run_whole(self, given: Given, fetch: Iterable[str], with_check: bool, session: int) -> dict[str, Any]:
        asked = dict.fromkeys(fetch)
        for name in asked and {spec.name for spec in self.outputs}:
            asked.pop(name, None)
        prepared = self._for_fetch(tuple(asked))
        try:
            return self._run(prepared, given, with_check, session)
        except BaseException as error:
            if self._driver is not None:
                self._driver.abort(error)
            raise

    # -- state ----------------------------------------------------------------------------------------------------

    def new_session(self) -> int:
        """A number for a sequence of runs with state of its own.

        Raises:
            ProgramError: this is not the process of rank 0, or the executor is closed.
        """
        self._check_driver()
        return next(self._sessions)

    def ask_state(
        self,
        what: StateRequest,
        session: int,
        blocks: Mapping[int, Mapping[str, Any]] | None = None,
        names: Sequence[str] = (),
        path: str = "",
    ) -> dict[int, Mapping[str, Any]]:
        """Let all ranks do something with the state of a session.

        Args:
            what: write, read or drop it; undo its last run; save or load it.
            session: from `new_session`.
            blocks: of each rank by name, where they are written.
            names: of the states that are read.
            path: of the checkpoint that is saved or loaded: a folder that all ranks see.

        Returns:
            What each rank gives back: name to block.

        Raises:
            ProgramError: this is not the process of rank 0, or the executor is closed.
            CheckpointError: one cannot be saved or loaded; ranks in other processes have ended then.
        """
        self._check_driver()
        with self._turn:
            if self._driver is not None:
                self._driver.check_open()
            told: dict[str, Any] = {"partition": self._partition, "session": session, "what": what, "path": path}
            requests = {
                rank: Request((blocks or {}).get(rank, {}), dict.fromkeys(names, ""), **told)
                for rank in range(self.mesh.size)
            }
            try:
                return self._ask_all(requests)
            except BaseException as error:
                if self._driver is not None:
                    self._driver.abort(error)
                raise

    def _ask_all(self, requests: Mapping[int, Request]) -> dict[int, Mapping[str, Any]]:
        others = self._driver.others if self._driver is not None else ()
        for rank in others:
            assert self._driver is not None
            self._driver.ask(rank, requests[rank])
        # All ranks of this process have read their blocks before one holds them: what cannot be read changes nothing.
        own = {rank: self._with_loaded(rank, requests[rank]) for rank in self._group.ranks}
        found = {rank: self._do_with_state(rank, request) for rank, request in own.items()}
        for rank in others:
            assert self._driver is not None
            found[rank] = self._driver.answer(rank, self.log).blocks
        return found

    def forget(self, session: int) -> None:
        """Drop what ranks of this process hold for a session that was never closed."""
        if self._driver is None:
            self._held.drop(session)

    def serve(self) -> None:
        """Run what the driver asks for until it closes; on other ranks than rank 0.

        Raises:
            ProgramError: this is rank 0, or the executor is closed.
            RunError: a rank failed; all ranks have stopped.
        """
        if self.is_driver:
            raise ProgramError("rank 0 drives the others", do="call run() in the process of rank 0, and then close()")
        self._check_open()
        self._has_served = True
        serve(self._messenger, self._run_request)

    def close(self) -> None:
        """Stop the threads, and let the other ranks end; the executor cannot run any more."""
        if not self.is_open or os.getpid() != self._process:
            return  # A process that was forked from this rank's holds nothing of it, and ends nothing.
        self.is_open = False
        if self._evaluation is not None:
            self._evaluation.close()
        if self._beside is not None:
            self._close_spaces()
            self._lockstep.close()
            return
        atexit.unregister(self.close)
        if not self.is_driver and not self._has_served:
            # The driver waits for a rank that will never be ready.
            self._messenger.abort(
                "its program closed the executor without serving\ndo: call executor.serve() on all ranks but rank 0"
            )
        try:
            if self._driver is not None:
                self._driver.close()
            self._lockstep.close()
        finally:
            self._group.close()
            self._close_spaces()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.is_open and not self.is_driver and not self._has_served:
            self._has_served = True
            abort(self._messenger, error)
        self.close()

    # -- a run --------------------------------------------------------------------------------------------------

    def _run(self, prepared: Prepared, given: Given, with_check: bool, session: int) -> dict[str, Any]:
        """Run here, and wherever else there are ranks; full results by name."""
        self.log = log = CollectiveLog(self.log)
        inputs, outputs, fetched = self._taken_by(session), self._given_by(session), prepared.specs(self.parts[0].graph)
        fetch = {spec.name: str(spec.sharding) for spec in fetched}
        others = self._driver.others if self._driver is not None else ()
        coords = self.mesh.coords
        for rank in others:
            assert self._driver is not None
            request = Request(given.scattered(inputs, coords(rank)), fetch, with_check, self._partition, session)
            program = "" if self._beside is None else EVALUATION
            self._driver.ask(rank, replace(request, batch=given.message(), program=program))
        blocks = {rank: given.blocks(inputs, coords(rank)) for rank in self._group.ranks}
        self.read_bytes = dict.fromkeys(range(self.mesh.size), 0)
        for rank in self._group.ranks:
            self.read_bytes[rank] = given.read_bytes(blocks[rank])
        states = self._run_ranks(prepared, blocks, session, log)
        computed: dict[int, Mapping[str, Any]] = {
            state.rank: self._computed(prepared, state, session) for state in states
        }
        for rank in others:
            assert self._driver is not None
            answer = self._driver.answer(rank, log)
            computed[rank], self.read_bytes[rank] = answer.blocks, answer.read_bytes
        results: dict[str, Any] = {}
        # Of copies that differ the first are reported: what is fetched is computed before the outputs.
        for spec in (*fetched, *outputs):
            blocks = {rank: held[spec.name] for rank, held in computed.items() if spec.name in held}
            result = self._whole(spec, blocks, with_check)
            results[spec.name] = self._held.apart(session, result) if session else result
        return {spec.name: results[spec.name] for spec in (*outputs, *fetched)}

    def _run_request(self, request: Request) -> Answer:
        """Run the one rank of this process as the driver asks.

        Raises:
            IrparError: the driver has another partition, or the rank failed.
        """
        if request.program:
            return self.evaluation._run_request(replace(request, program=""))
        self._check_partition(request)
        if request.what != "run":
            (rank,) = self._group.ranks
            return Answer(self._do_with_state(rank, self._with_loaded(rank, request)), CollectiveLog().text())
        graphs = [part.graph for part in self.parts]
        fetch = [name for name, sharding in request.fetch.items() if holds(graphs, name, sharding)]
        prepared = self._for_fetch(tuple(fetch))
        self.log = log = CollectiveLog(self.log)
        given = Given({}, Batch(*request.batch) if request.batch else None)
        (rank,) = self._group.ranks
        own = given.blocks(self.inputs, self.mesh.coords(rank))
        (state,) = self._run_ranks(prepared, {rank: {**request.inputs, **own}}, request.session, log)
        computed = self._computed(prepared, state, request.session)
        if not request.all_copies:
            specs = [*self.outputs, *prepared.specs(self.parts[0].graph)]
            first = {spec.name for spec in specs if is_first_holder(spec.sharding, self.mesh, state.rank)}
            computed = {name: block for name, block in computed.items() if name in first}
        return Answer(computed, log.text(), given.read_bytes(own))

    def _check_partition(self, request: Request) -> None:
        """Refuse to run with a driver that has another partition: a program may look alike and have other weights."""
        if request.partition != self._partition:
            raise ProgramError(
                f"rank {self._group.ranks[0]} has another partition than rank {DRIVER}",
                notes=(f"it has {self._partition}, rank {DRIVER} has {request.partition}",),
                do="give all ranks the folder of one partition, or packs of one",
            )

    def _whole(self, spec: TensorSpec, blocks: Mapping[int, Any], with_check: bool) -> Any:
        if self._results != "host":
            (block,) = blocks.values()
            return block
        if with_check:
            check_replicas(spec.name, blocks, spec.sharding)
        shape = spec.shape
        static = None if shape is None or not all(isinstance(dim, int) for dim in shape) else shape
        result = gather(blocks, spec.sharding, static)  # type: ignore[arg-type]
        if isinstance(result, np.ndarray) and not result.flags.writeable:
            return result.copy()  # It is (a view of) an input or a constant.
        return result

    # -- checks -------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Refuse what can be done no more, or not here.

        Raises:
            ProgramError: the executor is closed, or this process was forked from the one that made it.
        """
        if not self.is_open:
            raise ProgramError(
                "the executor is closed",
                do="get a new one with Partition.executor(...), on all ranks of other processes",
            )
        if os.getpid() != self._process:
            raise ProgramError(
                "this process was forked from the one that made the executor, and is no rank",
                do="run in that one, or make an executor here",
            )


@contextmanager
def _left_when_failing(group: Group, mesh: Mesh) -> Iterator[None]:
    """Leave a group when something fails, and tell the processes of the other ranks, where there are any."""
    try:
        yield
    except BaseException as error:
        if len(group.ranks) < mesh.size:
            abort(cast(Messenger, group), error)
        group.close()
        raise
