"""Bad models by what the error must say of them."""

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from .build import (
    BOOL,
    CALL,
    FLOAT,
    INT64,
    OPSETS,
    RELU,
    SHAPE,
    STRING,
    body,
    changed,
    external,
    function,
    model,
    node,
    numbers,
    of_op,
    raw,
    relu,
    value,
    with_constant,
)

Make = Callable[[], onnx.ModelProto]

GRAPHS: dict[str, Make] = {
    "the nodes form a cycle": lambda: model(node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), RELU),
    '"y" is defined twice': lambda: model(RELU, RELU),
    '"x" is defined twice': lambda: model(node("Relu", ["x"], ["x"]), RELU),
    '"w" is defined twice': lambda: model(RELU, constants=[numbers([1.0], "w"), numbers([2.0], "w")]),
    '"zzz" is read, but nothing defines it': lambda: model(node("Add", ["x", "zzz"], ["y"])),
    'graph output "y" is not defined': lambda: model(node("Relu", ["x"], ["q"])),
    'graph input "x" is defined twice': lambda: model(RELU, inputs=[value("x"), value("x")]),
    "a graph input has no name": lambda: model(RELU, inputs=[value("x"), value("")]),
    'domain "com.x", which the model does not import': lambda: model(node("Odd", ["x"], ["y"], domain="com.x")),
    'graph output "y" is defined twice': lambda: model(RELU, outputs=[value("y"), value("y")]),
    "has 0 results, Relu has 1": lambda: model(node("Relu", ["x"], [""]), RELU),
    "a node has no operator": lambda: model(node("", ["x"], ["y"])),
    "the model has no outputs": lambda: onnx.ModelProto(
        ir_version=10, graph=helper.make_graph([], "g", [], []), opset_import=OPSETS
    ),
    "not an ONNX model: it has no graph": lambda: relu("m.ClearField('graph')"),
    "not an ONNX model: it has no IR version": lambda: relu("m.ir_version = 0"),
    "IR version 99 is newer than irpar reads": lambda: relu("m.ir_version = 99"),
    "IR version -1 is none": lambda: relu("m.ir_version = -1"),
    "opset 99 is newer than irpar reads": lambda: model(RELU, opset=99),
    "opset 0 is none": lambda: model(RELU, opset=0),
    'opset -3 of domain "" is none': lambda: model(RELU, opset=-3),
    'opset versions 18 and 17 of domain ""': lambda: relu("m.opset_import.add(domain='ai.onnx', version=17)"),
    'domain "ai.onnx", which the model does not import': lambda: relu("del m.opset_import[:]"),
    "training_info": lambda: relu("m.training_info.add()"),
    "the model is a part of a partition already": lambda: changed(
        model(node("AllReduce", ["x"], ["y"], domain="irpar", axes=["tp"], reduce="sum", id=0)),
        "m.opset_import.add(domain='irpar', version=1)",
    ),
    "version 7 of irpar's operators": lambda: relu("m.opset_import.add(domain='irpar', version=7)"),
}

FUNCTIONS: dict[str, Make] = {
    "functions call each other in a circle: my.f -> my.f": lambda: model(
        CALL, functions=[function("f", node("f", ["a"], ["b"], domain="my"))]
    ),
    "functions call each other in a circle: my.f -> my.g -> my.f": lambda: model(
        CALL,
        functions=[
            function("f", node("g", ["a"], ["b"], domain="my")),
            function("g", node("f", ["a"], ["b"], domain="my")),
        ],
    ),
    "the function is defined twice": lambda: model(CALL, functions=[function("f", node("Relu", ["a"], ["b"]))] * 2),
    'function result "b" is not defined': lambda: model(CALL, functions=[function("f")]),
    "call of f with 2 operands and 1 results": lambda: model(
        node("f", ["x", "x"], ["y"], domain="my"), functions=[function("f", node("Relu", ["a"], ["b"]))]
    ),
    "function my.f, Add of b": lambda: model(CALL, functions=[function("f", node("Add", ["a", "q"], ["b"]))]),
    "a function has no name": lambda: changed(
        model(RELU, functions=[function("f", node("Relu", ["a"], ["b"]))]), "m.functions[0].name = ''"
    ),
    "the function follows opset 11": lambda: changed(
        model(CALL, functions=[function("f", node("Relu", ["a"], ["b"]))]),
        "m.functions[0].opset_import[0].version = 11",
    ),
}


TYPES: dict[str, Make] = {
    "%y is declared i64[4, 8], but Relu produces f32": lambda: model(RELU, outputs=[value("y", TensorProto.INT64)]),
    "Incompatible dimensions for matrix": lambda: model(node("MatMul", ["x", "x"], ["y"])),
    "f32[4611686018427387904, 4611686018427387904] has more than 2^63 bytes": lambda: model(
        RELU, inputs=[value("x", FLOAT, (2**62, 2**62))], outputs=[value("y", FLOAT, (2**62, 2**62))]
    ),
    "%y would be f32[1099511627776, 1099511627776], which has more than 2^63 bytes": lambda: model(
        node("MatMul", ["x", "z"], ["y"]),
        inputs=[value("x", FLOAT, (2**40, 1)), value("z", FLOAT, (1, 2**40))],
        outputs=[value("y", FLOAT, (None, None))],
    ),
    "sparse_tensor": lambda: model(RELU, inputs=[helper.make_sparse_tensor_value_info("x", FLOAT, SHAPE)]),
    "dim of -4": lambda: model(RELU, inputs=[value("x", FLOAT, (-4, 8))]),
    "unknown element type 77": lambda: model(RELU, inputs=[value("x", 77)]),
    "the type of input x is not known": lambda: model(RELU, inputs=[value("x", 0)]),
    "ONNX's map type": lambda: relu("g.input[0].type.map_type.key_type = 7"),
    "ONNX's opaque type": lambda: relu("g.input[0].type.opaque_type.name = 'o'"),
    "seq<?>": lambda: relu("g.input[0].type.sequence_type.SetInParent()"),
    "1 size is not known: NaN": lambda: model(
        RELU, inputs=[value("x", FLOAT, ("NaN", 8))], outputs=[value("y", FLOAT, None)]
    ),
}

TENSORS: dict[str, Make] = {
    "3 bytes of data for a tensor f32[4, 8]": lambda: raw([4, 8]),
    "which needs 4398046511104": lambda: raw([2**40]),
    "tensor with a negative dim: [-4, -8]": lambda: raw([-4, -8], bytes(128)),
    "128 bytes of data for a tensor f32[4611686018427387904, 4611686018427387904]": lambda: raw(
        [2**62, 2**62], bytes(128)
    ),
    "unknown element type 99": lambda: raw([4, 8], bytes(128), 99),
    "unknown element type 0": lambda: raw([4, 8], bytes(128), 0),
    "2 elements of data for a tensor f32[4, 8]": lambda: raw([4, 8], float_data=[1.0, 2.0]),
    "0 elements of data for a tensor i64[4]": lambda: raw([4], dtype=INT64, float_data=[1.0] * 4),
    "string tensor with raw_data": lambda: raw([4], bytes(4), STRING),
    "tensor stored in segments": lambda: raw([4, 8], segment=TensorProto.Segment(begin=0, end=4)),
    'location "../w.bin" leaves the model\'s folder': lambda: external("../w.bin"),
    'location "a/../../w.bin" leaves the model\'s folder': lambda: external("a/../../w.bin"),
    'location "/dev/zero" is absolute': lambda: external("/dev/zero"),
    'location "link.bin" is a symbolic link that leaves': lambda: external("link.bin"),
    'location "folder/elsewhere.bin" is a symbolic link that leaves': lambda: external("folder/elsewhere.bin"),
    "external data is in a named pipe, not in a file": lambda: external("pipe"),
    "Too many levels of symbolic links": lambda: external("self.bin"),
    "cannot read external data: No such file": lambda: external("no.bin"),
    'external data location "" is empty': lambda: external(None),
    "external data is in a folder, not in a file": lambda: external("."),
    "holds a zero byte": lambda: external("w.bin\0.txt"),
    "external data ends at byte 256, but a tensor f32[8, 8] needs bytes 128 to 384": lambda: external(offset=128),
    "external data ends at byte 256, but a tensor f32[8, 8] needs bytes 1024 to 1280": lambda: external(offset=1024),
    'offset "-4"': lambda: external(offset=-4),
    'length "-256"': lambda: external(length=-256),
    'offset "abc"': lambda: external(offset="abc"),
    'offset "nan"': lambda: external(offset="nan"),
    'offset "1000000000000000000000000000000"': lambda: external(offset=10**30),
    "external data of 128 bytes for a tensor": lambda: external(length=128),
    "external data of 1000 bytes for a tensor": lambda: external(length=1000),
    "an index of a sparse tensor is outside its shape [8]": lambda: sparse([0, 9]),
    "sparse initializer s": lambda: sparse([-1, 2]),
    "with values f32[2] and indices i64[1]": lambda: sparse([1]),
}


def sparse(indices: list[int]) -> onnx.ModelProto:
    """A sum with a sparse weight of 4 elements, 2 of them given."""
    made = model(node("Add", ["x", "s"], ["y"]), outputs=[value("y", FLOAT, None)])
    given = onnx.SparseTensorProto(dims=[8])
    given.values.CopyFrom(numbers([1.0, 2.0], "s", np.float32))
    given.indices.CopyFrom(numbers(indices, "", np.int64))
    made.graph.sparse_initializer.append(given)
    return made


ATTRIBUTES: dict[str, Make] = {
    "Relu is malformed: it has 3 operands, Relu has 1": lambda: model(node("Relu", ["x", "x", "x"], ["y"])),
    "'axis' must be in [-2 , 1]. Its actual value is: 77": lambda: of_op("Softmax", axis=77),
    "its attribute \"axis\" is 'one', which is of another kind": lambda: of_op("Softmax", axis="one"),
    "perm for Transpose has repeated value": lambda: of_op("Transpose", perm=[0, 0]),
    'Concat is malformed: its attribute "axis" is missing': lambda: of_op("Concat"),
    'Relu is malformed: it has no attribute "colour"': lambda: of_op("Relu", colour=3),
    'attribute "axis" has no known type (0)': lambda: changed(
        of_op("Softmax", axis=1), "g.node[0].attribute[0].type = 0"
    ),
    "an attribute has no name": lambda: changed(of_op("Softmax", axis=1), "g.node[0].attribute[0].name = ''"),
    'attribute "axis" is given twice': lambda: changed(
        of_op("Softmax", axis=1), "g.node[0].attribute.append(g.node[0].attribute[0])"
    ),
    "a Constant needs one value and one result": lambda: model(node("Constant", [], ["c"]), RELU),
    "Constant of d": lambda: model(node("Constant", [], ["d"], value_int=1, value_float=2.0), RELU),
    "Attribute to does not specify a valid type": lambda: of_op("Cast", to=99),
    "its equation is 'ij,,->>k'": lambda: of_op("Einsum", equation="ij,,->>k"),
    '"strides" is [0, 0], but has to be 1 or more': lambda: of_op(
        "Conv", value("x", FLOAT, (1, 4, 8, 8)), value("w", FLOAT, (4, 4, 3, 3)), strides=[0, 0]
    ),
    '"group" is 0, but has to be 1 or more': lambda: of_op(
        "Conv", value("x", FLOAT, (1, 4, 8, 8)), value("w", FLOAT, (4, 4, 3, 3)), group=0
    ),
    '"blocksize" is 0, but has to be 1 or more': lambda: of_op(
        "DepthToSpace", value("x", FLOAT, (1, 4, 8, 8)), blocksize=0
    ),
    '"blocksize" is -1': lambda: of_op("SpaceToDepth", value("x", FLOAT, (1, 4, 8, 8)), blocksize=-1),
    "Number of input tensors does not match the operands": lambda: of_op("Einsum", equation="ij,jk->ik"),
    "its equation is 'bij,\\x7fbjk'": lambda: of_op("Einsum", equation="bij,\x7fbjk"),
    "Inferred=3 Declared=8 Dimension=1": lambda: of_op("Concat", value("x"), value("z", FLOAT, (3, 3)), axis=0),
}

SIZES: dict[str, Make] = {
    "Reshape of f32[4, 8] (32 elements) to f32[5, 7]": lambda: with_constant("Reshape", [5, 7]),
    "Target shape may not have multiple -1 dimensions": lambda: with_constant("Reshape", [-1, -1]),
    "Invalid dimension value: -2": lambda: with_constant("Reshape", [-2, 16]),
    "the operands of Expand do not fit": lambda: with_constant("Expand", [3, 3]),
    "f32[1152921504606846976, 4, 8], which has more than 2^63 bytes": lambda: with_constant("Expand", [2**60, 4, 8]),
    "'Repeats' input must not contain negative values": lambda: with_constant("Tile", [-1, 2]),
    "Dimension of input 0 must be 1 instead of 4": lambda: with_constant("Squeeze", [0]),
    "Unexpected axis value: 9": lambda: with_constant("Unsqueeze", [9]),
    "axis must be in [-rank, rank-1]": lambda: with_constant("ReduceSum", [5]),
    "Mismatch between the sum of 'split' (2) and the split dimension": lambda: changed(
        with_constant("Split", [1, 1]), "g.node[0].output.append('z')"
    ),
    "Axis has less than the requested k elements": lambda: changed(
        with_constant("TopK", [100]), "g.node[0].output.append('z')"
    ),
    "the operands of Pad do not fit: the result would have a dim of -5": lambda: with_constant("Pad", [-9, 0, 0, 0]),
    "shape input tensor must have non-negative elements": lambda: model(
        node("ConstantOfShape", ["k"], ["c"]),
        RELU,
        constants=[numbers([-3], "k")],
        outputs=[value("y"), value("c", FLOAT, None)],
    ),
    "%c would be f32[4611686018427387904, 4611686018427387904]": lambda: model(
        node("ConstantOfShape", ["k"], ["c"]),
        RELU,
        constants=[numbers([2**62, 2**62], "k")],
        outputs=[value("y"), value("c", FLOAT, None)],
    ),
    "%r would be i64[4611686018427387904]": lambda: model(
        node("Range", ["a", "b", "c"], ["r"]),
        RELU,
        outputs=[value("y"), value("r", INT64, None)],
        constants=[numbers(0, "a"), numbers(2**62, "b"), numbers(1, "c")],
    ),
    "'step' cannot be 0 for Slice": lambda: model(
        node("Slice", ["x", "a", "b", "c", "d"], ["y"]),
        outputs=[value("y", FLOAT, None)],
        constants=[numbers([0], "a"), numbers([2], "b"), numbers([0], "c"), numbers([0], "d")],
    ),
}

SIZES["Range has a step of 0"] = lambda: model(
    node("Range", ["a", "b", "c"], ["r"]),
    RELU,
    outputs=[value("y"), value("r", INT64, None)],
    constants=[numbers(0, "a"), numbers(10, "b"), numbers(0, "c")],
)

CONDITION = value("c", BOOL, [])


def loop(inner: onnx.GraphProto, *operands: str, results: int = 1) -> onnx.ModelProto:
    """A Loop of 3 trips."""
    outputs = [f"y{index or ''}" for index in range(results)]
    made = node("Loop", ["n", "c", *operands], outputs, body=inner)
    typed = [value(name, FLOAT, None) for name in outputs]
    return model(made, inputs=[value("x"), CONDITION], outputs=typed, constants=[numbers(3, "n")])


def branches(**bodies: onnx.GraphProto) -> onnx.ModelProto:
    """An If."""
    return model(node("If", ["c"], ["y"], **bodies), inputs=[value("x"), CONDITION], outputs=[value("y", FLOAT, None)])


GOOD = body(node("Relu", ["x"], ["t"]), outputs=[value("t")])
COUNTED = [value("i", INT64, []), value("go", BOOL, [])]

BODIES: dict[str, Make] = {
    "it has no graph else_branch": lambda: branches(then_branch=GOOD),
    "its then_branch has 2 outputs": lambda: branches(
        then_branch=body(node("Relu", ["x"], ["t"]), outputs=[value("t"), value("x")]), else_branch=GOOD
    ),
    "its else_branch has 0 outputs": lambda: branches(then_branch=GOOD, else_branch=body(node("Relu", ["x"], ["t"]))),
    '"q" is read, but nothing': lambda: branches(
        then_branch=body(node("Relu", ["q"], ["u"]), outputs=[value("u")]), else_branch=GOOD
    ),
    '"c2" is read': lambda: model(node("If", ["c2"], ["y"], then_branch=GOOD, else_branch=GOOD)),
    "its then_branch has 1 inputs": lambda: branches(
        then_branch=body(node("Relu", ["p"], ["u"]), inputs=[value("p")], outputs=[value("u")]), else_branch=GOOD
    ),
    "its body has 0 inputs, the node asks for 3": lambda: loop(
        body(node("Relu", ["x"], ["t"]), outputs=[value("t")]), "x"
    ),
    "its body has 1 outputs, the node asks for 2": lambda: loop(
        body(node("Relu", ["s"], ["t"]), inputs=[*COUNTED, value("s")], outputs=[value("t")]), "x"
    ),
    "the node has 3 operands and 1 results": lambda: loop(
        body(node("Identity", ["go"], ["g"]), inputs=[*COUNTED, value("s")], outputs=[value("g", BOOL, [])]), "x"
    ),
    "it has no graph body": lambda: model(node("Loop", ["", "", "x"], ["y"])),
    "num_scan_inputs is 7": lambda: model(
        node(
            "Scan",
            ["x"],
            ["y"],
            body=body(node("Relu", ["a"], ["b"]), inputs=[value("a", FLOAT, [8])], outputs=[value("b", FLOAT, [8])]),
            num_scan_inputs=7,
        )
    ),
    "num_scan_inputs is -1": lambda: model(
        node(
            "Scan",
            ["x"],
            ["y"],
            body=body(node("Relu", ["a"], ["b"]), inputs=[value("a", FLOAT, [8])], outputs=[value("b", FLOAT, [8])]),
            num_scan_inputs=-1,
        )
    ),
}

MODELS: dict[str, Make] = {**GRAPHS, **FUNCTIONS, **TYPES, **TENSORS, **ATTRIBUTES, **SIZES, **BODIES}
