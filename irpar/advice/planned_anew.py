"""What would lower the peak of a partition and takes another plan: its model is planned anew with one thing changed."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import TYPE_CHECKING, Any

from irpar.analysis.weights.by_heads import without_heads
from irpar.errors import IrparError
from irpar.ir import Expr, Module, clone_module
from irpar.output.prediction import predict
from irpar.output.tables import pattern
from irpar.pass_manager import PassManager
from irpar.pass_manager.default_pipeline import composed
from irpar.passes.recompute import Recompute
from irpar.passes.zero import STAGES, Zero
from irpar.training.again import step_again

from .lower_peak import Change

if TYPE_CHECKING:
    from irpar.analysis.cost.network import Network
    from irpar.api import Partition
    from irpar.output.plan_record import Plan

_ANNOTATED = re.compile(r'annotated "[^"]*"( in .*, line \d+)?')
"""Why a value is sharded that was annotated, by nothing but its entry."""
_MOST_TRIED = 2
"""Ways to shard one value that are tried."""


class NotAnewError(IrparError):
    """A plan that does not tell all that it was made from."""


@dataclass(frozen=True)
class _Candidate:
    """Something that can be asked for: what it does, its option, and what is planned then."""

    what: str
    option: str
    make: Callable[[], Module]
    pipeline: str


class Anew:
    """The model of a plan, to be planned again.

    Args:
        plan: it.
        network: by which times are.

    Raises:
        IrparError: the model is not there, or is another one.
    """

    def __init__(self, plan: "Plan", network: "Network") -> None:
        from irpar.verification.original import Original

        self.plan = plan
        self._network = network
        self._model = Original.of_file(None, plan.source).module
        self.passes = PassManager.parse(plan.pipeline).passes

    def changes(self) -> list[Change]:
        """What can be asked for, whether it lowers the peak or not.

        Raises:
            NotAnewError: the model planned anew with the annotations that the plan tells of is another partition.
        """
        candidates = [*self._zero(), *self._micro_batches(), *self._sharded()]
        if not candidates:
            return []
        now = self._as_it_is
        tried = (self._tried(Change(each.what, each.option, 0, 0), each.make, each.pipeline) for each in candidates)
        return [replace(each, more_seconds=each.more_seconds - now) for each in tried if each is not None]

    def confirmed(self, found: Iterable[Change]) -> list[Change]:
        """Changes with what their pipelines hold and take in the end; those without one are as they are.

        What was tried on programs that communicate may come out otherwise: communication is put together after it.

        Raises:
            NotAnewError: as `changes`.
        """
        kept: list[Change] = []
        for each in found:
            if not each.pipeline:
                kept.append(each)
            elif (anew := self._tried(each, lambda: self._module(self.plan), each.pipeline)) is not None:
                kept.append(replace(anew, more_seconds=anew.more_seconds - self._as_it_is))
        return kept

    def _tried(self, change: Change, make: Callable[[], Module], pipeline: str) -> Change | None:
        """A change with the peak and the time of a whole step; None for what cannot be planned, which is no advice."""
        try:
            made = self._partition(make(), pipeline)
        except IrparError:
            return None
        peak = max(entry["peak_bytes"] for entry in made.plan.ranks)
        return replace(change, peak_bytes=peak, more_seconds=self._time(made), pipeline="")

    @cached_property
    def _as_it_is(self) -> float:
        """How long a step takes of the plan as it is, which must come out the same."""
        if any(isinstance(each, Recompute) and not each.match for each in self.passes):
            raise NotAnewError("a memory budget is searched for anew each time", do="leave it out")
        made = self._partition(self._module(self.plan), self.plan.pipeline)
        if [entry["peak_bytes"] for entry in made.plan.ranks] != [entry["peak_bytes"] for entry in self.plan.ranks]:
            raise NotAnewError("the plan does not tell all that it was made from", do="partition the model again")
        return self._time(made)

    # -- what is changed ----------------------------------------------------------------------------------------------

    def _zero(self) -> Iterator[_Candidate]:
        """ZeRO, one stage further; over the axes that shard the samples where there is none yet."""
        known = next((each for each in self.passes if isinstance(each, Zero)), None)
        axes = self._sample_axes() if known is None else known.axes
        if not axes or not self._is_default() or (known is not None and known.stage == STAGES[-1]):
            return
        zero = Zero(1, axes) if known is None else replace(known, stage=known.stage + 1)
        words = f"--zero {zero.stage}" + ("" if axes == ("dp",) else f" --zero-axes {','.join(axes)}")
        if zero.threshold_kb != Zero.threshold_kb:
            words += f" --zero-threshold-kb {zero.threshold_kb:g}"
        if zero.prefetch != Zero.prefetch:
            words += f" --zero-prefetch {zero.prefetch}"
        words += "" if zero.regather else " --no-zero-regather"
        sharded = {1: "optimizer state", 2: "gradients too", 3: "parameters too"}[zero.stage]
        what = f"shard {sharded} over {', '.join(axes)} (ZeRO, stage {zero.stage})"
        yield _Candidate(what, words, lambda: self._module(self.plan), composed(zero, self._again()))

    def _micro_batches(self) -> Iterator[_Candidate]:
        """Twice as many micro-batches, each of half the samples."""
        facts = self.plan.training
        symbol = None if facts is None else self._sample_symbol(facts)
        if facts is None or symbol is None or facts["bind"][symbol] % 2:
            return
        size, count = facts["bind"][symbol] // 2, 2 * facts["settings"]["micro_batches"]
        changed = {**facts, "bind": {**facts["bind"], symbol: size}}
        changed["settings"] = {**facts["settings"], "micro_batches": count}
        what = f"{count} micro-batches of {size} samples for the same step"
        words = f"--bind {symbol}={size} --micro-batches {count}"
        yield _Candidate(what, words, lambda: self._module(replace(self.plan, training=changed)), self.plan.pipeline)

    def _sharded(self) -> Iterator[_Candidate]:
        """The largest parameters that all ranks hold whole, sharded over the largest axis."""
        axes = [axis for axis, size in self.plan.mesh_of_ranks.axes.items() if size > 1]
        groups: dict[str, list[Mapping[str, Any]]] = {}
        for entry in self._whole_parameters():
            groups.setdefault(pattern(entry["source"]), []).append(entry)
        if not groups or not axes:
            return
        alike = max(groups.values(), key=lambda same: len(same) * prod(same[0]["shape"]))
        axis = max(axes, key=lambda axis: self.plan.mesh_of_ranks.axes[axis])
        name, shape = alike[0]["source"] if len(alike) == 1 else pattern(alike[0]["source"]), alike[0]["shape"]
        even = [dim for dim, size in enumerate(shape) if size % self.plan.mesh_of_ranks.axes[axis] == 0]
        for dim in even[:_MOST_TRIED]:
            spec = tuple(axis if place == dim else None for place in range(len(shape)))
            said = ", ".join("null" if each is None else f'["{each}"]' for each in spec)
            words = f'--shardings FILE with "{name}": [{said}] in its tensors'
            make = partial(self._annotated, name, spec)
            yield _Candidate(f"shard {name} over {axis}, dim {dim}", words, make, self.plan.pipeline)

    def _annotated(self, name: str, spec: tuple[str | None, ...]) -> Module:
        module = self._module(self.plan)
        module.shard(name, spec)
        return module

    def _whole_parameters(self) -> list[Mapping[str, Any]]:
        """The entries of parameters that every rank holds whole."""
        names = {entry["name"] for entry in self.plan.state if entry["kind"] == "parameter"}
        if self.plan.training is None:
            names |= {entry["value"] for entry in self.plan.replicated if entry.get("value")}
        return [
            entry
            for entry in self.plan.values
            if entry["source"] in names and entry["shape"] and not any(entry["sharding"])
        ]

    def _sample_axes(self) -> tuple[str, ...]:
        """The axes that shard the samples of a step."""
        facts = self.plan.training or {"inputs": ()}
        place = int(bool(facts.get("micro_batches")))
        found: dict[str, None] = {}
        for entry in self.plan.inputs:
            sharding = entry["sharding"] or ()
            if entry["name"] in facts["inputs"] and len(sharding) > place:
                found.update(dict.fromkeys(sharding[place] or ()))
        return tuple(found)

    def _sample_symbol(self, facts: Mapping[str, Any]) -> str | None:
        """The symbol of the model that counts the samples of a batch."""
        firsts = {
            str(type_.shape[0])
            for value in self._model.graph.inputs
            if value.source_name in facts["inputs"] and (type_ := value.tensor_type).shape
        }
        return next(iter(firsts)) if len(firsts) == 1 and firsts <= facts["bind"].keys() else None

    def _again(self) -> list[Recompute]:
        return [each for each in self.passes if isinstance(each, Recompute)]

    def _is_default(self) -> bool:
        zero = next((each for each in self.passes if isinstance(each, Zero)), None)
        return self.plan.pipeline == composed(zero, self._again())

    # -- planning -----------------------------------------------------------------------------------------------------

    def _module(self, plan: "Plan") -> Module:
        """The module that is partitioned, annotated as the plan says that it was."""
        module = clone_module(self._model)
        if plan.training is not None:
            module = step_again(plan, module)
        else:
            _bind(module, plan)
        module.network = plan.network
        if all(each.match for each in self._again()):  # A budget sets its limit itself.
            module.memory_limit = plan.memory_limit
        module.set_mesh(plan.mesh_of_ranks)
        ranks = {value.source_name: value.tensor_type.rank or 0 for value in module.graph.inputs}
        shapes = {value.source_name: value.shape for value in module.graph.constants if value.is_static}
        for entry in plan.values:
            if any(_ANNOTATED.fullmatch(each["why"]) for each in entry["why"] or ()):
                said = [axes or None for axes in entry["sharding"]]
                spec = [*without_heads(said, entry["shape"], shapes.get(entry["source"], entry["shape"]))]
                # An input that gets a dim for micro-batches has it in front.
                more = ranks.get(entry["source"], 0) - len(spec)
                module.shard(entry["source"], [None] * more + spec)
        return module

    def _partition(self, module: Module, pipeline: str) -> "Partition":
        from irpar.api import partition

        return partition(module, pipeline=pipeline)

    def _time(self, made: "Partition") -> float:
        assert made.module is not None
        found = predict(self._network, made.module.graphs, made.plan.collectives, made.plan.mesh_of_ranks)
        assert found is not None
        return found["step_seconds"] or 0.0


def _bind(module: Module, plan: "Plan") -> None:
    """Give the symbols of a model the sizes that the inputs of a plan have, and fixed inputs their values."""
    from irpar.inputs.fixed import fix_inputs, fixed_of_plan
    from irpar.passes.bind_dims import BindDims

    shapes = {entry["name"]: entry["shape"] for entry in plan.inputs}
    sizes: dict[str, int] = {}
    for value in module.graph.inputs:
        for dim, size in zip(value.tensor_type.shape or (), shapes.get(value.source_name) or (), strict=False):
            if isinstance(dim, Expr) and {str(dim)} == dim.symbols() and size is not None:
                sizes[str(dim)] = size
    if sizes:
        BindDims(sizes=sizes).run(module)
    fixed = fixed_of_plan(plan.inputs)
    if fixed:
        fix_inputs(module, fixed)
