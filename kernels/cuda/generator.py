"""CUDA C++ of an expression: one kernel for elementwise chains, and one for chains around reductions of rows.

Without reductions each thread computes vectors of up to 16 bytes of the results. With them a group of threads has a
row (what is reduced together), each thread some vectors of it in registers; what a later stage needs of an earlier one
stays there. Rows that are too long for that are read again in each stage.

The text holds the expression and how tensors lie: which strides are 0 or 1, the length of vectors, threads of a row.
Sizes and other strides are arguments, so that few programs are compiled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..expression import DTYPES, Expression, Number, Operand, Step, parse
from ..operands import is_float
from .layouts import Dims, Layout, Shape, merged

THREADS = 256
"""Of a block, where rows do not ask for more."""
MOST_ROW_THREADS = 1024
REGISTERS = 64
"""Numbers of a row that a thread holds at most; half of them where a block has all the threads that it can have."""
MOST_VECTORS = 16
"""Of a thread: more make long programs."""
MOST_DIMS = 6
MOST_PARAMETERS = 120

_STORED = {
    **{"f16": "half_t", "bf16": "bfloat_t", "f32": "float", "f64": "double", "bool": "bool"},
    **{"i8": "signed char", "i16": "short", "i32": "int", "i64": "long long"},
    **{"u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned int", "u64": "unsigned long long"},
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_REDUCERS = {"ReduceMax": "Greatest", "ReduceMin": "Least"}
"""By class of `expressions.cuh`; others are sums."""


@dataclass(frozen=True)
class Launch:
    """A generated kernel and how to launch it.

    Attributes:
        source: CUDA C++, with a function `fused`.
        grid, block: blocks, and threads of each.
        numbers: what stands behind the pointers to operands and results among the arguments.
    """

    source: str
    grid: int
    block: int
    numbers: tuple[Any, ...]


@lru_cache(maxsize=4096)
def generate(
    lines: tuple[str, ...], operands: tuple[Layout, ...], results: tuple[Layout, ...], multiprocessors: int
) -> Launch | None:
    """The kernel of an expression for operands and results that lie so; None where it is nothing for this generator."""
    expression = parse(lines)
    types = expression.types([Operand(layout.shape, layout.dtype) for layout in operands])
    problem = _Problem.of(expression, types, operands, results)
    if problem is None or not problem.count:
        return None
    kernel = (_RowKernel if problem.reduced else _ElementKernel)(problem, multiprocessors)
    made = kernel.launch()
    return made if len(made.numbers) + len(operands) + len(results) <= MOST_PARAMETERS else None


@cache
def functions() -> str:
    """What the source of every kernel begins with."""
    return (Path(__file__).parent / "expressions.cuh").read_text(encoding="utf-8")


def _stored(dtype: "np.dtype[Any]") -> str:
    return _STORED[_NAMES[dtype]]


def _computed(dtype: "np.dtype[Any]") -> str:
    """The C type that values of a dtype are computed in."""
    return "float" if _NAMES[dtype] in ("f16", "bf16") else _stored(dtype)


@dataclass(frozen=True)
class _Problem:
    """An expression over one space of indices.

    Attributes:
        expression, types: what is computed.
        space: the shape that all values broadcast to.
        reduced: how many dims at its end reductions sum up.
        tensors: operands and results by name, in order.
        squeezed: results that are others without dims of size 1, and which.
        rotated: tensors that are operands with the halves of their rows in each other's place, and where these begin:
            the last dim of the space is two then.
    """

    expression: Expression
    types: Mapping[str, Operand]
    space: Shape
    reduced: int
    tensors: Mapping[str, Layout]
    squeezed: Mapping[str, str]
    rotated: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, expression: Expression, types: Mapping[str, Operand], operands: Sequence[Layout], results: Sequence[Layout]
    ) -> "_Problem | None":
        """The space of an expression, if it has one."""
        seen_as = _seen_as(expression)
        if seen_as is None:
            return None
        types = {**types, **{name: types[step.target] for name, step in seen_as.items()}}
        squeezed = {step.target: step.names[0] for step in expression.steps if step.op_type == "Squeeze"}
        if any(name in squeezed for step in expression.steps for name in step.names):
            return None
        shapes = [types[name].shape for name in types if name not in squeezed]
        space = np.broadcast_shapes(*shapes)
        axes = {step.attribute("axes") for step in expression.steps if step.operator.kind == "reduction"}
        chosen = {frozenset(found) for found in axes}
        if len(chosen) > 1 or not set(squeezed) <= set(expression.results):
            return None
        reduced = len(next(iter(chosen))) if chosen else 0
        if chosen and next(iter(chosen)) != frozenset(range(-reduced, 0)):
            return None
        tensors = {f"x{place}": layout for place, layout in enumerate(operands)}
        tensors.update((name, tensors[name].unsqueezed(step.attribute("axes"))) for name, step in seen_as.items())
        for name, layout in zip(expression.results, results, strict=True):
            seen = types[squeezed.get(name, name)].shape
            tensors[name] = Layout.contiguous(seen, layout.dtype, layout.alignment)
        made = cls(expression, types, space, reduced, tensors, squeezed)
        if not all(map(made.is_covered, expression.steps)):
            return None
        kinds = {step.operator.kind for step in expression.steps}
        if {"rotation", "index"} <= kinds or ("index" in kinds and reduced):
            return None
        return made._halved() if "rotation" in kinds else made._with_places() if "index" in kinds else made

    def _with_places(self) -> "_Problem":
        """The problem with places along an axis as tensors like others, which are their own offsets."""
        types, tensors = {**self.types}, {**self.tensors}
        steps: list[Step] = []
        for step in self.expression.steps:
            if step.op_type == "IsIndex":
                name, shape, dtype = f"i{len(steps)}", types[step.target].shape, types[step.names[0]].dtype
                axis = step.attribute("axis") + len(shape)
                strides = tuple(int(dim == axis) for dim in range(len(shape)))
                types[name], tensors[name] = Operand(shape, dtype), Layout(shape, dtype, strides)
                step = Step(step.target, "Equal", (*step.names, name))
            steps.append(step)
        return replace(self, expression=Expression(tuple(steps)), types=types, tensors=tensors)

    def _halved(self) -> "_Problem | None":
        """The problem with the halves of rows as a dim of their own, and rotated operands as tensors like others."""
        if self.reduced or self.space[-1] < 4:
            return None
        types, tensors = {**self.types}, {name: layout.halved() for name, layout in self.tensors.items()}
        rotated, steps = {}, []
        for step in self.expression.steps:
            if step.op_type == "RotateHalf":
                (name,) = step.names
                layout = self.tensors.get(name)
                if layout is None or name[0] != "x" or layout.shape[-1] != self.space[-1]:
                    return None
                own = f"r{name[1:]}"
                types[own], tensors[own] = types[name], layout.halved(rotated=True)
                rotated[own] = layout.shape[-1] // 2 * layout.strides[-1]
                step = Step(step.target, step.op_type, (own,))
            steps.append(step)
        space = (*self.space[:-1], 2, self.space[-1] // 2)
        return _Problem(Expression(tuple(steps)), types, space, 0, tensors, self.squeezed, rotated)

    def is_covered(self, step: Step) -> bool:
        """Whether a step is one that can be written: a result of the space or of a row, a reduction of floats."""
        if step.op_type == "Squeeze":
            return self.types[step.names[0]].shape == self.row_shape and bool(self.reduced)
        shape, dtype = self.types[step.target].shape, self.types[step.names[0]].dtype
        full = (1,) * (len(self.space) - len(shape)) + shape
        if step.target[0] == "y" and full != self.space and (not self.reduced or full != self.row_shape):
            return False
        if step.operator.kind == "reduction":
            return is_float(dtype) and self.types[step.names[0]].shape[-self.reduced :] == self.space[-self.reduced :]
        to = step.attribute("to") if step.op_type == "Cast" else ""
        return not (to in ("f16", "bf16") and _computed(dtype) == "double")

    @property
    def row_shape(self) -> Shape:
        """The shape of what has one element for each row."""
        return self.space[: len(self.space) - self.reduced] + (1,) * self.reduced

    @property
    def count(self) -> int:
        """How many indices there are."""
        return int(np.prod(self.space, dtype=object)) if self.space else 1

    def is_wide(self, name: str) -> bool:
        """Whether a value differs along a row; without reductions: anywhere."""
        shape = self.types[self.squeezed.get(name, name)].shape
        inner = shape[max(0, len(shape) - self.reduced) :] if self.reduced else shape
        return any(size != 1 for size in inner)

    def is_small_index(self) -> bool:
        """Whether 32 bits hold every offset."""
        return max((self.count, *(layout.extent() for layout in self.tensors.values()))) < 2**31 - 2**26


# -- text -------------------------------------------------------------------------------------------------------------


def _number(value: Any, kind: str) -> str:
    """A number as a literal of a computed C type."""
    if kind not in ("float", "double"):
        return f"(({kind}){int(value)}ll)" if int(value) < 2**63 else f"(({kind}){int(value)}ull)"
    number = float(np.float32(value)) if kind == "float" else float(value)
    if number != number:
        return f"({kind})not_a_number()"
    if np.isinf(number):
        return f"({'-' if number < 0 else ''}({kind})infinity())"
    return f"({number.hex()}{'f' if kind == 'float' else ''})"


def _step_text(step: Step, types: Mapping[str, Operand], names: Mapping[str, str]) -> str:
    """What a step computes, in C++: `names` are those of its operands."""
    dtype = types[step.names[-1]].dtype
    kind = _computed(dtype)
    given = [
        names[operand] if isinstance(operand, str) else _number(operand.of_dtype(dtype), kind)
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
        given += [str(value) if isinstance(value, int) else _number(value, kind) for value in settings]
    return f"op_{name}<{kind}>({', '.join(given)})"


def _seen_as(expression: Expression) -> dict[str, Step] | None:
    """Operands that are read with more dims, and the step that puts these in; None where others read them too."""
    found = {step.names[0]: step for step in expression.steps if step.op_type == "Unsqueeze"}
    readers = [name for step in expression.steps for name in step.names]
    is_plain = all(name[0] == "x" and readers.count(name) == 1 and found[name].target[0] == "t" for name in found)
    return found if is_plain else None


def _cast_text(value: str, kind: str, to: str) -> str:
    made = f"convert<{kind}, {_computed(DTYPES[to])}>({value})"
    return f"widen(Store<{_STORED[to]}>::of({made}))" if to in ("f16", "bf16") else made


class _Kernel:
    """What the two kernels share: parameters, offsets, loads and stores."""

    def __init__(self, problem: _Problem) -> None:
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
            return _product(index, self.factor(f"{prefix}{name}", strides[-1]))
        terms = [
            _product(f"{prefix}{dim}", self.factor(f"{prefix}{name}_{dim}", stride))
            for dim, stride in enumerate(strides)
            if stride
        ]
        return " + ".join(terms)

    def source(self, body: Iterable[str], threads: int) -> str:
        """The whole text."""
        # A row's results never lie where operands do; elements may be written over those they are made of.
        restrict = " __restrict__" if self.problem.reduced else ""
        pointers = [
            f"{'const ' if name[0] == 'x' else ''}{_stored(layout.dtype)}*{restrict} p_{name}"
            for name, layout in self.problem.tensors.items()
            if name[0] in "xy"
        ]
        numbers = [f"Index {name}" for name in self.parameters]
        return "\n".join(
            (
                functions(),
                f"typedef {self.index} Index;",
                f'extern "C" __global__ void __launch_bounds__({threads}) fused({", ".join((*pointers, *numbers))}) {{',
                *_indented(body),
                "}",
                "",
            )
        )

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The numbers among the arguments."""
        kind = np.int32 if self.index == "int" else np.int64
        return tuple(map(kind, self.parameters.values()))


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"  {line}" for line in lines)


def _product(index: str, factor: str) -> str:
    return index if factor == "1" else f"{index} * {factor}"


def _sum(*terms: str) -> str:
    return " + ".join(filter(None, terms)) or "0"


class _Wide:
    """Statements for one vector of values that differ along it: loads, steps, stores.

    Args:
        kernel: of which kernel.
        inner, outer: the dims.
        base: what stands before the offset in the vector's own dims, for each tensor.
    """

    def __init__(self, kernel: _Kernel, inner: Dims, outer: Dims | None, base: Mapping[str, str]) -> None:
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
                steps.append(f"const {_computed(self.problem.types[name].dtype)} v_{name} = {element};")
            known[name] = f"v_{name}"
        for name in stored:
            kind = _stored(self.problem.types[name].dtype)
            loads.append(f"Vector<{width}, {kind}> s_{name};")
            steps.append(f"s_{name}.items[v] = Store<{kind}>::of({known[name]});")
        loop = ["#pragma unroll", f"for (int v = 0; v < {width}; ++v) {{", *_indented((*steps, *after)), "}"]
        return [*loads, *loop, *(line for name in stored for line in self._store(name))]

    def _step(self, name: str, known: Mapping[str, str]) -> str:
        step, types = self.steps[name], self.problem.types
        if step.op_type == "RotateHalf":
            value, half = known[step.names[0]], f"c{len(self.inner.sizes) - 2}"
            return f"const {_computed(types[name].dtype)} v_{name} = {half} == 0 ? -{value} : {value};"
        return f"const {_computed(types[name].dtype)} v_{name} = {_step_text(step, types, known)};"

    def _address(self, name: str) -> str:
        place = self.kernel.names.index(name)
        return _sum(self.base.get(name, ""), self.kernel.offset("c", "c", self.inner, place))

    def _load(self, name: str) -> tuple[list[str], str]:
        """Statements before the elements are gone through, and what gives one of them."""
        kernel, place = self.kernel, self.kernel.names.index(name)
        address, stride = self._address(name), self.inner.strides[place][-1]
        kind = _stored(self.problem.types[name].dtype)
        if name[0] == "i":
            computed, along = _computed(self.problem.types[name].dtype), ""
            if stride:
                along = f" + {_product('v', self._step_along(place))}"
            return [f"const Index l_{name} = {address};"], f"({computed})(l_{name}{along})"
        pointer = f"p_x{name[1:]}"
        if stride == 0:
            return [f"const {kind} l_{name} = {pointer}[{address}];"], f"widen(l_{name})"
        if kernel.width > 1 and kernel.is_vector(place, self.inner, self.outer, kernel.width):
            return [f"const auto l_{name} = load<{kernel.width}>({pointer} + {address});"], f"widen(l_{name}.items[v])"
        step = self._step_along(place)
        return [f"const {kind}* l_{name} = {pointer} + {address};"], f"widen(l_{name}[{_product('v', step)}])"

    def _store(self, name: str) -> list[str]:
        kernel, place = self.kernel, self.kernel.names.index(name)
        address = self._address(name)
        if kernel.width > 1 and kernel.is_vector(place, self.inner, self.outer, kernel.width):
            return [f"store(p_{name} + {address}, s_{name});"]
        item = f"p_{name}[{address} + {_product('v', self._step_along(place))}] = s_{name}.items[v];"
        return ["#pragma unroll", f"for (int v = 0; v < {kernel.width}; ++v) {item}"]

    def _step_along(self, place: int) -> str:
        """From one element of a vector to the next."""
        name, strides = self.kernel.names[place], self.inner.strides[place]
        suffix = "" if self.inner.is_line(place) else f"_{len(strides) - 1}"
        return self.kernel.factor(f"c{name}{suffix}", strides[-1])


# -- without reductions -----------------------------------------------------------------------------------------------


class _ElementKernel(_Kernel):
    """Each thread computes vectors of the results, at distances of the whole grid."""

    def __init__(self, problem: _Problem, multiprocessors: int) -> None:
        super().__init__(problem)
        self.dims = merged(problem.space, [layout.within(problem.space) for layout in problem.tensors.values()])
        self.width = self.fitting_width(self.dims, None)
        self.multiprocessors = multiprocessors

    def launch(self) -> Launch:
        """See `generate`."""
        problem, steps = self.problem, self.problem.expression.steps
        count = self.argument("count", problem.count)
        begins = {name: self.argument(f"half_{name}", begin) for name, begin in problem.rotated.items()}
        wide = _Wide(self, self.dims, None, begins)
        once, names = _once(problem, {name for name in problem.types if not problem.is_wide(name)}, {})
        results = problem.expression.results
        inner = [name for name in results if problem.is_wide(name)]
        made = wide.closure(inner, ())
        alone = [name for name in results if not problem.is_wide(name)]
        loop = [*self.coordinates("c", "c", self.dims, self.width), *wide.lines(made, inner, names, ())]
        body = [
            *once,
            f"Index c = ((Index)blockIdx.x * {THREADS} + threadIdx.x) * {self.width};",
            *(
                f"if (c == 0) p_{name}[0] = Store<{_stored(problem.types[name].dtype)}>::of({names[name]});"
                for name in alone
            ),
        ]
        if inner:
            step = f"(Index)gridDim.x * {THREADS * self.width}"
            body += [f"for (; c < {count}; c += {step}) {{", *_indented(loop), "}"]
        assert steps
        blocks = -(-problem.count // (THREADS * self.width))
        grid = min(blocks, 16 * self.multiprocessors)
        return Launch(self.source(body, THREADS), grid, THREADS, self.numbers)


def _once(problem: _Problem, chosen: set[str], base: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Statements for values that are the same for a whole row, or for all: `chosen` in the order of steps."""
    lines: list[str] = []
    names: dict[str, str] = {}
    for name in (*(name for name in problem.types if name[0] == "x"), *(s.target for s in problem.expression.steps)):
        if name not in chosen:
            continue
        kind = _computed(problem.types[name].dtype)
        step = next((step for step in problem.expression.steps if step.target == name), None)
        names[name] = f"u_{name}"
        text = (
            f"widen(p_{name}[{_sum(base.get(name, ''))}])" if step is None else _step_text(step, problem.types, names)
        )
        lines.append(f"const {kind} u_{name} = {text};")
    return lines, names


# -- with reductions --------------------------------------------------------------------------------------------------


class _RowKernel(_Kernel):
    """A group of threads has a row; between two stages all of them know what was reduced."""

    def __init__(self, problem: _Problem, multiprocessors: int) -> None:
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
        return _Wide(self, self.inner, self.outer, {}).closure(self._needed(stage), held)

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
        threads, problem = self.threads, self.problem
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
        body += [*_indented(inside), "}"]
        blocks = -(-self.rows // rows_of_block)
        grid = min(blocks, self.multiprocessors * max(1, 2048 // block) * 4)
        assert problem.reduced
        return Launch(self.source(body, block), grid, block, self.numbers)

    def _stage_lines(self, base: Mapping[str, str]) -> list[str]:
        problem, wide = self.problem, _Wide(self, self.inner, self.outer, base)
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
                kind = _computed(problem.types[name].dtype)
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
                kind = _computed(self.problem.types[name].dtype)
                text = (
                    f"widen(p_{name}[{_sum(base.get(name, ''))}])"
                    if step is None
                    else _step_text(step, self.problem.types, names)
                )
                lines.append(f"const {kind} u_{name} = {text};")
                names[name] = f"u_{name}"
        for result in self.problem.expression.results:
            source = self.problem.squeezed.get(result, result)
            if source in chosen:
                kind = _stored(self.problem.types[result].dtype)
                guard = "lane == 0 && end" if self.threads <= 32 else "lane == 0"
                address = _sum(base.get(result, ""))
                lines.append(f"if ({guard}) p_{result}[{address}] = Store<{kind}>::of({names[source]});")
        return lines

    def _loop(self, lines: Sequence[str]) -> list[str]:
        """Over the vectors of a thread."""
        inside = [*self.coordinates("c", "c", self.inner, self.width), *lines]
        if not self.holds:
            head = f"for (Index c = (Index)lane * {self.width}; c < end; c += {self.threads * self.width}) {{"
            return [head, *_indented(inside), "}"]
        over = ["#pragma unroll", f"for (int e = 0; e < {self.vectors}; ++e) {{"]
        column = f"  const Index c = (Index)(e * {self.threads} + lane) * {self.width};"
        return [*over, column, "  if (c < end) {", *_indented(_indented(inside)), "  }", "}"]

    def _kind(self, step: Step) -> str:
        return _computed(self.problem.types[step.target].dtype)

    def _start(self, step: Step) -> str:
        kind = self._kind(step)
        first = {"ReduceMax": -np.inf, "ReduceMin": np.inf}.get(step.op_type, 0.0)
        return f"{kind} r_{step.target} = {_number(first, kind)};"

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
