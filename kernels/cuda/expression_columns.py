"""Kernels around sums of columns: a block has some columns, its threads the rows of these in turn.

What is summed is computed where it is read, and what is made of the sums where they are known. Where rows are many,
several blocks have the same columns: the one that comes last adds up what all of them found, in the order of the rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ..expression import Expression, Operand, Step
from ..operands import is_float
from .expression_problem import Problem, computed_type
from .expression_text import KernelText, Launch, Wide, indented, once
from .gpu import COUNTERS
from .layouts import Layout, merged

THREADS = 512
SECTOR = 32
"""Bytes of a row that a block reads at least: memory gives no fewer."""
ROWS_EACH = 8
"""Of a thread, where that lets the blocks of all columns be enough."""
_SUMS = ("ReduceMean", "ReduceSum")


def problem_of(
    expression: Expression, types: Mapping[str, Operand], operands: Sequence[Layout], results: Sequence[Layout]
) -> tuple[Problem, int] | None:
    """An expression whose results are made of sums over the first dims, and how many dims these are; None: another."""
    sums = [step for step in expression.steps if step.operator.kind == "reduction"]
    if not sums or any(step.op_type not in _SUMS for step in sums):
        return None
    space, axes = types[sums[0].names[0]].shape, tuple(sums[0].attribute("axes"))
    outer = len(axes)
    if tuple(sorted(axes)) != tuple(range(-len(space), outer - len(space))) or outer >= len(space):
        return None
    if any(types[step.names[0]].shape != space or tuple(step.attribute("axes")) != axes for step in sums):
        return None
    plain = _without_squeezes(expression, {step.target for step in sums})
    if plain is None or len({computed_type(types[step.names[0]].dtype) for step in sums}) > 1:
        return None
    if any(step.operator.kind not in ("elementwise", "reduction") for step in plain.steps):
        return None
    known = plain.types([Operand(layout.shape, layout.dtype) for layout in operands])
    whole = (*(1 for _ in range(outer)), *space[outer:])
    is_fit = all((1,) * (len(space) - len(known[name].shape)) + known[name].shape == whole for name in plain.results)
    if (
        not is_fit
        or not is_float(known[sums[0].names[0]].dtype)
        or any(len(one.shape) > len(space) for one in operands)
    ):
        return None
    tensors = {f"x{place}": layout for place, layout in enumerate(operands)}
    for name, layout in zip(plain.results, results, strict=True):
        tensors[name] = Layout.contiguous(whole, layout.dtype, layout.alignment)
    return Problem(plain, known, space, 0, tensors, {}), outer


def _without_squeezes(expression: Expression, sums: set[str]) -> Expression | None:
    """The steps without those that drop the dims of sums, which broadcast alike; None where there are others."""
    names: dict[str, str] = {}
    for step in expression.steps:
        if step.op_type == "Squeeze":
            if step.names[0] not in sums or step.names[0] in names or step.names[0][0] == "y":
                return None
            names[step.names[0]] = step.target
    steps = (
        replace(
            step,
            target=names.get(step.target, step.target),
            operands=tuple(names.get(one, one) if isinstance(one, str) else one for one in step.operands),
        )
        for step in expression.steps
        if step.op_type != "Squeeze"
    )
    return Expression(tuple(steps))


class ColumnKernel(KernelText):
    """Sums of columns: see the module.

    Args:
        problem: it.
        outer: how many dims at its beginning are summed up.
        multiprocessors: of the device.
    """

    def __init__(self, problem: Problem, outer: int, multiprocessors: int) -> None:
        super().__init__(problem)
        strides = [layout.within(problem.space) for layout in problem.tensors.values()]
        self.rows_dims = merged(problem.space[:outer], [own[:outer] for own in strides])
        self.inner = merged(problem.space[outer:], [own[outer:] for own in strides])
        self.width = self.fitting_width(self.inner, self.rows_dims)
        self.sums = [step for step in problem.expression.steps if step.operator.kind == "reduction"]
        self.kind = computed_type(problem.types[self.sums[0].target].dtype)
        self.rows, self.length = self.rows_dims.count, self.inner.count
        self.across, self.down = self._shape_of_block()
        self.columns = -(-self.length // (self.across * self.width))
        wanted = -(-self.rows // (self.down * ROWS_EACH))
        room = max(1, 4 * multiprocessors // self.columns)
        self.ranges = min(wanted, room)
        self.each = -(-self.rows // self.ranges)

    def _shape_of_block(self) -> tuple[int, int]:
        """Threads along columns, and along rows."""
        items = [layout.dtype.itemsize for name, layout in self.problem.tensors.items() if name[0] == "x"]
        vectors = _power_of_two(-(-self.length // self.width))
        across = min(vectors, max(1, SECTOR // (min(items) * self.width)))
        down = min(THREADS // across, _power_of_two(self.rows))
        return min(vectors, THREADS // down), down

    @property
    def parts(self) -> int:
        """How many sums of ranges of rows there are."""
        return self.ranges * self.length * len(self.sums) if self.ranges > 1 else 0

    def launch(self) -> Launch | None:
        """See `generate`; None where there are too many columns."""
        if self.columns > COUNTERS:
            return None
        rows, length = self.argument("rows", self.rows), self.argument("length", self.length)
        block, across = self.across * self.down, self.argument("across", self.columns)
        each = self.argument("each", self.each)
        body = [
            f"__shared__ {self.kind} shared[{self.width * block}];",
            f"const int lane = threadIdx.x % {self.across}, line = threadIdx.x / {self.across};",
            f"const Index range = blockIdx.x / {across};",
            f"const Index c = ((blockIdx.x - range * {across}) * {self.across} + lane) * {self.width};",
            f"const Index end = {rows} - range * {each} < {each} ? {rows} : (range + 1) * {each};",
            *(f"{self.kind} r_{step.target}[{self.width}] = {{}};" for step in self.sums),
            f"if (c < {length}) {{",
            *indented(self._summed()),
            "}",
        ]
        for step in self.sums:
            body += self._joined(step)
        if self.ranges > 1:
            self.argument("ranges", self.ranges)
            body += self._over_ranges()
        body += [f"if (line == 0 && c < {length}) {{", *indented(self._results()), "}"]
        source = self.source(body, block)
        return Launch(source, self.columns * self.ranges, block, self.numbers, self.parts, self.kind)

    def _summed(self) -> Iterable[str]:
        """What a thread adds up of its rows."""
        problem = self.problem
        constants = {name for name in problem.types if not problem.is_wide(name) and not self._is_made_of_sums(name)}
        lines, names = once(problem, constants, {})
        lines += self.coordinates("c", "c", self.inner, self.width)
        inside = self.coordinates("o", "row", self.rows_dims)
        base: dict[str, str] = {}
        for place, name in enumerate(self.names):
            offset = self.offset("o", "row", self.rows_dims, place)
            if offset and name[0] == "x":
                inside.append(f"const Index b_{name} = {offset};")
                base[name] = f"b_{name}"
        wide = Wide(self, self.inner, self.rows_dims, base)
        needed = list(dict.fromkeys(step.names[0] for step in self.sums))
        after = [f"r_{step.target}[v] += {names.get(step.names[0], f'v_{step.names[0]}')};" for step in self.sums]
        inside += wide.lines(wide.closure(needed, names), [], names, after)
        head = f"for (Index row = range * each + line; row < end; row += {self.down}) {{"
        return [*lines, "#pragma unroll 4", head, *indented(inside), "}"]

    def _is_made_of_sums(self, name: str) -> bool:
        steps = {step.target: step for step in self.problem.expression.steps}
        step = steps.get(name)
        return step is not None and (step.operator.kind == "reduction" or any(map(self._is_made_of_sums, step.names)))

    def _joined(self, step: Step) -> list[str]:
        """Let the first thread of each column have what all of them added up."""
        name, block, width = f"r_{step.target}", self.across * self.down, self.width
        place = f"shared[v * {block} + threadIdx.x]"
        return [
            "__syncthreads();",
            *_for_each(width, f"{place} = {name}[v];"),
            f"for (int half = {self.down // 2}; half > 0; half /= 2) {{",
            "  __syncthreads();",
            "  if (line < half) {",
            *indented(
                indented(_for_each(width, f"{place} += shared[v * {block} + threadIdx.x + half * {self.across}];"))
            ),
            "  }",
            "}",
            *_for_each(width, f"{name}[v] = {place};"),
        ]

    def _over_ranges(self) -> list[str]:
        """Let the block that comes last at its columns add up what all of them found."""
        width, lines = self.width, []
        for number, step in enumerate(self.sums):
            place = f"parts[({number} * ranges + range) * length + c + v]"
            inside = [f"if (c + v < length) {place} = r_{step.target}[v];"]
            lines += ["if (line == 0) {", *indented(_for_each(width, *inside)), "}"]
        lines += [
            "__threadfence();",
            "__shared__ bool is_last;",
            "__syncthreads();",
            "unsigned* counter = counters + (blockIdx.x - range * across);",
            "if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == ranges - 1;",
            "__syncthreads();",
            "if (!is_last) return;",
            "if (threadIdx.x == 0) *counter = 0;",
            "__threadfence();",
        ]
        for number, step in enumerate(self.sums):
            name = f"r_{step.target}"
            place = f"((volatile {self.kind}*)parts)[({number} * ranges + other) * length + c + v]"
            lines += [
                *_for_each(width, f"{name}[v] = 0;"),
                f"for (int other = line; other < ranges; other += {self.down}) {{",
                *indented(_for_each(width, f"if (c + v < length) {name}[v] += {place};")),
                "}",
                *self._joined(step),
            ]
        return lines

    def _results(self) -> list[str]:
        """What is made of the sums, and written."""
        problem, names, lines = self.problem, {}, []
        for step in self.sums:
            names[step.target] = f"r_{step.target}[v]"
            if step.op_type == "ReduceMean":
                lines += _for_each(self.width, f"r_{step.target}[v] = r_{step.target}[v] / ({self.kind})rows;")
        constants = {name for name in problem.types if not problem.is_wide(name) and not self._is_made_of_sums(name)}
        before, known = once(problem, constants, {})
        wide = Wide(self, self.inner, self.rows_dims, {})
        results = list(problem.expression.results)
        made = wide.closure(results, {*names, *known})
        lines = [*before, *self.coordinates("c", "c", self.inner, self.width), *lines]
        return [*lines, *wide.lines(made, results, {**known, **names}, ())]

    def source(self, body: Iterable[str], threads: int) -> str:
        """The whole text, with memory for the sums of ranges among the arguments where there are several."""
        text = super().source(body, threads)
        if self.ranges == 1:
            return text
        head = text.rindex("fused(") + len("fused(")
        end = text.index(") {", head)
        pointers = text[head:end].split(", ")
        count = len(self.problem.tensors)
        given = [*pointers[:count], f"{self.kind}* parts", "unsigned* counters", *pointers[count:]]
        return text[:head] + ", ".join(given) + text[end:]


def _for_each(width: int, *lines: str) -> list[str]:
    """Statements for each element of a vector."""
    return ["#pragma unroll", f"for (int v = 0; v < {width}; ++v) {{", *indented(lines), "}"]


def _power_of_two(number: int) -> int:
    """The least that is not below a number."""
    return 1 << max(0, number - 1).bit_length()
