"""The rule of a node, and how it runs as its values lie."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from irpar.analysis.engines import is_known
from irpar.ir import Node, Value, tensor_type
from irpar.ops import definition, factor_rule, kind_of_rule, other_rules, what_is_uncovered, why_replicated
from irpar.sharding import Mesh, Sharding

from .placement import Placement
from .rule_view import RuleView, suggested


def has_rank(value: Value) -> bool:
    """True for tensors whose number of dims is known; completion gives these a sharding."""
    type_ = tensor_type(value.type)
    return type_ is not None and type_.shape is not None


def whole_placement(node: Node, mesh: Mesh) -> Placement:
    """The node runs on full tensors on every device."""

    def whole(value: Value | None) -> Sharding | None:
        rank = value.tensor_type.rank if value is not None and has_rank(value) else None
        return None if rank is None else Sharding.replicated(mesh, rank)

    return Placement(tuple(map(whole, node.operands)), tuple(map(whole, node.results)), None, ())


def rule_view(node: Node, mesh: Mesh) -> RuleView | None:
    """The rule of a node beside its shapes, or None where it must run replicated."""
    kind = kind_of_rule(node)
    if kind is None:
        return _new_view(node, mesh)
    key = mesh, kind
    if key not in _KNOWN:
        view = _new_view(node, mesh)
        if len(_KNOWN) == _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[key] = None if view is None else view.shared()
        return view
    shared = _KNOWN[key]
    return None if shared is None else RuleView.like(shared, node)


_MOST_KNOWN = 4096
"""Kinds of nodes whose rules are kept beside their shapes."""
_KNOWN: dict[tuple[Mesh, Hashable], Mapping[str, Any] | None] = {}
"""By mesh and kind; None where such a node must run replicated."""


def _new_view(node: Node, mesh: Mesh) -> RuleView | None:
    if not all(value.is_static for value in (*node.inputs, *node.results)):
        return None
    rule = factor_rule(node)
    if rule is None:
        return None
    view = RuleView(node, rule, mesh)
    view.ways = (view, *(RuleView(node, other, mesh) for other in other_rules(node)))
    return view


def why_whole(node: Node) -> str:
    """Why a node without a rule runs on full tensors."""
    if node.callee is not None:
        return "a function call: open it with inline-functions"
    found = definition(node)
    if found is None or found.rule is None:
        reason = why_replicated(node.domain, node.op_type)
        if reason is not None:
            return reason
        return f"{node.operator} has no sharding rule yet" + ("" if is_known(node) else ", and no engine knows it")
    uncovered = what_is_uncovered(node)
    told = f": {uncovered}" if uncovered else ""
    return f"the rule of {node.operator} does not cover these attributes or shapes{told}"


def placement_as_it_lies(node: Node, view: RuleView | None, mesh: Mesh) -> Placement | None:
    """How a node runs on blocks as its operands and results lie, nothing being moved; None where it cannot.

    Args:
        node: the node.
        view: its rule; None where it must run replicated.
        mesh: the mesh.
    """
    if view is None:
        whole = whole_placement(node, mesh)
        return whole if fits(node, whole) else None
    lies = tuple([None if value is None else value.sharding for value in view.values])
    return view.of_kind(("as it lies", lies), lambda: _fitting(node, view, lies))


def _fitting(node: Node, view: RuleView, lies: Sequence[Sharding | None]) -> Placement | None:
    """The first of its ways to run a node that takes and gives its values as they lie."""
    known = [None if lie is None else lie.canonical.axes for lie in lies]
    for way in view.ways:
        factors = tuple(choices[0] for choices in suggested(way, known))
        for carried in way.carriable(lies):
            placement = way.placement(factors, carried)
            if placement is not None and fits(node, placement):
                return placement
    return None


def fits(node: Node, placement: Placement) -> bool:
    """True where a node's operands and results are sharded as a placement needs and gives them."""
    pairs = zip((*node.operands, *node.results), (*placement.operands, *placement.results), strict=True)
    return all(
        value is None or needed is None or (value.sharding and value.sharding.canonical) == needed.canonical
        for value, needed in pairs
    )
