"""Calls of CUDA kernels, with fresh numbers: odd sizes, strides, arrays that begin anywhere."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from irpar.kernels import lookup
from irpar.kernels.cuda import lookup as cuda_lookup
from irpar.kernels.cuda.expression_problem import NAMES
from irpar.kernels.cuda.registry import CudaKernel
from irpar.kernels.faults import FAULTS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
UNIT = {
    np.dtype(np.float64): 2.0**-40,
    np.dtype(np.float32): 2.0**-20,
    np.dtype(np.float16): 2.0**-10,
    BFLOAT16: 2.0**-7,
}


@dataclass(frozen=True)
class Case:
    """A call.

    Attributes:
        op_type, version: the operator.
        operands: the arrays, any of which may be of any strides.
        attributes: of the node.
        n_outputs: how many results it has.
        is_exact: whether results must be the same bits as the generic kernel's.
        domain: of the operator.
    """

    op_type: str
    version: int
    operands: Sequence[Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    n_outputs: int = 1
    is_exact: bool = True
    domain: str = ""

    def __str__(self) -> str:
        shapes = "-".join("x".join(map(str, x.shape)) or "one" for x in self.operands if x is not None)
        return f"{self.op_type}-{self.operands[0].dtype}-{shapes}"

    @property
    def kernel(self) -> CudaKernel:
        """What is tried."""
        found = cuda_lookup(self.domain, self.op_type, self.version)
        assert found is not None
        return found

    def expected(self) -> tuple[np.ndarray, ...]:
        """What the generic kernel gives, floats in double precision where not exact."""
        operands = self.operands
        if not self.is_exact:
            operands = [x if x is None or x.dtype not in UNIT else x.astype(np.float64) for x in operands]
        return self._generic(operands)

    def dtypes(self) -> "tuple[np.dtype[Any], ...]":
        """Those of the results."""
        return tuple(result.dtype for result in self._generic(self.operands))

    def _generic(self, operands: Sequence[Any]) -> tuple[np.ndarray, ...]:
        generic = lookup(self.domain, self.op_type, self.version)
        assert generic is not None
        return generic(np, operands, self.attributes, self.n_outputs)


def run(
    case: Case, gpu: Any, to_device: Callable[[Any], Any], to_host: Callable[[Any], np.ndarray], outs: Any = None
) -> tuple[np.ndarray, ...] | None:
    """The results of a case; `outs`: where they are to go."""
    host = case.kernel.signature.host
    operands = [x if x is None or place in host else to_device(x) for place, x in enumerate(case.operands)]
    word = to_device(np.zeros(1, bool))
    with FAULTS.noted(lambda problem: word):
        results = case.kernel(gpu, operands, case.attributes, case.n_outputs, outs)
    assert not to_host(word)[0]
    return None if results is None else tuple(to_host(result) for result in results)


def check(case: Case, results: Sequence[np.ndarray]) -> None:
    """Compare with what the generic kernel gives."""
    for found, expected in zip(results, case.expected(), strict=True):
        assert found.shape == expected.shape
        if case.is_exact:
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found.tobytes(), expected.tobytes())
        else:
            unit = UNIT[found.dtype]
            np.testing.assert_allclose(found.astype(np.float64), expected, rtol=4 * unit, atol=4 * unit)


def shifted(x: np.ndarray, elements: int = 1) -> np.ndarray:
    """The same numbers, some elements behind where memory begins."""
    memory = np.zeros(x.size + elements + 1, x.dtype)
    made = memory[elements : elements + x.size].reshape(x.shape)
    made[...] = x
    return made


def gathers(numbers: np.random.Generator) -> list[Case]:
    """Rows of tables."""
    found = []
    for dtype in (np.uint8, np.float16, np.float32, np.float64):
        table = (numbers.standard_normal((11, 24)) * 50).astype(dtype)
        for place in (np.int32, np.int64):
            ids = numbers.integers(-11, 11, (3, 5)).astype(place)
            found.append(Case("Gather", 13, (table, ids)))
            found.append(Case("Gather", 13, (shifted(table), ids[::2].T)))
            found.append(Case("Gather", 13, (table, ids % 11), {"axis": 1}))
        cube = (numbers.standard_normal((4, 6, 5)) * 50).astype(dtype)
        found.append(Case("Gather", 13, (cube, ids % 6), {"axis": 1}))
        found.append(Case("Gather", 13, (cube[:, 1:4, :], np.array([-1, 0, 2])), {"axis": -2}))
        found.append(Case("Gather", 13, (cube[:, 3:], np.array(1)), {"axis": 1}))
        found.append(Case("Gather", 13, (cube, np.zeros((0, 2), np.int64))))
    return found


def scatters(numbers: np.random.Generator) -> list[Case]:
    """Rows added to rows, some of them again and again."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        for rows, inner, count in ((7, (3,), 40), (50, (2, 130), 9), (5, (2051,), 3), (6, (), 1030)):
            x = numbers.standard_normal((rows, *inner)).astype(dtype)
            ids = numbers.integers(-rows, rows, (count, 1))
            updates = numbers.standard_normal((count, *inner)).astype(dtype)
            found.append(Case("ScatterND", 18, (x, ids, updates), {"reduction": "add"}, is_exact=False))
        if dtype.itemsize < 8:
            ids = numbers.integers(-50, 50, (3, 400)).astype(np.int32)
            updates = numbers.standard_normal((3, 400, 2, 130)).astype(np.float32)
            facts = {"length": 50, "to": NAMES[dtype]}
            x = numbers.standard_normal((50, 2, 130)).astype(dtype)
            for operands in ((ids, updates), (ids, updates, x)):
                found.append(Case("AddRows", 1, operands, facts, is_exact=dtype.itemsize == 2, domain="irpar"))
        zeros = np.broadcast_to(np.zeros((), dtype), (9, 4))
        ids = numbers.integers(0, 9, (5, 2, 1)).astype(np.int32)
        turned = numbers.standard_normal((2, 5, 4)).astype(dtype).transpose(1, 0, 2)
        found.append(Case("ScatterND", 18, (zeros, ids, turned), {"reduction": "add"}, is_exact=False))
    return found


def one_hots(numbers: np.random.Generator) -> list[Case]:
    """Labels as rows."""
    found = []
    for dtype in (np.int64, np.float32, np.float16):
        ends = np.array([-1, 3]).astype(dtype)
        for axis in (-1, 0, 1):
            ids = numbers.integers(-9, 10, (5, 7)).astype(np.int32 if axis else np.int64)
            found.append(Case("OneHot", 11, (ids, np.array(8), ends), {"axis": axis}))
    return found


def losses(numbers: np.random.Generator) -> list[Case]:
    """Cross-entropy of few and many classes, weighted, with labels that do not count."""
    found = []
    for dtype in FLOATS:
        for rows, classes in ((5, 3), (3, 2500), (600, 17)):
            scores = (3 * numbers.standard_normal((rows, classes))).astype(dtype)
            labels = numbers.integers(0, classes, rows).astype(np.int32 if rows == 5 else np.int64)
            weights = numbers.random(classes).astype(dtype)
            for reduction in ("none", "sum", "mean"):
                some = {"reduction": reduction, "ignore_index": int(labels[0])}
                operator = ("SoftmaxCrossEntropyLoss", 13)
                found.append(Case(*operator, (scores, labels), {"reduction": reduction}, 2, is_exact=False))
                found.append(Case(*operator, (scores, labels, weights), some, 1, is_exact=False))
        for shape in ((2, 33, 70), (3, 5, 2, 9), (2, 1, 40)):  # batch, places, classes
            scores = (3 * numbers.standard_normal(shape)).astype(dtype)
            labels = numbers.integers(0, shape[-1], shape[:-1])
            turned = shifted(scores).transpose(0, len(shape) - 1, *range(1, len(shape) - 1))
            found.append(Case(*operator, (turned, labels), {"ignore_index": 3}, 2, is_exact=False))
            found.append(Case(*operator, (turned, labels), {"reduction": "none"}, 2, is_exact=False))
        scores = np.full((4, 6), -np.inf, dtype)
        scores[:, 2] = 60000
        found.append(Case("SoftmaxCrossEntropyLoss", 13, (scores, np.full(4, 2)), {}, 1, is_exact=False))
    return found


def cross_entropies(numbers: np.random.Generator) -> list[Case]:
    """Both directions, of rows that begin anywhere and rows that lie apart, into rows that are longer."""
    found = []
    for dtype in FLOATS:
        for shape, gap in (((5, 3), 0), ((2, 3, 2501), 0), ((3, 2, 2051), 5), ((2, 17), 7)):
            scores = (3 * numbers.standard_normal((*shape[:-1], shape[-1] + gap))).astype(dtype)
            scores = shifted(scores, 3 if gap else 8)[..., : shape[-1]]
            labels = numbers.integers(0, shape[-1], shape[:-1]).astype(np.int32 if gap else np.int64)
            weights = numbers.random(shape[-1]).astype(np.float32)
            some = {"ignore_index": int(labels.flat[0])}
            operator = {"domain": "irpar", "is_exact": False}
            forward = Case("CrossEntropyForward", 1, (scores, labels), {}, 2, **operator)
            found += [forward, Case("CrossEntropyForward", 1, (scores, labels, weights), some, 2, **operator)]
            norms = forward.expected()[1].astype(np.float32)
            ends = np.where(numbers.random(labels.shape) < 0.3, labels - shape[-1], labels)
            factors = numbers.standard_normal((labels.shape[0], 1, *labels.shape[1:])).astype(np.float32)
            even = {"length": -(-shape[-1] // 8) * 8}
            found.append(Case("CrossEntropyGradient", 1, (scores, ends, norms, factors), {}, **operator))
            found.append(Case("CrossEntropyGradient", 1, (scores, labels, norms, factors[:1]), even, **operator))
    return found


def joined_heads(numbers: np.random.Generator) -> list[Case]:
    """Heads that lie by places, by heads, and anywhere."""
    found = []
    for dtype in (np.uint8, *FLOATS):
        for size in (8, 5):
            for counts in ((3, 1, 2), (4,), (1, 1, 1, 1)):
                drawn = [(50 * numbers.standard_normal((2, count, 7, size))).astype(dtype) for count in counts]
                parts = [x.transpose(0, 2, 1, 3) for x in drawn]
                found.append(Case("JoinHeads", 1, parts, domain="irpar"))
                parts[0] = np.ascontiguousarray(parts[0])
                parts[-1] = shifted(drawn[-1]).transpose(0, 2, 1, 3)
                found.append(Case("JoinHeads", 1, parts, domain="irpar"))
    return found


def sums(numbers: np.random.Generator) -> list[Case]:
    """Sums over rows."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        for shape, axes in (((100, 33), [0]), ((3, 200, 64), [1]), ((4, 40, 5, 40), [0, 1]), ((700, 96), [-2])):
            x = (numbers.standard_normal(shape) / 30).astype(dtype)
            for operator in (("ReduceSum", 13), ("ReduceMean", 18)):
                keeps = {"keepdims": len(axes) - 1}
                found.append(Case(*operator, (shifted(x, len(axes)), np.array(axes)), keeps, is_exact=False))
    return found


def rotaries(numbers: np.random.Generator) -> list[Case]:
    """Heads as a dim and beside each other, tables with rows and with places, halves and pairs, and what stays."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        for size, rotated in ((16, 0), (64, 32), (6, 4), (10, 10)):
            half = (rotated or size) // 2
            x = numbers.standard_normal((2, 5, 3, size)).astype(dtype)
            angles = numbers.standard_normal((7, half))
            cos, sin = np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)
            ids = numbers.integers(-7, 7, (2, 5))
            rows = [table[ids] for table in (cos, sin)]
            keeps = {"rotary_embedding_dim": rotated}
            pairs = {**keeps, "interleaved": 1}
            beside = {**keeps, "num_heads": 3}
            by_heads = x.transpose(0, 2, 1, 3)
            operator = ("RotaryEmbedding", 23)
            for attributes, place in ((keeps, np.int64), (pairs, np.int32)):
                given = (by_heads, cos, sin, ids.astype(place))
                found.append(Case(*operator, given, attributes, is_exact=False))
                given = (np.ascontiguousarray(by_heads), *rows)
                found.append(Case(*operator, given, attributes, is_exact=False))
            flat = shifted(x.reshape(2, 5, -1))
            found.append(Case(*operator, (flat, cos, shifted(sin), ids[:, ::-1]), beside, is_exact=False))
            found.append(Case(*operator, (flat, *(row[:1] for row in rows)), {**beside, **pairs}, is_exact=False))
    return found


CONVOLUTIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 4, 9, 8), (6, 4, 3, 3), {"pads": (1, 1, 1, 1)}),
    ((3, 4, 7, 7), (6, 2, 3, 2), {"group": 2, "strides": (2, 1), "dilations": (1, 2), "auto_pad": "SAME_UPPER"}),
    ((2, 5, 4, 4), (3, 5, 1, 1), {}),
    ((2, 5, 7, 7), (3, 5, 1, 1), {}),
    ((1, 3, 21), (4, 3, 5), {"pads": (4, 0), "strides": (3,)}),
    ((1, 2, 3, 4, 5), (2, 2, 2, 2, 2), {"pads": (0, 1, 0, 1, 0, 1)}),
    ((2, 6, 9, 8), (12, 1, 3, 3), {"group": 6, "pads": (1, 1, 1, 1)}),
    ((2, 3, 17), (3, 1, 4), {"group": 3, "pads": (3, 0)}),
]


def convolutions(numbers: np.random.Generator) -> list[Case]:
    """By columns and channel by channel, with a bias and without one."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        for shape, kernel, attributes in CONVOLUTIONS:
            x, weight = (numbers.standard_normal(sizes).astype(dtype) for sizes in (shape, kernel))
            bias = numbers.standard_normal(kernel[0]).astype(dtype)
            found.append(Case("Conv", 22, (x, (weight / 4).astype(dtype), bias), attributes, is_exact=False))
            turned = np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
            found.append(Case("Conv", 22, (turned, (weight / 4).astype(dtype)), attributes, is_exact=False))
    return found


def pools(numbers: np.random.Generator) -> list[Case]:
    """Windows of images: apart and over each other, padded, with gaps, behind the end, of channels that lie last."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        x = numbers.standard_normal((2, 3, 9, 11)).astype(dtype)
        last = numbers.standard_normal((2, 8, 7, 3)).astype(dtype).transpose(0, 3, 1, 2)
        holey = x.copy()
        holey[0, 1, 4, 5], holey[1] = np.nan, -np.inf
        for geometry in (
            {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)},
            {"kernel_shape": (2, 3), "strides": (2, 1), "ceil_mode": 1},
            {"kernel_shape": (3, 2), "strides": (3, 2), "pads": (1, 0, 2, 1), "ceil_mode": 1},
            {"kernel_shape": (2, 2), "dilations": (3, 2), "auto_pad": "SAME_UPPER"},
        ):
            for given in (shifted(x), last, holey[:, ::-1]):
                found.append(Case("MaxPool", 22, (given,), geometry))
                for counts in (0, 1) if given is not holey else ():
                    means = {**geometry, "count_include_pad": counts}
                    found.append(Case("AveragePool", 22, (given,), means, is_exact=False))
    return found


POOLS_LAST: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 9, 11, 16), {"kernel_shape": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ((1, 9, 8, 12), {"kernel_shape": (2, 3), "strides": (2, 1), "ceil_mode": 1}),
    ((2, 7, 6, 3), {"kernel_shape": (3, 2), "strides": (3, 2), "pads": (1, 0, 2, 1), "ceil_mode": 1}),
    ((1, 9, 9, 6), {"kernel_shape": (2, 2), "dilations": (3, 2), "pads": (2, 1, 1, 1)}),
    ((3, 17, 5), {"kernel_shape": (4,), "pads": (3, 3)}),
    ((1, 3, 4, 5, 8), {"kernel_shape": (2, 2, 2), "pads": (0, 1, 0, 1, 0, 1)}),
    ((2, 40, 3, 8), {"kernel_shape": (40, 3)}),
]


def pools_last(numbers: np.random.Generator) -> list[Case]:
    """Windows of images with channels last; of all of an image, which threads share."""
    found = []
    for dtype in (np.dtype(np.float64), *FLOATS):
        for shape, geometry in POOLS_LAST:
            x = numbers.standard_normal(shape).astype(dtype)
            holey = x.copy()
            holey[(0, *(size // 2 for size in shape[1:]))], holey[-1, 0] = np.nan, -np.inf
            for given in (x, shifted(x), np.ascontiguousarray(x.swapaxes(1, -1)).swapaxes(1, -1)):
                for counts in (0, 1):
                    means = {**geometry, "mode": "average", "count_include_pad": counts}
                    found.append(Case("PoolChannelsLast", 1, (given,), means, is_exact=False, domain="irpar"))
                found.append(Case("PoolChannelsLast", 1, (given,), {**geometry, "mode": "max"}, domain="irpar"))
            greatest = {**geometry, "mode": "max"}  # Of what is no number there are several bits.
            found.append(Case("PoolChannelsLast", 1, (holey,), greatest, is_exact=False, domain="irpar"))
    return found


NORMS_LAST: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((2, 9, 7, 16), 4, {"activation": "Silu"}),
    ((1, 40, 32), 32, {}),
    ((3, 3, 4, 5, 8), 1, {"activation": "Relu", "epsilon": 1e-3}),
    ((2, 5, 5, 2080), 5, {}),
    ((1, 1, 3, 24), 3, {"activation": "Clip", "max": 1.0}),
]


def norms_last(numbers: np.random.Generator) -> list[Case]:
    """Groups of channels, some of which are far from zero, with and without numbers of channels."""
    found = []
    for dtype in FLOATS:
        for shape, groups, attributes in NORMS_LAST:
            x = (numbers.standard_normal(shape) + 20 * (np.arange(shape[-1]) % 3 == 0)).astype(dtype)
            scale, bias = (numbers.standard_normal(shape[-1:]).astype(dtype) for _ in range(2))
            turned = np.ascontiguousarray(x.swapaxes(1, -1)).swapaxes(1, -1)
            for operands in ((x, scale, bias), (x,), (turned, None, bias)):
                given = {"num_groups": groups, **attributes}
                found.append(Case("GroupNormChannelsLast", 1, operands, given, is_exact=False, domain="irpar"))
    return found


def all_cases(seed: int) -> list[Case]:
    """All of them."""
    numbers = np.random.default_rng(seed)
    return [
        case
        for made in (
            *(gathers, scatters, one_hots, losses, cross_entropies),
            *(joined_heads, sums, rotaries, convolutions, pools_last, norms_last),
        )
        for case in made(numbers)
    ]
