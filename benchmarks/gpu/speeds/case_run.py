"""One case, in a process of its own: both sides are made ready and compared, then timed when no other case is at it."""

import importlib
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from benchmarks.gpu.findings import problem_text
from benchmarks.gpu.machine import clocks

from .cases import AUTOTUNED, Case
from .device_program import DeviceProgram
from .stopwatch import Subject, measure, median_seconds
from .turns import Turns
from .work import least_work

TIMED_SECONDS = 8.0
"""For the medians of a case."""
WHOLE_RUNS = 3
MOST_TRACEBACK = 3000
"""Characters, of the end."""
STEPS = 3
"""Steps of training whose losses are compared; also the runs after which a program is captured and replayed."""


def run_case(
    case: Case, engine: str, turns: Turns, keep: Callable[[Mapping[str, Any]], None], autotune: bool = False
) -> None:
    """Measure a case.

    Args:
        case: it.
        engine: of irpar.
        turns: who may use the device.
        keep: is given what the report is made of, as JSON has it, as far as it is known, again and again.
        autotune: whether PyTorch compiles with max-autotune as well.
    """
    turns.together()
    run = _CaseRun(case, engine, keep)
    run.attempt("irpar", run.prepare_irpar)
    run.attempt("PyTorch", run.prepare_torch)
    for name, mode in _modes(case, autotune):
        run.attempt(f"torch.compile {mode}", lambda name=name, mode=mode: run.prepare_compiled(name, mode))
    with turns.alone():
        run.time()


def _modes(case: Case, autotune: bool) -> list[tuple[str, str]]:
    modes = [("compile", "reduce-overhead")]
    return [*modes, ("autotune", "max-autotune")] if autotune and case.name in AUTOTUNED else modes


def _torch_side() -> ModuleType | None:
    """The module `torch_side`; None where PyTorch is not installed."""
    return None if find_spec("torch") is None else importlib.import_module(f"{__package__}.torch_side")


class _CaseRun:
    """The sides of a case, as far as there are."""

    def __init__(self, case: Case, engine: str, keep: Callable[[Mapping[str, Any]], None]) -> None:
        self._case = case
        self._engine = engine
        self._keep = keep
        self._subjects: dict[str, Subject] = {}
        self._whole: dict[str, Callable[[], Any]] = {}
        self._results: dict[str, list[Any]] = {}
        self.made: dict[str, Any] = {"name": case.name, "rate": case.rate, "problems": [], "prepared_in": {}}

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Do something of which the case can do without."""
        start = time.monotonic()
        try:
            work()
        except Exception as error:
            self.made["problems"].append(f"{name}: {problem_text(error)}")
            self.made.setdefault("tracebacks", []).append(traceback.format_exc()[-MOST_TRACEBACK:])
        self.made["prepared_in"][name] = round(time.monotonic() - start, 2)
        self._keep(self.made)

    # -- making ready ---------------------------------------------------------------------------------------------

    def prepare_irpar(self) -> None:
        """Compile the program, and run it until it is captured."""
        case = self._case
        program = self._program = DeviceProgram(case.module(), self._engine, tf32=case.is_tf32)
        work = least_work(program.graph, case.masked_flops)
        self.made |= {"nodes": program.nodes, "work": work.as_json()}
        program.give(case.inputs)
        # What is given lies in the same place after each run.
        self._results["irpar"] = self._first_results(
            lambda: [one.copy() for one in program.results(program()).values()]
        )
        program.wait()
        session = self._session()
        session()
        self._whole["irpar"] = session
        # A step of training takes kilobytes from the host and gives the loss there: it is timed as users run it.
        self._subjects["irpar"] = Subject(session if case.is_training else program, program.wait)

    def _first_results(self, run: Callable[[], list[Any]]) -> list[Any]:
        """The results of a run; of steps of training the losses of the first ones."""
        found = [run() for _ in range(STEPS)]
        return [one for step in found for one in step] if self._case.is_training else found[-1]

    def _session(self) -> Callable[[], Any]:
        """irpar's public session, from and to arrays of the host."""
        partition, inputs, engine = self._program.partition, dict(self._case.inputs), self._engine
        partition.executor(engine, tf32=self._case.is_tf32)  # type: ignore[arg-type]
        if not self._case.is_training:
            return lambda: partition.run(inputs, engine=engine)  # type: ignore[arg-type]
        del inputs["learning_rate"]
        trainer = partition.trainer(engine=engine)  # type: ignore[arg-type]
        return lambda: trainer.step(inputs)

    def prepare_torch(self) -> None:
        """The module in eager, and whether it computes the same."""
        torch_side = _torch_side()
        if torch_side is None:
            self.made["beside"] = "PyTorch is not installed: nothing to compare with"
            return
        side = torch_side.TorchSide(self._case, self._device)
        self._results["eager"] = self._first_results(side)
        self._subjects["eager"] = side.subject
        self._whole["eager"] = side.whole()
        self._compare("irpar", "eager")

    def prepare_compiled(self, name: str, mode: str) -> None:
        """The module compiled, and whether that computes the same."""
        torch_side = _torch_side()
        if torch_side is None:
            return
        side = torch_side.TorchSide(self._case, self._device, mode)
        self._results[name] = self._first_results(side)
        side.warm()
        self._compare(name, "eager")
        self._subjects[name] = side.subject
        self._whole[name] = side.whole()

    @property
    def _device(self) -> str:
        return "cuda" if self._engine == "cupy" else "cpu"

    def _compare(self, one: str, other: str) -> None:
        """Note how far the results of two sides are apart."""
        if one not in self._results or other not in self._results:
            return
        torch_side = _torch_side()
        assert torch_side is not None
        allowed = self._case.allowed
        pairs = zip(self._results.pop(one), self._results[other], strict=True)
        error = max(torch_side.difference(*map(torch_side.as_tensor, pair)) for pair in pairs)
        self.made.setdefault("errors", {})[one] = error
        self.made["allowed"] = allowed
        if not error <= allowed:
            self.made["problems"].append(f"{one} and {other} differ by {error:.2g} of their size, allowed {allowed:g}")

    # -- timing ---------------------------------------------------------------------------------------------------

    def time(self) -> None:
        """The medians of all sides."""
        self._results.clear()
        self.made |= {"times": {}, "whole": {}}
        self.attempt("the medians", self._time_in_turn)
        for name, function in self._whole.items():
            self.attempt(f"{name} from the host", lambda name=name, function=function: self._time_whole(name, function))

    def _time_in_turn(self) -> None:
        times = measure(self._subjects, TIMED_SECONDS)
        self.made["times"] = {name: one.as_json() for name, one in times.items()}
        if self._engine == "cupy":
            self.made["clocks"] = clocks()
        if "irpar" in times:
            self.made |= {"notes": list(self._program.notes), "segments": self._program.capture_facts()}

    def _time_whole(self, name: str, function: Callable[[], Any]) -> None:
        self.made["whole"][name] = median_seconds(function, WHOLE_RUNS)
