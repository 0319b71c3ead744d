"""Digests from samples of a file."""

from pathlib import Path

import numpy as np
import pytest

from irpar.output.fingerprint import BLOCK_BYTES, SAMPLES, fingerprint


def test_a_fingerprint_sees_ends_sizes_and_exchanged_blocks(tmp_path: Path) -> None:
    size = (2 * SAMPLES + 7) * BLOCK_BYTES + 12_345
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    found = set()
    for change in ({}, {0: 1}, {size - 1: 1}, {BLOCK_BYTES - 1: 1}):
        changed = data.copy()
        for place, step in change.items():
            changed[place] += step
        (tmp_path / "w").write_bytes(changed.tobytes())
        found.add(fingerprint(tmp_path / "w"))
    for longer in (bytes(1), bytes(4096)):
        (tmp_path / "w").write_bytes(data.tobytes() + longer)
        found.add(fingerprint(tmp_path / "w"))
    half = size // 2
    (tmp_path / "w").write_bytes(data[:half].tobytes() + bytes(size - half))
    found.add(fingerprint(tmp_path / "w"))
    assert len(found) == 7


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, 5 * BLOCK_BYTES + 3, (SAMPLES + 2) * BLOCK_BYTES])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    data = bytearray(np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes())
    (tmp_path / "w").write_bytes(data)
    before = fingerprint(tmp_path / "w")
    assert fingerprint(tmp_path / "w") == before
    for place in {0, size // 3, size // 2, size - 1} if size else ():
        data[place] ^= 1
        (tmp_path / "w").write_bytes(data)
        assert fingerprint(tmp_path / "w") != before
        data[place] ^= 1
