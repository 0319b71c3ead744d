"""Random programs of nodes with odd attributes: what ONNX allows and models rarely have.

Each node is one that proves a rule (tests/ops/samples.py), changed: attributes of its operator set to what they may be,
left out or counted from the other end; dims of another size, 1 and 0 among them; other element types; optional operands
left out, constants given as inputs; in any operator set that has the operator, operands as the attributes that they were
there. ONNX Runtime says whether the node means something: what it refuses is not drawn.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
import onnx
from onnx import helper

from .ops.rule_proof import NEWEST, Array, Constant, Sample
from .ops.samples import IN_FILES
from .random_graphs import F32, F64, I32, I64, GraphMaker, Tensor, UnfitError
from .random_programs import Program, program_of
from .random_samples import CLASSIC, MICROSOFT, MOVES, ROUNDING, TRAINING, plain_attributes

OPSETS = (*range(7, NEWEST + 1), 13, 17, 18, 21, 22)
MOST_NODES = 6

FIXED = frozenset({("", "MaxUnpool"), ("com.microsoft", "SkipSimplifiedLayerNormalization")})
"""Operators of which the operands must fit in ways that ONNX Runtime does not check."""
STEPS = frozenset(
    {
        *("ArgMax", "ArgMin", "BitShift", "Cast", "CastLike", "Ceil", "DynamicQuantizeLinear", "Equal", "Floor"),
        *("Greater", "GreaterOrEqual", "Hardmax", "IsInf", "IsNaN", "Less", "LessOrEqual", "Mod", "QuantizeLinear"),
        *("Round", "Shrink", "Sign", "ThresholdedRelu", "TopK", "MaxRoiPool", "RoiAlign", "CropAndResize", "Unique"),
        *("GridSample", "DeformConv", "MaxPool", "Resize", "Upsample", "Binarizer", "OneHotEncoder", "Imputer"),
    }
)
"""They jump, or read numbers as places: nothing that was rounded goes in."""


def is_step(op_type: str) -> bool:
    """Whether rounding errors of operands may become large differences of results."""
    return op_type in STEPS or op_type.startswith(("QLinear", "Tree", "SVM", "Linear", "MatMulInteger", "ConvInteger"))


# -- attributes -------------------------------------------------------------------------------------------------------


@dataclass
class _Node:
    """A node in the making."""

    op: str
    domain: str
    version: int
    operands: list[Array | Constant | None]
    attributes: dict[str, Any]
    results: int

    def array(self, index: int) -> Array | None:
        """The numbers of an operand."""
        found = self.operands[index] if index < len(self.operands) else None
        return found.array if isinstance(found, Constant) else found

    @property
    def rank(self) -> int:
        """Of the first operand."""
        found = self.array(0)
        return 0 if found is None else found.ndim


def _flag(random: Random, node: _Node) -> int:
    return random.randint(0, 1)


def _axis(random: Random, node: _Node) -> int:
    if not node.rank:
        raise UnfitError
    return random.randint(-node.rank, node.rank - 1)


def _axes(random: Random, node: _Node) -> list[int]:
    chosen = random.sample(range(node.rank), random.randint(0, node.rank))
    return [axis - node.rank if random.random() < 0.5 else axis for axis in chosen]


def _permutation(random: Random, node: _Node) -> list[int]:
    return random.sample(range(node.rank), node.rank)


def _steps(random: Random, node: _Node) -> list[int]:
    return [random.choice([1, 1, 2, 3]) for _ in range(max(node.rank - 2, 0))]


def _pads(random: Random, node: _Node) -> list[int]:
    if node.op == "Pad":
        return [random.choice([0, 0, 1, 2, -1]) for _ in range(2 * node.rank)]
    return [random.choice([0, 0, 1, 1, 2]) for _ in range(2 * max(node.rank - 2, 0))]


def _kernel(random: Random, node: _Node) -> list[int]:
    return [random.choice([1, 1, 2, 3]) for _ in range(max(node.rank - 2, 0))]


def _modes(random: Random, node: _Node) -> str:
    known = {
        "Resize": ["nearest", "linear", "cubic"],
        "Upsample": ["nearest", "linear"],
        "Pad": ["constant", "edge", "reflect", "wrap"],
        "GridSample": ["linear", "nearest", "cubic", "bilinear", "bicubic"],
        "RoiAlign": ["avg", "max"],
        "DepthToSpace": ["DCR", "CRD"],
    }
    return random.choice(known.get(node.op, [""])) or _unfit()


def _unfit() -> Any:
    raise UnfitError


def _one_of(*choices: Any) -> Callable[[Random, _Node], Any]:
    return lambda random, node: random.choice(choices)


def _reduction(random: Random, node: _Node) -> str:
    is_loss = node.op.endswith("Loss")
    return random.choice(["none", "mean", "sum"] if is_loss else ["none", "add", "mul", "max", "min"])


Draw = Callable[[Random, _Node], Any]
ATTRIBUTES: dict[str, Draw] = {
    **dict.fromkeys(
        (
            *("keepdims", "ceil_mode", "count_include_pad", "storage_order", "select_last_index", "largest"),
            *("exclusive", "reverse", "noop_with_empty_axes", "allowzero", "transA", "transB", "align_corners"),
            *("exclude_outside", "antialias", "fmod", "upper", "saturate", "onesided", "inverse", "periodic"),
            *("linear_before_reset", "unidirectional", "is_causal", "interleaved", "detect_negative"),
            *("detect_positive", "normalize_variance", "across_channels", "training_mode", "time_axis", "layout"),
        ),
        _flag,
    ),
    "axis": _axis,
    "axes": _axes,
    "perm": _permutation,
    "strides": _steps,
    "dilations": _steps,
    "kernel_shape": _kernel,
    "pads": _pads,
    "auto_pad": _one_of("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    "mode": _modes,
    "reduction": _reduction,
    "p": _one_of(1, 2, 3),
    "batch_dims": _one_of(0, 1),
    "batch_axis": _one_of(0, 1),
    "blocksize": _one_of(1, 2),
    "alpha": _one_of(0.0, -0.5, 1.5),
    "beta": _one_of(0.0, 0.5, -1.0),
    "gamma": _one_of(0.5, 1.5),
    "lambd": _one_of(0.0, 0.75),
    "bias": _one_of(0.0, 0.5, 2.0),
    "size": _one_of(1, 2, 3, 5),
    "epsilon": _one_of(0.0, 1e-3, 0.5),
    "momentum": _one_of(0.0, 0.3, 1.0),
    "approximate": _one_of("none", "tanh"),
    "to": _one_of(1, 11, 10, 6, 7, 9, 2, 3, 12, 13),
    "direction": _one_of("LEFT", "RIGHT", "forward", "reverse", "bidirectional"),
    "nearest_mode": _one_of("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
    "coordinate_transformation_mode": _one_of(
        "half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", "output_half_pixel"
    ),
    "keep_aspect_ratio_policy": _one_of("stretch", "not_larger", "not_smaller"),
    "cubic_coeff_a": _one_of(-0.5, -0.75),
    "padding_mode": _one_of("zeros", "border", "reflection"),
    "output_padding": _steps,
    "clip": _one_of(0.5, 3.0),
    "scale": _one_of(0.5, 1.0),
    "softcap": _one_of(0.0, 1.5),
    "stash_type": _one_of(1, 11),
    "value": _one_of(0.0, 1.5),
    "extrapolation_value": _one_of(0.0, 2.0),
    "start": _one_of(0, 1, -1, -2),
    "end": _one_of(0, 1, -1, 5),
    "sampling_ratio": _one_of(0, 1, 2),
    "spatial_scale": _one_of(0.5, 1.0),
    "ignore_index": _one_of(0, 1, -1),
    "kernel_size": _one_of(1, 2),
    "output_shape": lambda random, node: [random.randint(3, 12) for _ in range(max(node.rank - 2, 0))],
}
"""Attribute to what it may be; an attribute that is not here stays as the sample has it."""


# -- changing a node --------------------------------------------------------------------------------------------------


MEANINGLESS: frozenset[tuple[str, str, float]] = frozenset({("Celu", "alpha", 0.0)})
"""What an operator divides by."""


def _change_attributes(random: Random, node: _Node, known: Mapping[str, Any]) -> None:
    share = random.choice([0.0, 0.2, 0.5])
    for name in sorted(known):
        if name in ATTRIBUTES and random.random() < share:
            value = ATTRIBUTES[name](random, node)
            if not isinstance(value, float) or (node.op, name, value) not in MEANINGLESS:
                node.attributes[name] = value
        elif name in node.attributes and not known[name].required and random.random() < 0.05:
            del node.attributes[name]


SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 0)


def _change_sizes(random: Random, node: _Node) -> None:
    """Let every dim of one size be of another, in all operands that are no constants."""
    arrays = [found for found in node.operands if isinstance(found, np.ndarray)]
    sizes = sorted({size for array in arrays for size in array.shape})
    if not sizes:
        return
    old, new = random.choice(sizes), random.choice(SIZES)
    if new == 0 and random.random() < 0.7:
        return
    for index, found in enumerate(node.operands):
        if isinstance(found, np.ndarray) and found.dtype != object:
            for dim, size in enumerate(found.shape):
                if size == old and (size or not new):
                    found = np.take(found, np.arange(new) % max(size, 1), axis=dim)
            node.operands[index] = found


def _change_types(random: Random, node: _Node) -> None:
    """All operands of float32 in another type."""
    dtype = random.choice([F64, F64, np.dtype("float16"), I32, I64, np.dtype("int8"), np.dtype("uint8")])
    for index, found in enumerate(node.operands):
        if isinstance(found, np.ndarray) and found.dtype == F32:
            numbers = np.round(found * 4) if dtype.kind in "iu" else found
            node.operands[index] = np.abs(numbers).astype(dtype) if dtype.kind == "u" else numbers.astype(dtype)


def _leave_out(random: Random, node: _Node, schema: onnx.defs.OpSchema | None) -> None:
    least = 1 if schema is None else max(schema.min_input, 1)
    for index in range(least, len(node.operands)):
        optional = schema is None or (
            index < len(schema.inputs)
            and schema.inputs[index].option == onnx.defs.OpSchema.FormalParameterOption.Optional
        )
        if optional and random.random() < 0.5:
            node.operands[index] = None
    while node.operands and node.operands[-1] is None:
        node.operands.pop()


def _let_constants_come_in(random: Random, node: _Node) -> None:
    """As inputs, so that nobody knows their numbers."""
    for index, found in enumerate(node.operands):
        if isinstance(found, Constant) and random.random() < 0.5:
            node.operands[index] = found.array


def _with_attributes_of_old(node: _Node, newest: onnx.defs.OpSchema, schema: onnx.defs.OpSchema) -> None:
    """Operands that were attributes in an older operator set."""
    for index, formal in reversed(list(enumerate(newest.inputs))):
        if index >= len(node.operands) or formal.name not in schema.attributes or index < len(schema.inputs):
            continue
        array = node.array(index)
        if array is not None:
            node.attributes[formal.name] = array.tolist() if array.ndim else array.item()
        del node.operands[index]


def changed(random: Random, sample: Sample, version: int) -> _Node:
    """A sample's node with something odd.

    Raises:
        UnfitError: the version lacks the operator, or it cannot be said there.
    """
    operands = [operand.copy() if isinstance(operand, np.ndarray) else operand for operand in sample.operands]
    node = _Node(sample.op, sample.domain, version, operands, plain_attributes(sample), sample.results)
    schema = _schema(sample.op, sample.domain, version)
    if onnx.defs.has(sample.op, sample.domain):
        if schema is None or schema.deprecated:
            raise UnfitError
        newest = onnx.defs.get_schema(sample.op, sample.version, sample.domain)
        if newest.since_version != schema.since_version:
            _with_attributes_of_old(node, newest, schema)
    known = {} if schema is None else dict(schema.attributes)
    if any(name not in known for name in node.attributes) and schema is not None:
        node.attributes = {name: value for name, value in node.attributes.items() if name in known}
    for change, share in (
        (lambda: _change_sizes(random, node), 0.0 if (node.domain, node.op) in FIXED else 0.5),
        (lambda: _change_sizes(random, node), 0.0 if (node.domain, node.op) in FIXED else 0.2),
        (lambda: _change_types(random, node), 0.15),
        (lambda: _leave_out(random, node, schema), 0.15),
        (lambda: _let_constants_come_in(random, node), 0.1),
        (lambda: _change_attributes(random, node, known), 1.0),
    ):
        if random.random() < share:
            change()
    return node


def _schema(op: str, domain: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None


# -- programs ---------------------------------------------------------------------------------------------------------


@cache
def _by_operator() -> Mapping[tuple[str, str], Sequence[Sample]]:
    found: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in IN_FILES:
        found[sample.domain, sample.op].append(sample)
    return found


def draw(seed: int | str) -> Program | None:
    """A program; None where nothing that was drawn means something to ONNX Runtime."""
    random = Random(f"odd/{seed}")
    opsets = {"": random.choice(OPSETS), CLASSIC: random.choice([1, 2, 3, 5]), MICROSOFT: 1, TRAINING: 1}
    maker = GraphMaker(random, opsets, "ort")
    wanted = random.randint(1, MOST_NODES)
    for _ in range(4 * wanted):
        if len(maker.nodes) >= wanted:
            break
        operator = random.choice(sorted(_by_operator()))
        sample = random.choice(_by_operator()[operator])
        maker.attempt(lambda maker, sample=sample: _plant(maker, sample))  # type: ignore[misc]
    return program_of(maker) if maker.nodes else None


def _plant(m: GraphMaker, sample: Sample) -> None:
    node = changed(m.random, sample, m.opsets[sample.domain])
    operands = [_operand(m, operand, node) for operand in node.operands]
    names = ["" if found is None else found.name for found in operands]
    while names and not names[-1]:
        names.pop()
    if any(isinstance(value, list) and not value for value in node.attributes.values()):
        raise UnfitError  # onnx's helper cannot tell of what the list is
    proto = helper.make_node(node.op, names, m.new_names(node.results), domain=node.domain, **node.attributes)
    m.rounds |= sample.op.startswith(ROUNDING) or _resizes_integers(node)
    made = m.append(proto, [found for found in operands if found is not None], is_limited=False)
    if any(
        found.array.dtype.kind == "f" and np.abs(found.array[np.isfinite(found.array)]).max(initial=0) > 1e4
        for found in made
    ):
        raise UnfitError


def _resizes_integers(node: _Node) -> bool:
    """Of weighted sums of integers ONNX Runtime leaves away what single precision makes of their fractions."""
    data = node.array(0)
    return node.op in ("Resize", "Upsample") and data is not None and data.dtype.kind in "iu"


def _operand(m: GraphMaker, operand: Array | Constant | None, node: _Node) -> Tensor | None:
    if operand is None:
        return None
    if isinstance(operand, Constant):
        return m.const(operand.array, operand.array.dtype)
    if m.number(0, 1) and operand.dtype.kind in "fb" and not is_step(node.op):
        known = [
            found
            for found in m.tensors
            if found.dtype == operand.dtype and found.array.size == operand.size and _lies_within(found.array, operand)
        ]
        if known:
            found = m.one_of(known)
            if found.shape == operand.shape:
                return found  # type: ignore[no-any-return]
            return m.node("Reshape", [found, m.const(operand.shape)])[0]
    if m.number(0, 3) == 0 and operand.size:
        move = m.one_of(MOVES)
        if m.attempt(lambda maker: move(maker, operand)):
            return m.tensors[-1]
    return m.given(operand, m.number(0, 2) == 0)


def _lies_within(array: Array, other: Array) -> bool:
    """Whether all numbers of an array are between those of another."""
    if not array.size or array.dtype.kind == "b":
        return True
    return bool(array.min() >= other.min() and array.max() <= other.max())
