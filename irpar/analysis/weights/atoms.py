"""What Reshape and Transpose do to the elements of a tensor, told by the pieces of its dims."""

from irpar.ir import Builder, Ints, Node, TensorType, Value

Atom = tuple[int, int, int]
"""(source dim, elements of the dim inside one step of it, size)."""
Plan = list[tuple[str, tuple[int, ...]]]
"""Nodes to make: ("Reshape", shape) or ("Transpose", perm)."""


class Atoms:
    """A tensor as a sequence of atoms, the indivisible pieces of the source's dims, in the order that they lie in.

    source [b, s, h*d]      atoms b | s | h*d
    Reshape [b, s, h, d]    b | s | h | d       the atom h*d is split
    Transpose 0 2 1 3       b | h | s | d
    Reshape [b*h, s, d]     b  h | s | d
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.source = shape
        self.dims: list[list[Atom]] = [[(dim, 1, size)] if size > 1 else [] for dim, size in enumerate(shape)]

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
        dims: list[list[Atom]] = []
        for size in shape:
            taken: list[Atom] = []
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

    def plan(self, target: tuple[int, ...]) -> Plan:
        """The shortest Reshape, Transpose, Reshape from the source to `target`; steps that do nothing are left out."""
        order = joined([atom for dim in self.dims for atom in dim])
        in_source_order = sorted(order, key=lambda atom: (atom[0], -atom[1]))
        plan: Plan = []
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

    def _whole(self, atoms: list[Atom]) -> bool:
        """True where each source dim of more than one element is one atom."""
        return [atom[2] for atom in atoms] == [size for size in self.source if size > 1]

    def _permutation(
        self, order: list[Atom], in_source_order: list[Atom], target: tuple[int, ...]
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


def follow(plan: Plan, value: Value, name: str, builder: Builder) -> Value:
    """Make the nodes of a plan that starts from `value`, their results named `name`; returns the last."""
    for op_type, argument in plan:
        if op_type == "Transpose":
            shape = tuple(value.shape[dim] for dim in argument)
            attributes = {"perm": Ints(argument)}
            value = builder.op("Transpose", [value], attributes, type=TensorType(value.dtype, shape), name=name)
        else:
            target = builder.constant(Ints(argument), "shape")
            value = builder.op("Reshape", [value, target], type=TensorType(value.dtype, argument), name=name)
    return value


def joined(atoms: list[Atom]) -> list[Atom]:
    """Atoms with neighbours joined that lie side by side in the source too."""
    joined: list[Atom] = []
    for source, inner, size in atoms:
        if joined and joined[-1][0] == source and joined[-1][1] == inner * size:
            joined[-1] = (source, inner, joined[-1][2] * size)
        else:
            joined.append((source, inner, size))
    return joined
