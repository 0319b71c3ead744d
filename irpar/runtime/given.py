"""What a run is given: full arrays, and samples of which each rank reads its own block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irpar.inputs.dataset import Batch

from .layout import TensorSpec, scatter


@dataclass(frozen=True)
class Given:
    """The inputs of a run.

    Attributes:
        arrays: full, by name.
        batch: samples; None: there are none.
    """

    arrays: Mapping[str, Any]
    batch: Batch | None = None

    def scattered(self, specs: Sequence[TensorSpec], coords: Sequence[int]) -> dict[str, Any]:
        """What the rank at some coordinates takes of the full arrays."""
        return {
            spec.name: scatter(self.arrays[spec.name], spec.sharding, coords)
            if isinstance(self.arrays[spec.name], np.ndarray)
            else self.arrays[spec.name]
            for spec in specs
            if spec.name in self.arrays
        }

    def blocks(self, specs: Sequence[TensorSpec], coords: Sequence[int]) -> dict[str, Any]:
        """The same, and what it reads of the samples.

        Raises:
            DataError: they cannot be read, or are out of range.
        """
        found = self.scattered(specs, coords)
        if self.batch is not None:
            found |= self.batch.blocks({spec.name: spec.sharding for spec in specs}, coords)
        return found

    def message(self) -> list[Any]:
        """The samples as ranks in other processes are told of them."""
        return [] if self.batch is None else self.batch.message()

    def read_bytes(self, blocks: Mapping[str, Any]) -> int:
        """How many bytes of blocks were read of samples."""
        return 0 if self.batch is None else sum(int(blocks[name].nbytes) for name in self.batch.names)
