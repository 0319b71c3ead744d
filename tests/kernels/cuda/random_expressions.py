"""Random expressions with their operands: shapes that broadcast, strides of views, rows of odd lengths."""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from irpar.kernels import lookup
from irpar.kernels.cuda.layouts import Layout
from irpar.kernels.expression_reading import parse

Array = np.ndarray[Any, Any]
FLOATS = tuple(map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)))
TOLERANCE = dict(zip(FLOATS, (1e-4, 4e-3, 3e-2, 1e-11), strict=True))
UNARY = ("Tanh", "Sigmoid", "Relu", "Gelu", "Neg", "Abs", "HardSwish", "Softplus", "Erf")
BINARY = ("Add", "Sub", "Mul", "Max", "Min")
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare")
SHAPES = ((7,), (64,), (3, 5), (4, 33), (2, 3, 40), (5, 1, 16), (2, 129), (70, 8), (3, 4, 5, 6), (1, 1030), (2, 2500))


@dataclass(frozen=True)
class Example:
    """An expression and arrays for it."""

    lines: tuple[str, ...]
    operands: tuple[Array, ...]

    def expected(self) -> tuple[Array, ...]:
        """The results in float64, of operands of smaller floats exactly."""
        wide = [x.astype(np.float64) if x.dtype in FLOATS else x for x in self.operands]
        return self._computed(wide)

    def computed(self) -> tuple[Array, ...]:
        """The results of the kernel that computes step by step."""
        return self._computed(list(self.operands))

    def _computed(self, operands: list[Array]) -> tuple[Array, ...]:
        kernel = lookup("irpar", "Fused", 1)
        assert kernel is not None
        return kernel(np, operands, {"expression": self.lines}, len(parse(self.lines).results))


def layout(array: Array) -> Layout:
    """How an array lies."""
    address = array.ctypes.data
    strides = tuple(stride // array.itemsize for stride in array.strides)
    return Layout(array.shape, array.dtype, strides, min(16, address & -address))


def draw(random: np.random.Generator) -> Example:
    """A random expression; in half of them there are reductions."""
    dtype = FLOATS[random.integers(len(FLOATS))]
    shape = SHAPES[random.integers(len(SHAPES))]
    reduced = int(random.integers(1, len(shape) + 1)) if random.random() < 0.5 else 0
    count = int(random.integers(1, 4))
    operands = [_strided(random, shape, dtype)]
    operands += [_strided(random, _broadcast(random, shape), dtype) for _ in range(count - 1)]
    wide, rows = [f"x{place}" for place in range(count)], []
    lines = []

    def add(op_type: str, *names: str, settings: str = "", known: list[str]) -> None:
        lines.append(f"t{len(lines)} = {op_type}({', '.join(names)}{settings})")
        known.append(f"t{len(lines) - 1}")

    add("Mul", "x0", "0.5", known=wide)
    wide.remove("x0")
    for _ in range(int(random.integers(2, 9))):
        choice = random.random()
        one = wide[random.integers(len(wide))]
        if choice < 0.3:
            add(UNARY[random.integers(len(UNARY))], one, known=wide)
        elif choice < 0.5 and reduced:
            axes = ", ".join(str(axis) for axis in range(-reduced, 0))
            full = [name for name in wide if name[0] == "t"]
            add("Add", "t0", full[random.integers(len(full))], known=wide)
            name = wide[-1]
            add(REDUCTIONS[random.integers(len(REDUCTIONS))], name, settings=f", axes=[{axes}]", known=rows)
            if random.random() < 0.5:
                add("Tanh", rows[-1], known=rows)
            full = [name for name in wide if name[0] == "t"]
            add("Add", full[-1], rows[-1], known=wide)
        else:
            other = "0.25" if choice > 0.9 else wide[random.integers(len(wide))]
            add(BINARY[random.integers(len(BINARY))], "t0" if one[0] == "x" else one, other, known=wide)
    last = [name for name in wide if name[0] == "t"][-1]
    lines.append(f"y0 = Add(t0, {last})")
    lines.append("y1 = Tanh(y0)" if len(lines) % 2 else "y1 = Neg(y0)")
    if rows:
        lines.append(f"y2 = Abs({rows[-1]})")
    read = sorted(
        {
            int(name[1:])
            for line in lines
            for name in line.replace("(", " ").replace(",", " ").replace(")", " ").split()
            if name[0] == "x"
        }
    )
    for new, old in enumerate(read):
        lines = [line.replace(f"x{old}", f"x{new}") for line in lines]
    return Example(tuple(lines), tuple(operands[place] for place in read))


def _broadcast(random: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = tuple(size if random.random() < 0.6 else 1 for size in shape)
    return kept[int(random.integers(0, len(shape))) :]


def _strided(random: np.random.Generator, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    """Numbers in memory as they come, of a transposed array, of every other element, or not aligned."""
    kind = random.integers(5)
    if kind == 1 and len(shape) > 1:
        return np.swapaxes(_strided_plain(random, np.swapaxes(np.empty(shape), -1, -2).shape, dtype), -1, -2)
    if kind == 2:
        return _strided_plain(random, (*shape[:-1], 2 * shape[-1]), dtype)[..., ::2]
    if kind == 3:
        return _strided_plain(random, (*shape[:-1], shape[-1] + 1), dtype)[..., 1:]
    return _strided_plain(random, shape, dtype)


def _strided_plain(random: np.random.Generator, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> Array:
    return np.asarray(random.normal(size=shape)).astype(dtype)
