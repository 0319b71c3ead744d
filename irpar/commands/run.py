"""irpar run: all ranks of a partition."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.sharding import IrparError
from irpar.tables.display import output, print_json, table
from irpar.units import bytes_text, count_text

from .options import Engine, Input, Inputs, Json, Out, Strict, Tf32
from .ranks import GroupName, Timeout, on_ranks
from .training_run import TrainingRun

if TYPE_CHECKING:
    from irpar.api import Partition

_TRAINING = "Train"
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Samples to train on: an .npz file, or a folder with an .npy file for each input.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        help="How many steps, those before a resumed checkpoint included.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", metavar="X", help="Instead of --steps.", rich_help_panel=_TRAINING, show_default=False),
]
CheckpointFolder = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="DIR",
        help="The folder for checkpoints: one at the end, and those of --every.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Every = Annotated[
    int, typer.Option("--every", metavar="K", help="Steps between checkpoints.", rich_help_panel=_TRAINING)
]
Keep = Annotated[
    int,
    typer.Option("--keep", metavar="K", help="How many checkpoints are kept; 0: all.", rich_help_panel=_TRAINING),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint of DIR, where there is one.", rich_help_panel=_TRAINING
    ),
]
Rate = Annotated[
    float | None,
    typer.Option("--lr", metavar="X", help="The learning rate.", rich_help_panel=_TRAINING, show_default=False),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        metavar="NAME",
        help="Of the learning rate: constant, linear or cosine, which come to --lr-end as the last step ends.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="N",
        help="Steps in which the learning rate rises.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
RateEnd = Annotated[
    float | None,
    typer.Option("--lr-end", metavar="X", help="See --schedule.", rich_help_panel=_TRAINING, show_default=False),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Of the order of samples.", rich_help_panel=_TRAINING, show_default=False),
]
InOrder = Annotated[
    bool, typer.Option("--in-order", help="Samples come as they lie; else shuffled.", rich_help_panel=_TRAINING)
]
Metrics = Annotated[
    Path | None,
    typer.Option(
        "--metrics",
        metavar="FILE",
        help="A line of JSON for each step; metrics.jsonl in DIR if not given.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
EvaluationData = Annotated[
    Path | None,
    typer.Option(
        "--eval-data",
        metavar="DATA",
        help="Samples to evaluate on, by the model as it is used, on the state as it is.",
        rich_help_panel=_TRAINING,
        show_default=False,
    ),
]
EvaluateEvery = Annotated[
    int,
    typer.Option(
        "--eval-every", metavar="K", help="Steps between evaluations; 0: at the end.", rich_help_panel=_TRAINING
    ),
]
Outputs = Annotated[
    Path | None,
    typer.Option("--outputs", metavar="FILE", help="The .npz file to write the outputs to.", show_default=False),
]


def run_command(
    context: typer.Context,
    out: Out,
    inputs: Inputs = None,
    given: Input = None,
    outputs: Outputs = None,
    engine: Engine = None,
    group: GroupName = None,
    timeout: Timeout = None,
    strict: Strict = False,
    tf32: Tf32 = False,
    data: Data = None,
    steps: Steps = None,
    epochs: Epochs = None,
    checkpoint: CheckpointFolder = None,
    every: Every = 0,
    keep: Keep = 0,
    resume: Resume = False,
    lr: Rate = None,
    schedule: ScheduleName = None,
    warmup: Warmup = None,
    lr_end: RateEnd = None,
    seed: Seed = None,
    in_order: InOrder = False,
    metrics: Metrics = None,
    eval_data: EvaluationData = None,
    eval_every: EvaluateEvery = 0,
    as_json: Json = False,
) -> None:
    """Run all ranks of a partition, on full inputs, and give back full outputs; or train (--data).

    All ranks run in this process, unless a launcher (irpar launch, torchrun, mpiexec, srun) started one for each: then
    rank 0 reads the inputs, writes the outputs and prints. Samples are read by each rank itself, as far as it computes
    with them.
    """
    asked = TrainingRun.of(locals())
    asked.check(inputs, outputs)

    def work(partition: "Partition", options: dict[str, Any]) -> None:
        from .input_values import given_inputs

        def read() -> dict[str, Any] | None:
            state = [entry["input"] for entry in partition.plan.state]
            return given_inputs(partition.plan.inputs, inputs, given, state)

        if asked.data is not None:
            asked.run(partition, options, given, as_json)
            return
        _run(partition, options, read, outputs, as_json)

    on_ranks(context, out, work, engine=engine, group=group, timeout=timeout, strict=strict, tf32=tf32)


def _run(
    partition: "Partition",
    options: dict[str, Any],
    read: Callable[[], Mapping[str, Any] | None],
    outputs: Path | None,
    as_json: bool,
) -> None:
    from .npz_file import check_npz_target, write_npz

    if outputs is not None:
        check_npz_target(outputs)
    arrays = _inputs(partition, read())
    executor = partition.executor(**options)
    start = time.perf_counter()
    results = executor.run(arrays)
    seconds = time.perf_counter() - start
    if outputs is not None:
        write_npz(outputs, results)
    sent, copies = partition.plan.totals["sent_bytes"], executor.log.copies
    if as_json:
        print_json(
            {
                "outputs": [_facts(name, value) for name, value in results.items()],
                "file": None if outputs is None else str(outputs),
                "seconds": seconds,
                "collectives": len(executor.log),
                "sent_bytes": sent,
                "copied_bytes": copies.copied_bytes,
                "notes": list(executor.notes),
            }
        )
        return
    console = output()
    made = table("output", "dtype", "shape", "min", "mean", "max", right=("min", "mean", "max"))
    for name, value in results.items():
        made.add_row(*_row(name, value))
    console.print(made)
    ranks = count_text(len(partition.plan.ranks), "rank")
    between = f"{bytes_text(copies.copied_bytes)} copied between memories in {len(copies):,}"
    copied = f"; {between}" if len(copies) else ""
    console.print(
        f"\n{ranks} in {seconds:.3f} s; {count_text(len(executor.log), 'collective')}, "
        f"each device sends at most {bytes_text(sent)}{copied}"
    )
    for note in executor.notes:
        console.print(note)
    if outputs is not None:
        console.print(f"written to {outputs}", soft_wrap=True)


def _inputs(partition: "Partition", inputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if inputs is not None:
        return inputs
    state = {entry["input"] for entry in partition.plan.state}
    needed = [spec for spec in partition.plan.inputs if spec["name"] not in state]
    if not needed:
        return {}
    names = ", ".join(f"{spec['name']} {spec['dtype']}{spec['shape']}" for spec in needed)
    trains = "" if partition.plan.training is None else "train: --data DATA --steps N; or run one step, and "
    raise IrparError(
        "the program takes inputs, and none are given",
        notes=(f"inputs: {names}",),
        do=f"{trains}give them: --inputs in.npz, or --input NAME=VALUE",
    )


def _facts(name: str, value: Any) -> dict[str, Any]:
    import numpy as np

    if isinstance(value, (list, tuple)):
        return {"name": name, "dtype": None, "shape": None, "length": len(value)}
    array = np.asarray(value)
    made: dict[str, Any] = {"name": name, "dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size and array.dtype.kind not in "OUSc":
        numbers = array.astype(np.float64)
        made |= {"min": float(numbers.min()), "mean": float(numbers.mean()), "max": float(numbers.max())}
    return made


def _row(name: str, value: Any) -> tuple[str, ...]:
    facts = _facts(name, value)
    shape = f"{facts['length']} items" if facts["shape"] is None else str(facts["shape"])
    numbers = (f"{facts[key]:.4g}" if key in facts else "" for key in ("min", "mean", "max"))
    return (name, facts["dtype"] or "sequence", shape, *numbers)
