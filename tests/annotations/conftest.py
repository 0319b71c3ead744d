"""A small model that all spellings annotate."""

import pytest

from irpar.ir import Module, parse_module
from irpar.sharding import Mesh

TEXT = """\
graph @mlp(%x: f32[8, 64]) -> (%y) opset 18 {
  %"h.0.w" = constant : f32[64, 128] data("w.bin", 0, 32768)
  %"h.1.w" = constant : f32[128, 64] data("w.bin", 32768, 32768)
  %"h.0.b" = constant : f32[128] data("w.bin", 65536, 512)
  %a = MatMul(%x, %"h.0.w") : f32[8, 128] name "up"
  %s = Add(%a, %"h.0.b") : f32[8, 128] name "bias"
  %r = Relu(%s) : f32[8, 128] name "act"
  %y = MatMul(%r, %"h.1.w") : f32[8, 64] name "down"
}
"""


NAMED = TEXT.replace("[8,", "[batch,")
"""The same, its batch a symbol."""


@pytest.fixture
def module() -> Module:
    return parse_module(TEXT)


@pytest.fixture
def named() -> Module:
    """The model with a symbolic batch, without a mesh."""
    return parse_module(NAMED)


@pytest.fixture
def meshed(module: Module) -> Module:
    """The model over dp=2,tp=4."""
    module.set_mesh(Mesh({"dp": 2, "tp": 4}))
    return module


def plain(annotations: dict[str, list[object]], mesh: Mesh | None = None, text: str = TEXT) -> Module:
    """The model as `module.shard` annotates it."""
    made = parse_module(text)
    made.set_mesh(mesh or Mesh({"dp": 2, "tp": 4}))
    for pattern, spec in annotations.items():
        made.shard(pattern, spec)
    return made
