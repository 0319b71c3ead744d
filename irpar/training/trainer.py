"""Training: a session that takes batches, and says what went wrong."""

import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.arguments import require
from irpar.errors import IrparError
from irpar.files.atomic import new_folder
from irpar.inputs.dataset import Batch, Limits
from irpar.inputs.targets import check_targets, limits_of
from irpar.ir import Value, tensor_type
from irpar.ir.state import LOSS, MODEL_KINDS
from irpar.output.checkpoint import Checkpoint, CheckpointError, Entry, folder_of, remove_older, unwritable
from irpar.passes.add_loss import COUNTED
from irpar.passes.optimizer.names import LEARNING_RATE
from irpar.runtime.errors import InputError
from irpar.runtime.session import Session
from irpar.sharding import option, spelled

from .micro_batches import SAMPLE_COUNT, BatchSizeError, stacked, stacked_inputs, takes_short
from .schedule import Schedule

if TYPE_CHECKING:
    from irpar.analysis.training_facts import TrainingFacts
    from irpar.runtime.executor import Executor

_AT_ONCE = 32
"""Values that are looked at in one run."""


class NotFiniteError(IrparError):
    """A loss that is not finite: training cannot go on."""


class Trainer(Session):
    """Steps of training, whose state stays on its ranks; made by `Partition.trainer`.

    with partition.trainer() as trainer:
        for batch in batches:
            loss = trainer.step(batch)
        trainer.save_checkpoint("steps")

    Attributes:
        facts: of the step.
        schedule: of the learning rate.
        results: of the last step: the loss, and what else the program gives.
    """

    def __init__(self, executor: "Executor", facts: "TrainingFacts", schedule: Schedule | None = None) -> None:
        super().__init__(executor)
        self.facts = facts
        self.schedule = schedule or Schedule(facts["learning_rate"])
        self.results: dict[str, Any] = {}
        self._shapes = {spec.name: tuple(spec.shape or ()) for spec in executor.inputs}
        self._rate_dtype = next(
            (spec.dtype.numpy for spec in executor.inputs if spec.name == LEARNING_RATE and spec.dtype is not None),
            np.float32,
        )

    def step(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        batch: Batch | None = None,
        learning_rate: float | None = None,
        samples: int | None = None,
    ) -> float:
        """Make one step.

        Args:
            inputs: name to full array, of the inputs that are no state; without the learning rate. Of several
                micro-batches [count, b, ...], or the same samples as one batch.
            batch: samples of which each rank reads its own part.
            learning_rate: of this step; None: that of the schedule.
            samples: how many samples count, from the first on, where a step may have fewer than it takes; None: as many
                as are given.

        Returns:
            The loss, before the update.

        Raises:
            InputError: inputs that do not fit, or the learning rate among them.
            BatchSizeError: there are too many samples for the micro-batches, or too few; or no number of them counts.
            DataError: a target that is no class.
            NotFiniteError: the loss is not finite; the state is that before the step.
            RunError: a rank failed; all ranks have stopped.
        """
        if inputs is not None:
            require("inputs", inputs, Mapping, "give a dict of arrays by the names of inputs")
            refuse_rate(inputs)
        given, count = stacked(self.facts, inputs or {}, self._shapes)
        self._check_target(given)
        rate = self.schedule.rate(self.steps) if learning_rate is None else learning_rate
        given[LEARNING_RATE] = np.asarray(rate, self._rate_dtype)
        if takes_short(self.facts):
            said = given.get(SAMPLE_COUNT)
            if said is not None and samples is not None:
                raise BatchSizeError(f"{SAMPLE_COUNT} and samples both say how many count", do="give one of them")
            counted = samples if samples is not None else count if said is None else int(said)
            given[SAMPLE_COUNT] = np.asarray(self._counted(counted))
        elif samples is not None:
            raise BatchSizeError(
                "the step takes all of its samples", do=f"make one that may have fewer: {option('short_batches')}"
            )
        self.results = self.run(given, batch=batch)
        loss = float(self.results[LOSS])
        if not math.isfinite(loss):
            self.undo()
            raise self._not_finite(loss, given, batch)
        return loss

    def _counted(self, samples: int | None) -> int:
        """How many samples of a step count: all where nothing is said."""
        trips, names = stacked_inputs(self.facts)
        rows = self._shapes[next(iter(names))][1]
        assert isinstance(rows, int)
        found = trips * rows if samples is None else samples
        if not 0 < found <= trips * rows:
            raise BatchSizeError(
                f"{found} samples count, and a step takes {trips * rows}", do=f"give a number from 1 to {trips * rows}"
            )
        return found

    @property
    def read_bytes(self) -> int:
        """The most that a rank read of the samples of the last step."""
        return max(self._executor.read_bytes.values(), default=0)

    def limits(self) -> Limits:
        """What numbers the targets may be."""
        return limits_of(self.facts)

    def _check_target(self, given: Mapping[str, Any]) -> None:
        check_targets(self.limits(), given, f"step {self.steps + 1}")

    def evaluate(self, batches: Iterable[Batch | Mapping[str, Any]]) -> float:
        """The mean loss of some batches as the model is used, on the state as it is; nothing is updated or copied.

        Where targets are ignored, each batch weighs as many targets of it as count.

        Args:
            batches: samples of which each rank reads its own part, or full arrays by name.

        Raises:
            ProgramError: the partition has no evaluation program.
            InputError: inputs that do not fit.
            RunError: a rank failed; all ranks have stopped.
        """
        program = self._executor.evaluation
        total = weight = 0.0
        with self._turn:
            self._check_open()
            for batch in batches:
                given: Mapping[str, Any] = {} if isinstance(batch, Batch) else batch
                self._check_target(given)
                samples = batch if isinstance(batch, Batch) else None
                results = program.run(given, session=self._number, batch=samples)
                counted = float(results.get(COUNTED, 1.0))
                total += float(results[LOSS]) * counted
                weight += counted
        return total / weight if weight else math.nan

    # -- what is not finite -----------------------------------------------------------------------------------------

    def _not_finite(self, loss: float, given: Mapping[str, Any], batch: Batch | None) -> NotFiniteError:
        if self._counts_nothing(given, batch):
            return NotFiniteError(
                f"the loss of step {self.steps + 1} is {loss}: no target of its batch counts",
                notes=(f"all are {self.facts['ignore_index']}, which is ignored", "the state is that before this step"),
                do=f"leave such batches out of the data, or add up several in a step: {option('micro_batches', 2)}",
            )
        first = self._first_not_finite(given, batch)
        notes = () if first is None else (f"the first tensor that is not finite: {first}",)
        return NotFiniteError(
            f"the loss of step {self.steps + 1} is {loss}",
            notes=(*notes, "the state is that before this step"),
            do="go on from a checkpoint with a lower learning rate, make a step that bounds gradients "
            f"({option('clip_norm', 1.0)}), or look at the data",
        )

    def _counts_nothing(self, given: Mapping[str, Any], batch: Batch | None) -> bool:
        """Whether all targets of a step are ignored."""
        name, ignored = self.facts["target"], self.facts["ignore_index"]
        if name is None or ignored is None:
            return False
        targets = given.get(name)
        if targets is None and batch is not None:
            targets = batch.blocks(dict.fromkeys(batch.names), ()).get(name)
        return targets is not None and bool((np.asarray(targets) == ignored).all())

    def _first_not_finite(self, given: Mapping[str, Any], batch: Batch | None) -> str | None:
        """The first tensor of the step, state and inputs included, that is not finite.

        Masks hold infinity where nothing is wrong: where that one has no NaN, the first with NaN is named too.
        """
        infinite = None
        for name, array in self._looked_at(given, batch):
            numbers = np.asarray(array)
            if numbers.dtype.kind not in "fV" and numbers.dtype.name != "bfloat16":
                continue
            wide = numbers.astype(np.float32)
            if np.isnan(wide).any():
                holds = f"{name}, which holds NaN"
                return holds if infinite is None else f"{infinite}; the first with NaN: {name}"
            if infinite is None and np.isinf(wide).any():
                infinite = f"{name}, which holds infinity"
        return infinite

    def _looked_at(self, given: Mapping[str, Any], batch: Batch | None) -> Iterator[tuple[str, Any]]:
        for name in self.states:
            yield name, self.read(name)
        yield from given.items()
        if batch is not None:
            yield from batch.blocks(dict.fromkeys(batch.names), ()).items()
        graph = self._executor.parts[0].graph
        names = dict.fromkeys(
            value.source_name
            for node in graph
            for value in node.results
            if (found := tensor_type(value.type)) is not None and found.dtype.is_float and not _is_partial(value)
        )
        waiting = list(names)
        while waiting:
            some, waiting = waiting[:_AT_ONCE], waiting[_AT_ONCE:]
            try:
                found_values = self._executor.run(given, fetch=some, session=self._number, batch=batch)
            except IrparError:
                return  # A value that cannot be fetched; what is known so far is told.
            self._executor.ask_state("undo", self._number)
            yield from ((name, found_values[name]) for name in some if name in found_values)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, folder: str | os.PathLike[str], *, keep: int = 0, facts: Mapping[str, Any] | None = None
    ) -> Path:
        """Write the state after the last step, which takes its place when it is complete.

        Each rank writes the blocks that no rank before it holds: the folder must be one that all ranks see.

        Args:
            folder: where checkpoints are; each gets a folder of its own.
            keep: how many are kept, the newest; 0: all.
            facts: what else it is to hold: the seed, the place in the data.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: the system refuses; those before it are whole.
        """
        target = folder_of(Path(folder), self.steps)
        with self._turn:
            self._check_open()
            try:
                with new_folder(target) as fresh:
                    self._write_checkpoint(fresh, facts or {})
            except OSError as error:
                raise unwritable(target, error) from None
        if keep:
            remove_older(Path(folder), keep)
        return target

    def _write_checkpoint(self, fresh: Path, facts: Mapping[str, Any]) -> None:
        written = self._executor.ask_state("save", self._number, path=str(fresh.absolute()))
        files = {name: f"rank{rank}.safetensors" for rank, names in sorted(written.items()) for name in names}
        tensors = {
            name: Entry(str(state.spec.dtype), tuple(state.spec.shape or ()), state.kind, state.parameter)  # type: ignore[arg-type]
            for name, state in self.states.items()
        }
        mesh = {"mesh": dict(self._executor.mesh.axes), "optimizer": self.facts["optimizer"]}
        metadata = {"step": self.steps, **mesh, "schedule": self.schedule.facts(), **facts}
        Checkpoint(fresh, metadata, tensors, files).write_index()

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> Checkpoint:
        """Let the ranks hold what a checkpoint has, of any mesh: the newest, of a folder with several.

        What an optimizer keeps and this program does not is left.

        Raises:
            CheckpointError: there is none, it is damaged, or it is not of this program.
        """
        found = Checkpoint.open(Path(folder))
        misfit = self._misfit(found)
        if misfit is not None:
            raise CheckpointError(
                "the checkpoint is not of this program",
                where=str(found.path),
                notes=(misfit,),
                do="resume the program that it was written by; on another mesh, partition the same model with the same "
                "options",
            )
        with self._turn:
            self._check_open()
            self._executor.ask_state("load", self._number, path=str(found.path.absolute()))
            self.steps = found.step
        return found

    def _misfit(self, checkpoint: Checkpoint) -> str | None:
        """What state a checkpoint lacks or has of another type, or what of the model it has and is no state here."""
        wanted = {name: (str(state.spec.dtype), tuple(state.spec.shape or ())) for name, state in self.states.items()}
        held = {name: (entry.dtype, entry.shape) for name, entry in checkpoint.tensors.items()}
        for name, (dtype, shape) in wanted.items():
            if held.get(name) != (dtype, shape):
                said = "nothing of that name" if name not in held else f"{held[name][0]}{list(held[name][1])}"
                return f"{name}: {said}, expected {dtype}{list(shape)}"
        for name, entry in checkpoint.tensors.items():
            if entry.kind in MODEL_KINDS and name not in wanted:
                return f"{name}: a {entry.kind} that the checkpoint has learnt, and this program does not"
        return None


def refuse_rate(inputs: Collection[str]) -> None:
    """Refuse the learning rate among inputs: it would not be taken, since each step has that of the schedule.

    Raises:
        InputError: see there.
    """
    if LEARNING_RATE in inputs:
        raise InputError(
            f"{LEARNING_RATE} is given as an input, and each step has that of the schedule",
            do=spelled("give --lr X", "give it apart: step(batch, learning_rate=X)"),
        )


def _is_partial(value: Value) -> bool:
    return value.sharding is not None and bool(value.sharding.partial)
