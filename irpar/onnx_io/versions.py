"""Versions: which IR and operator set versions irpar reads and writes, and older models brought up."""

import re
from collections.abc import Iterable, Mapping

import onnx
from onnx import TensorProto, helper, version_converter

from irpar.ir import DOMAIN, IRPAR_OPSET, DType
from irpar.ir.text.lexer import MOST_VERSION

from .errors import OnnxError, text_of
from .older import check_text, finish, prepare

OLDEST_OPSET = 13
NEWEST_OPSET = 28
NEWEST_IR_READ = 14
NEWEST_IR_WRITTEN = 13
"""The oldest ONNX Runtime that irpar allows, 1.31, loads up to this one."""

MAX_PROTOBUF = (1 << 31) - 1
"""Bytes that a model file may have."""

_METADATA_IR = 10
_FUNCTIONS_IR = 8
_KEPT_BYTES = 1024
"""Initializers up to this size go through the version converter, whose adapters look at them."""

_DTYPE_IR: dict[DType, int] = {
    **dict.fromkeys((DType.F8E4M3FN, DType.F8E4M3FNUZ, DType.F8E5M2, DType.F8E5M2FNUZ), 9),
    **dict.fromkeys((DType.U4, DType.I4), 10),
    DType.F4E2M1: 11,
    DType.F8E8M0: 12,
    **dict.fromkeys((DType.U2, DType.I2), 13),
}


def opsets_of(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Domain to version; "ai.onnx" is "".

    Raises:
        OnnxError: a domain is imported twice in different versions, or a version is none, or too new for irpar.
    """
    found: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain == "ai.onnx" else text_of(entry.domain)
        if not 0 <= entry.version <= MOST_VERSION:
            raise OnnxError(
                f'opset {entry.version} of domain "{domain}" is none', do="the model is damaged: export it again"
            )
        if found.setdefault(domain, entry.version) != entry.version:
            raise OnnxError(
                f'opset versions {found[domain]} and {entry.version} of domain "{domain}"', do="import each domain once"
            )
    if found.get("", 1) < 1:
        raise OnnxError(
            f"opset {found['']} is none: the versions of ONNX's operators start at 1",
            do="the model is damaged: export it again",
        )
    if found.get("", 0) > NEWEST_OPSET:
        raise OnnxError(
            f"opset {found['']} is newer than irpar reads ({OLDEST_OPSET} to {NEWEST_OPSET})",
            do=f"export the model with opset {NEWEST_OPSET}",
        )
    if found.get(DOMAIN, 0) > IRPAR_OPSET:
        raise OnnxError(
            f"the model uses version {found[DOMAIN]} of irpar's operators, this irpar knows {IRPAR_OPSET}",
            do="use the irpar that wrote it, or a newer one",
        )
    return found


def check_model(model: onnx.ModelProto) -> None:
    """Refuse what is no ONNX model, or one of a form that irpar does not take.

    Raises:
        OnnxError: naming what is missing or too new.
    """
    if not model.HasField("graph") or not model.ir_version:
        raise OnnxError(
            f"not an ONNX model: it has no {'IR version' if model.HasField('graph') else 'graph'}",
            do="give a model in ONNX's binary form (.onnx)",
        )
    if model.ir_version < 1:
        raise OnnxError(f"IR version {model.ir_version} is none: they start at 1", do="export the model again")
    if model.ir_version > NEWEST_IR_READ:
        raise OnnxError(
            f"IR version {model.ir_version} is newer than irpar reads ({NEWEST_IR_READ})",
            do=f"export the model with IR version {NEWEST_IR_WRITTEN} and opset {NEWEST_OPSET} or less",
        )
    if len(model.training_info):
        raise OnnxError(
            "the model has training_info (its own initialization and training graphs), which irpar does not carry",
            do="remove it (`del model.training_info[:]`); irpar makes backward passes by itself",
        )


def upgrade(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of an opset before 13 brought to 13 by onnx's version converter; others as they are.

    Raises:
        OnnxError: the converter fails; names the operators.
    """
    version = opsets_of(model.opset_import).get("", OLDEST_OPSET)
    if version >= OLDEST_OPSET:
        return model
    if len(model.functions):
        raise _refusal(model, version, "model-local functions are not converted", [])
    check_text(model)
    slim = onnx.ModelProto()
    slim.CopyFrom(model)
    # Before IR 4 the converter does not see weights that are not listed among the inputs.
    slim.ir_version = max(slim.ir_version, 4)
    prepare(slim, version)
    large = _take_large(slim.graph)
    try:
        converted = version_converter.convert_version(slim, OLDEST_OPSET)
    except Exception as error:  # the converter raises what its C++ code throws
        raise _refusal(model, version, str(error), _named_ops(model, str(error))) from None
    finish(slim, converted, version)
    _restore(model, converted, large)
    _forget_types(converted, model)
    if _interface(converted) != _interface(model):
        raise _refusal(model, version, "it changes the types of the model's inputs or results", [])
    return converted


def _forget_types(converted: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Leave results without a type that had none: what the converter inferred is inferred again."""
    untyped = {value.name for value in model.graph.output if not value.type.WhichOneof("value")}
    for value in converted.graph.output:
        if value.name in untyped:
            value.ClearField("type")


def _interface(model: onnx.ModelProto) -> list[tuple[str, bytes]]:
    """Names and types of inputs (without weights) and results; a result's shape may be declared or not."""
    weights = {tensor.name for tensor in model.graph.initializer}
    values = [value for value in model.graph.input if value.name not in weights]
    for value in model.graph.output:
        bare = onnx.ValueInfoProto()
        bare.CopyFrom(value)
        bare.type.tensor_type.ClearField("shape")
        values.append(bare)
    return [(value.name, value.type.SerializeToString(deterministic=True)) for value in values]


def _refusal(model: onnx.ModelProto, version: int, message: str, ops: list[str]) -> OnnxError:
    first = re.sub(r"^\S*/onnx/\S+: ", "", message.strip().splitlines()[0])[:300] if message.strip() else ""
    names = ops or sorted({node.op_type for node in model.graph.node})
    return OnnxError(
        f"opset {version} is older than irpar reads ({OLDEST_OPSET}), and onnx's version converter cannot convert it",
        notes=(f"operators: {', '.join(names[:20])}", f"converter: {first}"),
        do=f"export the model again with opset {OLDEST_OPSET} or newer",
    )


def _named_ops(model: onnx.ModelProto, message: str) -> list[str]:
    words = set(re.findall(r"[A-Za-z0-9]+", message.replace("_", " ")))
    lowered = {word.lower() for word in words}
    return sorted({node.op_type for node in model.graph.node if node.op_type.lower() in lowered})


def _take_large(graph: onnx.GraphProto) -> dict[str, TensorProto]:
    """Replace large and external initializers by graph inputs; the converter needs none of their numbers."""
    taken = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL or tensor.ByteSize() > _KEPT_BYTES
    }
    kept = [tensor for tensor in graph.initializer if tensor.name not in taken]
    known = {value.name for value in graph.input}
    for name, tensor in taken.items():
        if name not in known:
            graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, tuple(tensor.dims)))
    del graph.initializer[:]
    graph.initializer.extend(kept)
    return taken


def _restore(model: onnx.ModelProto, converted: onnx.ModelProto, large: dict[str, TensorProto]) -> None:
    """Give back what the converter was not shown or does not keep."""
    converted.graph.initializer.extend(large.values())
    if not len(converted.metadata_props):
        converted.metadata_props.extend(model.metadata_props)
    converted.doc_string = model.doc_string
    converted.producer_name, converted.producer_version = model.producer_name, model.producer_version
    converted.graph.doc_string = model.graph.doc_string
    named = {node.name: node for node in model.graph.node if node.name and len(node.metadata_props)}
    for node in converted.graph.node:
        origin = named.get(node.name)
        if origin is not None and not len(node.metadata_props):
            node.metadata_props.extend(origin.metadata_props)


def ir_version(
    source: int, opsets: Mapping[str, int], dtypes: Iterable[DType], *, functions: bool, metadata: bool
) -> int:
    """The IR version to write: the source's where it suffices for opsets, dtypes and what else the model holds."""
    table = helper.OP_SET_ID_VERSION_MAP
    needs = [table.get((domain or "ai.onnx", version), 4) for domain, version in opsets.items()]
    needs += [_DTYPE_IR.get(dtype, 4) for dtype in dtypes]
    needs += [4, _FUNCTIONS_IR * functions, _METADATA_IR * metadata]
    return int(min(max(source, *needs), NEWEST_IR_WRITTEN))
