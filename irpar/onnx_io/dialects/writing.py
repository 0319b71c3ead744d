"""Collectives as the operators of another runtime, in a model of a part that has irpar's own."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import helper

from irpar.ir import DOMAIN, Graph, Module, Node, TensorType, tensor_type
from irpar.onnx_io.errors import OnnxError
from irpar.ops.bodies import waits_for_copy
from irpar.ops.collectives import COLLECTIVES, OWN, CollectiveOp, Dialect, collective_axes
from irpar.ops.collectives.record import Spelling
from irpar.ops.facts import int_attribute, text_attribute
from irpar.ops.memory_copies import is_copy
from irpar.sharding import listed, option

from .around import Around, Step, around
from .marks import AROUND, IMPORTS, SAID, SPOKEN, holders, imports_text, numbered, rewrite

_LEAST_IR = 10
"""Nodes have metadata since."""


class DialectError(OnnxError):
    """A collective that a dialect cannot say."""


class Said(NamedTuple):
    """A collective in a dialect.

    Attributes:
        spelling: of its kind.
        ranks: that it joins, in order of position.
        operand, result: types.
        around: what stands before and after its operator.
    """

    spelling: Spelling
    ranks: list[int]
    operand: TensorType
    result: TensorType
    around: Around


def say_in(dialect: Dialect, model: onnx.ModelProto, module: Module, graph: Graph, ranks: Sequence[int]) -> None:
    """Put operators of a dialect in place of irpar's in the model of a part.

    Args:
        dialect: which.
        model: of the part.
        module: what it was made of.
        graph: which of its graphs.
        ranks: those that run it.

    Raises:
        DialectError: naming the first collective that the dialect cannot say.
    """
    said = {key: _said(dialect, module, node, ranks) for key, node in numbered(module, graph).items()}
    if said:
        _Writer(dialect, model, module, said).write()
    model.metadata_props.add(key=SPOKEN, value=dialect.name)


# -- what can be said ---------------------------------------------------------------------------------------------


def _said(dialect: Dialect, module: Module, node: Node, ranks: Sequence[int]) -> Said:
    if is_copy(node) or waits_for_copy(node):
        raise DialectError(
            f"{option('collectives', dialect.name)}: {dialect.runtime} has no copies between memories of a rank",
            where=f"copy {int_attribute(node, 'id')}, {node.title}",
            do=f"write {option('collectives', OWN)}, or leave everything on the device: no place, no store",
        )
    op = COLLECTIVES.get(node.op_type)
    spelling = None if op is None else op.spellings.get(dialect.name)
    if op is None or spelling is None:
        known = [name for name, other in COLLECTIVES.items() if dialect.name in other.spellings]
        what = f"{dialect.runtime} has no {node.op_type}"
        raise _refusal(dialect, node, what, (f"it has {listed(known, len(known))}",))
    operand, result = (tensor_type(value.type) for value in (*node.inputs, *node.results))
    if operand is None or result is None or not (operand.is_static and result.is_static):
        raise _refusal(dialect, node, "its shapes are not known")
    problem = next(_problems(dialect, op, spelling, node, operand), None)
    if problem is not None:
        raise _refusal(dialect, node, problem)
    group = _group(dialect, module, node, ranks)
    dims = [int_attribute(node, name) for name in spelling.first]
    shapes = operand.static_shape, result.static_shape
    return Said(spelling, group, operand, result, around(dims, *shapes, len(group)))


def _problems(dialect: Dialect, op: CollectiveOp, spelling: Spelling, node: Node, operand: TensorType) -> Iterator[str]:
    """What is wrong with a collective of a kind that the dialect has."""
    if any(name in node.attributes for name in op.uneven):
        yield f"its members' blocks differ in size, and {dialect.runtime} has equal ones alone"
    if "reduce" in op.others and text_attribute(node, "reduce") not in spelling.reductions:
        known = ", ".join(sorted(spelling.reductions))
        yield f"it reduces by {text_attribute(node, 'reduce')}, and {dialect.runtime} by {known} alone"
    if operand.dtype.text not in spelling.dtypes:
        yield f"it is of {operand.dtype}, and {dialect.runtime}'s takes {', '.join(sorted(spelling.dtypes))}"


def _group(dialect: Dialect, module: Module, node: Node, ranks: Sequence[int]) -> list[int]:
    """The ranks that a collective joins, the same for all that run the program.

    Raises:
        DialectError: the dialect cannot name them.
    """
    mesh = module.mesh
    groups = [group for group in mesh.groups(collective_axes(node)) if not set(group).isdisjoint(ranks)]
    first = groups[0]
    over = f"runs over {len(first)} of {mesh.size} ranks"
    if len(first) < mesh.size and not dialect.has_groups:
        raise _refusal(dialect, node, f"it {over}, and {dialect.runtime}'s over all alone")
    if len(groups) > 1:
        what = f"it {over}, others for ranks {ranks[0]} and {ranks[-1]}, which share a program"
        raise _refusal(dialect, node, what)
    if first != sorted(first):
        named = ", ".join(map(str, first))
        what = f"its ranks are in the order {named}, and {dialect.runtime} numbers them as they ascend"
        raise _refusal(dialect, node, what)
    return first


def _refusal(dialect: Dialect, node: Node, what: str, notes: tuple[str, ...] = ()) -> DialectError:
    number = int_attribute(node, "id")
    axes = ", ".join(map(str, collective_axes(node))) if "axes" in node.attributes else ""
    reason = node.doc.partition("\n")[0]
    kind = f"{option('collectives', dialect.name)}: "
    return DialectError(
        f"{kind}{what}",
        where=f"collective {number}, {node.title}{f' over {axes}' if axes else ''}",
        notes=(*notes, *((reason,) if reason else ())),
        do=f"write {option('collectives', OWN)}, or shard so that it is not needed (irpar explain shows all)",
    )


# -- writing ------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes what was said into a model."""

    def __init__(
        self, dialect: Dialect, model: onnx.ModelProto, module: Module, said: Mapping[tuple[str, int], Said]
    ) -> None:
        self.dialect = dialect
        self.model = model
        self.size = module.mesh.size
        self.said = said
        self.names = {
            name
            for holder in holders(model)
            for name in (*_defined(holder), *(n for o in holder.node for n in o.output))
        }

    def write(self) -> None:
        for holder in list(holders(self.model)):
            infos: list[onnx.ValueInfoProto] = []
            rewrite(holder, lambda node, infos=infos: self._nodes(node, infos))  # type: ignore[misc]
            holder.value_info.extend(infos)
        for importer in (self.model, *self.model.functions):
            self._import(importer)
        self.model.ir_version = max(self.model.ir_version, _LEAST_IR)

    def _import(self, importer: Any) -> None:
        """Import the dialect's operators in place of irpar's."""
        importer.metadata_props.add(key=IMPORTS, value=imports_text(importer))
        kept = {entry.domain: entry.version for entry in importer.opset_import if entry.domain != DOMAIN}
        if importer is self.model or len(kept) < len(importer.opset_import):
            kept.setdefault(self.dialect.domain, self.dialect.version)
        del importer.opset_import[:]
        importer.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in kept.items())

    def _nodes(self, own: onnx.NodeProto, infos: list[onnx.ValueInfoProto]) -> list[onnx.NodeProto] | None:
        """What stands in place of a node; None: it is no collective."""
        if own.domain != DOMAIN:
            return None
        attributes = {entry.name: _plain(helper.get_attribute_value(entry)) for entry in own.attribute}
        said = self.said[own.op_type, attributes["id"]]
        number = str(attributes["id"])
        before, operand = self._steps(said.around.before, own.input[0], own.output[0], number)
        sent = self._fresh(f"{own.output[0]}.sent") if said.around.after else own.output[0]
        node = onnx.NodeProto(op_type=said.spelling.op_type, domain=self.dialect.domain, name=own.name)
        node.input.append(operand)
        node.output.append(sent)
        node.doc_string = own.doc_string
        node.attribute.extend(helper.make_attribute(*item) for item in self._attributes(said, attributes).items())
        node.metadata_props.extend(own.metadata_props)
        node.metadata_props.add(key=SAID, value=json.dumps({"op": own.op_type, **attributes}))
        after: list[onnx.NodeProto] = []
        if said.around.after:
            dtype = said.result.dtype.value
            infos.append(helper.make_tensor_value_info(sent, dtype, said.around.sent))
            after, _ = self._steps(said.around.after, sent, own.output[0], number)
            after[-1].output[0] = own.output[0]
        return [*before, node, *after]

    def _attributes(self, said: Said, own: Mapping[str, Any]) -> dict[str, Any]:
        found = spelled(said.spelling, own) | dict.fromkeys(said.spelling.counted, len(said.ranks))
        is_all = len(said.ranks) == self.size
        return {**found, **(self.dialect.of_all if is_all else self.dialect.of_group(said.ranks))}

    def _steps(self, steps: Sequence[Step], value: str, name: str, number: str) -> tuple[list[onnx.NodeProto], str]:
        """The nodes of some steps from a value on, and what the last one gives."""
        nodes = []
        for step in steps:
            made = self._fresh(f"{name}.{step.op_type.lower()}")
            if step.op_type == "Transpose":
                nodes.append(helper.make_node("Transpose", [value], [made], perm=step.sizes))
            else:
                shape = self._fresh(f"{name}.shape")
                nodes.append(helper.make_node("Constant", [], [shape], value_ints=step.sizes))
                nodes.append(helper.make_node("Reshape", [value, shape], [made]))
            value = made
        for node in nodes:
            node.metadata_props.add(key=AROUND, value=number)
        return nodes, value

    def _fresh(self, hint: str) -> str:
        name, number = hint, 1
        while name in self.names:
            name, number = f"{hint}.{number}", number + 1
        self.names.add(name)
        return name


def spelled(spelling: Spelling, own: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that say what those of irpar's operator do, but for how many members there are and which."""
    return {**spelling.fixed, **{theirs: own[ours] for theirs, ours in spelling.named.items()}}


def _defined(holder: Any) -> Iterator[str]:
    """The names of inputs and constants."""
    if isinstance(holder, onnx.FunctionProto):
        yield from holder.input
    else:
        yield from (value.name for value in (*holder.input, *holder.initializer))


def _plain(value: Any) -> Any:
    """An attribute's value as JSON has it."""
    if isinstance(value, bytes):
        return value.decode()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
