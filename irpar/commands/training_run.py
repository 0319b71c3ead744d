"""irpar run --data: the steps of a training step."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpar.errors import IrparError
from irpar.tables.display import output, print_json
from irpar.units import bytes_text, count_text, seconds_text

from .input_values import given_inputs
from .progress_report import ProgressReport

if TYPE_CHECKING:
    from irpar.analysis.training_facts import TrainingFacts
    from irpar.api import Partition
    from irpar.training.loop import LoopOptions, Step, Summary


_SCHEDULE = {"learning_rate": "lr", "kind": "schedule", "warmup": "warmup", "least": "lr_end"}
"""Fields of `Schedule`, and the arguments of the command that give them."""


@dataclass(frozen=True)
class TrainingRun:
    """What `irpar run` is asked for about training.

    Attributes:
        data: samples to train on; None: it is a single run.
        steps, epochs: how long, by one of the two.
        checkpoint: the folder of checkpoints.
        every: steps between checkpoints; 0: one at the end.
        keep: how many are kept; 0: all.
        resume: go on from the newest.
        schedule: what is given of the learning rate, by the names of `Schedule`.
        seed: of the order of samples.
        in_order: samples come as they lie.
        metrics: the file of metrics.
        evaluation: samples to evaluate on.
        evaluate_every: steps between evaluations; 0: one at the end.
    """

    data: Path | None
    steps: int | None
    epochs: float | None
    checkpoint: Path | None
    every: int
    keep: int
    resume: bool
    schedule: Mapping[str, Any]
    seed: int | None
    in_order: bool
    metrics: Path | None
    evaluation: Path | None
    evaluate_every: int

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "TrainingRun":
        """These options of `irpar run`, of all that it has, by the names of its arguments."""
        schedule = {name: given[argument] for name, argument in _SCHEDULE.items() if given[argument] is not None}
        evaluation = {"evaluation": given["eval_data"], "evaluate_every": given["eval_every"]}
        own = {field.name: given[field.name] for field in fields(cls) if field.name in given}
        return cls(**{**own, **evaluation, "schedule": schedule})

    def check(self, inputs: Path | None, outputs: Path | None) -> None:
        """Refuse options that do not go together.

        Raises:
            IrparError: saying which.
        """
        if self.data is None:
            given = {
                "--steps": self.steps is not None,
                "--epochs": self.epochs is not None,
                "--checkpoint": self.checkpoint is not None,
                "--every": self.every,
                "--keep": self.keep,
                "--resume": self.resume,
                "--lr, --schedule, --warmup or --lr-end": self.schedule,
                "--seed": self.seed is not None,
                "--in-order": self.in_order,
                "--metrics": self.metrics is not None,
                "--eval-data": self.evaluation is not None,
                "--eval-every": self.evaluate_every,
            }
            wrong = next((name for name, is_given in given.items() if is_given), None)
            if wrong is not None:
                raise IrparError(f"{wrong} is for training, and there is no --data", do="give the samples: --data DATA")
            return
        if inputs is not None or outputs is not None:
            raise IrparError(
                "--data trains, and --inputs and --outputs are for a single run",
                do="leave them out; --input NAME=VALUE gives an input that is the same in all steps",
            )
        if (self.steps is None) == (self.epochs is None):
            raise IrparError("how long to train is not said, or twice", do="give --steps N, or --epochs X")
        is_constant = self.schedule.get("kind", "constant") == "constant" and not self.resume
        if is_constant and 0 <= self.schedule.get("least", -1) < math.inf:
            raise IrparError(
                "--lr-end is where a schedule ends, and a constant one does not",
                do="give --schedule linear or --schedule cosine, or leave it out",
            )
        if self.epochs is not None and not 0 < self.epochs < math.inf:
            raise IrparError(f"a run of {self.epochs:g} epochs", do="give a number above 0")

    def run(
        self, partition: "Partition", options: Mapping[str, Any], given: Sequence[str] | None, as_json: bool
    ) -> None:
        """Train, and say how it went."""
        from irpar.training.loop import run_loop

        with partition.trainer(**options) as trainer, ProgressReport(is_shown=not as_json) as progress:
            state = {entry["input"] for entry in partition.plan.state}
            specs = {spec["name"]: spec for spec in partition.plan.inputs if spec["name"] not in state}
            asked = self._loop_options(specs, given, trainer.facts)
            teller = _Teller(progress, asked.steps)
            start = time.perf_counter()
            summary = run_loop(trainer, specs, asked, teller.tell)
            seconds = time.perf_counter() - start
        self._report(partition, summary, seconds, asked.steps, as_json)

    def _loop_options(
        self, specs: Mapping[str, Mapping[str, Any]], given: Sequence[str] | None, facts: "TrainingFacts"
    ) -> "LoopOptions":
        """What the run is, of a step whose inputs are known.

        Args:
            specs: the entry of plan.json's `inputs`, by name, without state.
            given: what --input gives.
            facts: of the step.

        Raises:
            IrparError: an input or the samples do not fit.
        """
        from irpar.inputs.order import Order
        from irpar.training.loop import LoopOptions, samples_and_batch
        from irpar.training.micro_batches import takes_short

        assert self.data is not None
        values = given_inputs(list(specs.values()), None, given) or {}
        steps = self.steps
        if steps is None:
            assert self.epochs is not None
            samples = {name: specs[name] for name in facts["inputs"] if name not in values}
            order = Order(*samples_and_batch(self.data, facts, samples), has_short=takes_short(facts))
            steps = math.ceil(self.epochs * order.steps_per_epoch)
        return LoopOptions(
            data=self.data.absolute(),
            steps=steps,
            schedule=self.schedule,
            seed=self.seed,
            is_shuffled=not self.in_order,
            values=values,
            checkpoint=self.checkpoint,
            every=self.every,
            keep=self.keep,
            resume=self.resume,
            metrics=self.metrics,
            evaluation=None if self.evaluation is None else self.evaluation.absolute(),
            evaluate_every=self.evaluate_every,
        )

    def _report(self, partition: "Partition", summary: "Summary", seconds: float, steps: int, as_json: bool) -> None:
        """Say how a run went, which ended at so many steps."""
        made = summary.steps - summary.first
        if as_json:
            print_json(
                {
                    "steps": summary.steps,
                    "first_step": summary.first + 1,
                    "losses": summary.losses,
                    "seconds": seconds,
                    "read_bytes": summary.read_bytes,
                    "evaluations": summary.evaluations,
                    "checkpoint": None if summary.checkpoint is None else str(summary.checkpoint),
                    "notes": list(summary.notes),
                }
            )
            return
        console = output()
        for note in summary.notes:
            console.print(note, soft_wrap=True)
        if not made:
            console.print(f"nothing to do: the checkpoint is of step {summary.steps:,}, and --steps is {steps:,}")
            return
        ranks = count_text(len(partition.plan.ranks), "rank")
        first = f" after {summary.first:,}" if summary.first else ""
        console.print(f"{count_text(made, 'step')}{first} on {ranks} in {seconds:.3f} s ({made / seconds:.3g} steps/s)")
        losses = " to ".join(f"{loss:.4f}" for loss in summary.losses)
        console.print(
            f"loss {losses}; each rank read at most {bytes_text(summary.read_bytes)} of {self.data}", soft_wrap=True
        )
        for step, loss in summary.evaluations.items():
            console.print(f"evaluation after step {step:,}: loss {loss:.4f}")
        if summary.checkpoint is not None:
            console.print(f"checkpoint: {summary.checkpoint}", soft_wrap=True)


class _Teller:
    """Tells how far a run is: the loss, steps a second, and when it ends."""

    def __init__(self, progress: ProgressReport, total: int) -> None:
        self._progress = progress
        self._total = total
        self._start = time.perf_counter()
        self._made = 0

    def tell(self, step: "Step") -> None:
        """After a step."""
        self._made += 1
        seconds = (time.perf_counter() - self._start) / self._made
        left = (self._total - step.step) * seconds
        amount = f"step {step.step:,} of {self._total:,}, loss {step.loss:.4f}, {1 / seconds:.3g} steps/s"
        self._progress.steps(step.step, self._total, f"{amount}, {seconds_text(left)} left")
