"""LinearAttention, as a Scan over its steps, and CausalConvWithState in plain operators."""

import math

from irpar.ir import Graph, Node, Value

from ..facts import CannotTellError, float_attribute, int_attribute, needed, operand, text_attribute
from .fused import cut, swish
from .writer import GradientWriter, NoGradientError


def decompose_causal_conv(node: Node, w: GradientWriter) -> list[Value]:
    """A convolution of each channel with a kernel of its own, behind the places of an earlier call.

    Raises:
        NoGradientError: its activation is not known.
        CannotTellError: the number of channels is not.
    """
    x, kernel, bias, past = needed(node, 0), needed(node, 1), operand(node, 2), operand(node, 3)
    channels, reach = w.dims(x)[1], w.dims(kernel)[2]
    if not isinstance(channels, int) or not isinstance(reach, int):
        raise CannotTellError("the number of channels, or the size of the kernel")
    longer = w.pad(x, {2: (reach - 1, 0)}) if past is None else w.op("Concat", [past, x], {"axis": 2})
    operands = [w.widened(value) for value in (longer, kernel, bias) if value is not None]
    total = w.op("Conv", operands, {"group": channels})
    activation = text_attribute(node, "activation", "none")
    if activation not in ("none", "silu", "swish"):
        raise NoGradientError(f'because its activation is "{activation}"')
    results = [w.cast(swish(total, 1.0, w) if activation != "none" else total, x.dtype)]
    if len(node.results) > 1:
        end = [w.ints([number]) for number in (2**62, 2)]
        results.append(w.op("Slice", [longer, w.size_of(x, 2), *end]) if reach > 1 else cut(x, 2, 0, 0, w))
        results[1].type = node.results[1].type
    return results


def _steps(value: Value, heads: int, w: GradientWriter, group: int = 1) -> Value:
    """[steps, batch, heads, group, size] of [batch, steps, heads * group * size]."""
    wide = w.dims(value)[2]
    if not isinstance(wide, int) or heads < 1 or wide % (heads * group):
        raise CannotTellError("the size of a head")
    apart = w.reshaped(w.widened(value), [(value, 0), (value, 1), heads, group, wide // heads // group])
    return w.transpose(apart, [1, 0, 2, 3, 4])


def decompose_linear_attention(node: Node, w: GradientWriter) -> list[Value]:
    """S = exp(g) S + k (b (v - (exp(g) S)^T k))^T and o = scale S^T q, a step at a time.

    Raises:
        CannotTellError: the size of a head is not known.
    """
    query, past, decay, beta = needed(node, 0), operand(node, 3), operand(node, 4), operand(node, 5)
    heads, groups = int_attribute(node, "q_num_heads"), int_attribute(node, "kv_num_heads")
    if groups < 1 or heads % groups or int_attribute(node, "state_window", 0):
        raise CannotTellError("heads that are not covered")
    q = _steps(query, groups, w, heads // groups)
    scanned = {"q": q, "k": _steps(needed(node, 1), groups, w), "v": _steps(needed(node, 2), groups, w)}
    size = w.dims(q)[4]
    assert isinstance(size, int)
    if decay is not None:
        scanned["kept"] = w.op("Exp", [w.transpose(_steps(decay, groups, w), [0, 1, 2, 4, 3])])
    if beta is not None:
        rates = w.dims(beta)[2]
        scanned["rate"] = _steps(beta, rates if isinstance(rates, int) else 0, w)
    start = _start(past, scanned["k"], scanned["v"], w)
    body = _step(start, scanned, w)
    outputs = Value("", q.tensor_type.with_shape((*w.dims(q)[:4], w.dims(scanned["v"])[4])))
    attributes = {"body": body, "num_scan_inputs": len(scanned)}
    state = Value("", start.type)
    w.node("Scan", [start, *scanned.values()], attributes, results=[state, outputs])
    scaled = w.mul(outputs, float_attribute(node, "scale", 0.0) or 1 / math.sqrt(size))
    together = w.transpose(scaled, [1, 0, 2, 3, 4])
    value_size = w.dims(scanned["v"])[4]
    assert isinstance(value_size, int)
    y = w.reshaped(together, [(query, 0), (query, 1), heads * value_size])
    narrow = query.dtype if past is None else past.dtype
    return [w.cast(y, query.dtype), w.cast(state, narrow)][: len(node.results)]


def _start(past: Value | None, k: Value, v: Value, w: GradientWriter) -> Value:
    """The state before the first step: [batch, heads, size, value size]."""
    if past is not None:
        return w.widened(past)
    sizes = [(k, 1), (k, 2), (k, 4), (v, 4)]
    shape = w.listed([w.size_of(value, dim) for value, dim in sizes])
    dims = tuple(w.dims(value)[dim] for value, dim in sizes)
    return w.op("Expand", [w.number(0, k), shape], type=k.tensor_type.with_shape(dims))


def _step(start: Value, scanned: dict[str, Value], w: GradientWriter) -> Graph:
    """One step: of the state and what is given for it the next state and the outputs."""
    body = Graph("linear_attention_step", names=w.graph.names)
    inner = w.inside(body)
    state = body.add_input("state", start.type)
    given = {
        name: body.add_input(name, value.tensor_type.with_shape(w.dims(value)[1:])) for name, value in scanned.items()
    }
    k, written = given["k"], given["v"]
    if "kept" in given:
        state = inner.mul(state, given["kept"])
    if "rate" in given:
        written = inner.mul(given["rate"], inner.sub(written, inner.op("MatMul", [k, state])))
    state = inner.add(state, inner.mul(inner.transpose(k, [0, 1, 3, 2]), written))
    output = inner.op("MatMul", [given["q"], state])
    body.set_outputs([state, output], [state.name, output.name])
    return body
