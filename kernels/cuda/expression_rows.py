"""Kernels around reductions: a group of threads has a row, each of its threads some vectors of it."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..expression import Step
from .expression_problem import Problem, computed_type, stored_type
from .expression_text import KernelText, Launch, Wide, indented, number_text, step_text, total
from .layouts import merged

MOST_ROW_THREADS = 1024
REGISTERS = 64
"""Numbers of a row that a thread holds at most; half of them where a block has all the threads that it can have."""
MOST_VECTORS = 16
"""Of a thread: more make long programs."""

_REDUCERS = {"ReduceMax": "Greatest", "ReduceMin": "Least"}
"""By class of `expressions.cuh`; others are sums."""


class RowKernel(KernelText):
    """A group of threads has a row; between two stages all of them know what was reduced."""

    def __init__(self, problem: Problem, multiprocessors: int) -> None:
        super().__init__(problem)
        strides = [layout.within(problem.space) for layout in problem.tensors.values()]
        cut = len(problem.space) - problem.reduced
        self.outer = merged(problem.space[:cut], [own[:cut] for own in strides])
        self.inner = merged(problem.space[cut:], [own[cut:] for own in strides])
        self.width = self.fitting_width(self.inner, self.outer)
        self.multiprocessors = multiprocessors
        self.steps = {step.target: step for step in problem.expression.steps}
        self.stages = self._stages()
        self.rows, self.length = self.outer.count, self.inner.count
        self.threads, self.vectors, self.holds = self._shape_of_group()

    def _stages(self) -> dict[str, int]:
        """For each value how many reductions stand before it, one behind the other."""
        found = {name: 0 for name in self.problem.types if name[0] == "x"}
        for step in self.problem.expression.steps:
            before = max(found[name] for name in step.names)
            found[step.target] = before + (step.operator.kind == "reduction")
        return found

    def _shape_of_group(self) -> tuple[int, int, bool]:
        """Threads of a row, vectors of each, and whether it holds between stages what it has read."""
        vectors = -(-self.length // self.width)
        each = max(1, 16 // self.width)
        threads = min(MOST_ROW_THREADS, _power_of_two(-(-vectors // each)))
        while threads < 256 and threads < vectors and self.rows * threads < self.multiprocessors * 1024:
            threads *= 2
        held = max((len(self._held_after(stage)) for stage in range(self.last_stage)), default=0)
        while threads < MOST_ROW_THREADS and not self._is_held(threads, held):
            threads *= 2
        return threads, -(-vectors // threads), self._is_held(threads, held)

    def _is_held(self, threads: int, held: int) -> bool:
        """Whether the registers of so many threads have room for what is held of a row."""
        each = -(-self.length // self.width // threads)
        most = REGISTERS // 2 if threads == MOST_ROW_THREADS else REGISTERS
        return each <= MOST_VECTORS and each * self.width * max(1, held) <= most

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return max(self.stages.values())

    def _targets(self, stage: int) -> tuple[list[Step], list[str]]:
        """What a stage reduces, and the wide results that it stores."""
        problem = self.problem
        reductions = [
            step
            for step in problem.expression.steps
            if step.operator.kind == "reduction" and self.stages[step.target] == stage + 1
        ]
        stored = [name for name in problem.expression.results if problem.is_wide(name) and self.stages[name] == stage]
        return reductions, stored

    def _needed(self, stage: int) -> list[str]:
        reductions, stored = self._targets(stage)
        return [*(step.names[0] for step in reductions), *stored]

    def _made(self, stage: int, held: Iterable[str]) -> list[str]:
        return Wide(self, self.inner, self.outer, {}).closure(self._needed(stage), held)

    def _held_after(self, stage: int) -> list[str]:
        """Wide values that are made up to a stage and read by a later one."""
        made: dict[str, None] = {}
        for before in range(stage + 1):
            made.update(dict.fromkeys(self._made(before, made)))
        read: set[str] = set()
        for later in range(stage + 1, self.last_stage + 1):
            fresh = self._made(later, made)
            read.update(name for made_name in fresh if made_name in self.steps for name in self.steps[made_name].names)
            read.update(self._needed(later))
        return [name for name in made if name in read]

    def launch(self) -> Launch:
        """See `generate`."""
        threads = self.threads
        rows_of_block = 128 // threads if threads <= 32 else 1
        block = threads * rows_of_block
        rows, length = self.argument("rows", self.rows), self.argument("length", self.length)
        body = [
            f"const int lane = threadIdx.x % {threads};",
            f"for (Index first = (Index)blockIdx.x * {rows_of_block}; first < {rows}; "
            f"first += (Index)gridDim.x * {rows_of_block}) {{",
        ]
        inside: list[str] = []
        if rows_of_block > 1:
            inside += [
                f"const Index own = first + threadIdx.x / {threads};",
                f"const bool is_there = own < {rows};",
                f"const Index row = is_there ? own : {rows} - 1;",
                f"const Index end = is_there ? {length} : 0;",
            ]
        else:
            inside += ["const Index row = first;", f"const Index end = {length};"]
        inside += self.coordinates("o", "row", self.outer)
        base: dict[str, str] = {}
        for place, name in enumerate(self.names):
            offset = self.offset("o", "row", self.outer, place)
            if offset:
                inside.append(f"const Index b_{name} = {offset};")
                base[name] = f"b_{name}"
        inside += self._stage_lines(base)
        body += [*indented(inside), "}"]
        blocks = -(-self.rows // rows_of_block)
        grid = min(blocks, self.multiprocessors * max(1, 2048 // block) * 4)
        return Launch(self.source(body, block), grid, block, self.numbers)

    def _stage_lines(self, base: Mapping[str, str]) -> list[str]:
        problem, wide = self.problem, Wide(self, self.inner, self.outer, base)
        lines: list[str] = []
        names: dict[str, str] = {}
        kept: dict[str, None] = {}
        narrow_values = [name for name in problem.types if not problem.is_wide(name) and name not in problem.squeezed]
        for stage in range(self.last_stage + 1):
            lines += self._row_values([name for name in narrow_values if self.stages[name] == stage], names, base)
            reductions, stored = self._targets(stage)
            if not reductions and not stored:
                continue
            held = self._held_after(stage) if self.holds else []
            made = wide.closure(self._needed(stage), kept)
            fresh = [name for name in made if name in held]
            for name in fresh:
                kind = computed_type(problem.types[name].dtype)
                lines.append(f"{kind} h_{name}[{self.vectors}][{self.width}];")
            after = [f"h_{name}[e][v] = v_{name};" for name in fresh]
            there = {**names, **{name: f"h_{name}[e][v]" for name in kept}}
            for step in reductions:
                lines.append(self._start(step))
                after.append(self._gather(step, there))
            lines += self._loop(wide.lines(made, stored, there, after))
            kept.update(dict.fromkeys(fresh))
            lines += [line for step in reductions for line in self._finish(step, names)]
        return lines

    def _row_values(self, chosen: Sequence[str], names: dict[str, str], base: Mapping[str, str]) -> list[str]:
        """Values of one element for the row, and the results among them."""
        lines = []
        for name in chosen:
            step = self.steps.get(name)
            if step is None or step.operator.kind != "reduction":
                kind = computed_type(self.problem.types[name].dtype)
                text = (
                    f"widen(p_{name}[{total(base.get(name, ''))}])"
                    if step is None
                    else step_text(step, self.problem.types, names)
                )
                lines.append(f"const {kind} u_{name} = {text};")
                names[name] = f"u_{name}"
        for result in self.problem.expression.results:
            source = self.problem.squeezed.get(result, result)
            if source in chosen:
                kind = stored_type(self.problem.types[result].dtype)
                guard = "lane == 0 && end" if self.threads <= 32 else "lane == 0"
                address = total(base.get(result, ""))
                lines.append(f"if ({guard}) p_{result}[{address}] = Store<{kind}>::of({names[source]});")
        return lines

    def _loop(self, lines: Sequence[str]) -> list[str]:
        """Over the vectors of a thread."""
        inside = [*self.coordinates("c", "c", self.inner, self.width), *lines]
        if not self.holds:
            head = f"for (Index c = (Index)lane * {self.width}; c < end; c += {self.threads * self.width}) {{"
            return [head, *indented(inside), "}"]
        over = ["#pragma unroll", f"for (int e = 0; e < {self.vectors}; ++e) {{"]
        column = f"  const Index c = (Index)(e * {self.threads} + lane) * {self.width};"
        return [*over, column, "  if (c < end) {", *indented(indented(inside)), "  }", "}"]

    def _kind(self, step: Step) -> str:
        return computed_type(self.problem.types[step.target].dtype)

    def _start(self, step: Step) -> str:
        kind = self._kind(step)
        first = {"ReduceMax": -np.inf, "ReduceMin": np.inf}.get(step.op_type, 0.0)
        return f"{kind} r_{step.target} = {number_text(first, kind)};"

    def _gather(self, step: Step, there: Mapping[str, str]) -> str:
        """A statement that adds an element."""
        kind, own = self._kind(step), step.names[0]
        value = there.get(own, f"v_{own}")
        term = {
            "ReduceL1": f"op_Abs<{kind}>({value})",
            "ReduceL2": f"{value} * {value}",
            "ReduceSumSquare": f"{value} * {value}",
        }.get(step.op_type, value)
        name = f"r_{step.target}"
        return f"{name} = {_REDUCERS.get(step.op_type, 'Sum')}<{kind}>::of({name}, {term});"

    def _finish(self, step: Step, names: dict[str, str]) -> list[str]:
        """Statements that reduce what the threads have."""
        kind, name = self._kind(step), f"r_{step.target}"
        reducer = f"{_REDUCERS.get(step.op_type, 'Sum')}<{kind}>"
        made = f"reduced<{self.threads}, {reducer}, {kind}>({name})"
        if step.op_type == "ReduceMean":
            made = f"{made} / ({kind})length"
        elif step.op_type == "ReduceL2":
            made = f"op_Sqrt<{kind}>({made})"
        names[step.target] = f"u_{step.target}"
        return [f"const {kind} u_{step.target} = {made};"]


def _power_of_two(number: int) -> int:
    """The least that is not below a number."""
    return 1 << max(0, number - 1).bit_length()
