"""What is held at the peak of a rank, as `irpar explain OUT --memory` tells and draws it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from irpar.analysis.cost.network_name import network_name
from irpar.analysis.memory.by_use import USES
from irpar.errors import IrparError
from irpar.output.tables import merged, pattern
from irpar.tables.display import shortened, table
from irpar.units import bytes_text, count_text, seconds_text

if TYPE_CHECKING:
    from rich.console import Console

    from irpar.advice.lower_peak import Change, Programs
    from irpar.analysis.memory.holdings import Holding
    from irpar.ir import Graph
    from irpar.output.plan_record import Plan
    from irpar.tables.memory_picture import Panel

_MOST_LAYERS, _MOST_PARTS, _MOST_CHANGES = 12, 8, 3
"""Lines of each table."""
_MOST_NODES = 20_000
"""Of a program that is planned anew, which takes as long as it took."""
_NUMBERED = re.compile(r"\d")
_ELSEWHERE = "(no layer)"


@dataclass(frozen=True)
class PeakReport:
    """The peak of one rank, and what would lower that of the worst one.

    Attributes:
        rank: whose.
        graph: its program, calls opened.
        plain: that as it would be if it computed nothing again; None where it does not.
        step: of its peak.
        at_peak: what is held then.
        programs: those of all ranks.
        network: that of the plan.
        changes: what would lower the peak of the worst rank.
        untried: what could not be tried, in words.
    """

    rank: int
    graph: "Graph"
    plain: "Graph | None"
    step: int
    at_peak: "Sequence[Holding]"
    programs: "Programs"
    network: str
    changes: "Sequence[Change]"
    untried: Sequence[str]

    @classmethod
    def of(cls, plan: "Plan", folder: Path, rank: int | None) -> "PeakReport":
        """Read the programs and look at the peak of one.

        Args:
            plan: of the partition.
            folder: where it is.
            rank: whose peak; None: of the first rank that holds most.

        Raises:
            IrparError: there is no such rank, or the programs cannot be read.
        """
        from irpar.advice.lower_peak import Programs
        from irpar.analysis.memory.holdings import at_step, holdings, step_of_peak

        rank = max(plan.ranks, key=lambda entry: entry["peak_bytes"])["rank"] if rank is None else rank
        module, number = _opened(plan, folder, rank)
        programs = Programs(module, plan.pipeline)
        graph = module.graphs[number]
        step = step_of_peak(graph)
        plain = programs.plain.graphs[number] if programs.repeated else None
        found, untried = _changes(plan, programs)
        at_peak = at_step(holdings(graph), step)
        return cls(rank, graph, plain, step, at_peak, programs, plan.network, found[:_MOST_CHANGES], untried)

    @property
    def nbytes(self) -> int:
        """Of the peak."""
        return sum(one.nbytes for one in self.at_peak)

    # -- words --------------------------------------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        """What `--json` has of it."""
        node = None if self.step == 0 else list(self.graph)[self.step - 1]
        where = {"node": node and node.label, "scope": node and node.scope, "phase": node and node.phase}
        held = [
            {"layer": layer_of(scope), "scope": scope, "use": use, "bytes": sum(one.nbytes for one in same)}
            for (scope, use), same in _grouped(self.at_peak, lambda one: (one.scope, one.use))
        ]
        peak = {"rank": self.rank, "bytes": self.nbytes, "step": self.step, "steps": len(self.graph), **where}
        changed = [
            {
                "what": each.what,
                "option": each.option,
                "peak_bytes": each.peak_bytes,
                "more_seconds": each.more_seconds,
                "is_most": each.is_most,
            }
            for each in self.changes
        ]
        tried = {"changes": changed, "untried": list(self.untried), "time_of": self._time_of()}
        return {"peak": {**peak, "held": held}, **tried}

    def print(self, console: "Console") -> None:
        """Print what is held, where, and what would lower it."""
        where = _step_text(self.graph, self.step)
        title = f"the peak of rank {self.rank}: {bytes_text(self.nbytes)}, {where}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(self._layers())
        console.print()
        console.print(self._parts())
        console.print()
        self._print_changes(console)

    def _layers(self) -> Any:
        """What layers hold at the peak: those that hold the same together, those first that hold most."""
        layers = {
            layer: {use: sum(one.nbytes for one in same if one.use == use) for use in USES}
            for layer, same in _grouped(self.at_peak, lambda one: layer_of(one.scope))
        }
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for layer, held in layers.items():
            alike.setdefault((pattern(layer), tuple(held.values())), []).append(layer)
        rows = sorted(alike.items(), key=lambda row: -sum(row[0][1]) * len(row[1]))
        uses = [use for use in USES if any(held[use] for held in layers.values())]
        made = table("layer", *uses, "all", right=(*uses, "all"))

        def add(name: str, sums: Mapping[str, int]) -> None:
            made.add_row(
                name, *(bytes_text(sums[use]) if sums[use] else "" for use in uses), bytes_text(sum(sums.values()))
            )

        for (_, sizes), names in rows[:_MOST_LAYERS]:
            add(_several(names), {use: len(names) * size for use, size in zip(USES, sizes, strict=True)})
        others = [layer for _, names in rows[_MOST_LAYERS:] for layer in names]
        if others:
            add(f"{count_text(len(others), 'other')}", {use: sum(layers[name][use] for name in others) for use in USES})
        return made

    def _parts(self) -> Any:
        """The scopes and kinds that hold most at the peak, those of all layers together."""
        made = table("most at the peak", "", "values", "bytes", right=("values", "bytes"))
        groups = _grouped(self.at_peak, lambda one: (pattern(one.scope), one.use))
        ordered = sorted(groups, key=lambda group: -sum(one.nbytes for one in group[1]))
        for (_, use), same in ordered[:_MOST_PARTS]:
            names = list(dict.fromkeys(one.scope or _ELSEWHERE for one in same))
            size = bytes_text(sum(one.nbytes for one in same))
            made.add_row(_several(names), use, f"{len(same):,}", size)
        return made

    def _print_changes(self, console: "Console") -> None:
        from irpar.analysis.memory.liveness import peak_bytes

        before = peak_bytes(self.programs.now)
        if not before:
            console.print("the device holds nothing", soft_wrap=True)
            return
        if not self.changes:
            console.print("nothing that was tried lowers the peak by a hundredth", soft_wrap=True)
        for line in self.untried:
            console.print(Text(line), soft_wrap=True)
        if not self.changes:
            return
        seconds = self.programs.seconds(self.programs.now)
        made = table("", "would lower the peak", "to", "by", "time a step", right=("to", "by", "time a step"))
        for number, each in enumerate(self.changes, 1):
            most = "at most " if each.is_most else ""
            more = f"{most}{each.more_seconds / seconds:+.1%}" if seconds else ""
            saved = f"{1 - each.peak_bytes / before:.1%}"
            made.add_row(str(number), each.what, most + bytes_text(each.peak_bytes), saved, more)
        console.print(made)
        for number, each in enumerate(self.changes, 1):
            console.print(Text(f"{number}  {each.option}"), soft_wrap=True)
        step = seconds_text(seconds)
        console.print(Text(f"each tried by itself; {step} a step by {self._time_of()}"), soft_wrap=True)
        instead = "in place of options of the same name"
        if any(each.option.startswith("--pipeline") for each in self.changes):
            instead += "; --pipeline also of --zero, --recompute and --memory-budget"
        console.print(Text(f"{instead}; with all others that the partition was made with"), soft_wrap=True)

    def _time_of(self) -> str:
        """By which model times are."""
        from irpar.analysis.cost.network_lookup import network_of
        from irpar.analysis.recompute.costs import ASSUMED, timed

        name = network_name(self.network)
        if timed(self.network) is network_of(self.network):
            return name
        return f"{ASSUMED}: {name}, the network of the partition, does not know all times"

    # -- picture ------------------------------------------------------------------------------------------------------

    def draw(self, path: Path) -> None:
        """Write the picture: memory over the steps, without and with what is computed again.

        Raises:
            IrparError: the file cannot be written.
        """
        from irpar.files.atomic import new_file
        from irpar.tables.memory_picture import memory_picture

        panels = [_panel(self.graph, "memory")]
        if self.plain is not None:
            fewer = sum(1 for _ in self.graph.walk()) - sum(1 for _ in self.plain.walk())
            again = f"{count_text(fewer, 'node')} computed again"
            panels = [_panel(self.plain, "before: nothing computed again"), _panel(self.graph, f"after: {again}")]
        limit = self.programs.limit()
        limits = None if limit is None else ("memory budget", limit)
        if limits is None:
            from irpar.analysis.cost.network_lookup import network_of

            room = network_of(self.network).memory
            limits = None if room is None else (f"memory of a device ({network_name(self.network)})", int(room))
        text = memory_picture(f"rank {self.rank}: memory over a step", panels, limits)
        with new_file(path, "the picture") as fresh:
            fresh.write_text(text, encoding="utf-8")


def _changes(plan: "Plan", programs: "Programs") -> "tuple[list[Change], list[str]]":
    """What would lower the peak, and what could not be tried."""
    from irpar.advice.lower_peak import changes, lowering
    from irpar.advice.planned_anew import Anew
    from irpar.analysis.recompute.costs import timed

    found, untried = changes(programs), list(programs.untried())
    nodes = max(sum(1 for _ in graph.walk()) for graph in programs.now.graphs)
    try:
        if nodes > _MOST_NODES:
            raise IrparError(f"the program has {nodes:,} nodes")
        anew = Anew(plan, timed(plan.network))
        found = [*anew.confirmed(lowering(programs, found)), *anew.changes()]
    except IrparError as error:
        untried.append(f"ZeRO, micro-batches and other shardings are not tried: {error.what}")
        if any(each.pipeline for each in found):
            untried.append("what is computed again was tried on the programs: collectives may be fused otherwise then")
    return lowering(programs, found), untried


def layer_of(scope: str) -> str:
    """The layer that a scope lies in: what comes before its first part with a number, and that; else all of it."""
    parts = scope.split("/")
    numbered = next((place for place, part in enumerate(parts) if _NUMBERED.search(part)), len(parts) - 1)
    return "/".join(parts[: numbered + 1]) or _ELSEWHERE


def _grouped(held: "Iterable[Holding]", key: Any) -> "list[tuple[Any, list[Holding]]]":
    groups: dict[Any, list[Holding]] = {}
    for one in held:
        groups.setdefault(key(one), []).append(one)
    return list(groups.items())


def _several(names: Sequence[str]) -> str:
    """A name, or what several have in common, and how many they are."""
    return shortened(merged(list(names))) + (f" ({len(names)})" if len(names) > 1 else "")


def _step_text(graph: "Graph", step: int) -> str:
    """When a step of a program is, in words."""
    if step == 0:
        return f"before the first of {count_text(len(graph), 'step')}"
    node = list(graph)[step - 1]
    phase = f", {node.phase}" if node.phase else ""
    place = f" of {node.scope}" if node.scope and node.scope not in node.label else ""
    return f"in step {step:,} of {len(graph):,}: {shortened(node.label)}{place}{phase}"


def _opened(plan: "Plan", folder: Path, rank: int) -> Any:
    """The different programs of a partition as one module, and which of them a rank runs.

    Parts that the plan has the same figures of are alike.
    """
    from irpar.analysis.opening import with_calls_opened
    from irpar.runtime.pieces import open_programs, ranks_by_part

    ranks_by_part(plan, [rank])  # Refuses a rank that is not there.
    first: dict[tuple[Any, ...], int] = {}
    for entry in sorted(plan.ranks, key=lambda entry: entry["rank"] != rank):
        part = plan.parts[entry["part"]]
        figures = (entry["peak_bytes"], entry["arena_bytes"], *entry["memory"].values(), part["flops"])
        first.setdefault((*figures, len(part["segments"])), entry["rank"])
    opened = open_programs(folder, list(first.values()), plan)
    modules = [with_calls_opened(module) for module in opened.modules]
    number = next(number for number, part in enumerate(opened.parts) if rank in part.ranks)
    joined = modules[0]
    joined.graphs = [module.graph for module in modules]
    joined.network = plan.network
    return joined, number


def _panel(graph: "Graph", title: str) -> "Panel":
    from irpar.analysis.memory.holdings import bytes_by_step, holdings, step_of_peak
    from irpar.tables.memory_picture import Panel

    step = step_of_peak(graph)
    node = None if step == 0 else list(graph)[step - 1]
    label = "the inputs" if node is None else shortened(node.label, 40)
    phases: list[tuple[str, int]] = []
    for place, each in enumerate(graph, 1):
        if each.phase and (not phases or phases[-1][0] != each.phase):
            phases.append((each.phase, place))
    return Panel(title, bytes_by_step(holdings(graph), len(graph)), step, label, phases)
