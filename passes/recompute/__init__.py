"""recompute: results that are computed again rather than held, so that ranks hold less."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from irpar.analysis.gathers import gathered
from irpar.analysis.memory.limit_search import LEAST_SECONDS, next_end, search_within
from irpar.analysis.memory.liveness import peak, peak_bytes
from irpar.analysis.recompute import FoundSchedules, RecomputeError, solve_tree
from irpar.analysis.recompute.costs import Costs
from irpar.analysis.recompute.graph_tree import Schedules
from irpar.analysis.recompute.matching import names_of, schedule_without
from irpar.analysis.recompute.of_program import Program, as_tree, of_program
from irpar.analysis.recompute.rewriting import write
from irpar.globs import matching_names
from irpar.ir import Graph, Module
from irpar.ir.clone import clone_graph
from irpar.ops.bodies import is_numbered
from irpar.ops.collectives import number_alike
from irpar.ops.facts import int_attribute
from irpar.pass_manager import Pass, PassResult, format_pass
from irpar.sharding import IrparError, nearest_or_first_names
from irpar.units import bytes_text, count_text, gigabytes, gigabytes_option

__all__ = ["Recompute"]

_NEAR = 1.05
"""Of the least that was found: up to so much is asked for instead where that is found again in more time."""
_LITTLE = 0.1
"""Of the peak: so much should be lowered by what takes time."""


@dataclass(frozen=True)
class Recompute(Pass):
    """Compute results again just before they are read, instead of holding them, so that ranks hold less.

    Before: local view, the order that of execution. After: the same values, bit for bit, in the same order; what is
    computed again stands just before the new node that needs it, in all programs alike, with communication among it in
    equal order on all ranks. With a budget no rank holds more, which later passes keep: it is the module's memory limit
    then. All that counts is the peak of the whole step, as `irpar.analysis.memory.liveness` has it. Bodies share the
    budget, such as that of the loop over micro-batches: see `irpar.analysis.recompute.graph_tree`.

    Time is that of the network of the module, or where it knows none, of an H100, of the rank that takes longest.
    What draws random numbers runs once, but for counters, whose numbers repeat.

    Options:
        match: scopes, nodes or values of the model, or globs of them: what the backward pass reads of them is computed
            again.
        budget: what ranks may hold, as a share of what they hold without recompute.
        budget_gb: the same in GB.
        method: see `irpar.analysis.recompute`: auto is never worse than the others.
        seconds: of search, for all programs together.
        mp_comm_recompute: whether communication may be repeated, but for what gathers parameters.
        parallel_optimizer_comm_recompute: whether what gathers parameters may be repeated.
    """

    name = "recompute"
    match: tuple[str, ...] = ()
    budget: float = 0
    budget_gb: float = 0
    method: Literal["auto", "optimal", "chain", "sqrt", "sweep"] = "auto"
    seconds: float = 30
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = True

    def run(self, module: Module) -> PassResult:
        """Rewrite the programs.

        Raises:
            IrparError: an option does not fit.
            RecomputeError: no schedule that was found fits the budget.
        """
        self._check(module)
        before, known_limit, costs = peak_bytes(module), module.memory_limit, Costs(module)
        cost = sum(map(costs.of_graph, module.graphs))
        programs = self._programs(module, costs)
        if self.match:
            schedules = self._matched(module, programs)
            facts: tuple[str, ...] = ()
        else:
            budget = self.budget_of(before)
            schedules, facts = self._solved(module, programs, budget)
            module.memory_limit = budget if known_limit is None else min(budget, known_limit)
        count = _write(module, programs, schedules)
        if not count and self.match:
            return PassResult(False, notes=(_why_none(module),))
        if not count:
            return PassResult(
                module.memory_limit != known_limit, notes=(f"ranks hold {bytes_text(before)}, which fits",)
            )
        after = peak_bytes(module)
        trees = [as_tree([program]) for program in programs]
        more = sum(
            tree.outcome(plan).cost - tree.outcome(tree.plain).cost for tree, plan in zip(trees, schedules, strict=True)
        )
        note = (
            f"{count_text(count, 'node')} computed again: ranks hold {bytes_text(after)} instead of "
            f"{bytes_text(before)}, for {100 * more / max(cost, 1):.1f} % more time"
        )
        wide = self._wide(module) if before - after < _LITTLE * before else None
        if wide is not None:
            facts = (
                *facts,
                "that lowers little: where a pattern names whole layers, what one gives to the next is computed again "
                f'too, from the first layer on; "{wide}/*" names what is inside of them',
            )
        elif after >= before:
            facts = (*facts, "that lowers nothing, for the peak is elsewhere: irpar explain OUT --memory says where")
        return PassResult(True, notes=(note, *facts), statistics={"recomputed": count, "saved bytes": before - after})

    def _check(self, module: Module) -> None:
        where = format_pass(self)
        if not module.is_local:
            raise IrparError("recompute needs the local view", do="run it after localize")
        if sum(map(bool, (self.match, self.budget, self.budget_gb))) != 1:
            raise IrparError("recompute needs one of match, budget and budget-gb", where=where, do="write one of them")
        if not (0 <= self.budget <= 1 and 0 <= self.budget_gb < float("inf")):
            do = "give a share above 0 up to 1, or GB above 0"
            raise IrparError("the budget of recompute is no share and no size", where=where, do=do)
        if not 0 < self.seconds < float("inf"):
            raise IrparError("recompute needs time to search", where=where, do="give seconds above 0")

    def budget_of(self, before: int) -> int:
        """The bytes that ranks may hold, of so many that they hold without recompute."""
        return int(before * self.budget) if self.budget else gigabytes(self.budget_gb)

    def _programs(self, module: Module, costs: Costs) -> list[Program]:
        """The training graphs of the programs, in which communication runs once where programs differ."""

        def read(graph: Graph) -> Program:
            gathers = {node for inner in graph.graphs() for node, _ in gathered(inner)}
            return of_program(
                graph,
                costs.of_node,
                lambda node: self.parallel_optimizer_comm_recompute if node in gathers else self.mp_comm_recompute,
            )

        programs = [read(graph) for graph in module.graphs]
        if _are_alike(programs):
            return programs
        return [of_program(graph, costs.of_node, lambda node: False) for graph in module.graphs]

    def _wide(self, module: Module) -> str | None:
        """A pattern that names more than what is inside of scopes."""
        names = _names(module)
        wide = (pattern for pattern in self.match if not pattern.endswith("/*"))
        return next((pattern for pattern in wide if matching_names(f"{pattern}/*", names)), None)

    def _matched(self, module: Module, programs: Sequence[Program]) -> list[Schedules]:
        """Schedules that save nothing of what matches."""
        names = _names(module)
        chosen: set[str] = set()
        for pattern in self.match:
            found = matching_names(pattern, names)
            if not found:
                raise IrparError(
                    f'no scope, no node and no value is "{pattern}"',
                    where=format_pass(self),
                    notes=nearest_or_first_names(pattern, names),
                    do="name a scope of the model, such as h.0/mlp, or a glob",
                )
            chosen.update(found)
        return [[schedule_without(part, chosen) for part in program.parts] for program in programs]

    def _solved(
        self, module: Module, programs: Sequence[Program], budget: int
    ) -> tuple[list[Schedules], tuple[str, ...]]:
        """Schedules that fit; lines about them. Programs that are alike have one, which fits each."""
        begin = time.monotonic()
        end = begin + self.seconds
        if _are_alike(programs):
            one = self._fitting(programs, module.graphs, budget, end)
            return [one.schedules] * len(programs), _facts(one, time.monotonic() - begin)
        found: list[FoundSchedules] = []
        for place, (program, graph) in enumerate(zip(programs, module.graphs, strict=True)):
            found.append(self._fitting([program], [graph], budget, next_end(end, len(programs) - place)))
        slowest = max(found, key=lambda each: each.outcome.cost)
        return [each.schedules for each in found], _facts(slowest, time.monotonic() - begin)

    def _fitting(self, programs: Sequence[Program], graphs: Sequence[Graph], budget: int, end: float) -> FoundSchedules:
        """Schedules after which no program holds more than a budget, by the liveness of the programs themselves.

        Args:
            programs: the same but for sizes.
            graphs: what they are of.
            budget: bytes.
            end: when to stop, by `time.monotonic`.
        """
        whole = as_tree(programs)
        least = max(peak(graph).total_bytes for graph in graphs)
        if least <= budget:
            outcome = whole.outcome(whole.plain)
            return FoundSchedules(whole.plain, outcome, self.method, outcome.cost, True)

        def search(asked: int, seconds: float) -> tuple[FoundSchedules, bool]:
            solved = solve_tree(whole, asked, self.method, time.monotonic() + seconds)
            return solved, solved.outcome.peak <= asked

        def held_by(found: FoundSchedules) -> int:
            return max(_peak_after(graph, found.schedules) for graph in graphs)

        tried = search_within(budget, end, search, held_by)
        found, held = tried
        if found is not None:
            return found
        smallest, again = _least_again(lambda seconds: search(0, seconds)[0], held_by, budget, end)
        if again <= budget:
            return smallest
        least = min(least, held, again)
        asked = again if again <= _NEAR * least else least
        option = f"--memory-budget-gb {gigabytes_option(asked)} (budget-gb of the pass)"
        raise RecomputeError(
            f"no schedule was found after which ranks hold at most {budget:,} bytes ({bytes_text(budget)})",
            notes=(f"the least that was found holds {least:,} bytes ({bytes_text(least)})",),
            do=f"give a budget of at least {asked:,} bytes, {option}, or more seconds to search",
        )


def _least_again(
    search: Callable[[float], FoundSchedules], held_by: Callable[[FoundSchedules], int], budget: int, end: float
) -> tuple[FoundSchedules, int]:
    """What holds least, of searches in twice the seconds each time; the first one that fits a budget.

    With more time there are more of them, and the first ones are the same: so what one finds, and a user is told, is
    found again. One long search may find less than a short one.

    Args:
        search: finds what holds little in so many seconds.
        held_by: what that holds.
        budget: bytes.
        end: when to stop, by `time.monotonic`; one search there is in any case.
    """
    seconds = LEAST_SECONDS
    found = search(seconds)
    least = held_by(found)
    while least > budget and time.monotonic() + 2 * seconds <= end:
        seconds *= 2
        tried = search(seconds)
        held = held_by(tried)
        if held < least:
            found, least = tried, held
    return found, least


def _names(module: Module) -> dict[str, None]:
    """What patterns may name."""
    return dict.fromkeys(name for graph in module.graphs for node in graph.walk() for name in names_of(node))


def _why_none(module: Module) -> str:
    """Why nothing that is named is computed again."""
    if all(node.phase is None for graph in module.graphs for node in graph.walk()):
        return "nothing is computed again: there is no backward pass (a budget needs none)"
    return "nothing that the backward pass reads matches"


def _peak_after(graph: Graph, schedules: Schedules) -> int:
    """What a program holds that runs as schedules say."""
    trial = clone_graph(graph)
    write(of_program(trial, lambda node: 0, lambda node: False), schedules, 0)
    return peak(trial).total_bytes


def _are_alike(programs: Sequence[Program]) -> bool:
    """Whether programs are the same but for sizes, so that the same schedules fit all."""
    first = _shape(programs[0])
    return all(_shape(each) == first for each in programs[1:])


def _shape(program: Program) -> list[tuple[object, ...]]:
    """What a program and its bodies compute, but for sizes."""
    return [
        (part.graph.edges, [node and node.identity for node in part.nodes], [place for place, _ in part.bodies])
        for part in program.parts
    ]


def _write(module: Module, programs: Sequence[Program], schedules: Sequence[Schedules]) -> int:
    """Rewrite all programs; returns how many nodes of the one with most run again."""
    ids = [int_attribute(node, "id") for graph in module.graphs for node in graph.walk() if is_numbered(node)]
    first_id = max(ids, default=-1) + 1
    count = max(write(program, plan, first_id) for program, plan in zip(programs, schedules, strict=True))
    if count:
        number_alike(module.graphs)
    return count


def _facts(found: FoundSchedules, seconds: float) -> tuple[str, ...]:
    """How good schedules are."""
    by = f"by {found.method}, in {seconds:.1f} s"
    if found.proven:
        return (f"{by}: nothing is faster, of what the search looks at",)
    if found.bound is None:
        return (by,)
    share = 100 * (1 - found.bound / max(found.outcome.cost, 1))
    return (f"{by}: what is fastest, of what the search looks at, takes at most {share:.1f} % less",)
