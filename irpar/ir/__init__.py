"""The IR: graphs of values in SSA form, types, constants, text form and verifier."""

from .annotation import Annotation, AnnotationError
from .attributes import (
    Attribute,
    Floats,
    Graphs,
    Ints,
    RefAttribute,
    Strings,
    Tensors,
    Types,
    plain_attribute,
    same_attribute,
)
from .builder import Builder, Pattern, inherit, rewrite
from .clone import clone_graph, clone_module, clone_node, clone_value, without_metadata
from .compare import same_module, same_tensor
from .decisions import Conflict, Decision, Gone
from .dims import Dim, Expr, parse_dim, symbol, with_dim
from .dtypes import DType, dtype_of_numpy, dtype_of_onnx, dtype_of_text
from .function import COMMUNICATION, Function
from .graph import DOMAIN, Graph, Node, Place, captured_or_read, holder_in
from .module import DEFAULT_NETWORK, IRPAR_OPSET, Module
from .state import STATE_KINDS, State, StateError, StateKind
from .strategy import NodeStrategy
from .tensor import (
    ArrayTensor,
    ExternalTensor,
    JoinedTensor,
    LazyTensor,
    SlicedTensor,
    Tensor,
    TensorError,
    joined_tensor,
    place_of,
    range_along,
)
from .text.files import Printed, TextError, parse_module, print_module, read_text, write_text
from .types import UNKNOWN, InflightType, OptionalType, SequenceType, Shape, TensorType, Type, tensor_type
from .value import Memory, Names, Use, Value
from .verifier import VerifyError, register_check, register_module_check, verify

__all__ = [
    "COMMUNICATION",
    "DEFAULT_NETWORK",
    "DOMAIN",
    "IRPAR_OPSET",
    "STATE_KINDS",
    "UNKNOWN",
    "Annotation",
    "AnnotationError",
    "ArrayTensor",
    "Attribute",
    "Builder",
    "Conflict",
    "DType",
    "Decision",
    "Dim",
    "Expr",
    "ExternalTensor",
    "Floats",
    "Function",
    "Gone",
    "Graph",
    "Graphs",
    "InflightType",
    "Ints",
    "JoinedTensor",
    "LazyTensor",
    "Memory",
    "Module",
    "Names",
    "Node",
    "NodeStrategy",
    "OptionalType",
    "Pattern",
    "Place",
    "Printed",
    "RefAttribute",
    "SequenceType",
    "Shape",
    "SlicedTensor",
    "State",
    "StateError",
    "StateKind",
    "Strings",
    "Tensor",
    "TensorError",
    "TensorType",
    "Tensors",
    "TextError",
    "Type",
    "Types",
    "Use",
    "Value",
    "VerifyError",
    "captured_or_read",
    "clone_graph",
    "clone_module",
    "clone_node",
    "clone_value",
    "dtype_of_numpy",
    "dtype_of_onnx",
    "dtype_of_text",
    "holder_in",
    "inherit",
    "joined_tensor",
    "parse_dim",
    "parse_module",
    "place_of",
    "plain_attribute",
    "print_module",
    "range_along",
    "read_text",
    "register_check",
    "register_module_check",
    "rewrite",
    "same_attribute",
    "same_module",
    "same_tensor",
    "symbol",
    "tensor_type",
    "verify",
    "with_dim",
    "without_metadata",
    "write_text",
]
