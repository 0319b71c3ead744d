"""Gradients of matrix products."""

from collections.abc import Sequence
from string import ascii_letters

import numpy as np

from irpar.ir import Dim, DType, Node, Value

from ..facts import CannotTellError, broadcast_dims, float_attribute, int_attribute, needed, operand
from .writer import GradientWriter, NoGradientError, Of


def of_matmul(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """G B^T and A^T G; operands of one dim as rows or columns; batch dims that were broadcast are summed.

    A right operand without batch dims gets one product over all rows, of which no batch has to be summed.
    """
    a, b, g = needed(node, 0), needed(node, 1), of[0]
    assert g is not None
    is_row, is_column = len(w.dims(a)) == 1, len(w.dims(b)) == 1
    left = w.unsqueeze(a, [0]) if is_row else a
    right = w.unsqueeze(b, [1]) if is_column else b
    if is_column:
        g = w.unsqueeze(g, [len(w.dims(g))])
    if is_row:
        g = w.unsqueeze(g, [len(w.dims(g)) - 1])

    def of_left() -> Value:
        return w.shaped_as(w.sum_to(w.op("MatMul", [g, w.swapped(right)]), left), a)

    def of_right() -> Value:
        if len(w.dims(right)) == 2 and len(w.dims(left)) > 2:
            return w.shaped_as(_over_rows(left, g, w), b)
        return w.shaped_as(w.sum_to(w.op("MatMul", [w.swapped(left), g]), right), b)

    return w.each(of_left, of_right)


def _over_rows(left: Value, right: Value, w: GradientWriter) -> Value:
    """The product of two tensors over all dims but their last: [i, j].

    An Einsum leaves the dims apart, so that any of them may be sharded; ONNX Runtime has none of narrow floats.
    """
    if left.dtype in (DType.F32, DType.F64):
        rows = ascii_letters[: len(w.dims(left)) - 1]
        return w.op("Einsum", [left, right], {"equation": f"{rows}y,{rows}z->yz"})
    return w.op("MatMul", [w.swapped(_flat(left, w)), _flat(right, w)])


def _flat(value: Value, w: GradientWriter) -> Value:
    """All dims but the last as one."""
    *rows, columns = w.dims(value)
    return w.reshaped(value, [-1, columns if isinstance(columns, int) else (value, len(rows))])


def of_gemm(node: Node, of: Of, w: GradientWriter) -> Sequence[Value | None]:
    """alpha G B^T and alpha A^T G, each transposed where its operand is; beta G, summed to the shape of C."""
    a, b, c, g = needed(node, 0), needed(node, 1), operand(node, 2), of[0]
    assert g is not None
    across, back = int_attribute(node, "transA", 0), int_attribute(node, "transB", 0)
    alpha, beta = float_attribute(node, "alpha", 1.0), float_attribute(node, "beta", 1.0)

    def product(left: Value, right: Value, trans_left: int, trans_right: int) -> Value:
        given = {"alpha": alpha, "transA": trans_left, "transB": trans_right}
        default = {"alpha": 1.0, "transA": 0, "transB": 0}
        attributes = {name: value for name, value in given.items() if value != default[name]}
        return w.op("Gemm", [left, right], attributes)

    def bias() -> Value:
        assert c is not None
        found = w.sum_to(g, c)
        return found if beta == 1.0 else w.mul(found, beta)

    return w.each(
        lambda: product(b, g, back, 1) if across else product(g, b, 0, 1 - back),
        lambda: product(g, a, 1, across) if back else product(a, g, 1 - across, 0),
        None if c is None else bias,
    )


def of_einsum(node: Node, of: Of, w: GradientWriter, terms: Sequence[str], result: str) -> Sequence[Value | None]:
    """Each operand gets the Einsum of the gradient with the other operands, in its own letters.

    A letter that stands in this operand alone was summed there: the gradient is repeated along it, and along one of
    which the others have size 1. Where this operand has size 1 of a letter, the gradient is summed. A diagonal is a
    product with the identity: ii->i is ij,ij->i.
    """
    g = of[0]
    assert g is not None
    operands = list(node.inputs)
    terms = _once_each(operands, terms, w)
    found: list[Value | None] = []
    for index, term in enumerate(terms[: len(node.inputs)]):
        if not w.needs[index]:
            found.append(None)
            continue
        others = [number for number in range(len(terms)) if number != index]
        known = set(result).union(*(terms[number] for number in others))
        kept = "".join(letter for letter in term if letter in known)
        equation = ",".join([result, *(terms[number] for number in others)]) + "->" + kept
        dims = tuple(
            _size(letter, operands, terms, range(len(terms)) if letter in result else others, w) for letter in kept
        )
        type_ = g.tensor_type.with_shape(dims)
        made = w.einsum([g, *(operands[number] for number in others)], equation, type=type_)
        missing = [dim for dim, letter in enumerate(term) if letter not in known]
        found.append(w.fit_to(w.unsqueeze(made, missing), operands[index]))
    return found


def _once_each(operands: list[Value], terms: Sequence[str], w: GradientWriter) -> list[str]:
    """Terms in which each letter stands once; identities that keep the dims together are added to the operands.

    Raises:
        CannotTellError: the size of a diagonal is not known.
    """
    free = iter(sorted(set(ascii_letters).difference(*terms)))
    apart, identities = [], []
    for value, term in zip(tuple(operands), terms, strict=True):
        made = ""
        for dim, letter in enumerate(term):
            if letter not in made:
                made += letter
                continue
            size, other = w.dims(value)[dim], next(free, None)
            if not isinstance(size, int) or other is None:
                raise CannotTellError("the size of a diagonal")
            operands.append(w.constant(np.eye(size, dtype=value.dtype.numpy), "identity"))
            identities.append(letter + other)
            made += other
        apart.append(made)
    return [*apart, *identities]


def _size(
    letter: str, operands: Sequence[Value], terms: Sequence[str], places: Sequence[int], w: GradientWriter
) -> Dim:
    """How large a letter is in some operands together; None where that cannot be told."""
    found = [(w.dims(operands[place])[terms[place].index(letter)],) for place in places if letter in terms[place]]
    try:
        return broadcast_dims(found)[0]
    except CannotTellError:
        return None


def latin(terms: Sequence[str], result: str) -> tuple[list[str], str]:
    """The same equation in letters that ONNX has.

    Raises:
        NoGradientError: there are more dims than letters.
    """
    used = set(result).union(*terms)
    free = (letter for letter in ascii_letters if letter not in used)
    table: dict[int, str] = {}
    for letter in sorted(used):
        if letter not in ascii_letters:
            other = next(free, None)
            if other is None:
                raise NoGradientError("its equation has more than 52 dims")
            table[ord(letter)] = other
    return [term.translate(table) for term in terms], result.translate(table)
