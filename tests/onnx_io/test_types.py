import onnx
import pytest

from irpar.ir import UNKNOWN, DType, InflightType, OptionalType, SequenceType, TensorType, parse_dim, symbol
from irpar.onnx_io import OnnxError
from irpar.onnx_io.types import TypeReader, dim_text, write_type

F32 = TensorType(DType.F32, (symbol("batch"), 4, None))


@pytest.mark.parametrize(
    "type_",
    [
        F32,
        TensorType(DType.BF16, None),
        TensorType(DType.I4, ()),
        SequenceType(F32),
        OptionalType(SequenceType(F32)),
        UNKNOWN,
    ],
    ids=str,
)
def test_round_trip(type_: TensorType) -> None:
    proto = onnx.TypeProto()
    write_type(type_, proto)
    assert TypeReader().read(proto) == type_


def test_in_flight_is_written_as_what_arrives() -> None:
    proto = onnx.TypeProto()
    write_type(InflightType(F32), proto)
    assert TypeReader().read(proto) == F32


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch", symbol("batch")),
        ("past_length + 1", parse_dim("past_length + 1")),
        ("2*batch", parse_dim("2*batch")),
        ("batch-1", parse_dim("batch-1")),
        ("batch-size", symbol("batch-size")),
        ("unk__12", symbol("unk__12")),
        ("s0//2", symbol("s0//2")),
        ("a dim", symbol("a dim")),
        ("it's", symbol("it's")),
        ("7", 7),
        ("-1", None),
        ("?", None),
        ("", None),
        ("(" * 5000, symbol("(" * 5000)),
        ("9" * 6000, symbol("9" * 6000)),
    ],
)
def test_dim_names(text: str, expected: object) -> None:
    assert TypeReader({"batch"}).dim(text) == expected


def test_products_that_explode_stay_names() -> None:
    text = "*".join(f"(a{n}+b{n})" for n in range(30))
    assert TypeReader().dim(text) == symbol(text)


@pytest.mark.parametrize("name", ["batch", "batch-size", "a dim", "s0//2", "a+b", "2*a", "it's", "_", "a\nb"])
def test_dims_are_read_as_they_were_written(name: str) -> None:
    for dim in (symbol(name), symbol(name) * 2):
        assert not isinstance(dim, int)
        assert TypeReader({name}).dim(dim_text(dim)) == dim
    assert TypeReader().dim(dim_text(symbol(name))) == symbol(name)


def test_plain_names_are_written_plainly() -> None:
    assert dim_text(symbol("batch-size")) == "batch-size"
    assert dim_text(symbol("a dim")) == "a dim"


@pytest.mark.parametrize("number", [-1, -2])
def test_negative_dims(number: int) -> None:
    proto = onnx.helper.make_tensor_type_proto(1, [number])
    if number == -1:
        assert TypeReader().read(proto) == TensorType(DType.F32, (None,))
    else:
        with pytest.raises(OnnxError, match="dim of -2"):
            TypeReader().read(proto)
