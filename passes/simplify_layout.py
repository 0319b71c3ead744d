"""simplify-layout: chains of Reshape and Transpose become at most one Reshape, one Transpose and one Reshape."""

import math
from dataclasses import dataclass

from irpar.ir import Builder, Ints, Module, Node, TensorType, Value, tensor_type
from irpar.pass_manager import Pass, PassResult

SHAPE_OPS = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"})
"""Ops that keep the elements in row-major order; what they do is told by the static shape of the result."""


@dataclass(frozen=True)
class SimplifyLayout(Pass):
    """Replace chains of nodes that only move elements by shorter ones that say the same.

    Before: types are inferred. After: no chain of static Reshape, Transpose, Squeeze, Unsqueeze, Flatten and Identity
    nodes is longer than it must be. Exporters merge batch and heads to one dim and split it again after a transpose; a
    cut of the heads cannot be told on the merged dim, and would have to be undone around it.
    """

    name = "simplify-layout"

    def run(self, module: Module) -> PassResult:
        """Simplify all graphs."""
        count = 0
        for graph in module.all_graphs():
            for node in graph:
                chain = _chain(node)
                if len(chain) > 1 and not _goes_on(node):
                    count += _simplify(chain, module)
        return PassResult(count > 0, statistics={"chains": count})


def _is_layout(node: Node | None) -> bool:
    if node is None or node.domain or (node.op_type != "Transpose" and node.op_type not in SHAPE_OPS):
        return False
    return all(
        (type_ := tensor_type(value.type)) is not None and type_.is_static for value in (node.inputs[0], node.result)
    )


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


def _simplify(chain: list[Node], module: Module) -> int:
    source, last = chain[0].inputs[0], chain[-1]
    if not math.prod(source.shape):
        return 0
    atoms = _Atoms(source.shape)
    if not all(map(atoms.apply, chain)):
        return 0
    plan = atoms.plan(last.result.shape)
    if len(plan) >= len(chain) or (not plan and _lie_apart(source, last.result)):
        return 0
    assert last.graph is not None
    builder = Builder(last.graph, module.opsets, before=last, like=last)
    value = source
    for op_type, argument in plan:
        value = _make(builder, op_type, argument, value, last.result.name)
    name = last.result.name
    last.replace([value])
    if plan:
        value.rename(name)
    else:
        _hand_over(module, name, value.name)
    for node in reversed(chain[:-1]):
        if node.result.has_uses:
            break
        node.erase()
    return 1


def _hand_over(module: Module, name: str, heir: str) -> None:
    """Keep the annotation of a value that is gone, and the reason, under the name of the one that stands for it."""
    for table in (module.annotated, module.decisions):
        known = table.pop(name, None)
        if known is not None:
            table.setdefault(heir, known)  # type: ignore[arg-type]


def _lie_apart(source: Value, result: Value) -> bool:
    """True where both are annotated, and differently: one value cannot stand for both."""
    return source.sharding is not None and result.sharding is not None and source.sharding != result.sharding


def _make(builder: Builder, op_type: str, argument: tuple[int, ...], value: Value, name: str) -> Value:
    if op_type == "Transpose":
        shape = tuple(value.shape[dim] for dim in argument)
        return builder.op(
            "Transpose", [value], {"perm": Ints(argument)}, type=TensorType(value.dtype, shape), name=name
        )
    target = builder.constant(Ints(argument), "shape")
    return builder.op("Reshape", [value, target], type=TensorType(value.dtype, argument), name=name)


class _Atoms:
    """A tensor as a sequence of atoms, the indivisible pieces of the source's dims, in the order that they lie in.

    source [b, s, h*d]      atoms b | s | h*d
    Reshape [b, s, h, d]    b | s | h | d       the atom h*d is split
    Transpose 0 2 1 3       b | h | s | d
    Reshape [b*h, s, d]     b  h | s | d
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        # An atom is (source dim, elements of the dim inside one step of it, size).
        self.source = shape
        self.dims: list[list[tuple[int, int, int]]] = [
            [(dim, 1, size)] if size > 1 else [] for dim, size in enumerate(shape)
        ]

    def apply(self, node: Node) -> bool:
        """Follow one node; False where a dim is split so that the atoms cannot tell it."""
        if node.op_type == "Transpose":
            perm = node.attributes.get("perm")
            order = perm if isinstance(perm, Ints) else tuple(reversed(range(len(self.dims))))
            self.dims = [self.dims[dim] for dim in order]
            return True
        return self._regroup(node.result.shape)

    def _regroup(self, shape: tuple[int, ...]) -> bool:
        waiting = [atom for dim in self.dims for atom in dim][::-1]
        dims: list[list[tuple[int, int, int]]] = []
        for size in shape:
            taken: list[tuple[int, int, int]] = []
            while size > 1:
                source, inner, have = waiting.pop()
                if size % have == 0:
                    taken.append((source, inner, have))
                    size //= have
                elif have % size == 0:
                    taken.append((source, inner * (have // size), size))
                    waiting.append((source, inner, have // size))
                    size = 1
                else:
                    return False
            dims.append(taken)
        self.dims = dims
        return True

    def plan(self, target: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """The shortest Reshape, Transpose, Reshape from the source to `target`; steps that do nothing are left out."""
        order = _joined([atom for dim in self.dims for atom in dim])
        in_source_order = sorted(order, key=lambda atom: (atom[0], -atom[1]))
        plan: list[tuple[str, tuple[int, ...]]] = []
        shape = self.source
        if order != in_source_order:
            perm, shape = self._permutation(order, in_source_order, target)
            split = tuple(atom[2] for atom in in_source_order)
            if len(perm) == len(self.source) and self._whole(in_source_order):
                split = self.source
            if split != self.source:
                plan.append(("Reshape", split))
            plan.append(("Transpose", perm))
        if shape != target:
            plan.append(("Reshape", target))
        return plan

    def _whole(self, atoms: list[tuple[int, int, int]]) -> bool:
        """True where each source dim of more than one element is one atom."""
        return [atom[2] for atom in atoms] == [size for size in self.source if size > 1]

    def _permutation(
        self, order: list[tuple[int, int, int]], in_source_order: list[tuple[int, int, int]], target: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The perm, and the shape that it gives; dims of one element of the source go where the target has some."""
        if self._whole(in_source_order):
            ones = [dim for dim, size in enumerate(self.source) if size == 1]
            perm = [atom[0] for atom in order]
            for place, size in enumerate(target):
                if size == 1 and ones:
                    perm.insert(min(place, len(perm)), ones.pop(0))
            perm.extend(ones)
            return tuple(perm), tuple(self.source[dim] for dim in perm)
        places = {atom: place for place, atom in enumerate(in_source_order)}
        return tuple(places[atom] for atom in order), tuple(atom[2] for atom in order)


def _joined(atoms: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Atoms with neighbours joined that lie side by side in the source too."""
    joined: list[tuple[int, int, int]] = []
    for source, inner, size in atoms:
        if joined and joined[-1][0] == source and joined[-1][1] == inner * size:
            joined[-1] = (source, inner, joined[-1][2] * size)
        else:
            joined.append((source, inner, size))
    return joined
