"""The kernel of an expression for many lists of tensors: one launch, whose arguments hold a table of where they lie.

    struct Table { const void* places[52][8]; int counts[52]; int begins[52]; }

Each block finds its list by the number of the first block of each, and computes one piece of it. Only lists whose
tensors lie in the order of their elements, numbers apart, and that one text computes, share a launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..expression import Operand
from ..expression_reading import parse
from .expression_problem import Problem, stored_type
from .expression_text import KernelText, Wide, functions, indented, once
from .layouts import Layout, merged

THREADS = 256
ROUNDS = 8
"""Vectors of each thread: pieces are so long that a block finds its list once for many of them."""
TABLE_BYTES = 3800
"""Of the 4,096 that any device takes as arguments."""


@dataclass(frozen=True)
class EachKernel:
    """A generated kernel for lists of tensors.

    Attributes:
        source: CUDA C++, with a function `fused` of a table and of how many lists it has.
        tensors: how many each list has.
        lists: how many a table holds.
        piece: elements of a block.
        is_long: whether counts take 64 bits.
    """

    source: str
    tensors: int
    lists: int
    piece: int
    is_long: bool

    def table(self, places: Sequence[Sequence[int]], counts: Sequence[int]) -> "tuple[np.ndarray, int]":
        """The argument for some lists, and of how many blocks the launch is.

        Args:
            places: addresses of each list's tensors.
            counts: elements of each.
        """
        made = np.zeros(1, _table_type(self.tensors, self.lists, self.is_long))
        begins = np.cumsum([0, *(-(-count // self.piece) for count in counts)])
        made["places"][0, : len(places)] = places
        made["begins"][0, : len(places)] = begins[:-1]
        made["counts"][0, : len(places)] = counts
        return made, int(begins[-1])


def _table_type(tensors: int, lists: int, is_long: bool) -> "np.dtype[np.void]":
    count = np.int64 if is_long else np.int32
    fields = [("places", np.uint64, (lists, tensors)), ("counts", count, (lists,)), ("begins", np.int32, (lists,))]
    return np.dtype(fields, align=True)


@lru_cache(maxsize=4096)
def generate_each(
    lines: tuple[str, ...], operands: tuple[Layout, ...], results: tuple[Layout, ...]
) -> EachKernel | None:
    """The kernel for lists as this one; None where they take more than a walk over elements in their order."""
    expression = parse(lines)
    types = expression.types([Operand(layout.shape, layout.dtype) for layout in operands])
    problem = Problem.of(expression, types, operands, results)
    if problem is None or not problem.count or problem.reduced or problem.rotated:
        return None
    kernel = _Text(problem)
    return kernel.made() if kernel.is_plain else None


class _Text(KernelText):
    """The text for a list: elements in order, and single numbers."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.dims = merged(problem.space, [layout.within(problem.space) for layout in problem.tensors.values()])
        self.width = self.fitting_width(self.dims, None)

    @property
    def is_plain(self) -> bool:
        """Whether every tensor is one after the other or a single number, results the former."""
        strides = [own[-1] if own else 0 for own in self.dims.strides]
        written = [stride for name, stride in zip(self.names, strides, strict=True) if name[0] == "y"]
        return len(self.dims.sizes) == 1 and {*strides} <= {0, 1} and {*written} == {1} and not self._others

    @property
    def _others(self) -> list[str]:
        """Tensors that are no operands or results."""
        return [name for name in self.names if name[0] not in "xy"]

    def made(self) -> EachKernel:
        """See `generate_each`."""
        problem, tensors = self.problem, len(self.names)
        is_long = self.index != "int"
        lists = TABLE_BYTES // _table_type(tensors, 1, is_long).itemsize
        piece = THREADS * self.width * ROUNDS
        wide = Wide(self, self.dims, None, {})
        before, names = once(problem, {name for name in problem.types if not problem.is_wide(name)}, {})
        results = problem.expression.results
        loop = wide.lines(wide.closure(results, ()), results, names, ())
        body = [
            "int list = 0;",
            "for (int end = lists; end - list > 1;) {",
            "  const int middle = (list + end) / 2;",
            "  if (table.begins[middle] <= (int)blockIdx.x) list = middle; else end = middle;",
            "}",
            *(self._pointer(place, name) for place, name in enumerate(self.names)),
            *before,
            f"const Index first = (Index)((int)blockIdx.x - table.begins[list]) * {piece};",
            "const Index left = table.counts[list] - first;",
            f"const Index end = first + (left < {piece} ? left : {piece});",
            f"for (Index c = first + threadIdx.x * {self.width}; c < end; c += {THREADS * self.width}) {{",
            *indented(loop),
            "}",
        ]
        fields = f"const void* places[{lists}][{tensors}]; Index counts[{lists}]; int begins[{lists}];"
        head = f'extern "C" __global__ void __launch_bounds__({THREADS}) fused'
        text = (functions(), f"typedef {self.index} Index;", f"struct Table {{ {fields} }};")
        start = f"{head}(const __grid_constant__ Table table, int lists) {{"
        return EachKernel("\n".join((*text, start, *indented(body), "}", "")), tensors, lists, piece, is_long)

    def _pointer(self, place: int, name: str) -> str:
        kind = f"{'const ' if name[0] == 'x' else ''}{stored_type(self.problem.tensors[name].dtype)}*"
        return f"{kind} p_{name} = ({kind})table.places[list][{place}];"
