"""IR to ONNX files: the model beside one data file with its weights, both complete or not there."""

from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import TensorProto

from irpar.files.atomic import new_pair
from irpar.ir import DType, ExternalTensor, Module, Tensor, Value
from irpar.ir.data_file import DataFile

from .errors import OnnxError
from .proto import to_proto
from .tensors import write_tensor
from .versions import MAX_PROTOBUF

EXTERNAL_BYTES = 1024
"""Constants above this size go to the data file."""


def save(module: Module, path: str | Path, *, finish: Callable[[onnx.ModelProto], None] | None = None) -> None:
    """Write a module with one graph as `path` and its weights as `<path>.data`.

    Both are written beside their targets and renamed when complete. Weights are copied range by range.

    Args:
        module: the module.
        path: the .onnx file.
        finish: changes the model before it is written.

    Raises:
        OnnxError: the module cannot be written as ONNX, or a file cannot be written.
        TensorError: the bytes of a constant cannot be read.
    """
    path = Path(path)
    data_path = data_file(path)
    _refuse_own_source(module, data_path)
    layout = DataFile()
    with new_pair(path, data_path, "the model", OnnxError) as (fresh, fresh_data):
        place = _Placer(layout, data_path.name)
        model = to_proto(module, constant=place.constant, state=place.tensor)
        if finish is not None:
            finish(model)
        fresh.write_bytes(serialized(model))
        if layout.size:
            layout.write(fresh_data)


def data_file(path: Path) -> Path:
    """The file that holds the weights of the model that is written as `path`."""
    return path.with_name(path.name + ".data")


def serialized(model: onnx.ModelProto) -> bytes:
    """A model as bytes.

    Raises:
        OnnxError: it is larger than a protobuf may be.
    """
    data = bytes(model.SerializeToString())  # Asked for the size alone, protobuf makes the bytes as well.
    if len(data) > MAX_PROTOBUF:
        raise OnnxError(
            f"the model takes {len(data)} bytes without its external data; a protobuf holds at most 2 GB",
            do="move large attribute tensors into initializers",
        )
    return data


def sizes_pieces(value: Value) -> bool:
    """Whether a constant says how long the pieces of a Split are, which then stands in the model however many they are.

    Shape inference reads such numbers, and none that lie in another file: ONNX Runtime refuses the model. No other
    operator that reads sizes takes many.
    """
    return any(user.identity == ("", "Split") and index == 1 for user, index in value.uses)


class _Placer:
    """Puts small tensors into a model, and others into its data file."""

    def __init__(self, layout: DataFile, location: str) -> None:
        self.layout = layout
        self.location = location

    def constant(self, value: Value) -> TensorProto:
        """The tensor of a constant."""
        assert value.data is not None
        proto = TensorProto()
        if sizes_pieces(value):
            write_tensor(value.data, proto)
        else:
            self.tensor(value.data, proto)
        return proto

    def tensor(self, tensor: Tensor, proto: TensorProto) -> None:
        """Fill a TensorProto."""
        if tensor.nbytes <= EXTERNAL_BYTES or tensor.dtype is DType.STR:
            write_tensor(tensor, proto)
        else:
            external_tensor(proto, tensor, self.location, self.layout.place(tensor))


def external_tensor(proto: TensorProto, tensor: Tensor, location: str, offset: int) -> None:
    """State in a TensorProto that a tensor's bytes lie at `offset` of the file `location`."""
    proto.data_type = tensor.dtype.value
    proto.dims.extend(tensor.shape)
    proto.data_location = TensorProto.EXTERNAL
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(tensor.nbytes))):
        proto.external_data.add(key=key, value=text)


def _refuse_own_source(module: Module, data_path: Path) -> None:
    """Refuse to replace the file that the module still reads its weights from."""
    if not data_path.exists():
        return
    for graph in module.all_graphs():
        held = [value.data for value in graph.constants] + [state.data for state in graph.states.values()]
        for data in held:
            bases = data.bases if data is not None else ()
            files = {base.path for base in bases if isinstance(base, ExternalTensor)}
            if any(path.exists() and path.samefile(data_path) for path in files):
                raise OnnxError(
                    f"{data_path.name} is the file that the module reads its weights from",
                    where=str(data_path),
                    do="save under another name",
                )
