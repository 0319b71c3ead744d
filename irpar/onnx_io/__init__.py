"""ONNX to IR and back: models with functions, nested bodies, metadata and lazy weights."""

from .errors import OnnxError
from .external import check_external
from .load import Source, load, to_module
from .proto import Constant, embedded, to_proto
from .save import data_file, external_tensor, save, serialized, sizes_pieces
from .schemas import register

register()

__all__ = [
    "Constant",
    "OnnxError",
    "Source",
    "check_external",
    "data_file",
    "embedded",
    "external_tensor",
    "load",
    "save",
    "serialized",
    "sizes_pieces",
    "to_module",
    "to_proto",
]
