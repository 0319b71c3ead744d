"""simplify-layout: chains of Reshape and Transpose become short, and merged dims are taken apart."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from irpar.analysis.weights.atoms import Atoms, follow, joined
from irpar.ir import Builder, Ints, Module, Node, TensorType, Value
from irpar.ir.annotate import hand_over
from irpar.ops import traits
from irpar.ops.block_indices import counted_dims, without_columns
from irpar.pass_manager import Pass, PassResult

from .pads import pad_windows, take_off_windows


@dataclass(frozen=True)
class SimplifyLayout(Pass):
    """Replace chains of nodes that only move elements by shorter ones that say the same.

    Before: types are inferred. After: no chain of static Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Identity
    nodes is longer than it must be, and operators that treat dims one by one (elementwise, batched MatMul, Softmax ...)
    work on the parts of a dim that was merged before them. Exporters merge batch and heads to one dim and split it
    again behind attention; a cut of the heads cannot be told on the merged dim, and would have to be undone around it.
    They write the norm of a group of channels as one of instances, over a dim of all its channels, rows and columns.
    A GatherND whose first index counts the rows (`x[arange(batch), last]`) has them as batch dims, which may be cut.
    Zeros that are put around the places of a convolution, and places that are cut off its result, are its pads.
    """

    name = "simplify-layout"

    def run(self, module: Module) -> PassResult:
        """Simplify all graphs."""
        chains = merges = rows = pads = 0
        for graph in module.all_graphs():
            for node in graph:
                if not _is_layout(node):
                    if pad_windows(node) or take_off_windows(node):
                        pads += 1
                        continue
                    merges += _sink(node, module)
                    rows += _index_by_rows(node, module)
                    continue
                chain = _chain(node)
                if len(chain) > 1 and not _goes_on(node):
                    chains += _simplify(chain, module)
        found: dict[str, int | float] = {"chains": chains, "merges": merges, "rows": rows, "pads": pads}
        return PassResult(any(found.values()), statistics=found)


def _is_layout(node: Node | None) -> bool:
    # What views do is told by the static shape of the result: elements stay in row-major order.
    if node is None or not (traits(node).view or node.identity == ("", "Transpose")):
        return False
    return node.inputs[0].is_static and node.result.is_static


def _chain(node: Node) -> list[Node]:
    """The layout nodes that end in `node`, first to last."""
    chain: list[Node] = []
    step: Node | None = node
    while step is not None and _is_layout(step) and step.graph is node.graph:
        chain.append(step)
        # What is annotated stays where it is.
        step = step.inputs[0].node if step.inputs[0].sharding is None else None
    return chain[::-1]


def _goes_on(node: Node) -> bool:
    """True where the chain has exactly one way on: its end, further down, will be met later."""
    users = node.result.users
    return node.result.sharding is None and len(users) == 1 and _is_layout(users[0]) and users[0].graph is node.graph


def _atoms(chain: list[Node]) -> Atoms | None:
    """What a chain does to its source; None where the atoms cannot tell it."""
    source = chain[0].inputs[0]
    if not math.prod(source.shape):
        return None
    atoms = Atoms(source.shape)
    return atoms if all(map(atoms.apply, chain)) else None


def _simplify(chain: list[Node], module: Module) -> int:
    source, last = chain[0].inputs[0], chain[-1]
    atoms = _atoms(chain)
    if atoms is None:
        return 0
    plan = atoms.plan(last.result.shape)
    if len(plan) >= len(chain) or (not plan and _lie_apart(source, last.result)):
        return 0
    assert last.graph is not None
    value = follow(plan, source, last.result.name, Builder(last.graph, module.opsets, before=last, like=last))
    name, targets = last.result.name, last.inputs[1:]
    last.replace([value])
    _forget_unread(targets)
    if plan:
        value.rename(name)
    else:
        hand_over(module, name, value.name, f"it is %{value.name}, moved there and back")
    _erase_unread(chain[:-1])
    return 1


def _erase_unread(chain: Sequence[Node]) -> None:
    """Take out the end of a chain that nothing reads: a node without readers would still be sharded, and sent for."""
    for node in reversed(chain):
        # Chains of several operands may begin with the same nodes.
        if node.graph is None or node.result.has_uses:
            break
        targets = node.inputs[1:]
        node.erase()
        _forget_unread(targets)


def _forget_unread(values: Iterable[Value]) -> None:
    """Drop the constants among these that nothing reads: the shapes that a Reshape asked for."""
    for value in values:
        if value.data is not None and value.graph is not None and not value.has_uses:
            value.graph.remove_constant(value)


def _lie_apart(source: Value, result: Value) -> bool:
    """True where one value cannot stand for both: they are annotated differently, or what is made of a constant is."""
    if source.is_constant and result.sharding is not None:
        return True
    return source.sharding is not None and result.sharding is not None and source.sharding != result.sharding


# -- merged dims ----------------------------------------------------------------------------------------------------
#
# m = Reshape(q : [4, 8, 6, 16]) : [32, 6, 16]
# n = Reshape(k : [4, 8, 16, 6]) : [32, 16, 6]        s' = MatMul(q, k) : [4, 8, 6, 6]
# s = MatMul(m, n) : [32, 6, 6]                       s = Reshape(s') : [32, 6, 6]
#
# Of a merged dim only the major part can be sharded freely: blocks of batch and of heads together are no block of
# batch x heads. The Reshape wanders down until one that splits the dim again takes it away.

_FROM_AXIS = frozenset(
    {"Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"}
)
"""They work on the dims from an axis on; those before it are all alike."""
_FROM_AXIS_SINCE = 13
"""Before, Softmax took all dims from its axis on as one."""

Split = tuple[int, ...]
"""The sizes of the parts of a merged dim, major first."""


@dataclass(frozen=True)
class _Free:
    """Dims that an operator treats one by one, so that one may as well be several.

    Attributes:
        places: these dims, counted from the end of the result (-1 is the last), each with the operands that have it.
        axis: the operator's own axis, counted from the end, if it has one.
    """

    places: dict[int, tuple[int, ...]]
    axis: int | None = None


def _sink(node: Node, module: Module) -> bool:
    """Let a node work on dims that its operands merge, and merge them after it; False where there is nothing to do.

    Features, in the last dim, stay merged: of heads and their features only the heads are ever cut.
    """
    if node.domain or node.strategy is not None or len(node.results) != 1:
        return False
    merged = {value: found for value in node.inputs if (found := _merged(value)) is not None}
    if not merged or not all(map(_is_static, (*node.inputs, node.result))):
        return False
    free = _free(node)
    chosen = {place: split for place, index in free.places.items() if (split := _split_at(node, place, index, merged))}
    if not chosen:
        return False
    _rebuild(node, free, chosen, merged, module)
    return True


def _is_static(value: Value) -> bool:
    return value.is_static and 0 not in value.shape


@dataclass(frozen=True)
class _Merged:
    """An operand that a chain of layout nodes made, some of its dims of several.

    Attributes:
        chain: the nodes, first to last.
        atoms: what the chain does.
        splits: the merged dims, counted from the end: the sizes of their parts.
    """

    chain: list[Node]
    atoms: Atoms
    splits: dict[int, Split]

    @property
    def source(self) -> Value:
        """What the chain starts from."""
        return self.chain[0].inputs[0]


def _merged(value: Value) -> _Merged | None:
    """How a value was merged, or None; what is annotated stays as it is."""
    if value.node is None or value.sharding is not None or not _is_layout(value.node):
        return None
    chain = _chain(value.node)
    atoms = _atoms(chain)
    if atoms is None:
        return None
    parts = {dim - len(atoms.dims): joined(found) for dim, found in enumerate(atoms.dims)}
    splits = {place: tuple(size for _, _, size in found) for place, found in parts.items() if len(found) > 1}
    return _Merged(chain, atoms, splits) if splits else None


def _free(node: Node) -> _Free:
    rank = len(node.result.shape)
    everyone = tuple(range(len(node.operands)))
    if traits(node).is_elementwise:
        return _Free(dict.fromkeys(range(-rank, -1), everyone))
    if node.op_type == "MatMul":
        ranks = [len(value.shape) for value in node.inputs]
        if min(ranks) < 2:
            return _Free({})
        places = dict.fromkeys(range(-rank, -2), everyone)
        # Rows are free where there is one right-hand side for all.
        return _Free(places | {-2: (0,)} if ranks[1] == 2 else places)
    if node.op_type == "Gemm":
        return _Free({-2: (0,)} if _is_plain_product(node) else {})
    if node.op_type in _FROM_AXIS and node.version >= _FROM_AXIS_SINCE:
        axis = _axis(node, -1, rank)
        others = max((len(value.shape) for value in node.inputs[1:]), default=0)
        return _Free(dict.fromkeys(range(-rank, min(axis, -others)), (0,)), axis)
    if node.op_type == "InstanceNormalization":
        return _Free(dict.fromkeys(range(2 - rank, 0), (0,)))  # Places, which may be channels of a group too.
    if node.op_type == "Concat":
        axis = _axis(node, 0, rank)
        return _Free({place: everyone for place in range(-rank, -1) if place != axis}, axis)
    return _Free({})


def _is_plain_product(node: Node) -> bool:
    """True for a Gemm that is a MatMul and an Add: rows before columns, nothing scaled, one bias for all rows."""
    if node.attributes.get("transA") or any(node.attributes.get(name, 1.0) != 1.0 for name in ("alpha", "beta")):
        return False
    bias = node.operands[2] if len(node.operands) > 2 else None
    return bias is None or len(bias.shape) < 2 or bias.shape[-2] == 1


def _axis(node: Node, default: int, rank: int) -> int:
    """The attribute axis, counted from the end."""
    found = node.attributes.get("axis", default)
    assert isinstance(found, int)
    return found - rank if found >= 0 else found


def _split_at(node: Node, place: int, operands: Iterable[int], merged: dict[Value, _Merged]) -> Split | None:
    """How all operands that have a dim merge it; None where they do not, or not in one way."""
    found: set[Split] = set()
    for index in operands:
        value = node.operands[index]
        if value is None or len(value.shape) < -place or value.shape[place] == 1:
            continue
        if value in merged and place in merged[value].splits:
            found.add(merged[value].splits[place])
        elif not value.is_constant or value.sharding is not None:
            return None
    return found.pop() if len(found) == 1 else None


def _rebuild(node: Node, free: _Free, chosen: dict[int, Split], merged: dict[Value, _Merged], module: Module) -> None:
    assert node.graph is not None
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    operands: list[Value | None] = []
    for index, value in enumerate(node.operands):
        here = {place: split for place, split in chosen.items() if index in free.places[place]}
        operands.append(None if value is None else _apart(value, merged.get(value), here, node, builder))
    attributes = dict(node.attributes)
    if free.axis is not None:
        attributes["axis"] = free.axis - sum(len(split) - 1 for place, split in chosen.items() if place > free.axis)
    result = node.result
    type_ = TensorType(result.dtype, _expanded(result.shape, chosen))
    if node.op_type == "Gemm":
        value = _product(node, operands, type_, builder)
    else:
        value = builder.op(node.op_type, operands, attributes, type=type_, name=result.name)
    target = builder.constant(Ints(result.shape), "shape")
    again = builder.op("Reshape", [value, target], type=TensorType(result.dtype, result.shape), name=result.name)
    name = result.name
    node.replace([again])
    again.rename(name)
    for found in merged.values():
        _erase_unread(found.chain)


def _product(node: Node, operands: Sequence[Value | None], type_: TensorType, builder: Builder) -> Value:
    """A Gemm over more than two dims: MatMul and Add."""
    left, right, *rest = operands
    assert left is not None
    assert right is not None
    if node.attributes.get("transB"):
        right = follow([("Transpose", (1, 0))], right, right.name, builder)
    bias = rest[0] if rest else None
    name = node.result.name
    product = builder.op("MatMul", [left, right], type=type_, name=name if bias is None else f"{name}_product")
    return product if bias is None else builder.op("Add", [product, bias], type=type_, name=name)


def _expanded(shape: tuple[int, ...], splits: dict[int, Split]) -> tuple[int, ...]:
    """A shape with dims taken apart; of a dim of size 1 all parts have size 1."""
    sizes: list[int] = []
    for place, size in zip(range(-len(shape), 0), shape, strict=True):
        split = splits.get(place, (size,))
        sizes.extend(split if size != 1 else (1,) * len(split))
    return tuple(sizes)


def _apart(value: Value, merged: _Merged | None, splits: dict[int, Split], node: Node, builder: Builder) -> Value:
    """An operand with its dims taken apart."""
    target = _expanded(value.shape, splits)
    ahead = len(target) - len(value.shape)
    if target == value.shape or (traits(node).is_elementwise and target == (1,) * ahead + value.shape):
        return value
    if merged is not None:
        return follow(merged.atoms.plan(target), merged.source, value.name, builder)
    return follow([("Reshape", target)], value, value.name, builder)


# -- rows -----------------------------------------------------------------------------------------------------------
#
# i = Concat([[0], [1], [2], [3]], last : [4, 1])
# z = GatherND(x : [4, 6, 8], i : [4, 2]) : [4, 8]    z = GatherND(x, last) {batch_dims=1}


def _index_by_rows(node: Node, module: Module) -> bool:
    """Let a GatherND index row by row what its indices count row by row; False where there is nothing to do."""
    if (
        node.identity != ("", "GatherND")
        or node.strategy is not None
        or not all(map(_is_static, (*node.inputs, node.result)))
    ):
        return False
    data, index = node.inputs
    batch = int(str(node.attributes.get("batch_dims", 0)))
    # One index is left.
    count = min(counted_dims(index, data.shape, batch), index.shape[-1] - 1)
    if index.sharding is not None or count <= 0:
        return False
    assert node.graph is not None
    builder = Builder(node.graph, module.opsets, before=node, like=node)
    node.set_operand(1, without_columns(index, count, builder))
    node.set_attribute("batch_dims", batch + count)
    if index.node is not None and not index.has_uses:
        index.node.erase()
    return True
