"""Type inference: result types from operand types, by irpar's operator definitions, else by ONNX's own inference.

Inferred types are merged with the known ones: an inferred number stands, a declared number or symbol fills what cannot
be inferred. Exports often declare wrong shapes for inner values; there the inferred one stands too, with a note. What
cannot be is refused: another dtype than declared, and operands that do not fit each other.
"""

from collections.abc import Callable, Sequence

from irpar.ir import (
    UNKNOWN,
    Function,
    Graph,
    Module,
    Node,
    RefAttribute,
    TensorType,
    Type,
    Value,
)
from irpar.ir.instantiate import body_of_call
from irpar.ops import definition, infers_by_operands
from irpar.sharding import option

from . import control_flow
from .node_checks import check_node
from .onnx_inference import MAX_DATA, MAX_NUMBERS, OnnxInference, key_of
from .type_merge import TypeInferenceError, fits, is_complete, merge, without_dims

MAX_NOTES = 10
"""Contradictions that are reported one by one; the rest is counted."""


_NEVER_TAKEN = "or, where that branch is never taken, fix the input that decides it: "


class Inference:
    """One run of type inference over a module: keeps what it has worked out for calls and for equal nodes.

    Args:
        visit: what to do with a graph that a node holds, when the types of its inputs are set; by default its nodes are
            inferred in order. It must leave the types of the graph's results inferred.

    Attributes:
        inferred: number of values that got another type.
        contradictions: number of declared shapes that the inferred ones contradict.
        examples: the first of these, a line each.
    """

    def __init__(self, visit: Callable[[Graph], None] | None = None) -> None:
        self.visit = visit or self.graph
        self.inferred = 0
        self.contradictions = 0
        self.examples: list[str] = []
        self._onnx = OnnxInference()
        self._known: dict[object, Sequence[Type]] = {}
        self._types: dict[Type, Type] = {}
        self._calls: dict[object, tuple[Type, ...]] = {}
        self._rehearsal: Inference | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The contradictions, as lines for the user."""
        more = self.contradictions - len(self.examples)
        return (*self.examples, f"{more} more declared shapes like these") if more else tuple(self.examples)

    def graph(self, graph: Graph) -> None:
        """Infer all nodes of a graph in order, nested graphs included.

        Raises:
            TypeInferenceError: see the class.
        """
        for value in (*graph.inputs, *graph.constants):
            value.type = self._types.setdefault(value.type, value.type)
        for node in graph:
            self.node(node)

    def rehearse(self, graph: Graph) -> None:
        """Infer a graph without counting, telling or visiting: for a copy, or on an assumption that may not hold.

        Raises:
            TypeInferenceError: see the class.
        """
        if self._rehearsal is None:
            self._rehearsal = Inference()
            self._rehearsal._onnx, self._rehearsal._calls = self._onnx, self._calls
            self._rehearsal._rehearsal = self._rehearsal
        self._rehearsal.graph(graph)

    def node(self, node: Node) -> bool:
        """Infer the result types of a node from its operands' types.

        Returns:
            Whether a result has another type now.

        Raises:
            TypeInferenceError: see the class.
        """
        try:
            types = self.result_types(node)
            changed = False
            for value, inferred in zip(node.results, types, strict=True):
                changed |= self._set(node, value, inferred)
            return changed
        except TypeInferenceError as error:
            raise _in_branch(node, error) from error

    def result_types(self, node: Node) -> Sequence[Type]:
        """What the operands say of the results; UNKNOWN where they say nothing. Nested graphs are visited."""
        if node.callee is not None:
            return self._call(node, node.callee)
        if not node.attributes:
            return self._operator(node)
        if any(isinstance(attribute, RefAttribute) for attribute in node.attributes.values()):
            check_node(node)
            return [UNKNOWN] * len(node.results)
        if node.holds_graphs:
            check_node(node)
            infer = control_flow.INFER.get(node.identity)
            return [UNKNOWN] * len(node.results) if infer is None else infer(self, node)
        return self._operator(node)

    def _operator(self, node: Node) -> Sequence[Type]:
        """Of nodes that are alike one is checked and asked."""
        key = _key_of_node(node)
        types = None if key is None else self._known.get(key)
        if types is None:
            check_node(node)
            types = [self._types.setdefault(type_, type_) for type_ in self._asked(node)]
            if key is not None:
                self._known[key] = types
        return types

    def _asked(self, node: Node) -> Sequence[Type]:
        # ONNX is asked in any case, and first: irpar's definitions take it for granted that the operands fit.
        other = self._onnx.result_types(node)
        found = definition(node)
        own = found.infer(node) if found is not None and found.infer is not None else None
        if own is not None and node.identity == ("", "Reshape"):
            _check_reshape(node, own[0])
        if node.identity == ("", "Range"):
            _check_range(node)
        if own is None:
            return other
        if all(map(is_complete, own)):
            return own
        return [merge(mine, theirs) if fits(mine, theirs) else mine for mine, theirs in zip(own, other, strict=True)]

    def _set(self, node: Node, value: Value, inferred: Type) -> bool:
        known = value.type
        if inferred == known:
            value.type = inferred  # Equal types are one object, so that who compares them later is done at once.
            return False
        kinds = without_dims(inferred), without_dims(known)
        if kinds[0] != kinds[1] and "?" not in kinds:
            raise TypeInferenceError(
                f"%{value.name} is declared {known}, but {node.op_type} produces {inferred}",
                where=f"node {node.label}: {node!r}",
                notes=_operand_lines(node),
                do="mend the declared type in the model, or the operands of the node",
            )
        if not fits(inferred, known):
            self.contradictions += 1
            if len(self.examples) < MAX_NOTES:
                self.examples.append(f"%{value.name} of {node.label} is declared {known}, but is {inferred}")
        merged = merge(inferred, known)
        if merged == known:
            return False
        if isinstance(merged, TensorType) and merged.is_too_large:
            raise TypeInferenceError(
                f"%{value.name} would be {merged}, which has more than 2^63 bytes",
                where=f"node {node.label}: {node!r}",
                notes=_operand_lines(node),
                do="mend the model, or the sizes given for its symbols",
            )
        if (
            value.sharding is not None
            and isinstance(merged, TensorType)
            and merged.rank not in (None, value.sharding.rank)
        ):
            raise TypeInferenceError(
                f"%{value.name} is {merged}, but its sharding {value.sharding} is for {value.sharding.rank} dims",
                where=f"node {node.label}: {node!r}",
                do="annotate it with one entry for each of its dims",
            )
        value.type = merged
        self.inferred += 1
        return True

    def _call(self, node: Node, function: Function) -> Sequence[Type]:
        """Infer a copy of the function's body for these operands; equal calls share the answer."""
        key: object = (function, tuple(map(_key_of, node.operands)), tuple(node.attributes.items()))
        try:
            found = self._calls.get(key)
        except TypeError:  # an attribute that cannot be hashed
            key = found = None
        if found is None:
            body = body_of_call(node)
            for value, operand in zip(body.inputs, node.operands, strict=False):
                if operand is not None:
                    value.type = operand.type
                    if operand.data is not None and operand.data.size <= 16:
                        value.data = operand.data
            self.rehearse(body)
            found = tuple(value.type for value in body.outputs)
            if key is not None:
                self._calls[key] = found
        return found[: len(node.results)]


def infer_module(module: Module) -> Inference:
    """Infer all graphs and functions of a module; returns what was found out.

    Raises:
        TypeInferenceError: a dtype is not the declared one, or operands do not fit each other.
    """
    inference = Inference()
    for graph in module.graphs:
        inference.graph(graph)
    for function in module.functions.values():
        inference.graph(function.graph)
    return inference


def _in_branch(node: Node, error: TypeInferenceError) -> TypeInferenceError:
    """The same of a node in a branch, which may be one that these sizes never take."""
    branching = None if node.graph is None else node.graph.parent
    if branching is None or branching.op_type != "If" or _NEVER_TAKEN in error.do:
        return error
    return TypeInferenceError(
        error.what,
        where=error.where,
        notes=(*error.notes, f"it stands in a branch of If {branching.label}"),
        do=f"{error.do}; {_NEVER_TAKEN}{option('set', {'NAME': 'VALUE'})}",
    )


def _key_of(operand: Value | None) -> object:
    """What an inferred call depends on of an operand."""
    if operand is None:
        return None
    return operand.type, operand.data if operand.data is not None and operand.data.size <= 16 else None


def _key_of_node(node: Node) -> object:
    """What the result types of a node depend on; None where that is too much to compare.

    Lists of few numbers, such as sizes, are looked for through the nodes that make them, and so are those of sequences.
    """
    if not infers_by_operands(node) or any(map(_may_list, node.inputs)):
        return None
    key = key_of(node)
    return None if key is None else (key, tuple([value.type for value in node.results]))


def _may_list(value: Value) -> bool:
    """Whether a value may be a list of sizes or scales, or a sequence, that its key does not tell."""
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None or len(type_.shape) > MAX_NUMBERS:
        return True
    if value.data is None:
        return value.node is not None and len(type_.shape) <= 1
    return type_.dtype.is_index and len(type_.shape) <= 1 and value.data.size > MAX_DATA


def _check_reshape(node: Node, type_: Type) -> None:
    """Refuse a target of another number of elements, which ONNX's own inference lets pass."""
    before, after = node.inputs[0].type, type_
    if not (isinstance(before, TensorType) and isinstance(after, TensorType) and before.is_static and after.is_static):
        return
    if before.size != after.size:
        raise TypeInferenceError(
            f"Reshape of {before} ({before.size} elements) to {after} ({after.size} elements)",
            where=f"node {node.label}: {node!r}",
            do="give the sizes that the model was exported for, or export it again with this dim dynamic: "
            "a target shape is baked into the model",
        )


def _check_range(node: Node) -> None:
    """Refuse a step of zero, for which ONNX's own inference says that the result is empty."""
    step = node.operands[2]
    if step is not None and step.data is not None and step.data.size == 1 and not step.data.numpy().any():
        raise TypeInferenceError(
            "Range has a step of 0 and would never end",
            where=f"node {node.label}: {node!r}",
            do="mend the model, or export it again",
        )


def _operand_lines(node: Node) -> tuple[str, ...]:
    return tuple(f"operand %{value.name} : {value.type}" for value in node.inputs)
