"""Putting other moves between a value and its readers, with the log kept true."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.explanation.redistribution_log import log_step
from irpar.ir import Builder, Conflict, Decision, Graph, Module, Node, Value
from irpar.ir.value import Use
from irpar.ops.collectives import FREE
from irpar.ops.coords import root_of
from irpar.sharding import Sharding

from . import Step
from .held import is_held
from .trees import Tree, behind_parts, insert_step, is_move, mark_rematerialized, standing_in

_MOVE = re.compile(r"^\w+ of %\S+?(?=[,:]? |$)")
_WHOLE = "small enough that each device holds what is read of it whole"
Edge = tuple[Sharding, Step]


@dataclass(frozen=True)
class _Told:
    """What is known of one of the ways in which a value was read.

    Attributes:
        name: of the value that lay so.
        like: the node that gave it.
        doc: the reasons of all moves up to there.
        conflict: that it resolved.
        decisions: why each axis shards it, followed back to what stands before the moves.
        is_held: readers must meet it so.
    """

    name: str
    like: Node
    doc: str
    conflict: Conflict | None
    decisions: dict[str, Decision]
    is_held: bool = False


class TreeWriter:
    """Rewrites the moves of values of one graph.

    Args:
        module: with the log.
        graph: global view.
    """

    def __init__(self, module: Module, graph: Graph) -> None:
        self.module = module
        self.graph = graph
        self.order = {node: number for number, node in enumerate(graph)}
        self.order[graph.return_node] = len(self.order)
        self.anchors = list(self.order)
        self.instead: dict[tuple[str, str], Decision | None] = {}

    def write(self, tree: Tree, edges: Sequence[Edge], written: Sequence[Sharding] = ()) -> None:
        """Let the readers of a tree be served by other steps.

        Args:
            tree: as it is.
            edges: lead from its root to all shardings that are read but those written, each before what follows it.
            written: of a constant, the shardings in which it is written as well; where all readers are served by
                these, instead.
        """
        readers = {lies: self._readers(tree, values) for lies, values in tree.read.items()}
        gone = self._gone(tree)
        told = self._erase(tree, readers)
        made = self._write_constants(tree, told, written)
        first = {lies: min(map(self._place, uses)) for lies, uses in readers.items()}
        goal: dict[Sharding, Sharding] = {lies: lies for lies in readers}
        for before, step in reversed(edges):
            if before not in first or first[step.after] < first[before]:
                first[before] = first[step.after]
            goal.setdefault(before, goal[step.after])
        for before, step in edges:
            target = goal[step.after]
            anchor = behind_parts(made[before], tree.read) or self.anchors[first[step.after]]
            made[step.after] = self._make(made[before], step, anchor, told[target])
            names = told.get(step.after)
            if names is not None:
                made[step.after].rename(names.name)
            self._explain(made[before], made[step.after], step, told[target], target)
        mark_rematerialized(self.module, filter(None, (value.node for value in made.values())))
        for lies, uses in readers.items():
            tree.root.replace_uses(made[lies], only=uses)
        self._redirect(tree, made, gone)

    def _write_constants(
        self, tree: Tree, told: Mapping[Sharding, _Told], written: Sequence[Sharding]
    ) -> dict[Sharding, Value]:
        """The constants that a tree starts from: its root as it lies, if that is needed, and one for each other way."""
        root = tree.root
        made = {tree.lies: root}
        if not written:
            return made
        outermost = root_of(self.graph)
        if set(written) == set(tree.read):
            # The root itself lies in the first way then.
            del made[tree.lies]
            if root.graph is not outermost:
                outermost.lift_constant(root)
        for lies in written:
            value = root
            if made:
                assert root.data is not None
                value = outermost.add_constant(root.data, told[lies].name, root.source)
                value.memory, value.doc = root.memory, root.doc
            had = () if value is not root else cutting_names(tree.lies)
            for axis in cutting_names(lies):
                decision = told[lies].decisions.get(axis)
                if decision is not None and decision.follows == root.name:
                    decision = self.module.decision(root.name, axis)
                if decision is not None and axis not in had:
                    self.module.decide(value.name, replace(decision, axes=(axis,)))
            if not cutting_names(lies):
                self.module.decide(value.name, Decision("; ".join(filter(None, (_WHOLE, told[lies].doc)))))
            value.sharding, made[lies] = lies, value
        return made

    def finish(self) -> None:
        """Let what follows a value that is gone follow what has its axes."""
        for known in self.module.decisions.values() if self.instead else ():
            for number, decision in enumerate(known):
                axis = decision.axes[0] if decision.axes else ""
                other = self.instead.get((decision.follows or "", axis))
                if other is not None:
                    why = decision.why if other.follows is not None else other.why
                    known[number] = replace(decision, why=why, follows=other.follows)

    def _gone(self, tree: Tree) -> set[tuple[str, str]]:
        """The names of what moves give, with their axes."""
        return {(node.result.name, axis) for node in tree.moves for axis in (*cutting_names(node.result.sharding), "")}

    def _readers(self, tree: Tree, values: Sequence[Value]) -> list[Use]:
        return [
            use
            for value in values
            for use in value.uses
            if (value is not tree.root and self._ends(value)) or not (is_move(use[0]) and use[0].graph is self.graph)
        ]

    def _ends(self, value: Value) -> bool:
        """Whether a value that a move gives is held, so that moves of it are its readers."""
        return value.node is not None and is_move(value.node) and is_held(self.module, value)

    def _place(self, use: Use) -> int:
        return self.order[standing_in(self.graph, use[0])]

    # -- before -----------------------------------------------------------------------------------------------------

    def _erase(self, tree: Tree, readers: dict[Sharding, list[Use]]) -> dict[Sharding, _Told]:
        """Take the moves out, their readers reading the root for now; returns what was known of them."""
        names = {node.result.name for node in tree.moves}
        told: dict[Sharding, _Told] = {}
        for node in tree.moves:
            result = node.result
            assert result.sharding is not None
            lies = result.sharding.canonical
            ends = self._ends(result)
            if lies in readers and (lies not in told or ends):
                decisions = {axis: self._outer(names, result.name, axis) for axis in cutting_names(lies)}
                kept = {axis: decision for axis, decision in decisions.items() if decision is not None}
                told[lies] = _Told(result.name, node, *self._reasons(tree, node), kept, ends)
        for node in tree.moves:
            self.instead.update(
                ((node.result.name, axis), self._outer(names, node.result.name, axis))
                for axis in (*cutting_names(node.result.sharding), "")
            )
        for node in reversed(tree.moves):
            self.module.conflicts.pop(node.result.name, None)
            if not self._ends(node.result):
                self.module.decisions.pop(node.result.name, None)
            node.result.replace_uses(tree.root)
            node.erase()
        return told

    def _outer(self, inside: set[str], name: str, axis: str) -> Decision | None:
        """The last decision of a chain that is about a value of the tree."""
        seen: set[str] = set()
        while True:
            seen.add(name)
            decision = self.module.decision(name, axis or None)
            if decision is None or decision.follows not in inside or decision.follows in seen:
                return decision
            name = decision.follows

    def _reasons(self, tree: Tree, node: Node) -> tuple[str, Conflict | None]:
        """Why the moves up to a node were there: their docs, and the conflict that they resolved."""
        docs: list[str] = []
        conflict: Conflict | None = None
        step: Node | None = node
        while step is not None and is_move(step):
            docs.insert(0, step.doc)
            conflict = conflict or self.module.conflicts.get(step.result.name)
            step = step.inputs[0].node if step.inputs[0] is not tree.root else None
        return "; ".join(dict.fromkeys(filter(None, docs))), conflict

    # -- after ------------------------------------------------------------------------------------------------------

    def _make(self, value: Value, step: Step, before: Node, told: _Told) -> Value:
        builder = Builder(self.graph, self.module.opsets, before=before, like=told.like)
        return insert_step(builder, value, step, told.doc)

    def _explain(self, value: Value, result: Value, step: Step, told: _Told, target: Sharding) -> None:
        """Log why the result of a step is sharded so, and the conflict that it resolves."""

        def gained(axis: str) -> Decision | None:
            if told.is_held:
                return Decision(f"{step.op} of %{value.name}, to be sharded as %{told.name}", told.name, (axis,))
            outer = told.decisions.get(axis)
            if outer is None:
                return None
            return Decision(_MOVE.sub(f"{step.op} of %{value.name}", outer.why), outer.follows, (axis,))

        if result.name != told.name or not told.is_held:
            log_step(self.module, value, result, step.op, target, gained)
        if told.conflict is not None and step.op not in FREE:
            self.module.conflicts[result.name] = replace(told.conflict, rematerialized=False)

    def _redirect(self, tree: Tree, made: dict[Sharding, Value], gone: set[tuple[str, str]]) -> None:
        """Names that stand for a value again, with the axis, are followed as before; others give way to the root."""
        by_name = {value.name: value for value in made.values()}
        for name, axis in gone:
            value = by_name.get(name)
            if value is not None and (not axis or axis in cutting_names(value.sharding)):
                del self.instead[name, axis]
            elif axis in cutting_names(tree.root.sharding) or not axis:
                known = self.instead[name, axis]
                if known is not None:
                    self.instead[name, axis] = replace(known, follows=tree.root.name)
