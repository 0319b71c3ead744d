"""What `irpar inspect` tells of a model: its sizes, parameters and operators, and what cannot be sharded and why."""

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from irpar.analysis.completion.node_placement import why_whole
from irpar.analysis.cost.node import node_bytes, node_flops
from irpar.analysis.engines import unknown_notes
from irpar.analysis.memory.liveness import peak, value_bytes
from irpar.analysis.types.node_checks import MalformedNodeError
from irpar.analysis.types.symbols import free_symbols, unnamed_dims
from irpar.ir import Module, Node, State, Value, clone_module, tensor_type
from irpar.ir.annotate import named_values
from irpar.ops import definition, factor_rule, has_open_bodies
from irpar.ops.effects import is_compute
from irpar.pass_manager import Instrumentation, PassManager
from irpar.pass_manager.default_pipeline import NORMALISE
from irpar.sharding import IrparError
from irpar.tables.display import ROWS, report_text
from irpar.units import bytes_text, flops_text, scaled

from .layers import LayerFact, layers_of
from .parameters import ParameterGroup, exact_use_texts, parameters_of, scope_of


@dataclass(frozen=True)
class TensorFact:
    """An input, output or other tensor of the model."""

    name: str
    type: str


@dataclass(frozen=True)
class NamedTensor(TensorFact):
    """A tensor that a --shardings file may name; `uses` says what a constant is for."""

    uses: tuple[str, ...]


@dataclass(frozen=True)
class StateFact:
    """An input that is state.

    Attributes:
        name: of the input.
        kind: parameter, moment, cache ...
        replaced_by: the output that replaces it after a run; None: it stays as it is.
        dtype, shape: its type; dims that are not known are texts; None where even that is not known.
        memory: where it is kept: device, host or disk.
        bytes: of the full tensor; None where sizes are not known.
    """

    name: str
    kind: str
    replaced_by: str | None
    dtype: str | None
    shape: tuple[int | str, ...] | None
    memory: str
    bytes: int | None


@dataclass(frozen=True)
class OpFact:
    """All nodes of one operator.

    Attributes:
        op: operator, with its domain unless it is ONNX's own.
        nodes: how many there are.
        flops: floating-point operations of all; None where sizes are not known.
        bytes: read and written by all; None where sizes are not known.
        can_shard: True where every node has a sharding rule.
    """

    op: str
    nodes: int
    flops: int | None
    bytes: int | None
    can_shard: bool


@dataclass(frozen=True)
class ScopeFact:
    """All nodes of one place in the source program, layers together.

    Attributes:
        scope: modules from the outside in, with `*` for numbers: `h.*/attn/q`; empty where the model does not tell.
        nodes: how many there are.
        parameter_bytes: of the parameters that are first used here.
        flops, bytes: of all, as for an operator; None where sizes are not known.
    """

    scope: str
    nodes: int
    parameter_bytes: int
    flops: int | None
    bytes: int | None

    def within(self, depth: int) -> str:
        """The outermost modules of the scope."""
        return "/".join(self.scope.split("/")[:depth])


@dataclass(frozen=True)
class Unsharded:
    """Nodes of one operator that run replicated on every device, and why.

    Attributes:
        op: the operator.
        why: the reason.
        nodes: how many there are.
        first: label of the first.
    """

    op: str
    why: str
    nodes: int
    first: str


@dataclass(frozen=True)
class OneDevice:
    """Memory that the whole model needs on one device, in bytes, and the node at which it needs the most."""

    weights: int
    activations: int
    peak: int
    node: str | None


@dataclass(frozen=True, repr=False)
class Inspection:
    """Facts about a model.

    Attributes:
        states: inputs whose values outlive a run.
        symbols: symbolic dims of the inputs that are not bound, each with the inputs that have it.
        nodes_in_file: nodes as exported; `operators` has those that the normalising passes leave.
        normalised: False where the model could not be brought into that form; `notes` says why.
        layers: what the model repeats, up to weights.
        memory: None where sizes are not known.
        flops: None where sizes are not known.
    """

    model: str
    producer: str
    opsets: dict[str, int]
    ir_version: int
    functions: int
    nodes_in_file: int
    normalised: bool
    symbols: dict[str, list[str]]
    inputs: tuple[TensorFact, ...]
    outputs: tuple[TensorFact, ...]
    states: tuple[StateFact, ...]
    parameters: tuple[ParameterGroup, ...]
    operators: tuple[OpFact, ...]
    scopes: tuple[ScopeFact, ...]
    layers: tuple[LayerFact, ...]
    unsharded: tuple[Unsharded, ...]
    memory: OneDevice | None
    flops: int | None
    notes: tuple[str, ...]

    @property
    def parameter_elements(self) -> int:
        """Elements of all parameters."""
        return sum(group.elements for group in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(group.bytes for group in self.parameters)

    def __repr__(self) -> str:
        flops = "" if self.flops is None else f", {flops_text(self.flops)}"
        elements, size = scaled(self.parameter_elements, ""), bytes_text(self.parameter_bytes)
        model = self.model or "a model"
        return f"<inspection of {model}: {self.nodes_in_file:,} nodes, {elements} parameters, {size}{flops}>"

    def __str__(self) -> str:
        from .inspection_tables import print_inspection

        return report_text(lambda console: print_inspection(console, self, None))

    def _repr_html_(self) -> str:
        from irpar.tables.html import report_html

        from .inspection_tables import print_inspection

        return report_html(lambda page: print_inspection(page, self, ROWS))


def inspect(module: Module) -> Inspection:
    """Gather the facts. The module stays as it is.

    FLOPs and memory are counted after the normalising passes of the default pipeline, as `irpar partition` sees the
    model; they are None where symbols are not bound.
    """
    whole, notes = _normalised(module)
    counted = whole if whole is not None else module
    symbols = _symbols(module)
    is_static = whole is not None and not symbols
    nodes = [node for node in counted.graph if is_compute(node)]
    parameters = parameters_of(module)
    return Inspection(
        model=str(module.source or ""),
        producer=" ".join(filter(None, module.producer)),
        opsets={domain or "ai.onnx": version for domain, version in module.opsets.items()},
        ir_version=module.ir_version,
        functions=len(module.functions),
        nodes_in_file=sum(1 for graph in module.graphs for _ in graph.walk()),
        normalised=whole is not None,
        symbols=symbols,
        inputs=tuple(TensorFact(value.source_name, str(value.type)) for value in module.graph.inputs),
        outputs=_outputs(counted),
        states=_states(module),
        parameters=parameters,
        operators=_operators(nodes, is_static),
        scopes=_scopes(parameters, nodes, is_static),
        layers=layers_of(counted),
        unsharded=_unsharded(nodes),
        memory=_memory(counted) if is_static else None,
        flops=sum(map(node_flops, nodes)) if is_static else None,
        notes=(*notes, *unknown_notes(counted.graphs)),
    )


def tensors(module: Module, pattern: str) -> tuple[NamedTensor, ...]:
    """The tensors that a --shardings file may name and whose names match a glob, in order, with their types.

    Types that the file does not state are inferred where that is possible.

    Raises:
        IrparError: none matches.
    """
    matcher = re.compile(fnmatch.translate(pattern)).match
    work = clone_module(module)
    try:
        PassManager.parse("infer-types", Instrumentation(reproducer=None)).run(work)
    except IrparError:
        work = module
    found = {
        name: NamedTensor(name, str(value.type), exact_use_texts(value))
        for name, value in named_values(work)
        if matcher(name)
    }  # fmt: skip
    if not found:
        raise IrparError(f'no tensor matches "{pattern}"', do='"*" lists all tensors')
    return tuple(found.values())


def _normalised(module: Module) -> tuple[Module | None, tuple[str, ...]]:
    """A copy after the normalising passes, or None and the reason why they refuse the model.

    Raises:
        MalformedNodeError: a node has not the operands, results or bodies of its operator.
    """
    work = clone_module(module)
    try:
        PassManager.parse(NORMALISE, Instrumentation(reproducer=None)).run(work)
    except MalformedNodeError:
        raise
    except IrparError as error:
        return None, (f"FLOPs, memory and sharding rules are of the model as it was exported: {error.what}",)
    return work, ()


def _symbols(module: Module) -> dict[str, list[str]]:
    found = {symbol: [value.name for value in values] for symbol, values in free_symbols(module).items()}
    return found | {f"{value.name}.{index}": [value.name] for value, index in unnamed_dims(module)}


def _outputs(module: Module) -> tuple[TensorFact, ...]:
    graph = module.graph
    return tuple(
        TensorFact(name, str(value.type)) for name, value in zip(graph.output_names, graph.outputs, strict=True)
    )


def _states(module: Module) -> tuple[StateFact, ...]:
    graph = module.graph
    return tuple(_state(value, state, graph.output_names) for value, state in graph.states.items())


def _state(value: Value, state: State, outputs: Sequence[str]) -> StateFact:
    known = tensor_type(value.type)
    shape = None
    if known is not None and known.shape is not None:
        shape = tuple(dim if isinstance(dim, int) else str(dim) for dim in known.shape)
    return StateFact(
        name=value.source_name,
        kind=state.kind,
        replaced_by=None if state.output is None else outputs[state.output],
        dtype=None if known is None else known.dtype.text,
        shape=shape,
        memory=value.memory,
        bytes=value_bytes(value) if known is not None and known.is_static else None,
    )


# -- operators ----------------------------------------------------------------------------------------------------


def _operators(nodes: Sequence[Node], is_static: bool) -> tuple[OpFact, ...]:
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.operator, []).append(node)
    found = [
        OpFact(
            op=op,
            nodes=len(members),
            flops=sum(map(node_flops, members)) if is_static else None,
            bytes=sum(map(node_bytes, members)) if is_static else None,
            can_shard=all(reason_whole(node) is None for node in members),
        )
        for op, members in groups.items()
    ]
    return tuple(sorted(found, key=lambda fact: (-(fact.flops or 0), -fact.nodes)))


def _scopes(parameters: Iterable[ParameterGroup], nodes: Sequence[Node], is_static: bool) -> tuple[ScopeFact, ...]:
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(scope_of(node), []).append(node)
    held: dict[str, int] = {}
    for group in parameters:
        held[group.scope] = held.get(group.scope, 0) + group.bytes
        groups.setdefault(group.scope, [])
    found = [
        ScopeFact(
            scope=scope,
            nodes=len(members),
            parameter_bytes=held.get(scope, 0),
            flops=sum(map(node_flops, members)) if is_static else None,
            bytes=sum(map(node_bytes, members)) if is_static else None,
        )
        for scope, members in groups.items()
    ]
    return tuple(found)


def _unsharded(nodes: Iterable[Node]) -> tuple[Unsharded, ...]:
    groups: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        why = reason_whole(node)
        if why is not None:
            groups.setdefault((node.operator, why), []).append(node)
    return tuple(Unsharded(op, why, len(members), members[0].label) for (op, why), members in groups.items())


def reason_whole(node: Node) -> str | None:
    """Why a node runs replicated on every device, or None where it has a sharding rule.

    Where sizes are not known, an operator that has a rule counts as one that can be sharded.
    """
    if has_open_bodies(node):
        return None
    found = definition(node)
    if found is None or found.rule is None:
        return why_whole(node)
    if not all(map(_is_static, (*node.inputs, *node.results))):
        return None
    return None if factor_rule(node) is not None else why_whole(node)


def _is_static(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is not None and type_.is_static


def _memory(module: Module) -> OneDevice:
    found = peak(module.graph)
    node = None if found.node is None else found.node.label
    return OneDevice(found.constant_bytes, found.activation_bytes, found.total_bytes, node)


def as_json(inspection: Inspection) -> dict[str, Any]:
    """The facts as plain data."""
    return asdict(inspection) | {
        "parameter_elements": inspection.parameter_elements,
        "parameter_bytes": inspection.parameter_bytes,
    }
