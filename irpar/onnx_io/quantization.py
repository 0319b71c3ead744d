"""quantization_annotation of graphs: kept on the values that it speaks of, and written back while its tensors exist."""

import json
from collections.abc import Callable, Iterable, Mapping

import onnx

from irpar.ir import Value

from .errors import OnnxError
from .facts import QUANTIZATION


def read_quantization(proto: onnx.GraphProto, values: Mapping[str, Value | None]) -> None:
    """Keep a graph's annotations as metadata of its values.

    Raises:
        OnnxError: an annotation is about a tensor that the graph does not have.
    """
    for entry in proto.quantization_annotation:
        value = values.get(entry.tensor_name)
        if value is None:
            raise OnnxError(
                f'quantization_annotation of "{entry.tensor_name}", which the graph does not have',
                do="remove the annotation (`del model.graph.quantization_annotation[:]`)",
            )
        parameters = {item.key: item.value for item in entry.quant_parameter_tensor_names}
        value.metadata = {**(value.metadata or {}), QUANTIZATION: json.dumps(parameters)}


def write_quantization(
    values: Iterable[Value], proto: onnx.GraphProto, names: Mapping[str, Value], name_of: Callable[[Value], str]
) -> None:
    """Write the annotations whose tensors are all there; a rewrite may have made others void."""
    for value in values:
        text = value.metadata.get(QUANTIZATION) if value.metadata else None
        parameters = json.loads(text) if text is not None else {}
        if parameters and all(name in names for name in parameters.values()):
            entry = proto.quantization_annotation.add(tensor_name=name_of(value))
            for key, name in parameters.items():
                entry.quant_parameter_tensor_names.add(key=key, value=name_of(names[name]))
