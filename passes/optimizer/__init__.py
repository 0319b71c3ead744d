"""optimizer: what an update makes of each parameter and its gradient."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

from irpar.errors import IrparError, listed, nearest_names
from irpar.globs import matching_names
from irpar.ir import DType, Graph, Module, Tensor, TensorType, Value
from irpar.ir.added_input import add_named_input
from irpar.ir.state import LOSS, State
from irpar.ir.state_rules import replace_outputs, set_states
from irpar.ops.gradients.writer import GradientWriter
from irpar.pass_manager import Pass, PassResult
from irpar.passes.autodiff import GRAD

from .gradients import Prepared, prepare
from .names import LEARNING_RATE, MASTER, NEXT, SCALE, STEP
from .rules import RULES, SOME_READ, Numbers, Parameter
from .states import States

__all__ = ["LOSS_SCALES", "OPTIMIZERS", "Optimizer", "OptimizerError", "OptimizerKind"]

OptimizerKind = Literal["sgd", "momentum", "adam", "adamw", "lamb"]
OPTIMIZERS: tuple[str, ...] = tuple(RULES)
LossScale = Literal["none", "dynamic"]
LOSS_SCALES: tuple[str, ...] = get_args(LossScale)
_NARROW = (DType.F16, DType.BF16)


class OptimizerError(IrparError):
    """An optimizer that cannot be, or a graph that it cannot work on."""


_ALL_READ = ("weight-decay", "no-decay", "lr-scale", "clip-norm", "loss-scale")
"""Options of all optimizers."""


def require_read(kind: str, given: Collection[str]) -> None:
    """Refuse options that an optimizer does not read.

    Args:
        kind: the optimizer.
        given: names of options; of those that all optimizers read, nothing is said.

    Raises:
        OptimizerError: naming one, and those that it does.
    """
    reads = RULES[kind].reads
    for name in SOME_READ:
        if name in given and name not in reads:
            having = [kind for kind, rule in RULES.items() if name in rule.reads]
            raise OptimizerError(
                f"{kind} has no {name}",
                do=f"leave {name} out, or use {listed(having, 5)}; {kind} has {listed([*reads, *_ALL_READ], 10)}",
            )


@dataclass(frozen=True)
class Optimizer(Pass):
    """Turn gradients into updates: parameters, and what the optimizer keeps of each, become state.

    Before: global view; the results are `loss` and `grad.<parameter>`, of initializers and inputs of floats. After:
    the gradients are no results any more; each parameter is state, with `<parameter>.m` and `.v` as the optimizer has
    them, and `<parameter>.master`, float32, where it is of narrower floats; new nodes are of the phase optimizer, one
    for the update of each parameter (`irpar.ops.updates`; lamb, which takes norms, has several); the input
    `learning_rate` is a single number.

    Attributes:
        kind: sgd; momentum (Sutskever et al., 2013, as PyTorch has it); adam (Kingma and Ba, 2015); adamw (Loshchilov
            and Hutter, 2019); lamb (You et al., 2020).
        momentum: how much of the last update goes on, of momentum.
        nesterov: whether momentum looks ahead.
        betas: how much of the means of gradients and of their squares goes on, of adam, adamw and lamb.
        eps: what keeps divisors from 0; None: 1e-8, of lamb 1e-6.
        weight_decay: adamw and lamb take this part of the learning rate off each parameter; the others add this
            multiple of it to its gradient. None: 0.01 of adamw and lamb, else 0.
        no_decay: names or globs of parameters without weight decay.
        clip_norm: the most that the norm of all gradients together may be; None: any.
        loss_scale: "dynamic" (Micikevicius et al., 2018): the loss is multiplied by state that doubles after
            `growth_interval` updates and halves, without an update, where a gradient is not finite.
        growth_interval: see above.
        lr_scale: name or glob of parameters to what their learning rate is multiplied by; the last that fits counts.
    """

    name = "optimizer"
    kind: OptimizerKind = "adamw"
    momentum: float = 0.9
    nesterov: bool = False
    betas: tuple[float, ...] = (0.9, 0.999)
    eps: float | None = None
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = ()
    clip_norm: float | None = None
    loss_scale: LossScale = "none"
    growth_interval: int = 2000
    lr_scale: Mapping[str, float] = field(default_factory=dict)

    def run(self, module: Module) -> PassResult:
        """Write the updates.

        Raises:
            OptimizerError: a number or a name does not fit, or the graph has no gradients.
            TakenNameError: the graph has a tensor that is called as what is added.
        """
        self._check()
        graph = module.graph
        pairs = _pairs(graph)
        names = [value.source_name for value, _ in pairs]
        plain = {name for pattern in self.no_decay for name in _named("no-decay", pattern, names)}
        scales = {name: self.lr_scale[glob] for glob in self.lr_scale for name in _named("lr-scale", glob, names)}
        if self.loss_scale == "dynamic":
            _check_scale(graph)
        writer = GradientWriter(graph, module.opsets)
        writer.phase = "optimizer"
        rate = add_named_input(graph, LEARNING_RATE, TensorType(_rate_dtype(pairs), ()))
        states = States(graph)
        parameters = [
            self._parameter(value, gradient, scales.get(name, 1.0), 0.0 if name in plain else self.decay, states)
            for name, (value, gradient) in zip(names, pairs, strict=True)
        ]
        prepared = prepare(graph, parameters, self, states, writer)
        rule = RULES[self.kind]
        step = states.add(STEP, "counter", TensorType(DType.I64, ()), None) if rule.counts else None
        count = None if step is None else writer.add(step, writer.constant(1))
        numbers = Numbers(self, rate, count, writer)
        numbers_of_each = [rule.numbers(parameter, numbers) for parameter in parameters]
        for parameter, its_numbers in zip(parameters, numbers_of_each, strict=True):
            gradient = prepared.write_gradient(parameter, writer)
            updated = rule.update(parameter, gradient, its_numbers, self, writer)
            self._update(parameter, updated, states, prepared, writer)
        if step is not None:
            assert count is not None
            states.replace(step, prepared.kept(count, step, writer))
        _set_results(graph, states, prepared)
        return PassResult(True, (), {"parameters": len(pairs)})

    @property
    def decay(self) -> float:
        """The weight decay."""
        return (0.01 if self.kind in ("adamw", "lamb") else 0.0) if self.weight_decay is None else self.weight_decay

    @property
    def epsilon(self) -> float:
        """What keeps divisors from 0."""
        return (1e-6 if self.kind == "lamb" else 1e-8) if self.eps is None else self.eps

    def _check(self) -> None:
        """Refuse numbers that mean nothing.

        Raises:
            OptimizerError: see there.
        """
        named: dict[str, tuple[str, Sequence[str]]] = {
            "optimizer": (self.kind, OPTIMIZERS),
            "loss scale": (self.loss_scale, LOSS_SCALES),
        }
        for what, (name, known) in named.items():
            if name not in known:
                raise OptimizerError(
                    f'there is no {what} "{name}"', notes=nearest_names(name, known), do=f"use {listed(known, 5)}"
                )
        problems = [
            (
                "betas",
                self.betas,
                len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
                "two numbers from 0 to below 1",
            ),
            ("momentum", self.momentum, 0 <= self.momentum < 1, "a number from 0 to below 1"),
            ("eps", self.epsilon, 0 <= self.epsilon < math.inf, "a number of 0 or more"),
            ("weight decay", self.decay, 0 <= self.decay < math.inf, "a number of 0 or more"),
            ("clip norm", self.clip_norm, self.clip_norm is None or self.clip_norm > 0, "a number above 0"),
            ("growth interval", self.growth_interval, self.growth_interval > 0, "a number above 0"),
            *(
                (f"lr-scale {pattern}", factor, 0 <= factor < math.inf, "a number of 0 or more")
                for pattern, factor in self.lr_scale.items()
            ),
        ]
        for what, value, is_right, wanted in problems:
            if not is_right:
                raise OptimizerError(f"{what} of {value}", do=f"give {wanted}")
        self._check_read()

    def _check_read(self) -> None:
        """Refuse options that the optimizer does not read.

        Raises:
            OptimizerError: naming one, and those that it does.
        """
        defaults = {each.name: each.default for each in fields(self)}
        require_read(self.kind, [name for name in SOME_READ if getattr(self, name) != defaults[name]])

    def _parameter(self, value: Value, gradient: Value, scale: float, decay: float, states: States) -> Parameter:
        name = value.source_name
        states.adopt(value, "parameter")
        wide = value
        if value.dtype in _NARROW:
            data = states.data(value)
            first = None if data is None else _widened(data)
            type_ = TensorType(DType.F32, value.tensor_type.shape)
            wide = states.add(name + MASTER, "master", type_, first, parameter=name)
        moments = {
            suffix: states.add(f"{name}.{suffix}", "moment", wide.tensor_type, None, parameter=name)
            for suffix in RULES[self.kind].moments
        }
        return Parameter(name, value, wide, gradient, moments, scale, decay)

    def _update(
        self,
        parameter: Parameter,
        updated: Mapping[str, Value],
        states: States,
        prepared: Prepared,
        w: GradientWriter,
    ) -> None:
        for suffix, moment in parameter.moments.items():
            states.replace(moment, prepared.kept(updated[suffix], moment, w))
        wide = prepared.kept(updated["w"], parameter.wide, w)
        if parameter.wide is not parameter.value:
            states.replace(parameter.wide, wide)
        states.replace(parameter.value, w.cast(wide, parameter.value.dtype))


def _pairs(graph: Graph) -> list[tuple[Value, Value]]:
    """The parameters of a graph with their gradients.

    Raises:
        OptimizerError: there are none, or no loss.
    """
    named = {value.source_name: value for value in (*graph.inputs, *graph.constants)}
    results = dict(zip(graph.output_names, graph.outputs, strict=True))
    pairs = [
        (named[name.removeprefix(GRAD)], value)
        for name, value in results.items()
        if name.startswith(GRAD) and name.removeprefix(GRAD) in named
    ]
    if not pairs or LOSS not in results:
        raise OptimizerError(
            "the graph has no gradients of a loss among its results",
            do=f"run add-loss and autodiff{{outputs=[{LOSS}],keep-outputs=true}} before",
        )
    return pairs


def _check_scale(graph: Graph) -> None:
    """Refuse a graph whose loss is not multiplied by a scale.

    Raises:
        OptimizerError: it has no such input.
    """
    if not any(value.source_name == SCALE for value in graph.inputs):
        raise OptimizerError(
            f'the graph has no input "{SCALE}"', do="let the gradient of the loss begin with an input of that name"
        )


def _named(what: str, pattern: str, names: Sequence[str]) -> list[str]:
    """The parameters that a name or glob is of.

    Raises:
        OptimizerError: it is of none.
    """
    found = matching_names(pattern, names)
    if not found:
        raise OptimizerError(
            f'{what} "{pattern}" matches no parameter that is trained',
            notes=nearest_names(pattern, names),
            do="name a parameter of the model, by name or glob",
        )
    return found


def _rate_dtype(pairs: Sequence[tuple[Value, Value]]) -> DType:
    return DType.F64 if any(value.dtype is DType.F64 for value, _ in pairs) else DType.F32


def _widened(data: Tensor) -> Tensor:
    """The numbers that a master begins with: those before they were narrowed, where that is known."""
    from irpar.ir import LazyTensor
    from irpar.passes.lower_precision import NarrowedTensor

    if isinstance(data, NarrowedTensor):
        return data.wide

    return LazyTensor(DType.F32, data.shape, lambda: data.numpy().astype("float32"))


def _set_results(graph: Graph, states: States, prepared: Prepared) -> None:
    """Results that are no gradients, then what replaces each state."""
    kept = [
        (name, value)
        for name, value in zip(graph.output_names, graph.outputs, strict=True)
        if not name.startswith(GRAD)
    ]
    kept += prepared.results
    kept += [(state.source_name + NEXT, value) for state, value in states.after.items()]
    replace_outputs(graph, kept)
    places = {value: place for place, value in enumerate(states.after, len(kept) - len(states.after))}
    set_states(
        graph,
        {
            value: State(kind, places.get(value), data, parameter)
            for value, (kind, data, parameter) in states.kinds.items()
        },
    )
