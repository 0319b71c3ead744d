"""Running a program again and again, whose state stays on its ranks in between."""

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from irpar.arguments import require
from irpar.errors import IrparError, listed, nearest_names
from irpar.files.atomic import new_file
from irpar.inputs.dataset import Batch
from irpar.ir import LazyTensor, Tensor
from irpar.output.safetensors import read_safetensors, write_safetensors

from .errors import InputError, ProgramError
from .held_state import StateSpec
from .layout import Array, gather, scatter
from .specs import check_inputs

if TYPE_CHECKING:
    from .executor import Executor


_OTHER = "give the state of this program; session.write(name, value) changes a single one"


class SessionError(IrparError):
    """A file of state that cannot be written, or is not this program's."""


class Session:
    """One sequence of runs; made by `Partition.session`. Threads that share one take turns.

    session = partition.session()
    for batch in batches:
        loss = session.run({"x": batch})["loss"]      # the state that it leaves is there in the next run
    mean = session.read("mean")                       # in full, from the ranks that hold it

    Attributes:
        states: the states of the program, by name.
        steps: how many runs there have been.

    Args:
        executor: runs the program; several sessions may share it, each with state of its own.
    """

    def __init__(self, executor: "Executor") -> None:
        self._executor = executor
        self._number = executor.new_session()
        self._forget = weakref.finalize(self, executor.forget, self._number)
        self._forget.atexit = False
        self._turn = threading.RLock()
        self._is_open = True
        self.states: dict[str, StateSpec] = {state.spec.name: state for state in executor.states}
        self.steps = 0

    def run(
        self, inputs: Mapping[str, Any], *, fetch: Iterable[str] = (), batch: Batch | None = None
    ) -> dict[str, Any]:
        """Compute the results from full inputs and the state, which the ranks then replace.

        Args:
            inputs: name to full array, of the inputs that are no state.
            fetch: source names of further values to give back whole.
            batch: further inputs, of which each rank reads its own block.

        Returns:
            Name to full array: the results that replace no state, then what was fetched.

        Raises:
            InputError: inputs that do not fit, or one that is state.
            RunError: a rank failed; all ranks have stopped.
            StateLostError: an earlier step of training failed while it replaced the state.
        """
        require("inputs", inputs, Mapping, "give a dict of arrays by the names of inputs")
        given = [name for name in inputs if name in self.states]
        if given:
            raise InputError(
                f"{given[0]} is state of the session, and no input",
                do=f'leave it out; session.write("{given[0]}", value) changes it between runs',
            )
        with self._turn:
            self._check_open()
            found = self._executor.run(inputs, fetch=fetch, session=self._number, batch=batch)
            self.steps += 1
        return found

    def undo(self) -> None:
        """Let the state be what it was before the last run, once; of a step of training only if its loss is not finite.

        Raises:
            StateLostError: what was before is gone.
        """
        with self._turn:
            self._check_open()
            self._executor.ask_state("undo", self._number)
            self.steps -= 1

    def read(self, name: str) -> Array:
        """A state as a full array, gathered from the ranks that hold it.

        Raises:
            InputError: there is no such state.
        """
        return self._read([self._known(name)])[name]

    def read_all(self) -> dict[str, Array]:
        """All states as full arrays."""
        return self._read(list(self.states))

    def _read(self, names: list[str]) -> dict[str, Array]:
        with self._turn:
            self._check_open()
            held = self._executor.ask_state("read", self._number, names=names)
        found = {}
        for name in names:
            spec = self.states[name].spec
            blocks = {rank: blocks[name] for rank, blocks in held.items()}
            found[name] = np.array(gather(blocks, spec.sharding, spec.shape))  # type: ignore[arg-type]
        return found

    def write(self, name: str, value: Any) -> None:
        """Let the ranks hold the blocks of another array.

        Args:
            name: of a state.
            value: the full array, of the state's dtype and shape.

        Raises:
            InputError: there is no such state, or the array does not fit it.
        """
        self.write_all({name: value})

    def write_all(self, values: Mapping[str, Any]) -> None:
        """As `write`, several states at once: all of them, or none where one does not fit."""
        require("values", values, Mapping, "give a dict of arrays by the names of states")
        specs = [self.states[self._known(name)].spec for name in values]
        given = check_inputs(specs, values)
        mesh = self._executor.mesh
        blocks = {
            rank: {spec.name: np.array(scatter(given[spec.name], spec.sharding, mesh.coords(rank))) for spec in specs}
            for rank in range(mesh.size)
        }
        with self._turn:
            self._check_open()
            self._executor.ask_state("write", self._number, blocks)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write all states, in full, as a safetensors file, which takes its place when it is complete.

        Args:
            path: the file.
            force: replace a file.

        Raises:
            IrparError: it is there already, or cannot be written.
        """
        require("path", path, (str, os.PathLike), "name a file")
        target = Path(path)
        if not force and os.path.lexists(target):
            raise SessionError(f"{target} exists already", do="give another file, or force=True to replace it")
        tensors = {name: self._tensor(name) for name in self.states}
        # All of one step: the next run waits until the file is written.
        with self._turn, new_file(target, "the state", SessionError) as fresh:
            self._check_open()
            write_safetensors(fresh, tensors, {"irpar.steps": str(self.steps)})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Let the ranks hold what a safetensors file has, as `save` or another tool wrote it.

        Raises:
            IrparError: it cannot be read, or its tensors are not the states of this program; nothing is changed then.
        """
        require("path", path, (str, os.PathLike), "name a file")
        found = read_safetensors(Path(path))
        lacking, unknown = sorted(self.states.keys() - found.keys()), sorted(found.keys() - self.states.keys())
        if lacking or unknown:
            raise SessionError(
                "the file has other tensors than the program has states",
                where=str(path),
                notes=(f"lacking: {listed(lacking, 5) or 'none'}", f"unknown: {listed(unknown, 5) or 'none'}"),
                do=_OTHER,
            )
        wrong = [
            f"{name}: {tensor.type}, expected {self._tensor(name).type}"
            for name, tensor in found.items()
            if tensor.type != self._tensor(name).type
        ]
        if wrong:
            raise SessionError(
                "the file has tensors of other types than the states",
                where=str(path),
                notes=tuple(wrong[:5]),
                do=_OTHER,
            )
        with self._turn:
            for name, tensor in found.items():
                self.write(name, tensor.numpy())

    def _tensor(self, name: str) -> Tensor:
        """A state, gathered when its numbers are needed."""
        spec = self.states[name].spec
        assert spec.dtype is not None
        assert spec.shape is not None
        return LazyTensor(spec.dtype, spec.shape, lambda: self.read(name))  # type: ignore[arg-type]  # It is static.

    def close(self) -> None:
        """Let the ranks drop the state; the executor stays open."""
        with self._turn:
            if self._is_open:
                self._is_open = False
                self._forget.detach()
                if self._executor.is_open:
                    self._executor.ask_state("drop", self._number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(IrparError):  # The ranks may have ended with that error.
                self.close()

    def _known(self, name: str) -> str:
        require("name", name, str, "name a state")
        if name not in self.states:
            raise InputError(
                f'there is no state "{name}"',
                notes=nearest_names(name, self.states),
                do="name an input that `Module.add_state` made state, by its name in the source model",
            )
        return name

    def _check_open(self) -> None:
        if not self._is_open:
            raise ProgramError("the session is closed", do="begin a new one with Partition.session()")
