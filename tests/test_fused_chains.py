"""Random chains of Reshape, Transpose and elementwise operators between a product and what takes it apart."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
from hypothesis import HealthCheck, given, settings

import irpar

from .budget import budget
from .random_programs import SEEDS
from .written import model_of_text

CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
Cuts = dict[str, list[Any]]
CUTS: tuple[Cuts, ...] = ({"w": [None, "tp"]}, {"x": [None, "tp"]}, {"w": [None, None]}, {"x": ["tp", None]})
ALONE: tuple[list[str], ...] = ([], ["Relu({0})"], ["Neg({0})"])
Chain = tuple[onnx.ModelProto, int, Cuts]


def drawn(seed: int) -> Chain:
    """A model, how many devices, and what is annotated.

    The columns of x @ w become two dims or three, all dims are put in another order, two or three that stand side by
    side then become one, and that or another is taken apart.
    """
    random = Random(seed)
    shape = [random.randint(3, 5), *(random.randint(2, 4) for _ in range(random.randint(2, 3)))]
    rows, columns = shape[0], prod(shape[1:])
    calls = ["MatMul(x, w)", *random.choice([[], ["Add({0}, b)"]]), "Reshape({0}, apart)"]
    integers = {"apart": list(shape)}
    order = [*range(1, len(shape))]
    if random.randint(0, 2) == 0:
        random.shuffle(order)
    order.insert(random.randint(0, len(order)), 0)
    shape = [shape[dim] for dim in order]
    calls += [f"Transpose<perm={order}>({{0}})", *random.choice(ALONE)]
    first = min(random.choice([order.index(1), random.randrange(len(shape))]), len(shape) - 2)
    last = random.randint(first + 2, min(first + 3, len(shape)))
    shape[first:last] = [prod(shape[first:last])]
    integers["together"] = list(shape)
    calls += ["Reshape({0}, together)", *random.choice(ALONE)]
    lines = [f"v{number} = {call.format(f'v{number - 1}')}" for number, call in enumerate(calls)]

    dim = random.choice([first, random.randrange(len(shape))])
    cut = random.randint(1, shape[dim] - 1)
    parts = range(cut), range(cut, shape[dim])
    taken, sections = _taken_apart(random.choice(["Split", "Slice", "Gather"]), f"v{len(lines) - 1}", dim, parts)
    lines += [*taken, "y0 = Tanh(p0)", "y1 = Tanh(p1)"]
    results = [[*shape[:dim], len(part), *shape[dim + 1 :]] for part in parts]
    outputs = ", ".join(f"float{result} y{number}" for number, result in enumerate(results))
    text = f"g (float[{rows},8] x, float[8,{columns}] w, float[{columns}] b) => ({outputs}) {{ {'  '.join(lines)} }}"
    return model_of_text(text, ["w", "b"], integers | sections), random.choice([2, 3, 4]), random.choice(CUTS)


def _taken_apart(op: str, value: str, dim: int, parts: Sequence[range]) -> tuple[list[str], dict[str, list[int]]]:
    """The nodes that give p0, p1 ..., and the integers that they read."""
    if op == "Split":
        results = ", ".join(f"p{number}" for number in range(len(parts)))
        return [f"{results} = Split<axis={dim}>({value}, sizes)"], {"sizes": [len(part) for part in parts]}
    if op == "Gather":
        lines = [f"p{number} = Gather<axis={dim}>({value}, i{number})" for number in range(len(parts))]
        return lines, {f"i{number}": list(part) for number, part in enumerate(parts)}
    lines = [f"p{number} = Slice({value}, b{number}, e{number}, dim)" for number in range(len(parts))]
    bounds = {f"b{number}": [part.start] for number, part in enumerate(parts)}
    return lines, bounds | {f"e{number}": [part.stop] for number, part in enumerate(parts)} | {"dim": [dim]}


def _check(chain: Chain, folder: Path) -> int:
    """Both engines compute what the original does; returns how many weights were taken apart."""
    model, devices, cuts = chain
    onnx.save(model, folder / "chain.onnx")
    module = irpar.load(folder / "chain.onnx")
    irpar.annotate(module, cuts)
    partition = irpar.partition(module, {"tp": devices})
    partition.verify().check()
    partition.verify(engine="numpy").check()
    (record,) = (record for record in partition.passes.records if record.text.startswith("split-weights"))
    return int(record.statistics["weights"])


def _check_some(examples: int, folder: Path) -> None:
    """Check so many chains; of an eighth or more the weight is taken apart."""
    found: list[int] = []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=CHECKS)
    @given(seed=SEEDS)
    def each(seed: int) -> None:
        found.append(_check(drawn(seed), folder))

    each()
    assert sum(found) >= examples / 8


def test_chains(tmp_path: Path) -> None:
    _check_some(budget(24), tmp_path)


@pytest.mark.slow
def test_many_chains(tmp_path: Path) -> None:
    _check_some(budget(600), tmp_path)
