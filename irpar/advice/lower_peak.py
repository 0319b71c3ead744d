"""What would lower the peak of a partition, and what it would cost: tried on its programs."""

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from irpar.analysis.cost.model import FEMTOSECONDS
from irpar.analysis.memory.holdings import at_step, holdings, step_of_peak
from irpar.analysis.memory.liveness import peak_bytes
from irpar.analysis.recompute import RecomputeError
from irpar.analysis.recompute.chen import sqrt_schedule
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.recompute.graph_tree import GraphTree, Schedules
from irpar.analysis.recompute.matching import names_of, schedule_without
from irpar.analysis.recompute.of_program import Program, as_tree, of_program
from irpar.analysis.recompute.simulation import Outcome
from irpar.analysis.recompute.undone import without_repetitions
from irpar.globs import matching_names
from irpar.ir import Module, clone_module
from irpar.ops.effects import is_communication
from irpar.output.tables import pattern
from irpar.pass_manager import Pass, PassManager
from irpar.pass_manager.default_pipeline import LOCAL, composed
from irpar.passes.memory_order import MemoryOrder
from irpar.passes.recompute import Recompute

_GLOB = re.compile(r"[*?\[\]]")
_MOST_SCOPES = 8
"""Of the scopes that hold activations at the peak those are tried that hold most."""
_MOST_TRIED = 4
"""Ways to compute again that are tried: those that lower the peak most by the training graphs."""
_WHOLE = "what is held without recompute"
_LEAST_LOWER = 0.01
"""Of the peak is what a change has to lower it by."""
_BUDGET_STEP = 0.01
"""Of the shares that `--memory-budget` is given."""


@dataclass(frozen=True)
class Change:
    """Something else that could be asked for.

    Attributes:
        what: in words.
        option: the option of the command line that asks for it.
        peak_bytes: what the worst rank would hold.
        more_seconds: what a step would take longer by the time model; below 0 where it is faster.
        is_most: whether it holds that much, and takes that long, at the most.
        pipeline: with which the model would be planned, if passes that follow may change what is held; "" else.
    """

    what: str
    option: str
    peak_bytes: int
    more_seconds: float
    is_most: bool = False
    pipeline: str = ""


class Programs:
    """The different programs of a partition.

    Args:
        module: all of them, calls opened, with the network that the plan has.
        pipeline: what made them.

    Attributes:
        now: as they are.
        plain: as they would be if they computed nothing again.
        repeated: how many nodes of the one with most run again.
    """

    def __init__(self, module: Module, pipeline: str) -> None:
        self.now = module
        self.plain = clone_module(module)
        undone = [without_repetitions(graph) for graph in module.graphs]
        self.plain.graphs = [graph for graph, _ in undone]
        self.repeated = max(count for _, count in undone)
        self.passes = PassManager.parse(pipeline).passes
        self.costs = Costs(module)

    def seconds(self, module: Module) -> float:
        """What a step of programs takes, of the slowest one."""
        return max(map(self.costs.of_graph, module.graphs)) / FEMTOSECONDS

    def untried(self) -> Iterator[str]:
        """What cannot be tried, in words."""
        if all(node.phase is None for graph in self.plain.graphs for node in graph):
            yield "there is no backward pass in which results of scopes could be computed again"

    def limit(self) -> int | None:
        """What ranks may hold, as the last pass says that computes again for a budget; None where none does."""
        for one in reversed(self.passes):
            if isinstance(one, Recompute) and not one.match:
                return one.budget_of(peak_bytes(self.plain))
        return None


def changes(programs: Programs) -> list[Change]:
    """Changes that need no other plan, whether they lower the peak or not.

    Each is tried: the pass runs on the programs, and what they then hold and take is counted. Where they communicate,
    passes that follow it in a pipeline may still put communication together: see `planned_anew.Anew.confirmed`.
    """
    seconds = programs.seconds(programs.now)
    communicates = any(is_communication(node) for graph in programs.now.graphs for node in graph.walk())
    found: list[Change] = []
    for start, pass_, what, option, pipeline in _candidates(programs):
        trial = clone_module(start)
        try:
            pass_.run(trial)
        except RecomputeError:
            continue
        # What a budget leads to is searched by all methods, which may hold as much as it allows.
        is_most = isinstance(pass_, Recompute) and not pass_.match
        held = pass_.budget_of(peak_bytes(start)) if isinstance(pass_, Recompute) and is_most else peak_bytes(trial)
        open_to_change = pipeline if communicates and not is_most else ""
        found.append(Change(what, option, held, programs.seconds(trial) - seconds, is_most, open_to_change))
    return found


def lowering(programs: Programs, found: Iterable[Change]) -> list[Change]:
    """Changes that lower the peak, those first that lower it most; without those that another one beats.

    One is beaten by another that holds no more and takes no more time.
    """
    most = (1 - _LEAST_LOWER) * peak_bytes(programs.now)
    kept: list[Change] = []
    for each in sorted(found, key=lambda each: (each.peak_bytes, each.more_seconds, each.option)):
        if each.peak_bytes <= most and (not kept or each.more_seconds < kept[-1].more_seconds):
            kept.append(each)
    return kept


def _candidates(programs: Programs) -> Iterator[tuple[Module, Pass, str, str, str]]:
    """What is tried: the programs to begin with, the pass, what it does, how it is asked for, and with what pipeline.

    No pipeline stands for one that ends with the pass.
    """
    said = [each for each in programs.passes if isinstance(each, Recompute)]
    for pass_ in _promising(programs):
        glob, share = "".join(pass_.match), pass_.budget
        what = f"compute {glob} again in the backward pass" if glob else f"hold at most {share:.0%} of {_WHOLE}"
        yield programs.plain, pass_, what, *_option(replace(pass_, method="auto"), said, programs)
    if not any(isinstance(each, MemoryOrder) for each in programs.passes):
        pipeline = ",".join(map(str, (*programs.passes, MemoryOrder())))
        yield (
            programs.now,
            MemoryOrder(),
            "run nodes in an order that holds less",
            f"--pipeline {shlex.quote(pipeline)}",
            "",
        )


def _option(pass_: Recompute, said: Sequence[Recompute], programs: Programs) -> tuple[str, str]:
    """How a pass `recompute` is asked for, in the place of those that ran; and the pipeline that this leads to."""
    from irpar.passes.zero import Zero

    zero = next((each for each in programs.passes if isinstance(each, Zero)), None)
    if ",".join(map(str, programs.passes)) == composed(zero, said):
        option = f"--recompute {shlex.quote(pass_.match[0])}" if pass_.match else f"--memory-budget {pass_.budget:g}"
        return option, composed(zero, [pass_])
    passes = [each for each in programs.passes if each not in said]
    passes.insert(_place(programs.passes, said), pass_)
    pipeline = ",".join(map(str, passes))
    return f"--pipeline {shlex.quote(pipeline)}", pipeline


def _place(passes: Sequence[Pass], said: Sequence[Recompute]) -> int:
    """Where a pass `recompute` stands: in place of the first that ran, else behind those that make local programs."""
    if said:
        return passes.index(said[0])
    makers = LOCAL.split(",")
    place = max((place + 1 for place, each in enumerate(passes) if each.name == makers[0]), default=len(passes))
    while place < len(passes) and passes[place].name in makers:
        place += 1
    return place


def _globs(module: Module) -> list[str]:
    """Globs of scopes, those of all layers as one, whose activations are at the peak; first those that hold most."""
    held: dict[str, int] = {}
    for graph in module.graphs:
        forward = {node.scope for node in graph.walk() if node.phase == "forward" and node.scope}
        step = step_of_peak(graph)
        for one in at_step(holdings(graph), step):
            if one.use == "activations" and one.scope in forward and not _GLOB.search(one.scope):
                for scope in _outer(pattern(one.scope)):
                    held[scope] = held.get(scope, 0) + one.nbytes
    ordered = sorted(held, key=lambda scope: (-held[scope], scope))[:_MOST_SCOPES]
    outer = {around for scope in held for around in _outer(scope) if around != scope}
    globs = ["*"] if ordered else []
    for scope in ordered:
        globs.append(scope if scope.endswith("*") else f"{scope}*")
        if scope in outer:  # What stands in no inner scope, such as sums of a residual stream, stays held.
            globs.append(f"{scope}/*")
    return globs


def _outer(scope: str) -> Iterator[str]:
    """A scope and those around it."""
    parts = scope.split("/")
    for count in range(1, len(parts) + 1):
        yield "/".join(parts[:count])


def _promising(programs: Programs) -> list[Recompute]:
    """Of scopes, and of the least share that Chen's segments hold, what is worth to be tried by the training graphs."""
    read = [
        of_program(graph, programs.costs.of_node, lambda _: len(programs.plain.graphs) == 1)
        for graph in programs.plain.graphs
    ]
    names = dict.fromkeys(name for graph in programs.plain.graphs for node in graph.walk() for name in names_of(node))
    found = [(*_outcome(read, matching_names(glob, names)), Recompute((glob,))) for glob in _globs(programs.plain)]
    whole = peak_bytes(programs.plain)
    segments = _segments(read)
    if segments is not None and segments.peak < whole:
        share = min(1, round(ceil(segments.peak / whole / _BUDGET_STEP) * _BUDGET_STEP, 2))
        found.append((segments.peak, segments.cost, Recompute(budget=share, method="sqrt")))
    kept: list[tuple[int, int, Recompute]] = []
    for each in sorted(found, key=lambda each: each[:2]):
        if each[0] < whole and (not kept or each[1] < kept[-1][1]):
            kept.append(each)
    return [pass_ for _, _, pass_ in kept[:_MOST_TRIED]]


def _outcome(programs: Sequence[Program], names: Iterable[str]) -> tuple[int, int]:
    """Peak and cost of the program with most where nothing is held of what is known by some names."""
    chosen = set(names)
    outcomes = [as_tree([each]).outcome([schedule_without(part, chosen) for part in each.parts]) for each in programs]
    return max(each.peak for each in outcomes), max(each.cost for each in outcomes)


def _segments(programs: Sequence[Program]) -> Outcome | None:
    """Peak and cost of the program with most in the segments that hold least; None where one has none."""
    outcomes: list[Outcome] = []
    for program in programs:
        tree = as_tree([program])
        schedules = _segmented(tree)
        if schedules == tree.plain:
            return None
        outcomes.append(tree.outcome(schedules))
    return Outcome(max(each.peak for each in outcomes), max(each.cost for each in outcomes))


def _segmented(tree: GraphTree) -> Schedules:
    """The segments that hold least, of a graph around those of its bodies; as it is where it has none."""
    inside = [_segmented(body) for _, body in tree.bodies]
    peaks = [body.outcome(each).peak for (_, body), each in zip(tree.bodies, inside, strict=True)]
    own = sqrt_schedule(tree.around(peaks), 0) or tree.plain[0]
    return [own, *(schedule for each in inside for schedule in each)]
