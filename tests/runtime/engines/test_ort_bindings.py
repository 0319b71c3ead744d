"""Small segments of the engine `ort`: buffers that are bound once."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from irpar.output.parts import parts_of
from irpar.runtime.engines.base import Constants, EngineSettings
from irpar.runtime.engines.ort import BoundSegment, OrtEngine, OrtSegment
from irpar.runtime.errors import NodeError
from irpar.runtime.program import build_program
from tests.runtime.programs import module


def compiled(type_: str) -> OrtSegment:
    """`y = -x`, `z = x + x` as a segment."""
    text = f"""
        mesh @m = ["x"=1]
        graph local @g(%x: {type_}) -> (%y, %z) opset 21 ranks [0] {{
          %y = Neg(%x) : {type_}
          %z = Add(%x, %x) : {type_}
        }}
    """
    return compiled_text(text)


def compiled_text(text: str) -> OrtSegment:
    loaded = module(text)
    (segment,) = build_program(loaded.graph).segments
    engine = OrtEngine(EngineSettings(loaded.opsets, 1))
    return engine.compile(segment, Constants(parts_of(loaded, loaded.mesh)[0]))


def test_results_are_arrays_of_their_own():
    segment = compiled("f32[3]")
    assert isinstance(segment, BoundSegment)
    first = segment.run([np.array([1, 2, 3], np.float32)])
    second = segment.run([np.array([4, 5, 6], np.float32)[::-1]])
    np.testing.assert_array_equal(first, [[-1, -2, -3], [2, 4, 6]])
    np.testing.assert_array_equal(second, [[-6, -5, -4], [12, 10, 8]])


@pytest.mark.parametrize("type_", ["f32[5000]", "f32[0]"])
def test_what_is_large_or_empty_is_not_copied(type_):
    assert type(compiled(type_)) is OrtSegment


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros(1, np.float32)])
def test_an_array_that_does_not_fit_is_refused(wrong):
    """Neither converted nor repeated to fill the buffer."""
    with pytest.raises(NodeError):
        compiled("f32[3]").run([wrong])


def test_results_of_other_sizes_than_declared():
    """Exporters declare a window more than MaxPool computes; ONNX Runtime warns, and goes on."""
    text = """
        mesh @m = ["x"=1]
        graph local @g(%x: f32[1, 1, 4]) -> (%y) opset 13 ranks [0] {
          %y = MaxPool(%x) {ceil_mode = 1, kernel_shape = [1], strides = [2]} : f32[1, 1, 3]
        }
    """
    segment = compiled_text(text)
    for number in (1, 2):
        given = np.full((1, 1, 4), number, np.float32)
        np.testing.assert_array_equal(segment.run([given]), [np.full((1, 1, 2), number)])


def test_a_bound_segment_holds_what_it_is_bound_to():
    """ONNX Runtime is given addresses."""
    segment = compiled("f32[3]")
    arrays = [np.empty(3, np.float32) for _ in range(3)]
    work = segment.bind(arrays[:1], arrays[1:])
    known = list(map(weakref.ref, arrays))
    del arrays
    given, first, second = (array() for array in known)
    given[:] = [1, 2, 3]
    work.run()
    np.testing.assert_array_equal([first, second], [[-1, -2, -3], [2, 4, 6]])


def test_threads_do_not_share_buffers():
    segment = compiled("f32[64]")

    def work(number: int) -> bool:
        given = np.full(64, number, np.float32)
        return all((segment.run([given])[1] == 2 * number).all() for _ in range(200))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
