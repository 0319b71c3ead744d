"""An expression as the generator sees it: one space of indices, and tensors that lie somewhere in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..expression import DTYPES, Expression, Operand, Step
from ..operands import is_float
from .layouts import Layout, Shape

STORED = {
    **{"f16": "half_t", "bf16": "bfloat_t", "f32": "float", "f64": "double", "bool": "bool"},
    **{"i8": "signed char", "i16": "short", "i32": "int", "i64": "long long"},
    **{"u8": "unsigned char", "u16": "unsigned short", "u32": "unsigned int", "u64": "unsigned long long"},
}
"""C types of elements in memory, by the names of dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def stored_type(dtype: "np.dtype[Any]") -> str:
    """The C type that elements of a dtype have in memory."""
    return STORED[NAMES[dtype]]


def computed_type(dtype: "np.dtype[Any]") -> str:
    """The C type that values of a dtype are computed in."""
    return "float" if NAMES[dtype] in ("f16", "bf16") else stored_type(dtype)


@dataclass(frozen=True)
class Problem:
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
    ) -> "Problem | None":
        """The space of an expression, if it has one."""
        unsqueezed = seen_as(expression)
        if unsqueezed is None:
            return None
        types = {**types, **{name: types[step.target] for name, step in unsqueezed.items()}}
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
        tensors.update((name, tensors[name].unsqueezed(step.attribute("axes"))) for name, step in unsqueezed.items())
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

    def _with_places(self) -> "Problem":
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

    def _halved(self) -> "Problem | None":
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
        return Problem(Expression(tuple(steps)), types, space, 0, tensors, self.squeezed, rotated)

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
        return not (to in ("f16", "bf16") and computed_type(dtype) == "double")

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


def seen_as(expression: Expression) -> dict[str, Step] | None:
    """Operands that are read with more dims, and the step that puts these in; None where others read them too."""
    found = {step.names[0]: step for step in expression.steps if step.op_type == "Unsqueeze"}
    readers = [name for step in expression.steps for name in step.names]
    is_plain = all(name[0] == "x" and readers.count(name) == 1 and found[name].target[0] == "t" for name in found)
    return found if is_plain else None
