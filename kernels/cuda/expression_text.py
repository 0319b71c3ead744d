"""What generated kernels are written of: numbers, steps, offsets, loads and stores of vectors."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..expression import DTYPES, Number, Operand, Step
from .expression_problem import STORED, Problem, computed_type, stored_type
from .layouts import Dims
from .programs import Program


@dataclass(frozen=True)
class Launch:
    """A generated kernel and how to launch it.

    Attributes:
        source: CUDA C++, with a function `fused`.
        grid, block: blocks, and threads of each.
        numbers: what stands behind the pointers to operands and results among the arguments.
        parts: how many numbers it needs memory for; that and the stream's counters stand before `numbers` then.
        kind: their C type.
    """

    source: str
    grid: int
    block: int
    numbers: tuple[Any, ...]
    parts: int = 0
    kind: str = "float"


@cache
def functions() -> str:
    """What the source of every kernel begins with."""
    return Program.file("expressions.cuh").source


def number_text(value: Any, kind: str) -> str:
    """A number as a literal of a computed C type."""
    if kind not in ("float", "double"):
        return f"(({kind}){int(value)}ll)" if int(value) < 2**63 else f"(({kind}){int(value)}ull)"
    number = float(np.float32(value)) if kind == "float" else float(value)
    if number != number:
        return f"({kind})not_a_number()"
    if np.isinf(number):
        return f"({'-' if number < 0 else ''}({kind})infinity())"
    return f"({number.hex()}{'f' if kind == 'float' else ''})"


def step_text(step: Step, types: Mapping[str, Operand], names: Mapping[str, str]) -> str:
    """What a step computes, in C++: `names` are those of its operands."""
    dtype = types[step.names[-1]].dtype
    kind = computed_type(dtype)
    given = [
        names[operand] if isinstance(operand, str) else number_text(operand.of_dtype(dtype), kind)
        for operand in step.operands
    ]
    if step.op_type == "Cast":
        return _cast_text(given[0], kind, step.attribute("to"))
    if step.op_type == "Unsqueeze":
        return given[0]
    name = step.op_type
    if name == "Pow" and isinstance(step.operands[1], Number) and float(str(step.operands[1])) in (2.0, 3.0):
        name, given = ("Square" if float(str(step.operands[1])) == 2 else "Cube"), given[:1]
    elif name == "Gelu":
        name = "Gelu" if step.attribute("approximate") == "none" else "GeluTanh"
    elif name == "Mod":
        name = "FMod" if step.attribute("fmod") else "Mod"
    else:
        settings = (step.attribute(key) for key in dict(step.operator.defaults))
        given += [str(value) if isinstance(value, int) else number_text(value, kind) for value in settings]
    return f"op_{name}<{kind}>({', '.join(given)})"


def _cast_text(value: str, kind: str, to: str) -> str:
    made = f"convert<{kind}, {computed_type(DTYPES[to])}>({value})"
    return f"widen(Store<{STORED[to]}>::of({made}))" if to in ("f16", "bf16") else made


class KernelText:
    """What the two kernels share: parameters, offsets, loads and stores."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = tuple(problem.tensors)
        self.index = "int" if problem.is_small_index() else "long long"
        self.parameters: dict[str, int] = {}
        self.width = 1

    def argument(self, name: str, value: int) -> str:
        """A number that is an argument."""
        self.parameters[name] = value
        return name

    def factor(self, name: str, stride: int) -> str:
        """A stride as what an index is multiplied with: 0 and 1 stand in the text, others are arguments."""
        return str(stride) if stride in (0, 1) else self.argument(name, stride)

    def fitting_width(self, inner: Dims, outer: Dims | None) -> int:
        """The longest vector that divides the innermost dim and has up to 16 bytes of each result along it."""
        if not inner.sizes:
            return 1
        along = [name for place, name in enumerate(self.names) if inner.strides[place][-1] == 1]
        written = [name for name in along if name[0] == "y"]
        items = [self.problem.tensors[name].dtype.itemsize for name in written or along]
        width = min(8, 16 // max(items, default=16))
        while width > 1 and inner.sizes[-1] % width:
            width //= 2
        is_vector = any(self.is_vector(place, inner, outer, width) for place in range(len(self.names)))
        return width if is_vector else 1

    def is_vector(self, place: int, inner: Dims, outer: Dims | None, width: int) -> bool:
        """Whether vectors of a tensor lie in one piece, at addresses that are multiples of their size."""
        layout = self.problem.tensors[self.names[place]]
        others = (*inner.strides[place][:-1], *(outer.strides[place] if outer is not None else ()))
        is_aligned = layout.alignment % min(16, width * layout.dtype.itemsize) == 0
        return inner.strides[place][-1] == 1 and is_aligned and all(stride % width == 0 for stride in others)

    def coordinates(self, prefix: str, index: str, dims: Dims, unit: int = 1) -> list[str]:
        """Statements that take an index apart, as far as some tensor does not lie in its order."""
        apart = [own for place, own in enumerate(dims.strides) if not dims.is_line(place)]
        used = [any(own[dim] for own in apart) for dim in range(len(dims.sizes))]
        if not any(used):
            return []
        first = used.index(True)
        lines = [f"Index {prefix}_rest = {index}{f' / {unit}' if unit > 1 else ''};"]
        for dim in range(len(dims.sizes) - 1, max(first, 1) - 1, -1):
            innermost = dim == len(dims.sizes) - 1
            size = self.argument(f"{prefix}n{dim}", dims.sizes[dim] // (unit if innermost else 1))
            scale = f" * {unit}" if innermost and unit > 1 else ""
            if used[dim]:
                lines.append(f"const Index {prefix}{dim} = {prefix}_rest % {size}{scale};")
            if dim > first:
                lines.append(f"{prefix}_rest /= {size};")
        return [*lines, *([f"const Index {prefix}0 = {prefix}_rest;"] if used[0] else [])]

    def offset(self, prefix: str, index: str, dims: Dims, place: int) -> str:
        """Where a tensor has the element of an index; empty for no way from its start."""
        strides, name = dims.strides[place], self.names[place]
        if not any(strides):
            return ""
        if dims.is_line(place):
            return product(index, self.factor(f"{prefix}{name}", strides[-1]))
        terms = [
            product(f"{prefix}{dim}", self.factor(f"{prefix}{name}_{dim}", stride))
            for dim, stride in enumerate(strides)
            if stride
        ]
        return " + ".join(terms)

    def source(self, body: Iterable[str], threads: int) -> str:
        """The whole text."""
        # A row's results never lie where operands do; elements may be written over those they are made of.
        restrict = " __restrict__" if self.problem.reduced else ""
        pointers = [
            f"{'const ' if name[0] == 'x' else ''}{stored_type(layout.dtype)}*{restrict} p_{name}"
            for name, layout in self.problem.tensors.items()
            if name[0] in "xy"
        ]
        numbers = [f"Index {name}" for name in self.parameters]
        return "\n".join(
            (
                functions(),
                f"typedef {self.index} Index;",
                f'extern "C" __global__ void __launch_bounds__({threads}) fused({", ".join((*pointers, *numbers))}) {{',
                *indented(body),
                "}",
                "",
            )
        )

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers among the arguments."""
        kind = np.int32 if self.index == "int" else np.int64
        return tuple(map(kind, self.parameters.values()))


def indented(lines: Iterable[str]) -> Iterable[str]:
    """Lines of a block."""
    return (f"  {line}" for line in lines)


def product(index: str, factor: str) -> str:
    """An index times a factor that may be 1."""
    return index if factor == "1" else f"{index} * {factor}"


def total(*terms: str) -> str:
    """What is left of terms of which some are empty."""
    return " + ".join(filter(None, terms)) or "0"


class Wide:
    """Statements for one vector of values that differ along it: loads, steps, stores.

    Args:
        kernel: of which kernel.
        inner, outer: the dims.
        base: what stands before the offset in the vector's own dims, for each tensor.
    """

    def __init__(self, kernel: KernelText, inner: Dims, outer: Dims | None, base: Mapping[str, str]) -> None:
        self.kernel, self.inner, self.outer, self.base = kernel, inner, outer, base
        self.problem = kernel.problem
        self.steps = {step.target: step for step in self.problem.expression.steps}

    def closure(self, targets: Iterable[str], held: Iterable[str]) -> list[str]:
        """The wide values that targets need, those that are held left out, in an order in which they can be made."""
        found: dict[str, None] = {}
        known = set(held)

        def visit(name: str) -> None:
            if name in found or name in known or not self.problem.is_wide(name):
                return
            step = self.steps.get(name)
            if step is not None:
                if step.operator.kind == "reduction":
                    return
                for operand in step.names:
                    visit(operand)
            found[name] = None

        for target in targets:
            visit(target)
        return list(found)

    def lines(
        self, made: Sequence[str], stored: Sequence[str], names: Mapping[str, str], after: Sequence[str]
    ) -> list[str]:
        """Load the operands among the values, compute the others, store some.

        Args:
            made: the values, in order.
            stored: the results among them, and among what is held.
            names: what values are called that are there already.
            after: statements for each element, behind the steps.
        """
        width = self.kernel.width
        loads, steps, known = [], [], dict(names)
        for name in made:
            if name in self.steps:
                steps.append(self._step(name, known))
            else:
                loaded, element = self._load(name)
                loads += loaded
                steps.append(f"const {computed_type(self.problem.types[name].dtype)} v_{name} = {element};")
            known[name] = f"v_{name}"
        for name in stored:
            kind = stored_type(self.problem.types[name].dtype)
            loads.append(f"Vector<{width}, {kind}> s_{name};")
            steps.append(f"s_{name}.items[v] = Store<{kind}>::of({known[name]});")
        loop = ["#pragma unroll", f"for (int v = 0; v < {width}; ++v) {{", *indented((*steps, *after)), "}"]
        return [*loads, *loop, *(line for name in stored for line in self._store(name))]

    def _step(self, name: str, known: Mapping[str, str]) -> str:
        step, types = self.steps[name], self.problem.types
        if step.op_type == "RotateHalf":
            value, half = known[step.names[0]], f"c{len(self.inner.sizes) - 2}"
            return f"const {computed_type(types[name].dtype)} v_{name} = {half} == 0 ? -{value} : {value};"
        return f"const {computed_type(types[name].dtype)} v_{name} = {step_text(step, types, known)};"

    def _address(self, name: str) -> str:
        place = self.kernel.names.index(name)
        return total(self.base.get(name, ""), self.kernel.offset("c", "c", self.inner, place))

    def _load(self, name: str) -> tuple[list[str], str]:
        """Statements before the elements are gone through, and what gives one of them."""
        kernel, place = self.kernel, self.kernel.names.index(name)
        address, stride = self._address(name), self.inner.strides[place][-1]
        kind = stored_type(self.problem.types[name].dtype)
        if name[0] == "i":
            made, along = computed_type(self.problem.types[name].dtype), ""
            if stride:
                along = f" + {product('v', self._step_along(place))}"
            return [f"const Index l_{name} = {address};"], f"({made})(l_{name}{along})"
        pointer = f"p_x{name[1:]}"
        if stride == 0:
            return [f"const {kind} l_{name} = {pointer}[{address}];"], f"widen(l_{name})"
        if kernel.width > 1 and kernel.is_vector(place, self.inner, self.outer, kernel.width):
            return [f"const auto l_{name} = load<{kernel.width}>({pointer} + {address});"], f"widen(l_{name}.items[v])"
        step = self._step_along(place)
        return [f"const {kind}* l_{name} = {pointer} + {address};"], f"widen(l_{name}[{product('v', step)}])"

    def _store(self, name: str) -> list[str]:
        kernel, place = self.kernel, self.kernel.names.index(name)
        address = self._address(name)
        if kernel.width > 1 and kernel.is_vector(place, self.inner, self.outer, kernel.width):
            return [f"store(p_{name} + {address}, s_{name});"]
        item = f"p_{name}[{address} + {product('v', self._step_along(place))}] = s_{name}.items[v];"
        return ["#pragma unroll", f"for (int v = 0; v < {kernel.width}; ++v) {item}"]

    def _step_along(self, place: int) -> str:
        """From one element of a vector to the next."""
        name, strides = self.kernel.names[place], self.inner.strides[place]
        suffix = "" if self.inner.is_line(place) else f"_{len(strides) - 1}"
        return self.kernel.factor(f"c{name}{suffix}", strides[-1])


def once(problem: Problem, chosen: set[str], base: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Statements for values that are the same for a whole row, or for all: `chosen` in the order of steps."""
    lines: list[str] = []
    names: dict[str, str] = {}
    for name in (*(name for name in problem.types if name[0] == "x"), *(s.target for s in problem.expression.steps)):
        if name not in chosen:
            continue
        kind = computed_type(problem.types[name].dtype)
        step = next((step for step in problem.expression.steps if step.target == name), None)
        names[name] = f"u_{name}"
        text = (
            f"widen(p_{name}[{total(base.get(name, ''))}])" if step is None else step_text(step, problem.types, names)
        )
        lines.append(f"const {kind} u_{name} = {text};")
    return lines, names
