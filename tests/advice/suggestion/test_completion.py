"""A copy that is completed again comes to what one that was never completed before comes to."""

from collections.abc import Callable, Mapping

import pytest

import irpar
from irpar import models
from irpar.advice.suggestion.completion import Completions
from irpar.analysis.completion.flow import Flow
from irpar.ir import Module
from irpar.pass_manager import Instrumentation, PassManager
from irpar.sharding import DimSpec, Mesh
from tests.written import model_of_text

Tensors = Mapping[str, tuple[DimSpec, ...]]

LOOP = """
g (float[8, 16] x, float[16, 16] w, float[16, 16] v, int64 n, bool go) => (float[8, 16] z) {
  y = Loop(n, go, x) <body = b (int64 i, bool c, float[8, 16] a) => (bool d, float[8, 16] o) {
    d = Identity(c)  k = Constant <value = float[16] {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> ()
    h = MatMul(a, w)  o = Add(h, k)
  }>
  z = MatMul(y, v)
}"""
CUT: dict[str, tuple[Callable[[], Module], tuple[Tensors, ...]]] = {
    "an MLP": (lambda: irpar.load(models.build("mlp")), ({"x": (("dp",), None)}, {"x": (None, ("tp",))}, {})),
    "weights that are split, and are not": (
        lambda: irpar.load(models.build("gpt", layers=1, fused_qkv=True)),
        ({}, {"*c_attn.weight": (None, ("tp",))}, {"*c_attn.weight": (("tp",), None)}, {}),
    ),
    "a body whose constants are lifted": (
        lambda: irpar.load(model_of_text(LOOP, ("w", "v"))),
        ({"w": (None, ("tp",))}, {"x": (("dp",), None)}, {"w": (("tp",), None)}, {"w": (None, ("tp",))}),
    ),
}


def completed(completions: Completions, tensors: Tensors) -> tuple[dict[str, str], set[str], list[str]]:
    """How values lie, which were annotated, and where constants are."""

    def annotate(module: Module) -> None:
        for name, spec in tensors.items():
            module.shard(name, spec)

    module, flow = completions.completed(annotate, Instrumentation(reproducer=None))
    assert flow.graph is module.graph
    assert flow.nodes == Flow(module.graph, flow.mesh).nodes
    lies = {value.name: str(value.sharding) for graph in module.all_graphs() for value in graph.values()}
    return lies, set(module.annotated), [value.name for value in module.graph.constants]


@pytest.mark.parametrize("name", CUT)
def test_a_copy_is_completed_again(name: str) -> None:
    make, tries = CUT[name]
    module, mesh = make(), Mesh({"dp": 2, "tp": 2})
    PassManager.parse("infer-types,fold-constants,dce").run(module)
    again = Completions(module, mesh)
    before = str(module)
    for tensors in (*tries, *tries):
        assert completed(again, tensors) == completed(Completions(module, mesh), tensors)
    assert str(module) == before
