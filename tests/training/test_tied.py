"""What an exporter has tied, or untied, among what is trained is named."""

import numpy as np
import pytest

from irpar.ir import ArrayTensor, Graph, Node
from irpar.training.tied import ties_among

SIZE = 6


def parameters(arrays, readers):
    """Constants, each read by so many nodes."""
    graph = Graph("g")
    made = []
    for name, array in arrays.items():
        value = graph.add_constant(ArrayTensor(array), name)
        for _ in range(readers.get(name, 1)):
            graph.append(Node("Neg", [value]))
        made.append(value)
    return made


def drawn(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("number", "readers", "is_told"), [(0, 2, True), (1, 3, True), (0, 1, False), (0.5, 2, False)])
def test_a_parameter_that_is_one_number_and_several_nodes(number, readers, is_told):
    values = parameters({"b": np.full(SIZE, number, np.float32)}, {"b": readers})
    told = list(ties_among(values))
    assert (
        told
        == [
            f"%b is trained as one parameter of {readers} nodes, and is {number} throughout: if it was several that are "
            "equal, export the model so that it keeps them apart"
        ]
        * is_told
    )


@pytest.mark.parametrize("shape", [(12, 5), (SIZE, SIZE)])
def test_a_matrix_that_is_another_one_transposed(shape):
    matrix = drawn(*shape)
    values = parameters({"wte": matrix, "other": drawn(*shape) + 1, "head": np.ascontiguousarray(matrix.T)}, {})
    (told,) = ties_among(values)
    assert told.startswith("%head has the numbers of %wte, transposed, and each is trained by itself")


def test_matrices_that_are_equal_or_zero_are_not_told():
    values = parameters(
        {"a": drawn(4, 4), "b": drawn(4, 4), "c": np.zeros((4, 3), "f"), "d": np.zeros((3, 4), "f")}, {}
    )
    assert not list(ties_among(values))


def test_a_matrix_that_is_its_own_transpose_is_not_told():
    matrix = drawn(5, 5)
    assert not list(ties_among(parameters({"a": matrix + matrix.T, "b": matrix + matrix.T}, {})))
