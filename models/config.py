"""What every model family is configured by, and the one error a bad configuration raises."""

from dataclasses import dataclass

from onnx import helper

OPSETS = range(18, 27)
"""Opsets that the builders write: 18 brought the operators they need, 26 is the newest that ONNX Runtime 1.31 loads."""

NEWEST_IR_VERSION = 13
"""The newest ONNX IR version that ONNX Runtime 1.31 loads."""

DTYPES = ("float32", "float16", "bfloat16", "float64")
"""Element types of weights and activations."""


class ConfigError(ValueError):
    """A configuration that no model can be built from; the message says which value is wrong and why."""


def lowest_ir_version(opset: int) -> int:
    """Return the lowest ONNX IR version that a model of the opset may have."""
    return int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Settings common to all families.

    Attributes:
        batch: rows of the input; the largest sensible batch when `dynamic`.
        dtype: element type of weights and activations, one of `DTYPES`.
        opset: version of the default ONNX operator set, in `OPSETS`.
        ir_version: ONNX IR version; None takes the lowest that the opset allows.
        seed: seed of the random weights; equal seeds give bit-equal models.
        dynamic: make the batch (and sequence) dims symbolic instead of fixed.
    """

    batch: int = 4
    dtype: str = "float32"
    opset: int = 18
    ir_version: int | None = None
    seed: int = 0
    dynamic: bool = False

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        self.require_positive("batch")
        require(self.dtype in DTYPES, f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        require(self.opset in OPSETS, f"opset must be {OPSETS[0]} to {OPSETS[-1]}, not {self.opset}")
        lowest = lowest_ir_version(self.opset)
        require(
            self.ir_version is None or lowest <= self.ir_version <= NEWEST_IR_VERSION,
            f"ir_version must be {lowest} to {NEWEST_IR_VERSION} for opset {self.opset}, not {self.ir_version}",
        )
        require(self.seed >= 0, f"seed must not be negative, got {self.seed}")

    def require_positive(self, *fields: str) -> None:
        """Raise `ConfigError` unless each of the named fields is at least 1."""
        for field in fields:
            value = getattr(self, field)
            require(value >= 1, f"{field} must be at least 1, got {value}")

    def require_positive_if_given(self, *fields: str) -> None:
        """As `require_positive`, for fields that may be None."""
        self.require_positive(*(field for field in fields if getattr(self, field) is not None))

    @property
    def batch_dim(self) -> int | str:
        """The batch dim of the graph input: a size, or the symbol `batch`."""
        return "batch" if self.dynamic else self.batch


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(ModelConfig):
    """Settings common to the transformers.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: query heads; divides `hidden`.
    """

    layers: int = 2
    hidden: int = 64
    heads: int = 4

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("layers", "hidden", "heads")
        require(
            self.hidden % self.heads == 0,
            f"hidden {self.hidden} is not divisible by heads {self.heads}: every head needs the same width",
        )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads


@dataclass(frozen=True, kw_only=True)
class TextConfig(TransformerConfig):
    """Settings common to the transformers that read tokens.

    Attributes:
        vocab: size of the vocabulary.
        seq: tokens per row; the longest row when `dynamic`.
    """

    vocab: int = 256
    seq: int = 32

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("vocab", "seq")

    @property
    def seq_dim(self) -> int | str:
        """The sequence dim of the graph input: a size, or the symbol `seq`."""
        return "seq" if self.dynamic else self.seq
