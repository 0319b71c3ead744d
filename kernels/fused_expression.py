"""irpar.Fused and FusedEach computed step by step, with the kernels of the operators that the expression names.

That is what the kernels that `cuda/generator.py` writes are compared with.
"""

from collections.abc import Mapping, Sequence

from .cast import convert
from .expression import DTYPES, Number, Operand, Step
from .expression_reading import parse
from .operands import compute_dtype, narrow, widen
from .registry import Array, ArrayModule, kernel, lookup


@kernel("Fused", since=1, domain="irpar")
def fused(
    xp: ArrayModule, *operands: Array, expression: tuple[str, ...], outs: Sequence[Array | None] = ()
) -> tuple[Array, ...]:
    """The results of an expression, step by step with the kernels of its operators."""
    made = parse(tuple(expression))
    types = made.types([Operand(tuple(operand.shape), operand.dtype) for operand in operands])
    values = {f"x{place}": widen(operand) for place, operand in enumerate(operands)}
    for step in made.steps:
        values[step.target] = _computed(xp, step, values, types)
    results = [narrow(values[name], types[name].dtype) for name in made.results]
    into = (*outs[: len(results)], *(None for _ in results[len(outs) :]))
    return tuple(_placed(xp, result, out) for result, out in zip(results, into, strict=True))


@kernel("FusedEach", since=1, domain="irpar")
def fused_each(
    xp: ArrayModule, *operands: Array, expression: tuple[str, ...], times: int, outs: Sequence[Array | None] = ()
) -> tuple[Array, ...]:
    """The results of an expression for several lists of operands, one after the other."""
    found: list[Array] = []
    count = len(operands) // times
    for start in range(0, len(operands), count):
        into = outs[len(found) :]
        found += fused(xp, *operands[start : start + count], expression=expression, outs=into)
    return tuple(found)


def _placed(xp: ArrayModule, result: Array, out: Array | None) -> Array:
    """A result where it was asked for, if it fits there."""
    if out is None or out.shape != result.shape or out.dtype != result.dtype:
        return result
    xp.copyto(out, result)
    return out


def _computed(xp: ArrayModule, step: Step, values: Mapping[str, Array], types: Mapping[str, Operand]) -> Array:
    """What a step makes of values in their compute dtypes."""
    dtype = types[step.names[-1]].dtype
    operands = [
        xp.full((), operand.of_dtype(dtype), compute_dtype(dtype)) if isinstance(operand, Number) else values[operand]
        for operand in step.operands
    ]
    if step.op_type == "Cast":
        made = convert(xp, operands[0], DTYPES[step.attribute("to")])
        return widen(made.copy() if made is operands[0] else made)
    if step.operator.kind in ("squeeze", "unsqueeze"):
        return operands[0].reshape(types[step.target].shape)
    if step.op_type == "IsIndex":
        places = xp.arange(step.attribute("size")).astype(dtype)
        return operands[0] == places.reshape(-1, *(1 for _ in range(-step.attribute("axis") - 1)))
    if step.op_type == "RotateHalf":
        half = operands[0].shape[-1] // 2
        return xp.concatenate((-operands[0][..., half:], operands[0][..., :half]), axis=-1)
    found = lookup("", step.op_type, step.operator.version)
    assert found is not None
    attributes = {name: step.attribute(name) for name in dict(step.operator.defaults)}
    if step.operator.kind == "reduction":
        attributes["keepdims"] = 1
    (result,) = found(xp, operands, attributes, 1)
    return result
