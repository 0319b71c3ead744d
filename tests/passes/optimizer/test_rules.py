"""The update rules over five steps, beside the formulas of their papers in NumPy, in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import irpar
from irpar.ir.text.files import parse_module
from irpar.passes.optimizer import Optimizer

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
Rule = Callable[[int, str, Array, Array, dict[str, Array]], Array]
"""The step from 1, the name, the parameter, its gradient, and what is kept of it: the new parameter."""

STEPS, RATE = 5, 0.1
SHAPES = {"a.weight": (3, 4), "a.bias": (4,)}
TEXT = """
graph @step(%l: f64[], %ga: f64[3, 4], %gb: f64[4], %a: f64[3, 4] from "a.weight", %b: f64[4] from "a.bias") -> (%l as "loss", %ga as "grad.a.weight", %gb as "grad.a.bias") opset 21 {
}
"""


def gradients() -> list[Weights]:
    random = np.random.default_rng(1)
    return [{name: random.standard_normal(shape) for name, shape in SHAPES.items()} for _ in range(STEPS)]


def first() -> Weights:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape) for name, shape in SHAPES.items()}


def found(text: str = TEXT, **options: Any) -> dict[str, Array]:
    """The state after all steps."""
    module = parse_module(text)
    Optimizer(**options).run(module)
    with irpar.partition(module, "d=1").session(engine="numpy") as session:
        session.write_all(first())
        for each in gradients():
            given = {"ga": each["a.weight"], "gb": each["a.bias"], "l": np.float64(1)}
            session.run({**given, "learning_rate": np.float64(RATE)})
        return session.read_all()


def expected(rule: Rule) -> tuple[Weights, dict[str, dict[str, Array]]]:
    """The parameters after all steps, and what is kept of them."""
    weights: Weights = first()
    kept: dict[str, dict[str, Array]] = {name: {} for name in weights}
    for step, each in enumerate(gradients(), 1):
        for name, gradient in each.items():
            weights[name] = rule(step, name, weights[name], gradient, kept[name])
    return weights, kept


def compare(rule: Rule, **options: Any) -> None:
    weights, kept = expected(rule)
    state = found(**options)
    for name, wanted in weights.items():
        np.testing.assert_allclose(state[name], wanted, rtol=1e-12, atol=1e-14)
        for suffix, moment in kept[name].items():
            np.testing.assert_allclose(state[f"{name}.{suffix}"], moment, rtol=1e-12, atol=1e-14)


def sgd(decay: float = 0.0, scales: Mapping[str, float] | None = None, undecayed: tuple[str, ...] = ()) -> Rule:
    def rule(step: int, name: str, w: Array, g: Array, kept: dict[str, Array]) -> Array:
        rate = RATE * (scales or {}).get(name, 1.0)
        return w - rate * (g + (0 if name in undecayed else decay) * w)

    return rule


def momentum(mu: float, decay: float, nesterov: bool) -> Rule:
    """Sutskever et al., 2013, with the learning rate outside of the mean, as PyTorch has it."""

    def rule(step: int, name: str, w: Array, g: Array, kept: dict[str, Array]) -> Array:
        g = g + decay * w
        kept["m"] = mu * kept.get("m", 0.0) + g
        return w - RATE * (g + mu * kept["m"] if nesterov else kept["m"])

    return rule


def adam(betas: tuple[float, float], eps: float, decay: float, is_decoupled: bool, undecayed: str = "") -> Rule:
    """Kingma and Ba, 2015, algorithm 1; decoupled: Loshchilov and Hutter, 2019, algorithm 2."""
    one, two = betas

    def rule(step: int, name: str, w: Array, g: Array, kept: dict[str, Array]) -> Array:
        own = 0.0 if name == undecayed else decay
        g = g if is_decoupled else g + own * w
        kept["m"] = one * kept.get("m", 0.0) + (1 - one) * g
        kept["v"] = two * kept.get("v", 0.0) + (1 - two) * g**2
        m, v = kept["m"] / (1 - one**step), kept["v"] / (1 - two**step)
        update = m / (np.sqrt(v) + eps)
        return w - RATE * (update + own * w if is_decoupled else update)

    return rule


def lamb(betas: tuple[float, float], eps: float, decay: float) -> Rule:
    """You et al., 2020, algorithm 2, the norm itself in place of phi."""
    one, two = betas

    def rule(step: int, name: str, w: Array, g: Array, kept: dict[str, Array]) -> Array:
        kept["m"] = one * kept.get("m", 0.0) + (1 - one) * g
        kept["v"] = two * kept.get("v", 0.0) + (1 - two) * g**2
        m, v = kept["m"] / (1 - one**step), kept["v"] / (1 - two**step)
        update = m / (np.sqrt(v) + eps) + decay * w
        size, length = np.linalg.norm(w), np.linalg.norm(update)
        return w - RATE * (size / length if size and length else 1.0) * update

    return rule


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_sgd(decay: float) -> None:
    compare(sgd(decay), kind="sgd", weight_decay=decay)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_momentum(decay: float, nesterov: bool) -> None:
    compare(momentum(0.8, decay, nesterov), kind="momentum", momentum=0.8, nesterov=nesterov, weight_decay=decay)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_adam(kind: str, decay: float) -> None:
    compare(adam((0.8, 0.95), 1e-3, decay, kind == "adamw"), kind=kind, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)


def test_what_optimizers_have_where_nothing_is_said() -> None:
    compare(sgd(), kind="sgd")
    compare(momentum(0.9, 0.0, False), kind="momentum")
    compare(adam((0.9, 0.999), 1e-8, 0.0, False), kind="adam")
    compare(adam((0.9, 0.999), 1e-8, 0.01, True), kind="adamw")
    compare(lamb((0.9, 0.999), 1e-6, 0.01), kind="lamb")


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb(decay: float) -> None:
    compare(lamb((0.8, 0.95), 1e-3, decay), kind="lamb", betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)


@pytest.mark.parametrize("is_zero", ["parameter", "update"])
def test_lamb_takes_a_ratio_of_one_where_a_norm_is_zero(is_zero: str) -> None:
    module = parse_module(TEXT)
    Optimizer(kind="lamb", weight_decay=0.0).run(module)
    given = {name: np.zeros(shape) if is_zero == "update" else np.ones(shape) for name, shape in SHAPES.items()}
    with irpar.partition(module, "d=1").session(engine="numpy") as session:
        before = {name: np.zeros(shape) if is_zero == "parameter" else np.ones(shape) for name, shape in SHAPES.items()}
        session.write_all(before)
        feeds = {"ga": given["a.weight"], "gb": given["a.bias"], "l": np.float64(1), "learning_rate": np.float64(RATE)}
        session.run(feeds)
        after = session.read_all()
    change = 0.0 if is_zero == "update" else -RATE
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array + change, rtol=1e-5)


def test_the_count_of_updates_is_state() -> None:
    assert found(kind="adam")["step"] == STEPS


def test_parameters_without_decay() -> None:
    compare(sgd(0.3, undecayed=("a.bias",)), kind="sgd", weight_decay=0.3, no_decay=("*.bias",))
    rule = adam((0.9, 0.999), 1e-8, 0.3, True, "a.bias")
    compare(rule, kind="adamw", weight_decay=0.3, no_decay=("a.bias",))


def test_the_last_scale_of_a_learning_rate_that_fits_counts() -> None:
    compare(sgd(scales={"a.weight": 0.5, "a.bias": 3.0}), kind="sgd", lr_scale={"*": 0.5, "*.bias": 3.0})
    compare(sgd(scales={"a.weight": 0.5, "a.bias": 0.5}), kind="sgd", lr_scale={"*.bias": 3.0, "*": 0.5})
    compare(sgd(scales={"a.weight": 0.0}), kind="sgd", lr_scale={"a.weight": 0.0})


def test_updates_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    makers: dict[str, Callable[[Any], Any]] = {
        "sgd": lambda each: torch.optim.SGD(each, lr=RATE, weight_decay=0.3),
        "momentum": lambda each: torch.optim.SGD(each, lr=RATE, weight_decay=0.3, momentum=0.9, nesterov=True),
        "adam": lambda each: torch.optim.Adam(each, lr=RATE, weight_decay=0.3),
        "adamw": lambda each: torch.optim.AdamW(each, lr=RATE, weight_decay=0.3),
    }
    for kind, make in makers.items():
        weights = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in first().items()}
        optimizer = make(list(weights.values()))
        for each in gradients():
            for name, gradient in each.items():
                weights[name].grad = torch.tensor(gradient)
            optimizer.step()
        state = found(kind=kind, weight_decay=0.3, nesterov=kind == "momentum")
        for name, weight in weights.items():
            np.testing.assert_allclose(state[name], weight.detach().numpy(), rtol=1e-12)
