"""Which parameters are gathered together, and what a rank then holds of them."""

from collections import defaultdict

import numpy as np
import pytest

import irpar
from irpar import models
from irpar.analysis.gathers import SAID, gathered, gathers_said, layers_of
from irpar.ir import Module
from irpar.onnx_io import to_module
from irpar.pass_manager.default_pipeline import with_zero
from irpar.sharding import IrparError

GPT = {"layers": 4, "hidden": 64, "heads": 4, "seq": 16, "vocab": 64, "batch": 8}
TOGETHER = "fuse-communication{mode=size, size-mb=25}"
"""All that may be sent together is, whatever the network says."""


def step(family: str = "gpt", **options: object) -> Module:
    return irpar.train_step(to_module(models.build(family, **(options or GPT))), optimizer="adamw")


def layers_in(module: Module) -> dict[str, int]:
    return layers_of(module.graph, [value for value, state in module.graph.states.items() if state.is_trained])


def gathered_together(partition: irpar.Partition) -> dict[str, list[set[int]]]:
    """Of each phase the layers whose parameters each collective gathers."""
    assert partition.module is not None
    graph = partition.module.graph
    layers = gathers_said(partition.module).layers
    parameters = {value: {value} for value, state in graph.states.items() if state.kind == "parameter"}
    found = defaultdict(list)
    for node in graph:
        reads = [parameters.get(value, set()) for value in node.inputs if not value.is_constant]
        sources = set().union(*reads) if reads and all(reads) else set()
        if sources and node.phase in ("forward", "backward"):
            if node.domain == "irpar":
                found[node.phase].append({layers[value.source_name] for value in sources})
            if node.domain == "irpar" or node.op_type in ("Transpose", "Reshape", "Unsqueeze", "Concat", "Identity"):
                parameters.update(dict.fromkeys(node.results, sources))
    return dict(found)


def partitioned(module: Module, zero: str, fusion: str = TOGETHER) -> irpar.Partition:
    module.shard("input_ids", ["dp", None])
    pipeline = with_zero(f"zero{{stage=3, threshold-kb=0, {zero}}}").replace("fuse-communication", fusion)
    return irpar.partition(module, "dp=4", pipeline=pipeline)


def test_layers_are_what_the_forward_pass_repeats() -> None:
    layers = layers_in(step())
    of_block = {name: number for name, number in layers.items() if name.startswith("h.")}
    assert {name.split(".")[1] for name in of_block} == {"0", "1", "2", "3"}
    assert {int(name.split(".")[1]): number for name, number in of_block.items()} == {
        block: block + 1 for block in range(4)
    }
    assert layers["wte.weight"] == layers["wpe.weight"] == 0
    assert layers["ln_f.weight"] == layers["lm_head.weight"] == 5


def test_outside_of_layers_no_more_than_the_largest_goes_together() -> None:
    module = step("mlp", layers=2, width=32, hidden=64, batch=8)
    layers = layers_in(module)
    sizes = {
        value.source_name: value.tensor_type.nbytes
        for value in module.graph.states
        if not value.source_name.endswith((".m", ".v"))
    }
    groups = defaultdict(int)
    for name, number in layers.items():
        groups[number] += sizes[name]
    assert max(groups.values()) <= max(sizes.values())
    assert list(dict.fromkeys(sorted(layers.values()))) == list(range(len(groups)))


@pytest.mark.parametrize(
    ("prefetch", "regather"), [*(pytest.param(count, "true", marks=pytest.mark.slow) for count in (1, 3)), (2, "false")]
)
def test_gathers_of_a_few_layers_are_sent_together(prefetch: int, regather: str) -> None:
    partition = partitioned(step(), f"prefetch={prefetch}, regather={regather}")
    found = gathered_together(partition)
    assert max(max(numbers) - min(numbers) + 1 for numbers in found["forward"]) == prefetch
    assert any(len(numbers) == prefetch for numbers in found["forward"])
    assert {len(numbers) for numbers in found.get("backward", ())} == ({1} if regather == "true" else set())


@pytest.mark.slow
def test_buffers_are_of_one_layer_more() -> None:
    """The gathered layer, packed, beside its parts."""
    module = step()
    layers = layers_in(module)
    bytes_of: dict[int, int] = defaultdict(int)
    for value, state in module.graph.states.items():
        if state.kind == "parameter":
            bytes_of[layers[value.source_name]] += value.tensor_type.nbytes
    held = [partitioned(step(), f"prefetch={count}").plan.ranks[0]["memory"]["buffers"] for count in (1, 2, 4)]
    assert held == sorted(held)
    assert held[0] <= 2 * max(bytes_of.values())
    assert held[1] <= 4 * max(bytes_of.values())


@pytest.mark.slow
def test_numbers_are_the_same() -> None:
    losses = []
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, 64, (8, 16)) for name in ("input_ids", "target")}
    for prefetch in (1, 2):
        with partitioned(step(), f"prefetch={prefetch}").trainer(engine="numpy") as trainer:
            losses.append([trainer.step(batch) for _ in range(3)])
    assert losses[0] == losses[1]


def test_what_only_moves_a_parameter() -> None:
    partition = partitioned(step(), "prefetch=1", "fuse-communication")
    assert partition.module is not None
    moved = [(node.op_type, value.source_name) for node, value in gathered(partition.module.graph)]
    assert ("AllGather", "wte.weight") in moved
    assert not any(name.endswith((".m", ".v")) for _, name in moved)


def test_refused() -> None:
    with pytest.raises(IrparError, match="a prefetch of 0 layers"):
        partitioned(step(), "prefetch=0")
    module = step()
    module.metadata[SAID] = "[]"
    with pytest.raises(IrparError, match=f"the metadata {SAID} of the module cannot be read"):
        gathers_said(module)
