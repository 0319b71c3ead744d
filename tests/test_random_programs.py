"""Random programs on random meshes with random annotations: the partition computes what the original computes.

A draw that failed once stands below as a small program of its own.
"""

import os
import re
import tempfile
import traceback
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import irpar
from irpar.ops import definitions

from .budget import budget
from .random_graphs import Array
from .random_programs import Outcome, Program, Spec, UnsteadyError, check, partitioned, programs
from .random_replication import Run, runs
from .random_samples import MICROSOFT, groups
from .random_smallest import smallest

ANY_TIME = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")  # What failed is reported made small.
MOST = 0.02
"""The share of programs that may be refused, and of nodes whose work is repeated though nothing forces it."""
ANYWAY = 1
"""So many more may be: of thirty programs one is above that share."""
LEAST_EXAMPLES = 2
"""Of each group of operators that programs are drawn for."""
LEAST_DRAWN = 20
"""How often each operator, of 20 examples of each group."""


class Tally:
    """What many draws came to."""

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.runs: dict[str, list[Run]] = defaultdict(list)

    def check(self, program: Program) -> None:
        """Check one program; inside every third, every tenth from disk too."""
        number = self.ends.total()
        outcome, found = _outcome(program, inside=number % 3 == 0, saved=number % 10 == 0)
        self.drawn.update(program.drawn)
        self.collectives.update(outcome.collectives)
        self.ends[_reason(outcome.refusal)] += 1
        if outcome.refusal:
            self.refused.update(program.drawn)
        for run in found:
            self.runs[run.operator].append(run)

    @property
    def unforced(self) -> list[Run]:
        """Nodes whose work is repeated though nothing forces it."""
        return [run for found in self.runs.values() for run in found if run.unforced]

    def report(self) -> None:
        """Print what was drawn and what came of it; refuse a run in which too much was refused or repeated.

        In the table: nodes of programs; of partitions those that are cut, run whole, and repeat work though nothing
        forces them to; nodes of programs that were refused.
        """
        print(f"\n{self.ends.total()} programs: {dict(self.ends)}\ncollectives: {dict(self.collectives)}")
        print(f"\n{'operator':48} drawn   cut whole unforced refused")
        for operator in sorted({*self.drawn, *self.runs}, key=lambda name: (-self.drawn[name], name)):
            found = self.runs[operator]
            cut = sum(run.ways > 1 for run in found)
            unforced = sum(bool(run.unforced) for run in found)
            counts = f"{cut:5} {len(found) - cut:5} {unforced:8} {self.refused[operator]:7}"
            print(f"{operator:48} {self.drawn[operator]:5} {counts}")
        known = [run for found in self.runs.values() for run in found]
        reached = sum(run.could > 1 for run in known)
        print(
            f"\nof {len(known)} nodes with a rule annotations reach {reached}; "
            f"{sum(run.ways > 1 for run in known)} are sharded, {sum(run.ways < run.could for run in known)} could be sharded more, "
            f"and nothing forces {len(self.unforced)} of these to repeat work:"
        )
        for operator, run in {run.operator: run for run in self.unforced}.items():
            print(f"  {operator}: {run.unforced}")
        refused = self.ends.total() - self.ends["right"]
        assert refused <= MOST * self.ends.total() + ANYWAY, self.ends
        assert len(self.unforced) <= MOST * reached + ANYWAY
        assert {"all_gather", "all_reduce", "all_to_all"} <= set(self.collectives)


def _outcome(program: Program, *, inside: bool, saved: bool) -> tuple[Outcome, list[Run]]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = check(program, Path(folder), inside=inside, saved=saved)
        except UnsteadyError:
            return Outcome("the original has no steady answer"), []
        except Exception as error:
            how = type(error)
            small = smallest(program, lambda other: _fails(other, how))
            raise AssertionError(f"{small!r}\nof {program!r}\n{traceback.format_exc()}") from None
        return outcome, [] if outcome.refusal else runs(program, Path(folder))


def _fails(program: Program, how: type[Exception]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            check(program, Path(folder), saved=True)
        except UnsteadyError:
            return False
        except Exception as error:
            return isinstance(error, how)
    return False


def _reason(refusal: str) -> str:
    """The first line of an error, without names and numbers."""
    return re.sub(r"%\w+|\d+", "_", refusal.splitlines()[0]) if refusal else "right"


def _draw(tally: Tally, size: int, count: int, examples: int, salt: str) -> None:
    """Check programs of groups of `size` operators, `count` of a group in each."""
    for group in groups(size, salt):

        @settings(
            max_examples=budget(examples, least=LEAST_EXAMPLES),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=ANY_TIME,
            phases=[Phase.generate],
        )
        @given(programs(group, count))
        def draws(program: Program) -> None:
            tally.check(program)

        draws()


def test_random_programs() -> None:
    tally = Tally()
    _draw(tally, 25, 5, 10, "few")
    tally.report()


@pytest.mark.slow
def test_many_random_programs() -> None:
    tally = Tally()
    salt = os.environ.get("IRPAR_DRAWS", "many")
    for part in range(2):
        _draw(tally, 5, 5, 20, f"{salt}.{part}")
    tally.report()
    of_models = [found for found in definitions() if found.domain != "irpar"]  # its updates come with training alone
    ruled = {f"{found.domain}.{found.name}".lstrip(".") for found in of_models if found.rule is not None}
    least = LEAST_DRAWN * budget(20, least=LEAST_EXAMPLES) / 20
    assert {operator: tally.drawn[operator] for operator in ruled if tally.drawn[operator] < least} == {}


# -- draws that failed once -----------------------------------------------------------------------------------------


def parsed(text: str, mesh: dict[str, int], annotations: dict[str, Spec], opset: int = 21) -> Program:
    """A program in ONNX's text form; inputs are quarters, 0 and 1 for ids."""
    imports = f'"": {opset}, "{MICROSOFT}": 1' if MICROSOFT in text else f'"": {opset}'
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")
    random = np.random.default_rng(0)
    inputs: dict[str, Array] = {}
    for value in model.graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        numbers = random.integers(-8, 9, shape) / 4 if dtype.kind == "f" else random.integers(0, 2, shape)
        inputs[value.name] = np.asarray(numbers).astype(dtype)
    engines = ("ort",) if MICROSOFT in text else ("ort", "numpy")
    return Program(model, irpar.Mesh(mesh), annotations, inputs, engines=engines)


FAILED: dict[str, Program] = {
    "an annotated result of which the model declares no type": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) { y = Relu(x) z = Exp(y) }", {"x": 2}, {"y": [["x"], None]}
    ),
    "bools gathered along an axis that is sharded": parsed(
        "g (float[2, 4] x, int64[3] ids) => (bool[2, 3] z) <float[1] zero = {0}>"
        "{ y = Greater(x, zero) z = Gather<axis = 1>(y, ids) }",
        {"x": 2},
        {"y": [None, ["x"]]},
    ),
    "a needed result that nothing reads, before others that something reads": parsed(
        "g (float[4, 6] x, float[6] s) => (float[4, 1] m, float[4, 1] d) { y, m, d = LayerNormalization(x, s) }",
        {"x": 2},
        {"x": [["x"], None]},
    ),
    "sub-axes whose cuts do not divide each other": parsed(
        "g (float[6, 6, 7] x, float[6, 6, 7] y) => (float[6, 6, 7] z) { z = Add(x, y) }",
        {"x": 6},
        {"x": [["?"], ["x:(1)2"], ["x:(2)3"]], "y": [["x:(3)2"], None, ["x:(1)3"]]},
    ),
    "an axis of one device": parsed(
        "g (float[4, 6] x, float[4, 6] y) => (float[4, 6] z) { z = Add(x, y) }",
        {"x": 1, "y": 2},
        {"x": [["x"], ["y"]], "y": [["y"], ["x"]]},
    ),
    "a value that one reads on an axis of one device, and one on no axis": parsed(
        "g (float[5, 1] x, float[5, 4] y, float[1, 3] w) => (float[5, 4] z, float[5, 3] p)"
        "{ z = Add(x, y) p = MatMul(x, w) }",
        {"x": 1, "y": 3},
        {"x": [None, ["y", "?"]], "y": [["x", "?"], ["?"]]},
    ),
    "Hardmax of an old operator set, which takes several dims as one": parsed(
        "g (float[2, 3, 4] x) => (float[2, 3, 4] z) { z = Hardmax<axis = 0>(x) }",
        {"x": 2},
        {"z": [None, None, ["x"]]},
        opset=12,
    ),
    "a chain of layouts that ends in a scalar": parsed(
        "g (float[7] x) => (float z) <int64[1] a = {-1}, int64[2] b = {1, 1}>"
        "{ y = ReduceSum<keepdims = 1>(x, a) w = Reshape(y, b) z = Squeeze(w) }",
        {"x": 2},
        {"x": [["x"]]},
    ),
    "annotated behind a target shape that is computed": parsed(
        "g (float[2, 6] x, float[12] y) => (float[2, 6] z) { s = Shape(x) r = Reshape(y, s) z = Exp(r) }",
        {"x": 2},
        {"r": [None, ["x"]]},
    ),
    "a Gemm with a bias whose result is annotated": parsed(
        "g (float[5, 4] x, float[4, 6] w, float[6] c) => (float[5, 6] z) { z = Gemm(x, w, c) }",
        {"x": 2, "y": 2},
        {"z": [["x"], None], "c": [["y"]]},
    ),
    "a chain of layouts that does nothing between two annotations": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) { y = Transpose(x) z = Transpose(y) }",
        {"x": 2},
        {"x": [None, None], "z": [["x"], None]},
    ),
    "a chain of layouts with an annotation inside": parsed(
        "g (float[2, 6] x) => (float[2, 6] z) { y = Transpose(x) z = Transpose(y) }",
        {"x": 2},
        {"y": [["x"], None], "z": [["x"], None]},
    ),
    "an If that is decided, with an annotated result": parsed(
        "g (float[4, 6] x) => (float[4, 6] z) <bool p = {1}> { z = If(p) <"
        "then_branch = a () => (float[4, 6] a) { a = Neg(x) }, else_branch = b () => (float[4, 6] b) { b = Abs(x) }> }",
        {"x": 2},
        {"z": [["x"], None]},
    ),
    "an If of which a branch computes what is there already": parsed(
        "g (float[4, 6] x, bool p) => (float[4, 6] z, float[4, 6] n) { n = Neg(x) z = If(p) <"
        "then_branch = a () => (float[4, 6] a) { a = Neg(x) }, else_branch = b () => (float[4, 6] b) { b = Abs(x) }> }",
        {"x": 2},
        {"n": [None, ["x"]], "z": [["x"], None]},
    ),
    "a Loop whose collected results nobody reads in the end": parsed(
        "g (float[4, 6] x, float[4, 6] y) => (float[4, 6] z, float[4, 4] w) <int64 n = {2}> {"
        'z, s = Loop(n, "", x) <body = b (int64 i, bool go, float[4, 6] in) => (bool on, float[4, 6] out, float[4, 6] all)'
        "{ on = Identity(go) out = Add(in, x) all = Identity(out) }> c = ReduceSum<keepdims = 0>(s)"
        "w = Gemm<beta = 0.0, transB = 1>(x, y, c) }",
        {"x": 2},
        {"y": [["x"], None]},
    ),
    "a Slice along a dim of strings that is sharded": parsed(
        "g (float[8, 4] x) => (float[5, 4] z) <int64[1] two = {2}, int64[1] seven = {7}, int64[1] zero = {0}>"
        "{ s = Cast<to = 8>(x) t = Slice(s, two, seven, zero) z = Cast<to = 1>(t) }",
        {"y": 3},
        {"s": [["y"], None]},
    ),
    "an operand of one of ONNX Runtime's own operators, cut by coordinates": parsed(
        "g (float[5, 64] x, uint8[6, 4, 8] w, float[24] s, float[8] c) => (float[5, 6] z)"
        "<int64[1] one = {1}, int64[1] seven = {7}, int64[1] zero = {0}> { b = Slice(c, one, seven, zero) z = "
        'com.microsoft.MatMulNBits<K = 64, N = 6, bits = 4, block_size = 16>(x, w, s, "", "", b) }',
        {"x": 2},
        {"s": [["x"]]},
    ),
}


@pytest.mark.parametrize("name", FAILED)
def test_draws_that_failed_once(name: str, tmp_path: Path) -> None:
    assert check(FAILED[name], tmp_path, saved=True).refusal == ""


def test_a_constant_that_is_read_twice_is_cut_for_nothing(tmp_path: Path) -> None:
    program = parsed(
        "g (float[4] x) => (float[4] z) <float[4] c = {1, -2, 3, 4}> { y = Mul(c, c) z = Add(x, y) }",
        {"x": 2},
        {"y": [["x"]], "c": [None]},
    )
    assert [(run.operator, run.ways, run.unforced) for run in runs(program, tmp_path)] == [
        ("Mul", 2, ""),
        ("Add", 2, ""),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "g (float[4] x) => (float[4] z) { r = RandomUniformLike(x) z = Add(x, r) }",
        "g (float[4] x) => (float[4] z) <float ratio = {0.5}, bool train = {1}> { z = Dropout(x, ratio, train) }",
    ],
)
def test_devices_do_not_draw_their_own_random_numbers(text: str, tmp_path: Path) -> None:
    with pytest.raises(irpar.IrparError, match="draws random numbers, and each of the 2 devices would draw its own"):
        partitioned(parsed(text, {"x": 2}, {"x": [["x"]]}), tmp_path)
    partitioned(parsed(text, {"x": 1}, {"x": [["x"]]}), tmp_path)
