"""The options of irpar train that irpar partition has not."""

from pathlib import Path
from typing import Annotated

import typer

_LOSS, _UPDATE, _WHAT, _ZERO = "The loss", "The update", "What is trained", "What ranks share (ZeRO)"
_BATCHES = "Micro-batches"

Output = Annotated[
    Path,
    typer.Option("-o", "--out", metavar="OUT", help="The folder to write; or an .onnx file.", show_default=False),
]
Loss = Annotated[
    str,
    typer.Option("--loss", metavar="LOSS", help="cross_entropy, mse, bce, or output:NAME.", rich_help_panel=_LOSS),
]
LossOutput = Annotated[
    str,
    typer.Option(
        "--output",
        metavar="NAME",
        help="The output that the loss is taken of; the first of floats if none is named.",
        rich_help_panel=_LOSS,
        show_default=False,
    ),
]
ClassAxis = Annotated[
    int,
    typer.Option("--class-axis", metavar="DIM", help="Where classes are, of cross_entropy.", rich_help_panel=_LOSS),
]
IgnoreIndex = Annotated[
    int | None,
    typer.Option(
        "--ignore-index",
        metavar="CLASS",
        help="Targets of this class do not count.",
        rich_help_panel=_LOSS,
        show_default=False,
    ),
]
LabelSmoothing = Annotated[
    float,
    typer.Option(
        "--label-smoothing", metavar="X", help="How much of each target all classes share.", rich_help_panel=_LOSS
    ),
]
OptimizerName = Annotated[
    str,
    typer.Option("--optimizer", metavar="NAME", help="sgd, momentum, adam, adamw or lamb.", rich_help_panel=_UPDATE),
]
LearningRate = Annotated[
    float,
    typer.Option("--lr", metavar="X", help="The learning rate; irpar run can change it.", rich_help_panel=_UPDATE),
]
Momentum = Annotated[
    float | None,
    typer.Option(
        "--momentum",
        metavar="X",
        help="Of the optimizer momentum; 0.9 if not given.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
Nesterov = Annotated[bool, typer.Option("--nesterov", help="Momentum looks ahead.", rich_help_panel=_UPDATE)]
Betas = Annotated[
    str | None,
    typer.Option(
        "--betas",
        metavar="X,X",
        help="Of adam, adamw and lamb; 0.9,0.999 if not given.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
Eps = Annotated[
    float | None,
    typer.Option(
        "--eps",
        metavar="X",
        help="What keeps divisors from 0; 1e-8 if not given, of lamb 1e-6.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
WeightDecay = Annotated[
    float | None,
    typer.Option(
        "--weight-decay",
        metavar="X",
        help="If not given 0.01 of adamw and lamb, beside the gradient; else 0, added to it.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
NoDecay = Annotated[
    list[str] | None,
    typer.Option(
        "--no-decay",
        metavar="GLOB",
        help="Parameters without weight decay. May be repeated.",
        rich_help_panel=_UPDATE,
    ),
]
LrScale = Annotated[
    list[str] | None,
    typer.Option(
        "--lr-scale",
        metavar="GLOB=X",
        help="What the learning rate of some parameters is multiplied by. May be repeated; the last that fits counts.",
        rich_help_panel=_UPDATE,
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(
        "--clip-norm",
        metavar="X",
        help="The most that the norm of all gradients together may be.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
LossScale = Annotated[
    str,
    typer.Option(
        "--loss-scale",
        metavar="HOW",
        help="none, or dynamic: a factor that keeps small gradients from becoming 0. fp16 has it by default.",
        rich_help_panel=_UPDATE,
        show_default=False,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        "--precision",
        metavar="DTYPE",
        help="What matmuls and convolutions compute in: f32, bf16 or fp16; parameters have a float32 master then.",
        rich_help_panel=_UPDATE,
    ),
]
Trainable = Annotated[
    list[str] | None,
    typer.Option(
        "--trainable",
        metavar="GLOB",
        help="Initializers and inputs that are trained; all initializers of floats but single numbers, running "
        "statistics and what PyTorch's exporter calls buffers if none is named. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
AlsoTrainable = Annotated[
    list[str] | None,
    typer.Option(
        "--also-trainable",
        metavar="GLOB",
        help="More of them, such as logit_scale, which is a single number. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
Freeze = Annotated[
    list[str] | None,
    typer.Option("--freeze", metavar="GLOB", help="Those that are not. May be repeated.", rich_help_panel=_WHAT),
]
FreezeStatistics = Annotated[
    bool,
    typer.Option(
        "--freeze-statistics", help="BatchNormalization keeps the statistics of the model.", rich_help_panel=_WHAT
    ),
]
Dropout = Annotated[
    list[str] | None,
    typer.Option(
        "--dropout",
        metavar="GLOB=SHARE",
        help="Values of which each step drops a share of the elements, such as h.*.mlp.out=0.1. May be repeated.",
        rich_help_panel=_WHAT,
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="What the masks of dropout begin with.", rich_help_panel=_WHAT)
]
DatasetSharding = Annotated[
    str,
    typer.Option(
        "--dataset-sharding",
        metavar="HOW",
        help="How samples are sharded: as the inputs are (inputs), along their first dim over all ranks "
        "(data_parallel), or not at all (full_batch).",
        rich_help_panel=_WHAT,
    ),
]
Zero = Annotated[
    int,
    typer.Option(
        "--zero",
        metavar="STAGE",
        help="Shard optimizer state over ranks that would hold the same (1), gradients too (2), parameters too (3); "
        "0: nothing.",
        rich_help_panel=_ZERO,
    ),
]
ZeroAxes = Annotated[
    str,
    typer.Option(
        "--zero-axes",
        metavar="AXES",
        help="Mesh axes, or sub-axes such as dp:(2)4, over which --zero shards.",
        rich_help_panel=_ZERO,
    ),
]
ZeroThreshold = Annotated[
    float,
    typer.Option(
        "--zero-threshold-kb",
        metavar="KB",
        help="Parameters of which a rank holds less than that stay as they are.",
        rich_help_panel=_ZERO,
    ),
]
ZeroPrefetch = Annotated[
    int,
    typer.Option(
        "--zero-prefetch",
        metavar="N",
        help="Of --zero 3: layers whose parameters the forward pass may gather together, ahead of their readers.",
        rich_help_panel=_ZERO,
    ),
]
ZeroRegather = Annotated[
    bool,
    typer.Option(
        "--zero-regather/--no-zero-regather",
        help="Of --zero 3: gather parameters again in the backward pass, or keep what the forward pass gathered.",
        rich_help_panel=_ZERO,
    ),
]
MicroBatches = Annotated[
    int,
    typer.Option(
        "--micro-batches",
        metavar="N",
        help="Add up the gradients of so many batches of the model's size, one after the other, for each update.",
        rich_help_panel=_BATCHES,
    ),
]
Undivided = Annotated[
    list[str] | None,
    typer.Option(
        "--undivided",
        metavar="GLOB",
        help="Inputs that each micro-batch reads whole; so are those whose first dim is not that of the target.",
        rich_help_panel=_BATCHES,
        show_default=False,
    ),
]
ReduceGradients = Annotated[
    str,
    typer.Option(
        "--reduce-gradients",
        metavar="WHEN",
        help="Of --zero: reduce gradients once a step (step), in each micro-batch, which holds less and sends "
        "more (micro-batch), or as memory allows (auto).",
        rich_help_panel=_BATCHES,
    ),
]
GatherParameters = Annotated[
    str,
    typer.Option(
        "--gather-parameters",
        metavar="WHEN",
        help="Of --zero 3: gather parameters once a step, in each micro-batch, or as memory allows.",
        rich_help_panel=_BATCHES,
    ),
]
MemoryLimitGb = Annotated[
    float | None,
    typer.Option(
        "--memory-limit-gb",
        metavar="GB",
        help="What a rank may hold: nothing that only saves time is done where it would then hold more. If not given, "
        "what --network says of the memory of its devices counts for what micro-batches send.",
        rich_help_panel=_BATCHES,
        show_default=False,
    ),
]
ShortBatches = Annotated[
    bool,
    typer.Option(
        "--short-batches",
        help="Steps may have fewer samples than all micro-batches take, such as those at the end of the data; refused "
        "where samples of the model depend on each other.",
        rich_help_panel=_BATCHES,
    ),
]
