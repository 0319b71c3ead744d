"""What a training step is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Settings:
    """What `train_step` was asked for; see there."""

    loss: str = "cross_entropy"
    optimizer: str = "adamw"
    output: str = ""
    learning_rate: float = 1e-3
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float | None = None
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    clip_norm: float | None = None
    trainable: tuple[str, ...] = ()
    also_trainable: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    freeze_statistics: bool = False
    dropout: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    class_axis: int = -1
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    loss_scale: str = "none"
    precision: str = "f32"
    micro_batches: int = 1
    undivided: tuple[str, ...] = ()
    reduce_gradients: str = "auto"
    gather_parameters: str = "auto"
    short_batches: bool = False
