"""CUDA C++ of an expression: a kernel for elementwise chains, one for chains around reductions of rows, and of columns.

Without reductions each thread computes vectors of up to 16 bytes of the results. With them a group of threads has a
row (what is reduced together), each thread some vectors of it in registers; what a later stage needs of an earlier one
stays there. Rows that are too long for that are read again in each stage.

The text holds the expression and how tensors lie: which strides are 0 or 1, the length of vectors, threads of a row.
Sizes and other strides are arguments, so that few programs are compiled.
"""

from functools import lru_cache

from ..expression import Operand
from ..expression_reading import parse
from .expression_columns import ColumnKernel, problem_of
from .expression_problem import Problem, stored_type
from .expression_rows import RowKernel
from .expression_text import KernelText, Launch, Wide, indented, once
from .layouts import Layout, merged

THREADS = 256
"""Of a block, where rows do not ask for more."""
MOST_PARAMETERS = 120


@lru_cache(maxsize=4096)
def generate(
    lines: tuple[str, ...], operands: tuple[Layout, ...], results: tuple[Layout, ...], multiprocessors: int
) -> Launch | None:
    """The kernel of an expression for operands and results that lie so; None where it is nothing for this generator."""
    expression = parse(lines)
    types = expression.types([Operand(layout.shape, layout.dtype) for layout in operands])
    problem = Problem.of(expression, types, operands, results)
    made: Launch | None = None
    if problem is not None and problem.count:
        made = (RowKernel if problem.reduced else ElementKernel)(problem, multiprocessors).launch()
    elif (columns := problem_of(expression, types, operands, results)) is not None and columns[0].count:
        made = ColumnKernel(*columns, multiprocessors).launch()
    if made is None or len(made.numbers) + len(operands) + len(results) > MOST_PARAMETERS:
        return None
    return made


class ElementKernel(KernelText):
    """Each thread computes vectors of the results, at distances of the whole grid."""

    def __init__(self, problem: Problem, multiprocessors: int) -> None:
        super().__init__(problem)
        self.dims = merged(problem.space, [layout.within(problem.space) for layout in problem.tensors.values()])
        self.width = self.fitting_width(self.dims, None)
        self.multiprocessors = multiprocessors

    def launch(self) -> Launch:
        """See `generate`."""
        problem = self.problem
        count = self.argument("count", problem.count)
        begins = {name: self.argument(f"half_{name}", begin) for name, begin in problem.rotated.items()}
        wide = Wide(self, self.dims, None, begins)
        before, names = once(problem, {name for name in problem.types if not problem.is_wide(name)}, {})
        results = problem.expression.results
        inner = [name for name in results if problem.is_wide(name)]
        made = wide.closure(inner, ())
        alone = [name for name in results if not problem.is_wide(name)]
        loop = [*self.coordinates("c", "c", self.dims, self.width), *wide.lines(made, inner, names, ())]
        body = [
            *before,
            f"Index c = ((Index)blockIdx.x * {THREADS} + threadIdx.x) * {self.width};",
            *(
                f"if (c == 0) p_{name}[0] = Store<{stored_type(problem.types[name].dtype)}>::of({names[name]});"
                for name in alone
            ),
        ]
        if inner:
            step = f"(Index)gridDim.x * {THREADS * self.width}"
            body += [f"for (; c < {count}; c += {step}) {{", *indented(loop), "}"]
        blocks = -(-problem.count // (THREADS * self.width))
        grid = min(blocks, 16 * self.multiprocessors)
        return Launch(self.source(body, THREADS), grid, THREADS, self.numbers)
