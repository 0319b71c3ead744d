"""Small models with If, Loop and Scan: a choice of two branches, a block that repeats, a recurrence by hand."""

import math
from dataclasses import dataclass

import numpy as np
import onnx

from .builder import GraphBuilder
from .config import ModelConfig, require
from .layers import gelu, linear_with_bias
from .weights import WeightStore

KINDS = ("if", "loop", "scan")


@dataclass(frozen=True, kw_only=True)
class ControlConfig(ModelConfig):
    """A small model around one operator with bodies.

    Attributes:
        kind: the operator, one of `KINDS`.
        width: features of the input.
        hidden: width inside a perceptron.
        steps: trips of the loop, and steps of the scan.
    """

    kind: str = "if"
    width: int = 32
    hidden: int = 64
    steps: int = 4

    def __post_init__(self) -> None:
        """Check the configuration; raises `ConfigError`."""
        super().__post_init__()
        self.require_positive("width", "hidden", "steps")
        require(self.kind in KINDS, f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")


PRESETS: dict[str, dict[str, object]] = {
    "tiny": {},
    "small": {"width": 512, "hidden": 2048, "steps": 16, "batch": 32},
}


def build_control(config: ControlConfig, weights: WeightStore) -> GraphBuilder:
    """Build `x [batch, width] -> y [batch, width]`; of a scan `x [batch, steps, width] -> y` of the same shape."""
    b = GraphBuilder("control", config, weights)
    steps = (config.steps,) if config.kind == "scan" else ()
    shape = (config.batch_dim, *steps, config.width)
    x = b.input("x", b.elem_type, shape)
    y = {"if": _branches, "loop": _repeated, "scan": _scanned}[config.kind](b, config, x)
    with b.scope("head"):
        y = linear_with_bias(b, "fc", y, config.width, config.width)
    b.output("y", y, b.elem_type, shape)
    return b


def _perceptron(b: GraphBuilder, config: ControlConfig, x: str) -> str:
    """`[.., width] -> [.., width]` with a Gelu between."""
    inner = linear_with_bias(b, "fc1", x, config.width, config.hidden)
    with b.scope("act"):
        inner = gelu(b, inner)
    return linear_with_bias(b, "fc2", inner, config.hidden, config.width, gain=math.sqrt(2))


def _branches(b: GraphBuilder, config: ControlConfig, x: str) -> str:
    """One of two perceptrons for the whole batch, by the sign of the sum of all its numbers."""
    result = [("", b.elem_type, (config.batch_dim, config.width))]
    is_positive = b.op("Greater", b.op("ReduceSum", x, keepdims=0), b.constant("0.0", 0.0))

    def branch(name: str) -> onnx.GraphProto:
        def build() -> list[str]:
            with b.scope(name):
                return [_perceptron(b, config, x)]

        return b.body(name, [], build, result)

    return b.op("If", is_positive, then_branch=branch("positive"), else_branch=branch("negative"))


def _repeated(b: GraphBuilder, config: ControlConfig, x: str) -> str:
    """x + f(x), `steps` times with the same weights."""
    row = (config.batch_dim, config.width)
    truth: tuple[str, int, tuple[int | str, ...]] = ("keep_on", onnx.TensorProto.BOOL, ())

    def build(trip: str, keep_on: str, state: str) -> list[str]:
        with b.scope("block"):
            # Equal weights push the same way at each trip: a share each keeps the sum of order 1.
            gain = b.constant("gain", 1 / config.steps)
            step = b.op("Mul", _perceptron(b, config, state), gain)
            return [b.op("Identity", keep_on), b.op("Add", state, step)]

    body = b.body(
        "block",
        [("trip", onnx.TensorProto.INT64, ()), truth, ("state", b.elem_type, row)],
        build,
        [truth, ("", b.elem_type, row)],
    )
    trips, keep_on = b.constant("steps", config.steps), b.constant("true", np.array(True))
    return b.op("Loop", trips, keep_on, x, body=body)


def _scanned(b: GraphBuilder, config: ControlConfig, x: str) -> str:
    """tanh of the step's input and of the state before, each times a weight: `[B,S,W] -> [B,S,W]`."""
    row = (config.batch_dim, config.width)

    def build(state: str, step: str) -> list[str]:
        with b.scope("cell"):
            given = linear_with_bias(b, "input", step, config.width, config.width)
            kept = linear_with_bias(b, "state", state, config.width, config.width)
            state = b.op("Tanh", b.op("Add", given, kept))
            return [state, b.op("Identity", state)]

    body = b.body(
        "cell",
        [("state", b.elem_type, row), ("step", b.elem_type, row)],
        build,
        [("", b.elem_type, row), ("", b.elem_type, row)],
    )
    first = b.op("Mul", b.op("Gather", x, b.constant("index", 0), axis=1), b.constant("0.0", 0.0))
    _, states = b.ops("Scan", 2, first, x, body=body, num_scan_inputs=1, scan_input_axes=(1,), scan_output_axes=(1,))
    return states
