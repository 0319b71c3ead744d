"""The text of an expression, read: one line for each step."""

import re
from functools import cache

from .expression import DTYPES, OPERATORS, Attribute, Expression, ExpressionError, Number, Step

_STEP = re.compile(r"([ty]\d+) = ([A-Za-z0-9]+)\((.*)\)")
_ITEM = re.compile(r"(?:([a-z_]+)=)?(\[[^\]]*\]|[^,\[\]=]+)(?:, |$)")
_NAME = re.compile(r"[xty]\d+")


@cache
def parse(lines: tuple[str, ...]) -> Expression:
    """The expression of a text, one line for each step.

    Raises:
        ExpressionError: with the line that is wrong.
    """
    steps: list[Step] = []
    known: set[str] = set()
    for number, line in enumerate(lines):
        try:
            step = _parse_step(line)
            _check_step(step, known)
        except ExpressionError as error:
            raise ExpressionError(f"step {number}, {line!r}: {error}") from None
        known.add(step.target)
        steps.append(step)
    made = Expression(tuple(steps))
    if made.results != tuple(f"y{place}" for place in range(len(made.results))) or not made.results:
        raise ExpressionError(f"the results are y0, y1 and so on, not {', '.join(made.results) or 'none'}")
    return made


def _parse_step(line: str) -> Step:
    match = _STEP.fullmatch(line)
    if match is None:
        raise ExpressionError(
            "a step is written t0 = Operator(x0, x1, attribute=value), its target t or y and a number"
        )
    target, op_type, inside = match.groups()
    operands: list[str | Number] = []
    attributes: dict[str, Attribute] = {}
    position = 0
    while position < len(inside):
        item = _ITEM.match(inside, position)
        if item is None:
            raise ExpressionError(f"{inside[position:]!r} is no operand, and no attribute")
        name, text = item.groups()
        if name is None:
            operands.append(text if _NAME.fullmatch(text) else Number(_checked_number(text)))
        elif name in attributes:
            raise ExpressionError(f"{name} is set twice")
        else:
            attributes[name] = _parse_value(text)
        position = item.end()
    return Step(target, op_type, tuple(operands), tuple(sorted(attributes.items())))


def _checked_number(text: str) -> str:
    try:
        float(text)
    except ValueError:
        raise ExpressionError(f"{text!r} is neither a value (x0, t0, y0) nor a number") from None
    return text


def _parse_value(text: str) -> Attribute:
    try:
        if text.startswith("["):
            return tuple(int(item) for item in text[1:-1].split(","))
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    except ValueError:
        if text.startswith("["):
            raise ExpressionError(f"{text} is no list of integers") from None
        return text


def _check_step(step: Step, known: set[str]) -> None:
    operator = OPERATORS.get(step.op_type)
    if operator is None:
        raise ExpressionError(f"there is no operator {step.op_type}; there are {', '.join(OPERATORS)}")
    if len(step.operands) != operator.operands:
        raise ExpressionError(f"{step.op_type} has {operator.operands} operands, not {len(step.operands)}")
    unknown = next((name for name in step.names if name[0] != "x" and name not in known), None)
    if unknown is not None or step.target in known:
        raise ExpressionError(f"{unknown} is not defined before" if unknown else f"{step.target} is defined before")
    if not step.names or (step.op_type == "Where" and len(step.names) < 2):
        raise ExpressionError("one operand that says the dtype is no number")
    defaults = dict(operator.defaults)
    wrong = next((name for name, _ in step.attributes if name not in defaults), None)
    if wrong is not None:
        raise ExpressionError(f"{step.op_type} has no attribute {wrong}")
    for name, default in defaults.items():
        value = step.attribute(name)
        _check_attribute(name, value)
        if isinstance(default, int) and not isinstance(value, int):
            raise ExpressionError(f"{name} is an integer, not {value}")
        if isinstance(default, float) and not isinstance(value, int | float):
            raise ExpressionError(f"{name} is a number, not {value}")


def _check_attribute(name: str, value: Attribute | None) -> None:
    if name == "axes" and not (isinstance(value, tuple) and value and max(value) < 0 and len(set(value)) == len(value)):
        raise ExpressionError("axes is a list of different dims, counted from the last one, which is -1")
    if name == "axis" and not (isinstance(value, int) and value < 0):
        raise ExpressionError("axis is a dim, counted from the last one, which is -1")
    if name == "size" and not (isinstance(value, int) and value > 0):
        raise ExpressionError("size is a number of places")
    if name == "to" and value not in DTYPES:
        raise ExpressionError(f"to is one of {', '.join(DTYPES)}")
    if name == "approximate" and value not in ("none", "tanh"):
        raise ExpressionError("approximate is none or tanh")
