"""zero: optimizer state, gradients and parameters sharded over the ranks that hold the same ones."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from irpar.analysis.completion.flow import require_global
from irpar.analysis.gathers import Gathers, layers_of, say_gathers
from irpar.analysis.optimizer_parallel import optimizer_parallel_said
from irpar.analysis.redistribution import bytes_held
from irpar.analysis.training_facts import ZeroFacts, ZeroParameter, facts_of, metadata_of
from irpar.errors import IrparError, listed, nearest_names
from irpar.ir import Module, Value
from irpar.ir.annotate import annotate_further
from irpar.ir.state import OPTIMIZER_KINDS
from irpar.pass_manager import Pass, PassResult
from irpar.passes.autodiff import GRAD
from irpar.sharding import Axis, Mesh, Sharding, ShardingError, are_disjoint, spelled
from irpar.units import bytes_text, count_text

from .cuts import Cut, cut_of
from .views import gathers_in_trips, let_trips_gather, loop_over, regather

__all__ = ["Zero", "ZeroError"]

STAGES = (1, 2, 3)


class ZeroError(IrparError):
    """Optimizer sharding that cannot be."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that a step replaces, and what belongs to it.

    Attributes:
        value: the parameter.
        states: its master and moments.
        gradient: what its update reads; None where nothing in the graph has that name any more.
    """

    value: Value
    states: tuple[Value, ...]
    gradient: Value | None


@dataclass(frozen=True)
class Gathering:
    """How parameters are gathered.

    Attributes:
        is_changed: whether anything of it changed the module.
        again: whether the backward pass gathers them once more.
        notes: a line, where memory was looked at.
    """

    is_changed: bool = False
    again: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Zero(Pass):
    """Shard what a training step keeps over the ranks that would hold the same (ZeRO; Rajbhandari et al., 2020).

    Before: global view with state, after optimizer, before complete-sharding; types are static, the module has a mesh.
    After: masters and moments of parameters are annotated as sharded over the axes, and from stage 2 on gradients, and
    in stage 3 the parameters themselves; what the stage does not shard stays as it was annotated or, where it was not,
    as annotations propagate to it. The collectives that follow from it are put in by insert-redistribution:
    gradients are reduce-scattered, and parameters all-gathered after the update or, in stage 3, where they are read.
    Stage 3 shards a parameter further than its annotation says; masters, moments and gradients of which somebody says
    how they are sharded stay so.

    Attributes:
        stage: 1, 2 or 3.
        axes: mesh axes or sub-axes, major first, such as dp, or `dp:(2)4` for groups of four neighbours (HSDP).
        threshold_kb: parameters of which a rank holds fewer than so many times 1,000 bytes stay as they are.
        prefetch: in stage 3, parameters of so many layers may be gathered together, ahead of the first that reads them;
            what is gathered again is of one layer. A rank holds 1 + prefetch gathered layers at most.
        regather: in stage 3 gather parameters once in the forward and once in the backward pass, and hold none in
            between; false: once, and keep them until the backward pass has read them.
    """

    name = "zero"
    stage: int = 1
    axes: tuple[str, ...] = ("dp",)
    threshold_kb: float = 64
    regather: bool = True
    prefetch: int = 1

    def run(self, module: Module) -> PassResult:
        """Annotate.

        Raises:
            ZeroError: an option does not fit, or the graph is no training step.
            IrparError: the module has no mesh, or is in local view already.
        """
        require_global(module, self.name)
        self._check()
        axes = self._axes(module.mesh)
        trained = _trained_parameters(module)
        before = _shardings(module, [each.value for each in trained])
        whole = optimizer_parallel_said(module).whole
        cuts = {each: self._cut(each.value, before[each.value], axes, whole) for each in trained}
        changed = [self._annotate(module, each, before[each.value], cut) for each, cut in cuts.items()]
        gathering = Gathering()
        if self.stage == 3:
            gathering = self._gather(module, [each.value for each, cut in cuts.items() if cut.is_sharded])
        changed += [gathering.is_changed, self._write_facts(module, cuts, axes, regathers=gathering.again)]
        sharded = sum(cut.is_sharded for cut in cuts.values())
        statistics: dict[str, int | float] = {"sharded": sharded, "left": len(cuts) - sharded}
        return PassResult(any(changed), (*self._notes(module, cuts, axes), *gathering.notes), statistics)

    def _check(self) -> None:
        """Refuse options that mean nothing.

        Raises:
            ZeroError: saying which.
        """
        if self.stage not in STAGES:
            raise ZeroError(f"there is no stage {self.stage}", do="use 1 (optimizer state), 2 (gradients too) or 3")
        if not 0 <= self.threshold_kb < float("inf"):
            raise ZeroError(f"a threshold of {self.threshold_kb} kB", do="give a number of 0 or more")
        if self.prefetch < 1:
            raise ZeroError(f"a prefetch of {self.prefetch} layers", do="give a number of 1 or more")

    def _axes(self, mesh: Mesh) -> list[Axis]:
        """The mesh axes that are meant.

        Raises:
            ZeroError: there are none, or they do not fit the mesh.
        """
        if not self.axes:
            raise ZeroError("zero has no axes", do=f"name axes of the mesh {mesh}")
        try:
            axes = [Axis.parse(axis) for axis in self.axes]
            for axis in axes:
                mesh.axis_size(axis)
        except ShardingError as error:
            unknown = [axis for axis in self.axes if axis.partition(":")[0] not in mesh.axes]
            raise ZeroError(
                f"zero cannot shard over {listed(self.axes, 5)}: {error.what}",
                notes=tuple(note for axis in unknown for note in nearest_names(axis, mesh.axis_names)),
                do=f"name axes over which the batch is sharded, of the mesh {mesh} or of another one"
                if unknown
                else error.do,
            ) from error
        if not are_disjoint(mesh, axes):
            raise ZeroError(f"the axes {listed(self.axes, 5)} overlap", do="name each once")
        return axes

    def _annotate(self, module: Module, trained: TrainedParameter, lies: Sharding, cut: Cut) -> bool:
        """Annotate a parameter and, where nothing says how they are sharded, what belongs to it."""
        words = f"zero, stage {self.stage}"
        changed = annotate_further(module, trained.value, cut.sharding if self.stage == 3 else lies, words)
        gradients = [trained.gradient] if self.stage >= 2 and trained.gradient is not None else []
        for value in (*trained.states, *gradients):
            if value.sharding is None:
                changed = annotate_further(module, value, cut.sharding, words) or changed
        return changed

    def _gather(self, module: Module, sharded: Sequence[Value]) -> Gathering:
        """Say which parameters are gathered together, and let them be gathered again where that is asked for.

        What trips of a loop read is gathered once, before it, unless they are to gather it themselves.
        """
        graph = module.graph
        has_loop = loop_over(graph, sharded) is not None
        gather = partial(let_trips_gather, parameters=[value.name for value in sharded], again=self.regather)
        in_trips, notes = gathers_in_trips(module, gather) if has_loop else (False, ())
        if in_trips:
            is_changed, layers = gather(module)
        else:
            places = {node: place for place, node in enumerate(graph)}
            views = [regather(module, value, places) for value in sharded if self.regather]
            is_changed = any(views)
            layers = layers_of(graph, sharded)
        is_changed = say_gathers(module, Gathers(self.prefetch, layers)) or is_changed
        return Gathering(is_changed, self.regather and (in_trips or not has_loop), notes)

    def _write_facts(
        self, module: Module, cuts: Mapping[TrainedParameter, Cut], axes: Sequence[Axis], *, regathers: bool
    ) -> bool:
        """Let the plan of a training step say what was done; true where it said something else."""
        facts = facts_of(module.metadata)
        if facts is None:
            return False
        rows: list[ZeroParameter] = [
            {
                "parameter": each.value.source_name,
                "sharding": cut.sharding.spec(),
                "is_sharded": cut.is_sharded,
                "why": cut.why,
            }
            for each, cut in cuts.items()
            if cut.why
        ]
        kept: ZeroFacts = {
            "stage": self.stage,
            "axes": [str(axis) for axis in axes],
            "threshold_kb": self.threshold_kb,
            "regather": regathers,
            "parameters": rows,
        }
        module.metadata |= metadata_of({**facts, "zero": kept})
        return facts.get("zero") != kept

    def _cut(self, value: Value, lies: Sharding, axes: Sequence[Axis], whole: Sequence[str]) -> Cut:
        if value.source_name in whole:
            return Cut(lies, "the module says that it stays as it is", is_sharded=False)
        held = bytes_held(value, lies)
        if self._is_small(held):
            why = f"a rank holds {bytes_text(held)} of it, less than the threshold of {self.threshold_kb:g} kB"
            return Cut(lies, why, is_sharded=False)
        return cut_of(lies, value.shape, axes)

    def _is_small(self, held: int) -> bool:
        return held < self.threshold_kb * 1000

    def _notes(self, module: Module, cuts: Mapping[TrainedParameter, Cut], axes: Sequence[Axis]) -> Iterator[str]:
        """Lines for the user."""
        what = {1: "optimizer state", 2: "optimizer state and gradients", 3: "parameters, their state and gradients"}
        sharded, over = sum(cut.is_sharded for cut in cuts.values()), ",".join(map(str, axes))
        stay = [(each.value, cut.sharding) for each, cut in cuts.items() if not cut.is_sharded]
        stays = f"; {len(stay)} {'stays as it is' if len(stay) == 1 else 'stay as they are'}" if stay else ""
        if small := sum(self._is_small(bytes_held(value, lies)) for value, lies in stay):
            kb = f"{self.threshold_kb:g}"
            stays += f" ({small} below {spelled(f'--zero-threshold-kb {kb}', f'the threshold of {kb} kB')})"
        yield f"{what[self.stage]} of {count_text(sharded, 'tensor')} sharded over {over}{stays}"
        graph = module.graph
        given = [value.sharding for value in graph.inputs if value not in graph.states and value.sharding is not None]
        is_free = all(are_disjoint(module.mesh, [*lies.all_axes, *axes]) for lies in given)
        if is_free and module.mesh.group_size(axes) > 1:
            names = list(dict.fromkeys(axis.name for axis in axes))
            dim = json.dumps(names if len(names) > 1 else names[0])
            how = spelled("--dataset-sharding data_parallel", f"module.shard(INPUT, [{dim}, ...])")
            yield f"no input is sharded over {over}, so ranks along it may compute with the same samples; do: {how}"


def _trained_parameters(module: Module) -> list[TrainedParameter]:
    """The parameters that the graph replaces.

    Raises:
        ZeroError: there are none.
    """
    graph = module.graph
    of: dict[str, list[Value]] = {}
    for value, state in graph.states.items():
        if state.kind in OPTIMIZER_KINDS and state.parameter is not None:
            of.setdefault(state.parameter, []).append(value)
    gradients = {value.source_name: value for value in graph.values() if value.source_name.startswith(GRAD)}
    found = [
        TrainedParameter(value, tuple(of.get(value.source_name, ())), gradients.get(GRAD + value.source_name))
        for value, state in graph.states.items()
        if state.is_trained
    ]
    if not found:
        raise ZeroError(
            "the graph has no parameter that it replaces: it is no training step",
            do="make one: irpar train, or irpar.train_step",
        )
    return found


def _shardings(module: Module, parameters: Sequence[Value]) -> dict[Value, Sharding]:
    """How parameters are sharded without the pass: as annotated, or as annotations propagate to them."""
    said = {value: value.sharding for value in parameters if value.sharding is not None and value.sharding.is_settled}
    if len(said) == len(parameters):
        return said
    from irpar.passes.complete_sharding import propagated

    known = propagated(module)
    return {value: known[value] for value in parameters if value in known}
