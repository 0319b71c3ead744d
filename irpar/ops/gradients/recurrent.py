"""RNN, GRU and LSTM as a Scan over their steps, which has a gradient.

The products of the input with its weights are made for all steps at once, before; a step has those of the state.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from irpar.ir import DType, Floats, Graph, Ints, Node, Strings, TensorType, Value

from ..facts import float_attribute, int_attribute, needed, operand, text_attribute
from .writer import GradientWriter, NoGradientError

Activation = Callable[[Value, GradientWriter], Value]
Step = Callable[[Value, Sequence[Value], GradientWriter], list[Value]]
"""(what the input gives the gates, states, writer of the body) to the new states, the hidden one first."""

_DEFAULTS = {"RNN": ("Tanh",), "GRU": ("Sigmoid", "Tanh"), "LSTM": ("Sigmoid", "Tanh", "Tanh")}
_STATES = {"RNN": (5,), "GRU": (5,), "LSTM": (5, 6)}
"""The operands that states begin as."""
_ALPHAS = {
    "affine": 1.0,
    "leakyrelu": 0.01,
    "thresholdedrelu": 1.0,
    "scaledtanh": 1.0,
    "hardsigmoid": 0.2,
    "elu": 1.0,
}
"""Activations that have one, with its default."""
_BETAS = {"affine": 0.0, "scaledtanh": 1.0, "hardsigmoid": 0.5}
_PLAIN = {
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "softsign": "Softsign",
    "softplus": "Softplus",
}
_WITH_ALPHA = {"leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu", "elu": "Elu"}


def _activation(name: str, alpha: float, beta: float, clip: float | None) -> Activation:
    """An activation behind a limit for what goes into it.

    Raises:
        NoGradientError: ONNX has no such activation.
    """

    def apply(x: Value, w: GradientWriter) -> Value:
        if clip is not None:
            x = w.op("Clip", [x, w.bound(-clip, x), w.bound(clip, x)])
        if name in _PLAIN:
            return w.op(_PLAIN[name], [x])
        if name in _WITH_ALPHA:
            return w.op(_WITH_ALPHA[name], [x], {"alpha": alpha})
        if name == "hardsigmoid":
            return w.op("HardSigmoid", [x], {"alpha": alpha, "beta": beta})
        if name == "affine":
            return w.add(w.mul(x, alpha), beta)
        return w.mul(w.op("Tanh", [w.mul(x, beta)]), alpha)

    if name not in {*_PLAIN, *_ALPHAS}:
        raise NoGradientError(f'because its activation is "{name}"')
    return apply


def _activations(node: Node, clip: float | None) -> list[Activation]:
    """Of all directions; alphas and betas go in order to those that have one."""
    given = node.attributes.get("activations")
    names = [str(name) for name in given] if isinstance(given, Strings) else [*_DEFAULTS[node.op_type]] * 2
    alphas, betas = (_numbers(node, name) for name in ("activation_alpha", "activation_beta"))
    made = []
    for name in map(str.lower, names):
        alpha = next(alphas, _ALPHAS[name]) if name in _ALPHAS else 0.0
        beta = next(betas, _BETAS[name]) if name in _BETAS else 0.0
        made.append(_activation(name, alpha, beta, clip))
    return made


def _numbers(node: Node, name: str) -> Iterator[float]:
    given = node.attributes.get(name)
    return iter(given if isinstance(given, Floats) else ())


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer.

    Attributes:
        number: which.
        backwards: whether it begins with the last step.
        weights: of the input: [gates * hidden, input].
        recurrent: of the state: [gates * hidden, hidden].
        biases: of input and of state, each [gates * hidden]; None where there are none.
        peepholes: [3 * hidden], or None.
    """

    number: int
    backwards: bool
    weights: Value
    recurrent: Value
    biases: tuple[Value, Value] | None
    peepholes: Value | None


def decompose_recurrent(node: Node, w: GradientWriter) -> list[Value]:
    """What an RNN, GRU or LSTM computes, as a Scan for each direction.

    Raises:
        NoGradientError: an activation is none of ONNX's.
        CannotTellError: a rank is not known.
    """
    x = needed(node, 0)
    batch_first = bool(int_attribute(node, "layout", 0))
    if batch_first:
        x = w.transpose(x, [1, 0, 2])
    alive = _alive(node, x, w)
    hidden, lasts = [], []
    for direction in _directions(node, w):
        steps, last = _run(node, x, direction, alive, batch_first, w)
        hidden.append(w.unsqueeze(steps, [1]))
        lasts.append([w.unsqueeze(state, [0]) for state in last])
    sequence = hidden[0] if len(hidden) == 1 else w.op("Concat", hidden, {"axis": 1})
    states = [parts[0] if len(parts) == 1 else w.op("Concat", parts, {"axis": 0}) for parts in zip(*lasts, strict=True)]
    if batch_first:
        sequence = w.transpose(sequence, [2, 0, 1, 3])
        states = [w.transpose(state, [1, 0, 2]) for state in states]
    return [sequence, *states][: len(node.results)]


def _directions(node: Node, w: GradientWriter) -> list[_Direction]:
    names = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    backwards = names[text_attribute(node, "direction", "forward")]
    found = []
    for number, is_backwards in enumerate(backwards):

        def own(value: Value, number: int = number) -> Value:
            if len(backwards) == 1:
                return w.squeeze(value, [0])
            return w.op("Gather", [value, w.constant(number)], {"axis": 0})

        bias, peepholes = operand(node, 3), operand(node, 7)
        halves = None
        if bias is not None:
            first, second = w.node("Split", [own(bias)], {"axis": 0, "num_outputs": 2}, results=2).results
            halves = first, second
        found.append(
            _Direction(
                number,
                is_backwards,
                own(needed(node, 1)),
                own(needed(node, 2)),
                halves,
                None if peepholes is None else own(peepholes),
            )
        )
    return found


def _alive(node: Node, x: Value, w: GradientWriter) -> Value | None:
    """bool[steps, batch, 1]: whether a sequence has not ended; None where all are of full length."""
    lengths = operand(node, 4)
    if lengths is None:
        return None
    steps = w.op("Range", [w.constant(0), w.squeeze(w.size_of(x, 0), [0]), w.constant(1)])
    steps.type = TensorType(DType.I64, (w.dims(x)[0],))
    return w.op("Less", [w.unsqueeze(steps, [1, 2]), w.unsqueeze(w.cast(lengths, DType.I64), [0, 2])])


def _run(
    node: Node, x: Value, direction: _Direction, alive: Value | None, batch_first: bool, w: GradientWriter
) -> tuple[Value, list[Value]]:
    """All hidden states of a direction [steps, batch, hidden], and the last states."""
    projected = w.op("MatMul", [x, w.transpose(direction.weights, [1, 0])])
    if direction.biases is not None:
        projected = w.add(projected, direction.biases[0])
    starts = [_start(node, place, x, direction, batch_first, w) for place in _STATES[node.op_type]]
    step = _STEPS[node.op_type](node, direction, w)
    body = Graph(f"{node.op_type}_step", names=w.graph.names)
    inner = w.inside(body)
    states = [body.add_input("state", start.type) for start in starts]
    gates = body.add_input("gates", projected.tensor_type.with_shape(w.dims(projected)[1:]))
    goes_on = None if alive is None else body.add_input("alive", TensorType(DType.BOOL, w.dims(alive)[1:]))
    new = step(gates, states, inner)
    output = new[0]
    if goes_on is not None:  # Past its end a sequence keeps its state and gives zeros.
        output = inner.where(goes_on, output, 0.0)
        new = [inner.where(goes_on, after, before) for after, before in zip(new, states, strict=True)]
    else:
        output = inner.op("Identity", [output])
    body.set_outputs([*new, output], [value.name for value in (*new, output)])
    scanned = [projected] if alive is None else [projected, alive]
    results = [Value("", start.type) for start in starts]
    hidden = w.dims(starts[0])[1]
    results.append(Value("", x.tensor_type.with_shape((*w.dims(x)[:2], hidden))))
    attributes: dict[str, object] = {"body": body, "num_scan_inputs": len(scanned)}
    if direction.backwards:
        attributes["scan_input_directions"] = Ints([1] * len(scanned))
        attributes["scan_output_directions"] = Ints([1])
    made = w.node("Scan", [*starts, *scanned], attributes, results=results)
    return made.results[-1], list(made.results[:-1])


def _start(node: Node, place: int, x: Value, direction: _Direction, batch_first: bool, w: GradientWriter) -> Value:
    """A state before the first step: [batch, hidden]."""
    given = operand(node, place)
    if given is None:
        shape = w.listed([w.size_of(x, 1), w.size_of(direction.recurrent, 1)])
        dims = (w.dims(x)[1], w.dims(direction.recurrent)[1])
        return w.op("Expand", [w.number(0, x), shape], type=x.tensor_type.with_shape(dims))
    return w.op("Gather", [given, w.constant(direction.number)], {"axis": 1 if batch_first else 0})


def _clip(node: Node) -> float | None:
    return float_attribute(node, "clip", 0.0) if "clip" in node.attributes else None


def _rnn_step(node: Node, direction: _Direction, w: GradientWriter) -> Step:
    activation = _activations(node, _clip(node))[direction.number]
    recurrent = w.transpose(direction.recurrent, [1, 0])

    def step(gates: Value, states: Sequence[Value], inner: GradientWriter) -> list[Value]:
        total = inner.add(gates, inner.op("MatMul", [states[0], recurrent]))
        if direction.biases is not None:
            total = inner.add(total, direction.biases[1])
        return [activation(total, inner)]

    return step


def _gru_step(node: Node, direction: _Direction, w: GradientWriter) -> Step:
    of_gates, of_hidden = _activations(node, _clip(node))[2 * direction.number :][:2]
    resets_late = bool(int_attribute(node, "linear_before_reset", 0))

    def parts(value: Value, writer: GradientWriter, axis: int) -> Sequence[Value]:
        return writer.node("Split", [value], {"axis": axis, "num_outputs": 3}, results=3).results

    turned = [w.transpose(part, [1, 0]) for part in parts(direction.recurrent, w, 0)]
    biases = None if direction.biases is None else parts(direction.biases[1], w, 0)

    def step(gates: Value, states: Sequence[Value], inner: GradientWriter) -> list[Value]:
        (h,) = states

        def product(state: Value, place: int) -> Value:
            made = inner.op("MatMul", [state, turned[place]])
            return made if biases is None else inner.add(made, biases[place])

        to_update, to_reset, to_hidden = parts(gates, inner, -1)
        update = of_gates(inner.add(to_update, product(h, 0)), inner)
        reset = of_gates(inner.add(to_reset, product(h, 1)), inner)
        recurrent = inner.mul(reset, product(h, 2)) if resets_late else product(inner.mul(reset, h), 2)
        candidate = of_hidden(inner.add(to_hidden, recurrent), inner)
        return [inner.add(inner.mul(inner.sub(1, update), candidate), inner.mul(update, h))]

    return step


def _lstm_step(node: Node, direction: _Direction, w: GradientWriter) -> Step:
    of_gates, of_cell, _ = _activations(node, _clip(node))[3 * direction.number :][:3]
    of_hidden = _activations(node, None)[3 * direction.number + 2]  # What goes into this one has no limit.
    recurrent = w.transpose(direction.recurrent, [1, 0])
    peeps = None
    if direction.peepholes is not None:
        peeps = w.node("Split", [direction.peepholes], {"axis": 0, "num_outputs": 3}, results=3).results

    def step(gates: Value, states: Sequence[Value], inner: GradientWriter) -> list[Value]:
        hidden, cell = states
        total = inner.add(gates, inner.op("MatMul", [hidden, recurrent]))
        if direction.biases is not None:
            total = inner.add(total, direction.biases[1])
        split = inner.node("Split", [total], {"axis": -1, "num_outputs": 4}, results=4)
        to_enter, to_leave, to_keep, to_cell = split.results

        def peeked(value: Value, place: int, of: Value) -> Value:
            return value if peeps is None else inner.add(value, inner.mul(peeps[place], of))

        entering = of_gates(peeked(to_enter, 0, cell), inner)
        if int_attribute(node, "input_forget", 0):
            kept = inner.sub(1, entering)
        else:
            kept = of_gates(peeked(to_keep, 2, cell), inner)
        new = inner.add(inner.mul(kept, cell), inner.mul(entering, of_cell(to_cell, inner)))
        leaving = of_gates(peeked(to_leave, 1, new), inner)
        return [inner.mul(leaving, of_hidden(new, inner)), new]

    return step


_STEPS: dict[str, Callable[[Node, _Direction, GradientWriter], Step]] = {
    "RNN": _rnn_step,
    "GRU": _gru_step,
    "LSTM": _lstm_step,
}
