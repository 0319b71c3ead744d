"""A run of many steps: batches in order, metrics, checkpoints, and going on where another run ended."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.errors import IrparError, listed
from irpar.files.atomic import new_file
from irpar.inputs.dataset import Batch, Limits, dataset_of
from irpar.inputs.order import Order
from irpar.ir.state import LOSS
from irpar.output.checkpoint import Checkpoint, CheckpointError, checkpoints, instead_of

from .micro_batches import as_one_batch, as_samples, in_micro_batches, taker, takes_short
from .schedule import Schedule, ScheduleError
from .trainer import Trainer, refuse_rate

if TYPE_CHECKING:
    from irpar.analysis.training_facts import TrainingFacts

METRICS = "metrics.jsonl"
_BEGINNING = '{"step": '
"""Of each line, also where the rest of it was not written: a file of anything else is nobody's to replace."""
_WORDS: Mapping[str, Callable[[Any], str]] = {
    "samples": "{} samples".format,
    "batch": "steps of {} samples".format,
    "seed": "seed {}".format,
    "is_shuffled": lambda is_shuffled: "samples shuffled" if is_shuffled else "samples in order",
    "has_short": lambda has_short: "a short step at the end of an epoch" if has_short else "steps of all samples alone",
}
"""What must be as it was in a run that is gone on with."""


class LoopError(IrparError):
    """A run that cannot be made, or cannot go on."""


@dataclass(frozen=True)
class LoopOptions:
    """What a run is asked for.

    Attributes:
        data: the samples: an .npz file, or a folder of .npy files.
        steps: how many steps the run has, those before a checkpoint that it goes on from included.
        schedule: fields of the schedule that are given; others are those of the checkpoint, or the program's.
        seed: of the order of samples; None: that of the checkpoint, or 0.
        is_shuffled: whether samples come in another order in each epoch.
        values: inputs that are no samples, and are the same in all steps.
        checkpoint: the folder of checkpoints; None: none are written.
        every: steps between checkpoints; 0: one at the end.
        keep: how many are kept; 0: all.
        resume: go on from the newest checkpoint, where there is one.
        metrics: the file of metrics; None: in the folder of checkpoints, if there is one.
        evaluation: samples to evaluate on; None: none.
        evaluate_every: steps between evaluations; 0: one at the end.
    """

    data: Path
    steps: int
    schedule: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    is_shuffled: bool = True
    values: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    every: int = 0
    keep: int = 0
    resume: bool = False
    metrics: Path | None = None
    evaluation: Path | None = None
    evaluate_every: int = 0


@dataclass(frozen=True)
class Step:
    """What is told of a step: a line of metrics.jsonl.

    Attributes:
        step: from 1.
        epoch: from 0.
        loss: before the update.
        learning_rate: of the step.
        seconds: that it took.
        read_bytes: the most that a rank read of the samples.
        others: single numbers that the program gives besides, such as the norm of the gradients.
    """

    step: int
    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    read_bytes: int
    others: Mapping[str, float]

    def line(self) -> str:
        """The line, without an end."""
        fields = asdict(self)
        others = fields.pop("others")
        return json.dumps({**fields, **others})


@dataclass
class Summary:
    """What a run came to.

    Attributes:
        first: how many steps there were before it.
        steps: how many there are now.
        losses: of the first and the last step of it.
        read_bytes: the most that a rank read, of all steps.
        checkpoint: the last one.
        evaluations: step to the mean loss of the samples to evaluate on.
        notes: lines about what it goes on from.
    """

    first: int
    steps: int
    losses: list[float]
    read_bytes: int = 0
    checkpoint: Path | None = None
    evaluations: dict[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run_loop(
    trainer: Trainer,
    inputs: Mapping[str, Mapping[str, Any]],
    options: LoopOptions,
    report: Callable[[Step], None] | None = None,
) -> Summary:
    """Make the steps.

    Args:
        trainer: whose state is as the program begins.
        inputs: the entry of plan.json's `inputs`, by name.
        options: of the run.
        report: told after each step.

    Raises:
        LoopError: options that mean nothing, or a checkpoint that is not of this run.
        InputError: values that do not fit.
        DataError: samples that do not fit.
        NotFiniteError: a loss is not finite.
        CheckpointError: a checkpoint cannot be read or written.
    """
    _check(options)
    names = [name for name in trainer.facts["inputs"] if name not in options.values]
    has_short = takes_short(trainer.facts)
    samples, batch = samples_and_batch(options.data, trainer.facts, {name: inputs[name] for name in names})
    before = _resumed(trainer, options)
    order = _order(options, before, samples, batch, has_short=has_short)
    trainer.schedule = _schedule(trainer, options, before)
    summary = Summary(trainer.steps, trainer.steps, [], notes=() if before is None else tuple(_left(trainer, before)))
    limits = {name: limit for name, limit in trainer.limits().items() if name in names}
    evaluation, left_out = _evaluation(trainer, inputs, options, limits)
    summary.notes += left_out
    with _metrics(options, trainer.steps) as write:
        while trainer.steps < options.steps:
            number = trainer.steps
            start = time.perf_counter()
            rows = order.rows(number)
            taken = Batch(str(options.data), in_micro_batches(trainer.facts, rows, batch), names, limits)
            loss = trainer.step(options.values, batch=taken, samples=len(rows) if has_short else None)
            step = Step(
                number + 1,
                order.place(number)[0],
                loss,
                trainer.schedule.rate(number),
                time.perf_counter() - start,
                trainer.read_bytes,
                _singles(trainer.results),
            )
            write(step.line())
            _note(summary, step)
            if report is not None:
                report(step)
            if evaluation and _is_due(trainer.steps, options.evaluate_every, options.steps):
                mean = trainer.evaluate(evaluation)
                summary.evaluations[trainer.steps] = mean
                write(json.dumps({"step": trainer.steps, "evaluation_loss": mean}))
            if options.checkpoint is not None and _is_due(trainer.steps, options.every, options.steps):
                summary.checkpoint = _save(trainer, options, order, samples)
    return summary


def samples_and_batch(data: Path, facts: "TrainingFacts", inputs: Mapping[str, Mapping[str, Any]]) -> tuple[int, int]:
    """How many samples data have, and how many a step takes.

    Args:
        data: an .npz file, or a folder of .npy files.
        facts: of the step.
        inputs: those that are samples: the entry of plan.json's `inputs`, by name.

    Raises:
        DataError: the data cannot be read, or do not fit the inputs.
    """
    wanted = {name: as_samples(facts, name, entry) for name, entry in inputs.items()}
    return dataset_of(str(data)).check(wanted, taker=taker(facts), may_be_short=takes_short(facts))


def _check(options: LoopOptions) -> None:
    """Refuse options that mean nothing.

    Raises:
        LoopError: saying which.
        InputError: the learning rate is among the values.
    """
    refuse_rate(options.values)
    if options.steps < 1:
        raise LoopError(f"a run of {options.steps} steps", do="give --steps 1 or more")
    if options.seed is not None and options.seed < 0:
        raise LoopError(f"a seed of {options.seed}", do="give a number of 0 or more")
    if options.checkpoint is None and (options.every or options.keep or options.resume):
        raise LoopError("checkpoints are asked for, and there is no folder for them", do="give --checkpoint DIR")
    if options.checkpoint is not None and options.checkpoint.exists() and not options.checkpoint.is_dir():
        raise LoopError(
            "checkpoints are asked for in a file", where=str(options.checkpoint), do="give a folder: --checkpoint DIR"
        )
    if options.evaluation is None and options.evaluate_every:
        raise LoopError("evaluation is asked for, and there are no samples for it", do="give --eval-data DATA")
    if options.evaluate_every < 0:
        raise LoopError(f"an evaluation every {options.evaluate_every} steps", do="give a number of 0 or more")
    if options.every < 0 or options.keep < 0:
        raise LoopError(
            f"a checkpoint every {options.every} steps, of which {options.keep} are kept",
            do="give numbers of 0 or more",
        )
    if options.checkpoint is not None and not options.resume and checkpoints(options.checkpoint):
        raise LoopError(
            "the folder has checkpoints of another run",
            where=str(options.checkpoint),
            do="go on from them with --resume, or give another folder",
        )


def _resumed(trainer: Trainer, options: LoopOptions) -> Checkpoint | None:
    """The checkpoint that the run goes on from, whose state the ranks then hold; None: it begins.

    Raises:
        CheckpointError: it is damaged, or not of this program.
    """
    if not options.resume or options.checkpoint is None or not checkpoints(options.checkpoint):
        return None
    return trainer.load_checkpoint(options.checkpoint)


def _left(trainer: Trainer, before: Checkpoint) -> Iterator[str]:
    """Lines about what a run does not go on with as it was: another optimizer, and state that it does not keep."""
    was, now = before.metadata.get("optimizer"), trainer.facts["optimizer"]
    if was != now:
        yield f"the checkpoint is of a run with {was}: this one goes on with {now}"
        if "momentum" in (was, now) and any(name.endswith(".m") and name in trainer.states for name in before.tensors):
            yield f"{now} goes on from what {was} kept as .m: the one is a mean of gradients, the other a sum of them"
    left = [name for name in before.tensors if name not in trainer.states]
    if left:
        yield f"the checkpoint has {listed(left, 5)}, which this program does not keep"


def _order(options: LoopOptions, before: Checkpoint | None, samples: int, batch: int, *, has_short: bool) -> Order:
    """The order of the samples.

    Raises:
        LoopError: it is not that of the run that is gone on with.
    """
    # Runs of which nothing is said had steps of all samples alone.
    known: Mapping[str, Any] = {} if before is None else {"has_short": False, **before.metadata.get("data", {})}
    given = {"samples": samples, "batch": batch, "seed": options.seed, "is_shuffled": options.is_shuffled}
    given["has_short"] = has_short
    for name, value in given.items():
        if name in known and value is not None and known[name] != value:
            raise LoopError(
                f"the run before had {_WORDS[name](known[name])}, and this one has {_WORDS[name](value)}",
                where=str(options.checkpoint),
                do="go on with the same data, seed and number of samples a step, or begin anew in another folder",
            )
    seed = options.seed if options.seed is not None else known.get("seed", 0)
    return Order(samples, batch, seed, options.is_shuffled, has_short)


def _schedule(trainer: Trainer, options: LoopOptions, before: Checkpoint | None) -> Schedule:
    """The schedule of the run: that of the checkpoint or the program, but for what is given.

    Raises:
        ScheduleError: it cannot be.
        CheckpointError: the checkpoint has none.
    """
    base = trainer.schedule if before is None else saved_schedule(before)
    return replace(base, **{**options.schedule, "steps": options.steps})


def saved_schedule(checkpoint: Checkpoint) -> Schedule:
    """The schedule of the run that wrote a checkpoint.

    Raises:
        CheckpointError: it has none that can be.
    """
    try:
        return Schedule(**checkpoint.metadata["schedule"])
    except (KeyError, TypeError, ScheduleError):
        raise CheckpointError(
            "the checkpoint has no schedule that this irpar knows",
            where=str(checkpoint.path),
            do=instead_of(checkpoint.path),
        ) from None


def _is_due(step: int, every: int, last: int) -> bool:
    return step == last or bool(every and step % every == 0)


def _evaluation(
    trainer: Trainer,
    inputs: Mapping[str, Mapping[str, Any]],
    options: LoopOptions,
    limits: Limits,
) -> tuple[list[Batch | dict[str, Any]], tuple[str, ...]]:
    """The batches to evaluate on, in order, and what there is to say of samples that make no batch.

    Raises:
        DataError: samples that do not fit.
        LoopError: inputs are given by value.
    """
    if options.evaluation is None:
        return [], ()
    if options.values:
        raise LoopError(
            f"{next(iter(options.values))} is the same in all steps, which evaluation cannot take",
            do="give it in the data, one for each sample",
        )
    names = trainer.facts["inputs"]
    path = str(options.evaluation)
    wanted = {name: as_one_batch(trainer.facts, inputs[name]) for name in names}
    samples, batch = dataset_of(path).check(wanted, taker="an evaluation at a time", fewer="--bind")
    order = Order(samples, batch, is_shuffled=False)
    batches = order.steps_per_epoch
    left = samples - batches * batch
    notes = (f"evaluation takes {batch} samples at a time: the last {left} of {samples} are left out",) if left else ()
    return [Batch(path, order.rows(number), names, limits) for number in range(batches)], notes


def _save(trainer: Trainer, options: LoopOptions, order: Order, samples: int) -> Path:
    epoch, place = order.place(trainer.steps)
    assert options.checkpoint is not None
    data = {"samples": samples, "batch": order.batch, "seed": order.seed, "is_shuffled": order.is_shuffled}
    data["has_short"] = order.has_short
    facts = {"epoch": epoch, "batch_of_epoch": place, "data": data}
    return trainer.save_checkpoint(options.checkpoint, keep=options.keep, facts=facts)


def _note(summary: Summary, step: Step) -> None:
    summary.steps = step.step
    summary.losses = [*summary.losses[:1], step.loss]
    summary.read_bytes += step.read_bytes


def _singles(results: Mapping[str, Any]) -> dict[str, float]:
    """The results that are single numbers, but for the loss."""
    return {
        name: float(np.asarray(value).reshape(-1)[0])
        for name, value in results.items()
        if name != LOSS and isinstance(value, (np.ndarray, np.generic)) and np.size(value) == 1
    }


@contextmanager
def _metrics(options: LoopOptions, first: int) -> Iterator[Callable[[str], None]]:
    """Writes lines to the file of metrics, behind those of the steps before."""
    path = options.metrics
    if path is None and options.checkpoint is not None:
        path = options.checkpoint / METRICS
    if path is None:
        yield lambda _: None
        return
    if path.is_file() and not options.resume:
        raise LoopError(
            "the file has the metrics of another run", where=str(path), do="give another --metrics FILE, or --resume"
        )
    do = "give another --metrics FILE" if options.metrics is not None else "give another folder: --checkpoint DIR"
    with _told(path, do):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first) if path.is_file() else []
        with new_file(path, "the metrics", LoopError) as fresh:
            fresh.write_text("".join(kept), encoding="utf-8")
        file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed below
    with file:

        def write(line: str) -> None:
            with _told(path, do):
                file.write(line + "\n")
                file.flush()

        yield write


@contextmanager
def _told(path: Path, do: str) -> Iterator[None]:
    """Tell what the system refuses, and what to do."""
    try:
        yield
    except OSError as error:
        raise LoopError(f"cannot write the metrics: {error.strerror or error}", where=str(path), do=do) from None


def _lines_until(path: Path, step: int) -> list[str]:
    """The lines of a file of metrics about steps up to one; what was cut short is left out.

    Raises:
        LoopError: it is another file.
    """
    found: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                found.append(line + "\n")
        except (ValueError, KeyError, TypeError):
            if not found and not _BEGINNING.startswith(line.lstrip("\ufffd")[: len(_BEGINNING)]):
                raise LoopError(
                    "the file has no metrics of a run", where=str(path), do="give another --metrics FILE"
                ) from None
            break
    return found
