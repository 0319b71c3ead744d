"""RNN, GRU and LSTM: one loop over time for each direction, with the input products of all steps done at once."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .activation import sigmoid_of, softplus_of
from .gemm import for_product, product
from .operands import check_same_dtype, compute_dtype, narrow, one_of, widen
from .registry import Array, ArrayModule, Shaped, kernel
from .scratch import SCRATCH, piece_bytes

Floats = tuple[float, ...]
Names = tuple[str, ...]
Activation = Callable[[Array], Array]
State = tuple[Array, ...]
Step = Callable[[Array, State], State]

# name -> (function of xp, x, alpha, beta; default alpha; default beta)
_ACTIVATIONS: dict[str, tuple[Callable[[ArrayModule, Array, float, float], Array], float, float]] = {
    "relu": (lambda xp, x, a, b: xp.maximum(x, 0), 0, 0),
    "tanh": (lambda xp, x, a, b: xp.tanh(x), 0, 0),
    "sigmoid": (lambda xp, x, a, b: sigmoid_of(xp, x), 0, 0),
    "affine": (lambda xp, x, a, b: a * x + b, 1.0, 0.0),
    "leakyrelu": (lambda xp, x, a, b: xp.where(x >= 0, x, a * x), 0.01, 0),
    "thresholdedrelu": (lambda xp, x, a, b: xp.where(x >= a, x, xp.zeros_like(x)), 1.0, 0),
    "scaledtanh": (lambda xp, x, a, b: a * xp.tanh(b * x), 1.0, 1.0),
    "hardsigmoid": (lambda xp, x, a, b: xp.clip(a * x + b, 0, 1), 0.2, 0.5),
    "elu": (lambda xp, x, a, b: xp.where(x >= 0, x, a * xp.expm1(x)), 1.0, 0),
    "softsign": (lambda xp, x, a, b: x / (1 + xp.abs(x)), 0, 0),
    "softplus": (lambda xp, x, a, b: softplus_of(xp, x), 0, 0),
}
_TAKES_ALPHA = {"affine", "leakyrelu", "thresholdedrelu", "scaledtanh", "hardsigmoid", "elu"}
_TAKES_BETA = {"affine", "scaledtanh", "hardsigmoid"}


def _activations(
    xp: ArrayModule, names: Sequence[str], alphas: Sequence[float], betas: Sequence[float], clip: float | None
) -> list[Activation]:
    """The named functions; alphas and betas go in order to those functions that take one."""
    remaining_alphas, remaining_betas = iter(alphas), iter(betas)
    result: list[Activation] = []
    for name in map(str.lower, names):
        one_of("activations", name, _ACTIVATIONS)
        function, alpha, beta = _ACTIVATIONS[name]
        alpha = next(remaining_alphas, alpha) if name in _TAKES_ALPHA else alpha
        beta = next(remaining_betas, beta) if name in _TAKES_BETA else beta
        result.append(partial(_clipped, xp, function, alpha, beta, clip))
    return result


def _clipped(xp: ArrayModule, function: Any, alpha: float, beta: float, clip: float | None, x: Array) -> Array:
    return function(xp, x if clip is None else xp.clip(x, -clip, clip), alpha, beta)


@dataclass(frozen=True)
class Layer:
    """Operands of one recurrent layer, time first, in their compute dtype.

    Attributes:
        xp: the array module.
        x: (time, batch, input).
        w: (directions, gates * hidden, input).
        r: (directions, gates * hidden, hidden).
        w_bias: (directions, gates * hidden), added to the input products.
        r_bias: (directions, gates * hidden), added to the hidden products.
        lengths: (batch,) steps of each sequence, or None for all.
        initial: states before the first step, each (directions, batch, hidden).
        direction: `forward`, `reverse` or `bidirectional`.
    """

    xp: ArrayModule
    x: Array
    w: Array
    r: Array
    w_bias: Array
    r_bias: Array
    lengths: Array | None
    initial: tuple[Array, ...]
    direction: str

    @classmethod
    def of(
        cls,
        xp: ArrayModule,
        operands: tuple[Array, Array, Array],
        bias: Array | None,
        lengths: Array | None,
        initial: Sequence[Array | None],
        *,
        direction: str,
        hidden_size: int | None,
        layout: int,
    ) -> "Layer":
        """Check and arrange the operands (x, w, r) and the optional ones."""
        one_of("direction", direction, ("forward", "reverse", "bidirectional"))
        one_of("layout", layout, (0, 1))
        check_same_dtype(*operands, bias, *initial)
        # The state is as wide as it is computed, and what it is multiplied with.
        x, w, r = for_product(xp, operands[0]), for_product(xp, operands[1]), widen(operands[2])
        directions, hidden = 2 if direction == "bidirectional" else 1, r.shape[2]
        if w.shape[0] != directions or r.shape[0] != directions or hidden_size not in (None, hidden):
            raise ValueError(f"weights {w.shape} and {r.shape} do not fit {direction!r} and hidden_size={hidden_size}")
        x = xp.swapaxes(x, 0, 1) if layout else x
        biases = xp.zeros((directions, 2 * w.shape[1]), dtype=r.dtype) if bias is None else widen(bias)
        states = tuple(
            xp.zeros((directions, x.shape[1], hidden), dtype=r.dtype)
            if state is None
            else (xp.swapaxes(widen(state), 0, 1) if layout else widen(state))
            for state in initial
        )
        w_bias, r_bias = biases[:, : w.shape[1]], biases[:, w.shape[1] :]
        return cls(xp, x, w, r, w_bias, r_bias, lengths, states, direction)

    def run(self, step_of: Callable[[int], Step], layout: int, dtype: Any) -> tuple[Array, ...]:
        """All hidden states and the last states, in ONNX's layout, `step_of(d)` giving the step of direction d."""
        hidden, last = [], []
        for d in range(self.w.shape[0]):
            backwards = self.direction == "reverse" or d == 1
            outputs, final = self._run_direction(d, step_of(d), backwards)
            hidden.append(outputs)
            last.append(final)
        xp = self.xp
        y = xp.stack(hidden, axis=1)
        states = [xp.stack(state, axis=0) for state in zip(*last, strict=True)]
        if layout:
            y, states = y.transpose(2, 0, 1, 3), [xp.swapaxes(state, 0, 1) for state in states]
        return tuple(narrow(result, dtype) for result in (y, *states))

    def _run_direction(self, d: int, step: Step, backwards: bool) -> tuple[Array, State]:
        xp = self.xp
        weight = self.w[d].T
        shape = (*self.x.shape[:2], weight.shape[1])
        into = SCRATCH.array("products", shape, self.r.dtype) if xp.__name__ == "numpy" else None
        products = product(xp, self.x, weight, self.r.dtype, out=into)
        products += self.w_bias[d]
        state = tuple(initial[d] for initial in self.initial)
        outputs: list[Array] = [None] * len(products)
        for t in reversed(range(len(products))) if backwards else range(len(products)):
            new = step(products[t], state)
            output = new[0]
            if self.lengths is not None:
                # past its end a sequence keeps its state and gives zeros
                alive = (t < self.lengths)[:, None]
                output = xp.where(alive, output, xp.zeros_like(output))
                new = tuple(xp.where(alive, after, before) for after, before in zip(new, state, strict=True))
            outputs[t], state = output, new
        empty = xp.zeros((0, *state[0].shape), dtype=state[0].dtype)
        return (xp.stack(outputs) if outputs else empty), state


def _scratch_bytes(operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]) -> int:
    """For the input products of all steps, of one direction after the other."""
    x, w = operands[0], operands[1]
    if x is None or w is None:
        return 0
    return piece_bytes(math.prod(x.shape[:2]) * w.shape[1], compute_dtype(x.dtype).itemsize)


def _temporary_bytes(
    operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
) -> int:
    """For the hidden states of all steps, one by one and together."""
    x, r = operands[0], operands[2]
    if x is None or r is None:
        return 0
    states = math.prod(x.shape[:2]) * r.shape[0] * r.shape[2]
    return 5 * states * compute_dtype(x.dtype).itemsize // 2


def _names(activations: Names | None, default: Names, direction: str) -> Names:
    wanted = len(default) * (2 if direction == "bidirectional" else 1)
    names = tuple(activations or default * 2)[:wanted]
    if len(names) != wanted:
        raise ValueError(f"attribute activations={list(names)} must name {wanted} functions")
    return names


@kernel("RNN", since=7, scratch=_scratch_bytes, temporaries=_temporary_bytes)
def rnn(
    xp: ArrayModule,
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats = (),
    activation_beta: Floats = (),
    activations: Names | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Array, ...]:
    """Simple recurrent layer; gives all hidden states and the last."""
    layer = Layer.of(
        xp,
        (x, w, r),
        bias,
        sequence_lens,
        (initial_h,),
        direction=direction,
        hidden_size=hidden_size,
        layout=layout,
    )
    functions = _activations(xp, _names(activations, ("Tanh",), direction), activation_alpha, activation_beta, clip)

    def step_of(d: int) -> Step:
        def step(projected: Array, state: State) -> State:
            return (functions[d](projected + product(xp, state[0], layer.r[d].T) + layer.r_bias[d]),)

        return step

    return layer.run(step_of, layout, x.dtype)


@kernel("GRU", since=7, scratch=_scratch_bytes, temporaries=_temporary_bytes)
def gru(
    xp: ArrayModule,
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats = (),
    activation_beta: Floats = (),
    activations: Names | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Array, ...]:
    """Gated recurrent layer; gives all hidden states and the last."""
    layer = Layer.of(
        xp,
        (x, w, r),
        bias,
        sequence_lens,
        (initial_h,),
        direction=direction,
        hidden_size=hidden_size,
        layout=layout,
    )
    names = _names(activations, ("Sigmoid", "Tanh"), direction)
    functions = _activations(xp, names, activation_alpha, activation_beta, clip)
    n = layer.r.shape[2]

    def step_of(d: int) -> Step:
        f, g = functions[2 * d : 2 * d + 2]
        r_gates, r_hidden = layer.r[d, : 2 * n].T, layer.r[d, 2 * n :].T
        bias_gates, bias_hidden = layer.r_bias[d, : 2 * n], layer.r_bias[d, 2 * n :]

        def step(projected: Array, state: State) -> State:
            (h,) = state
            gates = f(projected[:, : 2 * n] + product(xp, h, r_gates) + bias_gates)
            update, reset = gates[:, :n], gates[:, n:]
            if linear_before_reset:
                recurrent = reset * (product(xp, h, r_hidden) + bias_hidden)
            else:
                recurrent = product(xp, reset * h, r_hidden) + bias_hidden
            return ((1 - update) * g(projected[:, 2 * n :] + recurrent) + update * h,)

        return step

    return layer.run(step_of, layout, x.dtype)


@kernel("LSTM", since=7, scratch=_scratch_bytes, temporaries=_temporary_bytes)
def lstm(
    xp: ArrayModule,
    x: Array,
    w: Array,
    r: Array,
    bias: Array | None = None,
    sequence_lens: Array | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    peepholes: Array | None = None,
    *,
    activation_alpha: Floats = (),
    activation_beta: Floats = (),
    activations: Names | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Array, ...]:
    """Long short-term memory layer; gives all hidden states, the last hidden and the last cell state."""
    layer = Layer.of(
        xp,
        (x, w, r),
        bias,
        sequence_lens,
        (initial_h, initial_c),
        direction=direction,
        hidden_size=hidden_size,
        layout=layout,
    )
    names = _names(activations, ("Sigmoid", "Tanh", "Tanh"), direction)
    functions = _activations(xp, names, activation_alpha, activation_beta, clip)
    unclipped = _activations(xp, names, activation_alpha, activation_beta, None)
    n = layer.r.shape[2]
    peep = xp.zeros((len(layer.w), 3 * n), dtype=layer.r.dtype) if peepholes is None else widen(peepholes)

    def step_of(d: int) -> Step:
        f, g, _ = functions[3 * d : 3 * d + 3]
        h = unclipped[3 * d + 2]  # ONNX Runtime limits what goes into gates, and the cell not.
        peep_input, peep_output, peep_forget = (peep[d, k * n : (k + 1) * n] for k in range(3))

        def step(projected: Array, state: State) -> State:
            hidden, cell = state
            total = projected + product(xp, hidden, layer.r[d].T) + layer.r_bias[d]
            gate_in, gate_out, gate_forget, candidate = (total[:, k * n : (k + 1) * n] for k in range(4))
            entering = f(gate_in + peep_input * cell)
            kept = 1 - entering if input_forget else f(gate_forget + peep_forget * cell)
            new_cell = kept * cell + entering * g(candidate)
            return f(gate_out + peep_output * new_cell) * h(new_cell), new_cell

        return step

    return layer.run(step_of, layout, x.dtype)
