"""Values as bytes and back."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irpar.runtime.messages import ALIGNMENT, decode, encode

ARRAYS = {
    "bf16": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
    "int4": np.array([1, -2, 3], ml_dtypes.int4),
    "texts": np.array([["x", "yé"]], object),
    "bytes": np.array([b"\xff\x00"], object),
    "scalar": np.array(True),
    "empty": np.zeros((0, 3), np.float16),
    "strided": np.arange(12.0).reshape(3, 4)[:, ::2],
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_any_dtype(name):
    array = ARRAYS[name]
    made = decode(encode({"a": [array, None]}))["a"][0]
    assert made.dtype == array.dtype
    assert made.shape == array.shape
    assert made.tolist() == array.tolist()
    assert made.dtype == object or made.size == 0 or made.ctypes.data % ALIGNMENT == 0


@pytest.mark.parametrize("shift", range(3))
def test_arrays_are_aligned_wherever_the_message_lies(shift):
    message = encode({"x" * 5: np.arange(3.0), "y": np.arange(7, dtype=np.int8), "z": np.arange(5, dtype=np.float32)})
    moved = memoryview(bytearray(b"\0" * shift + message))[shift:]
    for array in decode(moved).values():
        assert array.ctypes.data % ALIGNMENT == 0
        assert array.tolist() == list(range(array.size))


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_plain_values(value):
    assert decode(encode(value)) == value


@pytest.mark.parametrize("message", [b"", b"\x05\x00\x00\x00\x00\x00\x00\x00{", encode([1])[:-1], b"\xff" * 40])
def test_what_is_no_message_is_refused(message):
    with pytest.raises(ValueError, match="not a message of irpar"):
        decode(message)


def test_other_objects_are_refused():
    with pytest.raises(TypeError, match="cannot hold a set"):
        encode({1, 2})
