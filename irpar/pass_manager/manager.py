"""Running a pipeline over a module, watched by an instrumentation."""

import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from irpar.ir import Module, clone_module
from irpar.ir.annotate import note_gone
from irpar.ir.collector import collector_off
from irpar.sharding import IrparError, require

from .instrumentation import Instrumentation
from .memory_limit import run_within_limit
from .pipeline import Pass, format_pass, format_pipeline, parse_pipeline
from .progress import PassRecord, Progress
from .reproducer import write_reproducer
from .tables import statistics_table, timing_table

Again = Callable[[], Module]
"""Makes a module once more."""


T = TypeVar("T")

_KEEPS_COPIES = ContextVar("keeps_copies", default=True)


def _same(module: Module) -> Again:
    return lambda: module


class PassFailure(IrparError):  # noqa: N818 - it says that a pass failed
    """A pass failed through a bug of its own; the message names the file that replays it. Chained from the original."""


def without_copies(make: Callable[[], T]) -> T:
    """What several pipelines make, one after the other, without a copy of the module before each.

    Where a pass fails, all is made again, with copies, so that the failure says how to replay it.

    Args:
        make: makes it, of what stays as it is.

    Raises:
        IrparError: as from `PassManager.run`.
    """
    before = _KEEPS_COPIES.set(False)
    try:
        return make()
    except PassFailure:
        pass
    finally:
        _KEEPS_COPIES.reset(before)
    return make()


@dataclass(frozen=True)
class PipelineResult:
    """What a pipeline did, pass by pass."""

    records: tuple[PassRecord, ...]

    @property
    def changed(self) -> bool:
        """True where any pass changed the module."""
        return any(record.changed for record in self.records)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes of all passes, each behind the name of its pass."""
        return tuple(f"{record.name}: {note}" for record in self.records for note in record.notes)

    @property
    def seconds(self) -> float:
        """Wall-clock time of all passes."""
        return sum(record.seconds for record in self.records)

    def timings(self) -> Table:
        """A table of the time that each pass took."""
        return timing_table(self.records)

    def statistics(self) -> Table:
        """A table of what the passes counted."""
        return statistics_table(self.records)


class PipelineRun:
    """A pipeline on its way over a module.

    run = manager.start(module)
    run.advance(lambda pass_: pass_.name in NORMALISING)     # up to the first pass that is no normalising one
    cost = graph_flops(module.graph)
    run.advance()                                            # to the end

    Attributes:
        module: what the passes change.
        result: what those that have run did.
    """

    def __init__(self, manager: "PassManager", module: Module, again: Again | None = None) -> None:
        self.module = module
        self._manager = manager
        self._records: list[PassRecord] = []
        watch = manager.instrumentation
        watch.at_start(module)
        # A pass that fails may leave the module half changed. What it met is made again from this copy, so that at
        # most one copy is made, not one before each pass.
        self._again: Again | None = None
        if watch.reproducer is not None and (again is not None or _KEEPS_COPIES.get()):
            self._again = again or _same(clone_module(module))

    @property
    def result(self) -> PipelineResult:
        return PipelineResult(tuple(self._records))

    def advance(self, while_: Callable[[Pass], bool] = lambda _: True) -> None:
        """Run the passes that are left, up to the first for which `while_` is false.

        Raises:
            IrparError: as from `PassManager.run`.
        """
        with collector_off():
            for index in range(len(self._records), len(self._manager.passes)):
                if not while_(self._manager.passes[index]):
                    return
                self._run(index)

    @property
    def left(self) -> "tuple[Pass, ...]":
        """The passes that have not run yet."""
        return self._manager.passes[len(self._records) :]

    @property
    def instrumentation(self) -> Instrumentation:
        """What is done around each pass."""
        return self._manager.instrumentation

    def beside(self, module: Module) -> "PipelineRun":
        """The same passes, from here on, over another module; nobody watches, and nothing that fails is reported."""
        watch = Instrumentation(verify_each=self.instrumentation.verify_each, reproducer=None)
        made = PipelineRun(PassManager(self._manager.passes, watch), module)
        made._records = list(self._records)
        return made

    def take_over(self, other: "PipelineRun") -> None:
        """Go on from where a run from `beside` has come to, with its module."""
        watch, passes = self.instrumentation, self._manager.passes
        for index, record in enumerate(other._records[len(self._records) :], len(self._records)):
            watch.report(Progress("start", passes[index].name, index, len(passes)))
            watch.report(Progress("end", passes[index].name, index, len(passes), record.seconds))
        self.module, self._records = other.module, list(other._records)

    def note(self, note: str) -> None:
        """Say something behind the notes of the last pass that has run."""
        if self._records:
            last = self._records[-1]
            self._records[-1] = replace(last, notes=(*last.notes, note))

    def _run(self, index: int) -> None:
        watch, module, passes = self._manager.instrumentation, self.module, self._manager.passes
        name = passes[index].name
        watch.report(Progress("start", name, index, len(passes)))
        watch.before(passes[index], module)
        record = self._manager.run_one(index, module, self._again)
        self._records.append(record)
        module.forget_names()
        watch.after(passes[index], index, module, record.changed)
        watch.report(Progress("end", name, index, len(passes), record.seconds))


class PassManager:
    """Runs passes in order.

    Args:
        passes: the passes.
        instrumentation: what to print, dump, verify and report; the default only writes a reproducer when a pass fails.
    """

    def __init__(self, passes: Iterable[Pass] = (), instrumentation: Instrumentation | None = None) -> None:
        self.passes = tuple(passes)
        self.instrumentation = instrumentation if instrumentation is not None else Instrumentation()

    @classmethod
    def parse(cls, text: str, instrumentation: Instrumentation | None = None) -> "PassManager":
        """A manager for a pipeline text such as `infer-types,fold-constants{max-bytes=4096}`.

        Raises:
            PipelineError: the text cannot be read, with the place.
        """
        require("pipeline", text, str, 'write passes as text, such as "infer-types,localize"')
        return cls(parse_pipeline(text), instrumentation)

    def __str__(self) -> str:
        return format_pipeline(self.passes)

    def run(self, module: Module) -> PipelineResult:
        """Run all passes over a module, in place.

        Raises:
            IrparError: from a pass, unchanged: the model or the options are at fault.
            PassFailure: a pass failed in any other way, or the verifier found fault with what it left.
        """
        started = self.start(module)
        started.advance()
        return started.result

    def start(self, module: Module, again: Again | None = None) -> "PipelineRun":
        """Begin to run the passes over a module, for who looks at it in between; errors are those of `run`.

        Args:
            module: what they change.
            again: makes the module as it is now once more, where a failure is to be reproduced; None: it is copied.
        """
        require("module", module, Module, 'load a model first: module = irpar.load("model.onnx")')
        self.instrumentation.check([pass_.name for pass_ in self.passes])
        return PipelineRun(self, module, again)

    def run_one(self, index: int, module: Module, again: Again | None) -> PassRecord:
        """Run the pass of a number.

        Args:
            index: which.
            module: what it changes.
            again: gives the module before the first pass, of which a failure is made again; None: no reproducer.

        Raises:
            IrparError: as from `run`.
        """
        pass_ = self.passes[index]
        annotated = dict(module.annotated)
        start = time.perf_counter()
        try:
            result = run_within_limit(pass_, module)
        except IrparError:
            raise
        except Exception as error:
            what = f"pass {pass_.name} failed: {type(error).__name__}: {error}"
            raise self._failure(what, index, again, error) from error
        seconds = time.perf_counter() - start
        note_gone(module, annotated, f"{pass_.name} took it out{pass_.takes_out and f': {pass_.takes_out}'}")
        if self.instrumentation.verify_each:
            self._verify(index, module, again)
        nodes = sum(map(len, module.graphs))
        text = format_pass(pass_)
        return PassRecord(text, pass_.name, result.changed, result.notes, dict(result.statistics), seconds, nodes)

    def _verify(self, index: int, module: Module, again: Again | None) -> None:
        from irpar.ir.verifier import verify

        try:
            verify(module)
        except IrparError as error:
            what = f"pass {self.passes[index].name} left an invalid module: {error.what}"
            raise self._failure(what, index, again, error, error.notes) from error

    def _failure(
        self, what: str, index: int, again: Again | None, error: Exception, notes: tuple[str, ...] = ()
    ) -> PassFailure:
        do = "this is a bug of the pass, not of your model: report it"
        if again is None:
            return PassFailure(what, notes=notes, do=do + "; run again with a reproducer to attach")
        try:
            path = self._reproduce(index, again(), error)
        except Exception as second:
            note = f"no reproducer could be written: {type(second).__name__}: {second}"
            return PassFailure(what, notes=(*notes, note), do=do)
        do = f"{do} with that file; `irpar opt {path}` replays it"
        data = path.with_name(f"{path.name}.data")
        files = (f"reproducer: {path}", *([f"its numbers: {data}"] if data.exists() else []))
        return PassFailure(what, notes=(*notes, *files), do=do)

    def _reproduce(self, index: int, original: Module, error: Exception) -> Path:
        """Write the module as the failing pass met it, or, where that cannot be made again, as the pipeline met it."""
        start, module = index, clone_module(original)
        try:
            for pass_ in self.passes[:index]:
                pass_.run(module)
        except Exception:
            start, module = 0, original
        folder = self.instrumentation.reproducer
        return write_reproducer(folder if isinstance(folder, Path) else None, module, self.passes[start:], error)
