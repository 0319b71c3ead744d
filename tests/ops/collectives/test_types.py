"""Types of collectives in both views, what they send, and what the verifier finds wrong with them."""

import pytest

from irpar.ir import DType, Graph, Module, Node, TensorType, VerifyError, verify
from irpar.ops import definition, definitions
from irpar.ops.collectives import COLLECTIVES, FREE, KINDS, STARTED, WAIT, sends, sent_bytes
from irpar.sharding import Axis, Mesh, Sharding, local_shape, permutation, permuted_shapes

MESH = Mesh({"dp": 2, "tp": 4})
TP = Axis("tp")


def sharding(*dims: str | None, partial: str | None = None, mesh: Mesh = MESH) -> Sharding:
    """Axes of each dim, and what is partial(sum)."""
    cut = [[Axis.parse(dim)] if dim else [] for dim in dims]
    return Sharding.of_axes(mesh, cut, [Axis.parse(partial)] if partial else [])


def collective(
    op: str, before: Sharding, after: Sharding, shape: tuple[int, ...], rank: int | None = None, **attributes: object
) -> Node:
    """A collective in a graph; a local one for `rank`."""
    graph = Graph()
    module = Module(graph)
    module.set_mesh(before.mesh)
    operand = graph.add_input("x", TensorType(DType.F32, shape))
    named = {"axes": ["tp"], **({} if op in FREE else {"id": 0}), **attributes}
    node = graph.append(Node(op, [operand], named, domain="irpar", version=1))
    operand.sharding, node.result.sharding = before, after
    node.result.type = TensorType(DType.F32, shape)
    if rank is not None:
        graph.view, graph.ranks = "local", (rank,)
        for value in (operand, node.result):
            assert value.sharding is not None
            value.global_shape = shape
            value.type = TensorType(DType.F32, local_shape(value.sharding, shape, before.mesh.coords(rank)))
    graph.set_outputs([node.result], ["y"])
    return node


def inferred(node: Node) -> object:
    found = definition(node)
    assert found is not None
    assert found.infer is not None
    types = found.infer(node)
    return None if types is None else types[0]


def problems(node: Node) -> str:
    assert node.graph is not None
    module = Module(node.graph)
    sharded = node.inputs[0].sharding
    assert sharded is not None
    module.set_mesh(sharded.mesh)
    with pytest.raises(VerifyError) as error:
        verify(module)
    return str(error.value)


CASES = {
    "AllReduce": (sharding("dp", None, partial="tp"), sharding("dp", None), {"reduce": "sum"}),
    "AllGather": (sharding("dp", "tp"), sharding("dp", None), {"dim": 1}),
    "ReduceScatter": (sharding(None, None, partial="tp"), sharding(None, "tp"), {"dim": 1, "reduce": "sum"}),
    "AllToAll": (sharding("tp", None), sharding(None, "tp"), {"split_dim": 1, "concat_dim": 0}),
    "CollectivePermute": (sharding("tp", None), sharding("tp", None), {"pairs": [0, 1]}),
    "Broadcast": (sharding(None, None), sharding(None, None), {"root": 0}),
}
UNEVEN = {
    "AllGather": {"sizes": [2, 2, 2, 1]},
    "ReduceScatter": {"sizes": [2, 2, 2, 1]},
    "AllToAll": {"split_sizes": [2, 2, 2, 1], "concat_sizes": [3, 3, 3, 2]},
}


def test_every_collective_is_defined_without_a_rule() -> None:
    own = (known for known in definitions() if known.domain == "irpar" and not known.copies)
    found = {known.name: known for known in own if known.decompose is None}
    assert set(COLLECTIVES) == {*KINDS, *FREE}
    assert set(found) == {*COLLECTIVES, *STARTED, WAIT}
    assert all(known.rule is None for known in found.values())


@pytest.mark.parametrize("op", CASES)
def test_global_types_stay(op: str) -> None:
    before, after, attributes = CASES[op]
    node = collective(op, before, after, (8, 16), **attributes)
    assert sends(node)
    assert inferred(node) == TensorType(DType.F32, (8, 16))
    assert node.graph is not None
    module = Module(node.graph)
    module.set_mesh(MESH)
    verify(module)


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("rank", range(8))
@pytest.mark.parametrize("shape", [(8, 16), (11, 7)])
def test_local_types_follow_from_the_attributes(op: str, rank: int, shape: tuple[int, int]) -> None:
    before, after, attributes = CASES[op]
    uneven = UNEVEN.get(op, {}) if shape == (11, 7) else {}
    node = collective(op, before, after, shape, rank, **attributes, **uneven)
    assert inferred(node) == node.result.type
    assert node.graph is not None
    module = Module(node.graph)
    module.set_mesh(MESH)
    verify(module)


SENT = {
    # f32[8, 16], cut by dp=2 in all but where said; tp=4
    "AllReduce": 2 * 3 * (4 * 16 * 4) // 4,
    "AllGather": 3 * (4 * 4 * 4),
    "ReduceScatter": 3 * (8 * 4 * 4),
    "AllToAll": 3 * (2 * 16 * 4) // 4,
    "CollectivePermute": 2 * 16 * 4,
    "Broadcast": 8 * 16 * 4,
}


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("rank", [None, 0, 7])
def test_sent_bytes_by_the_ring_model(op: str, rank: int | None) -> None:
    before, after, attributes = CASES[op]
    assert sent_bytes(collective(op, before, after, (8, 16), rank, **attributes), MESH) == SENT[op]


SENT_UNEVEN = {
    # f32[11, 7]: blocks of 6, 5 over dp; 3, 3, 3, 2 and 2, 2, 2, 1 over tp, padded to 3 and 2
    "AllGather": 3 * (6 * 2 * 4),
    "ReduceScatter": 3 * (11 * 2 * 4),
    "AllToAll": 3 * (3 * 2 * 4),
}


@pytest.mark.parametrize("op", SENT_UNEVEN)
@pytest.mark.parametrize("rank", [None, 0, 3])
def test_sent_bytes_pad_uneven_blocks(op: str, rank: int | None) -> None:
    before, after, attributes = CASES[op]
    node = collective(op, before, after, (11, 7), rank, **attributes, **UNEVEN[op])
    assert sent_bytes(node, MESH) == SENT_UNEVEN[op]


def test_a_slice_sends_nothing() -> None:
    node = collective("AllSlice", sharding("dp", None), sharding("dp", "tp"), (8, 16), dim=1)
    assert not sends(node)
    assert sent_bytes(node, MESH) == 0
    assert inferred(node) == TensorType(DType.F32, (8, 16))


@pytest.mark.parametrize("rank", [None, *range(8)])
def test_a_permutation_takes_blocks_to_where_another_sharding_has_them(rank: int | None) -> None:
    """f32[7, 9]: the blocks that change places are of other sizes; `shapes` tells those of all members."""
    before, after = Sharding.of_spec(MESH, [["dp", "tp"], None]), Sharding.of_spec(MESH, [["tp", "dp"], None])
    axes, pairs = permutation(before, after)
    attributes: dict[str, object] = {"axes": list(map(str, axes)), "pairs": list(pairs)}
    if rank is not None:
        attributes["shapes"] = permuted_shapes(before, (7, 9), axes, MESH.coords(rank))
    node = collective("CollectivePermute", before, after, (7, 9), rank, **attributes)
    assert inferred(node) == node.result.type
    assert node.graph is not None
    module = Module(node.graph)
    module.set_mesh(MESH)
    verify(module)


def test_shares_of_a_whole_value() -> None:
    node = collective("MakePartial", sharding(None), sharding(None, partial="tp"), (8,), reduce="sum")
    assert not sends(node)
    assert sent_bytes(node, MESH) == 0
    assert node.graph is not None
    module = Module(node.graph)
    module.set_mesh(MESH)
    verify(module)


def test_a_group_of_one_sends_nothing() -> None:
    mesh = Mesh({"tp": 1})
    before = sharding("tp", None, mesh=mesh)
    assert sent_bytes(collective("CollectivePermute", before, before, (8, 16), pairs=[0, 0]), mesh) == 0


WRONG = {
    "no partial value": ("AllReduce", sharding(None), sharding(None), {"reduce": "sum"}, "cannot run over tp"),
    "an axis that stays": ("AllGather", sharding("tp"), sharding("tp"), {"dim": 0}, "to another sharding"),
    "no such dim": ("AllGather", sharding("tp"), sharding(None), {"dim": 1}, "which is no dim of f32[8]"),
    "another reduction": (
        "AllReduce",
        sharding(None, partial="tp"),
        sharding(None),
        {"reduce": "max"},
        "reduces by max what is partial(sum)",
    ),
    "an unknown reduction": (
        "AllReduce",
        sharding(None, partial="tp"),
        sharding(None),
        {"reduce": "mean"},
        "one of sum, max",
    ),
    "an unknown axis": ("AllGather", sharding("tp"), sharding(None), {"dim": 0, "axes": ["pp"]}, 'no axis "pp"'),
    "no axes": ("AllGather", sharding("tp"), sharding(None), {"dim": 0, "axes": None}, "no attribute axes"),
    "no id": ("AllGather", sharding("tp"), sharding(None), {"dim": 0, "id": None}, "no attribute id"),
    "pairs that two get": (
        "CollectivePermute",
        sharding("tp"),
        sharding("tp"),
        {"pairs": [0, 1, 2, 1]},
        "has pairs [0, 1, 2, 1], which are no senders and receivers",
    ),
    "pairs outside the group": (
        "CollectivePermute",
        sharding("tp"),
        sharding("tp"),
        {"pairs": [0, 4]},
        "in turn among 4 devices",
    ),
    "pairs that lead elsewhere": (
        "CollectivePermute",
        Sharding.of_spec(MESH, [["dp", "tp"]]),
        Sharding.of_spec(MESH, [["tp", "dp"]]),
        {"axes": ["dp", "tp"], "pairs": [n for rank in range(8) for n in (rank, rank)]},
        "does not take [@(dp,tp)] over dp, tp to [@(tp,dp)]",
    ),
    "a permutation to other blocks": (
        "CollectivePermute",
        sharding("tp"),
        sharding("dp"),
        {"axes": ["dp", "tp"], "pairs": [n for rank in range(8) for n in (rank, rank)]},
        "does not take [@tp] over dp, tp to [@dp]",
    ),
    "shares of what is sharded": (
        "MakePartial",
        sharding("tp"),
        sharding("tp", partial="dp"),
        {"reduce": "sum"},
        "cannot run over tp",
    ),
    "a slice of what is held": ("AllSlice", sharding("tp"), sharding("tp"), {"dim": 0}, "cannot run over tp"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_verifier_says_what_is_wrong(name: str) -> None:
    op, before, after, attributes, text = WRONG[name]
    assert text in problems(collective(op, before, after, (8,), **attributes))


@pytest.mark.parametrize("op", sorted(FREE))
def test_what_sends_nothing_stands_in_global_view_only(op: str) -> None:
    after, attributes = {
        "AllSlice": (sharding("tp"), {"dim": 0}),
        "MakePartial": (sharding(None, partial="tp"), {"reduce": "sum"}),
    }[op]
    found = problems(collective(op, sharding(None), after, (8,), 1, **attributes))
    assert "is in a local graph; localize turns it into plain ONNX operators" in found


def test_the_verifier_checks_local_types() -> None:
    node = collective("AllGather", sharding("tp"), sharding(None), (7,), 0, dim=0)
    assert "produces f32[8], but its result is f32[7]" in problems(node)


def test_a_sub_axis_may_be_gathered_from_the_whole_one() -> None:
    after = sharding("tp:(1)2")
    node = collective("AllGather", sharding("tp"), after, (8,), 0, dim=0, axes=["tp:(2)2"])
    assert inferred(node) == TensorType(DType.F32, (4,))
    assert node.graph is not None
    module = Module(node.graph)
    module.set_mesh(MESH)
    verify(module)
