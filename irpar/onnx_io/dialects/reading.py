"""Parts in any dialect as irpar has them: its own operators, and no stand-ins."""

from collections import defaultdict
from typing import Any

import onnx
from onnx import helper

from irpar.ir import DOMAIN
from irpar.onnx_io.errors import OnnxError
from irpar.ops.collectives import COLLECTIVES, DIALECTS, OWN, Dialect

from .marks import AROUND, IMPORTS, SAID, SPOKEN, STUB, entry_of, holders, read_entry, rewrite, take_entry
from .writing import spelled


def own(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model as irpar would write it by default: itself, or a changed copy where it is in a dialect or has stubs.

    Raises:
        OnnxError: the dialect is unknown, or what the model says of its collectives does not fit.
    """
    spoken = entry_of(model, SPOKEN)
    has_stubs = any(entry_of(function, STUB) is not None for function in model.functions)
    if spoken is None and not has_stubs:
        return model
    given, model = model, onnx.ModelProto()
    model.CopyFrom(given)
    if has_stubs:
        _drop_stubs(model)
    if spoken is not None:
        take_entry(model, SPOKEN)
        if spoken not in DIALECTS:
            known = ", ".join((OWN, *DIALECTS))
            raise OnnxError(
                f'the collectives are in the dialect "{spoken:.40}", which this irpar does not know',
                notes=(f"it knows {known}",),
                do="use the irpar that wrote it, or a newer one",
            )
        _translate(model, DIALECTS[spoken])
    return model


def _drop_stubs(model: onnx.ModelProto) -> None:
    kept = [function for function in model.functions if entry_of(function, STUB) is None]
    functions = [onnx.FunctionProto.FromString(function.SerializeToString()) for function in kept]
    del model.functions[:]
    model.functions.extend(functions)
    for holder in holders(model):
        for node in holder.node:
            if node.domain == DOMAIN:
                node.ClearField("overload")


def _translate(model: onnx.ModelProto, dialect: Dialect) -> None:
    for holder in list(holders(model)):
        _Holder(holder, dialect).translate()
    for importer in (model, *model.functions):
        text = take_entry(importer, IMPORTS)
        if text is None:
            continue
        imports = read_entry(
            IMPORTS, text, lambda found: [helper.make_opsetid(domain, version) for domain, version in found.items()]
        )
        del importer.opset_import[:]
        importer.opset_import.extend(imports)


class _Holder:
    """The nodes of one graph."""

    def __init__(self, holder: Any, dialect: Dialect) -> None:
        self.holder = holder
        self.dialect = dialect
        self.beside: defaultdict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in holder.node:
            number = entry_of(node, AROUND)
            if number is not None:
                self.beside[number].append(node)
        self.gone: set[str] = set()

    def translate(self) -> None:
        """Put irpar's operators in place of those that say them."""
        rewrite(self.holder, self._nodes)
        if self.gone:
            kept = [info for info in self.holder.value_info if info.name not in self.gone]
            infos = [onnx.ValueInfoProto.FromString(info.SerializeToString()) for info in kept]
            del self.holder.value_info[:]
            self.holder.value_info.extend(infos)

    def _nodes(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        text = entry_of(node, SAID)
        if text is not None:
            return [self._own(node, text)]
        return None if entry_of(node, AROUND) is None else []

    def _own(self, node: onnx.NodeProto, text: str) -> onnx.NodeProto:
        op_type, attributes = read_entry(SAID, text, _parsed)
        self._check(node, op_type, attributes)
        made = onnx.NodeProto(op_type=op_type, domain=DOMAIN, name=node.name, doc_string=node.doc_string)
        value, result = self._ends(node, str(attributes["id"]))
        made.input.append(value)
        made.output.append(result)
        made.attribute.extend(helper.make_attribute(name, value) for name, value in attributes.items())
        made.metadata_props.extend(entry for entry in node.metadata_props if entry.key != SAID)
        return made

    def _ends(self, node: onnx.NodeProto, number: str) -> tuple[str, str]:
        """The operand and the result of a node and those beside it."""
        nodes = [*self.beside[number], node]
        if len(node.input) != 1 or len(node.output) != 1:
            raise self._misfit(node, "it has not one operand and one result")
        producers = {other.output[0]: other for other in nodes if other.output}
        readers = {name: other for other in nodes for name in other.input[:1]}
        first, last = node, node
        for _ in nodes:
            first = producers.get(first.input[0], first)
            last = readers.get(last.output[0], last)
        self.gone.update(name for name in producers if name != last.output[0])
        return first.input[0], last.output[0]

    def _check(self, node: onnx.NodeProto, op_type: str, attributes: dict[str, Any]) -> None:
        """Refuse a node that says something else than its entry: one of the two was changed."""
        op = COLLECTIVES.get(op_type)
        spelling = None if op is None else op.spellings.get(self.dialect.name)
        if spelling is None or (node.domain, node.op_type) != (self.dialect.domain, spelling.op_type):
            raise self._misfit(node, f"it is no {op_type:.40}")
        found = {entry.name: entry for entry in node.attribute}
        try:
            expected = spelled(spelling, attributes)
        except KeyError as error:
            raise self._misfit(node, f"the {op_type} has no {error.args[0]}") from None
        for name, value in expected.items():
            if name not in found or found[name] != helper.make_attribute(name, value):
                raise self._misfit(node, f"its {name} is not {value}")

    def _misfit(self, node: onnx.NodeProto, what: str) -> OnnxError:
        return OnnxError(
            f"{node.op_type} does not fit its metadata {SAID}: {what}",
            where=f"node {node.name or ', '.join(node.output)}",
            do="change both alike, or partition the model again",
        )


def _parsed(found: Any) -> tuple[str, dict[str, Any]]:
    """The operator and attributes of an entry."""
    attributes = {name: value for name, value in found.items() if name != "op"}
    for value in attributes.values():
        kinds = {type(item) for item in (value if isinstance(value, list) else [value])}
        if kinds not in ({int}, {str}):
            raise TypeError(value)
    if type(found["op"]) is not str or type(attributes["id"]) is not int:
        raise TypeError(found)
    return found["op"], attributes
