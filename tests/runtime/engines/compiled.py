"""Programs of one segment, on the engine cupy and on the engine numpy."""

from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import numpy as np

from irpar.output.parts import Part
from irpar.runtime.engines.arena import Arena
from irpar.runtime.engines.base import Constants, EngineSettings, make_engine
from irpar.runtime.program import build_program
from tests.runtime.programs import module


class Compiled:
    """A program of one segment, compiled for a device and for the host.

    Args:
        text: the program.
        place: a device array of a numpy array.
        numpy: a numpy array of what the device gives.
        keep_on_device: whether the segment gives device arrays.
        captures: whether it is captured.
        lends: whether results are valid until the next run alone.

    Attributes:
        segment: of the program.
        engine: cupy.
        device, host: the segment there.
    """

    def __init__(
        self,
        text: str,
        place: Callable[[np.ndarray], Any],
        numpy: Callable[[Any], np.ndarray],
        *,
        keep_on_device: bool,
        captures: bool,
        lends: bool = False,
    ) -> None:
        loaded = module(text)
        part = Part(0, loaded.graph, (0,), ())
        (self.segment,) = build_program(part.graph).segments
        settings = EngineSettings(loaded.opsets, 1, keep_on_device=keep_on_device, captures=captures, lends=lends)
        self.engine: Any = make_engine("cupy", settings)
        self.device: Any = self.engine.compile(self.segment, Constants(part))
        self.host = make_engine("numpy", EngineSettings(loaded.opsets, 1)).compile(self.segment, Constants(part))
        self._place = place
        self._numpy = numpy

    def run(self, *inputs: np.ndarray, on_device: bool = False, arena: Arena | None = None) -> list[Any]:
        """What the device gives for the inputs of the program, in its order."""
        given = [self._place(array) if on_device else array for array in self._in_order(inputs)]
        found: list[Any] = self.device.run(given, arena=arena)
        return found

    def expected(self, *inputs: np.ndarray) -> list[Any]:
        """What the host gives."""
        return self.host.run(self._in_order(inputs))

    def check(
        self, *inputs: np.ndarray, on_device: bool = False, arena: Arena | None = None, tolerance: float = 0
    ) -> None:
        """Compare what the device gives with what the host does."""
        found = self.run(*inputs, on_device=on_device, arena=arena)
        for one, expected in zip(found, self.expected(*inputs), strict=True):
            np.testing.assert_allclose(self._numpy(one), expected, rtol=tolerance, atol=tolerance)

    @property
    def captured(self) -> tuple[int, ...]:
        """Pieces, nodes in them, other nodes."""
        return astuple(self.device.captured)

    def _in_order(self, inputs: tuple[np.ndarray, ...]) -> list[Any]:
        named = dict(zip(self.segment.graph.inputs, inputs, strict=True))
        return [named[value] for value in self.segment.inputs]
