"""split-weights: weights that hold several side by side become several."""

from dataclasses import dataclass

from irpar.analysis.atoms import Atoms
from irpar.analysis.fused_weights import FusedWeight, Picked, beside, columns_of, fused_weights, weights_taken_apart
from irpar.ir import Builder, Ints, Module, Node, TensorType, Value, range_along
from irpar.pass_manager import Pass, PassResult

from .simplify_layout import SimplifyLayout


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Replace a product of which Split, Slice or Gather take sections apart by one product for each section.

    Before: global view, types are inferred. After: q, k and v (or gate and up) of one matrix are products of their own
    with blocks of that matrix, which stay views of its file; biases and elementwise operators behind it go along. A cut
    of the columns of the matrix is then one of each section, so that each device has its own heads of q, of k and of v:
    a contiguous block of the whole is no block of any of them. join-weights puts them together again, device by device.

    A weight stays one where another node reads it too, where something between it and its readers is annotated, where
    readers overlap, and where it is annotated with a cut that does not divide each section.
    """

    name = "split-weights"

    def run(self, module: Module) -> PassResult:
        """Split in all graphs."""
        if module.is_local or module.annotations:
            return PassResult(False)  # Annotations that wait for a mesh name the weights as they are.
        count = 0
        for find in (weights_taken_apart, fused_weights):
            for fused in [fused for graph in module.all_graphs() for fused in find(graph)]:
                if all(_divides(value, dim, fused) for value, dim in _weights(fused)):
                    _Split(module, fused).run()
                    count += 1
        if count:
            # Where sections were taken out of the middle of a chain of Reshape and Transpose, its ends meet.
            SimplifyLayout().run(module)
        return PassResult(count > 0, statistics={"weights": count})


def _weights(fused: FusedWeight) -> list[tuple[Value, int]]:
    """The constants that have the columns, and their dims of them."""
    found = {fused.weight: fused.dim}
    for step, columns in _columns(fused):
        for index, dim in columns.items():
            value = step.operands[index]
            if value is not None and value.is_constant:
                found.setdefault(value, dim)
    return list(found.items())


def _columns(fused: FusedWeight) -> list[tuple[Node, dict[int, int]]]:
    """The steps, and which operands of each have the columns at which dim."""
    if not fused.steps:
        return []
    product, *others = fused.steps
    found = columns_of(product)
    assert found is not None
    place, columns = found
    listed = [(product, columns)]
    for step, before in zip(others, fused.steps, strict=False):
        own = next(index for index, value in enumerate(step.operands) if value is not None and value.node is before)
        value = step.operands[own]
        assert value is not None
        # One behind a Reshape has a single operand.
        listed.append((step, {own: place} if len(step.operands) == 1 else beside(step, value, place) or {}))
    return listed


def _divides(value: Value, dim: int, fused: FusedWeight) -> bool:
    """Whether the cut that a weight is annotated with divides each section."""
    parts = 1 if value.sharding is None else value.sharding.dim_parts(dim)
    return all((stop - start) % parts == 0 for start, stop in fused.sections)


class _Split:
    """Splits one weight."""

    def __init__(self, module: Module, fused: FusedWeight) -> None:
        self.module = module
        self.fused = fused

    def run(self) -> None:
        """Make the products of all sections, and take out the one that was."""
        fused = self.fused
        weights = [value for value, _ in _weights(fused)]
        old = dict.fromkeys((*(picked.node for picked in fused.picked), *reversed((*fused.steps, *fused.layout))))
        columns = dict(_columns(fused))
        for section in fused.sections:
            value = self._section(section, columns)
            for picked in fused.picked:
                if (picked.start, picked.stop) == section:
                    self._take(picked, value)
        order = sorted(old, key=self._depth, reverse=True)
        for node in (*order, *reversed(fused.start)):
            node.erase()
        for weight in weights:
            if not weight.has_uses:
                self._forget(weight)

    def _depth(self, node: Node) -> int:
        """How far behind the weight a node stands."""
        chain = (*self.fused.steps, *self.fused.layout)
        return chain.index(node) if node in chain else len(chain)

    def _section(self, section: tuple[int, int], columns: dict[Node, dict[int, int]]) -> Value:
        """What the last step gives of a section."""
        fused = self.fused
        value = self._part(fused.weight, fused.dim, section)
        for node in fused.start:
            assert node.graph is not None
            shape = tuple(value.shape[dim] for dim in _perm(node))
            builder = Builder(node.graph, self.module.opsets, before=node, like=node)
            type_ = TensorType(value.dtype, shape)
            value = builder.op("Transpose", [value], node.attributes, type=type_, name=node.result.name)
        for node in fused.steps:
            value = self._step(node, value, section, columns[node])
        return value

    def _step(self, node: Node, before: Value, section: tuple[int, int], columns: dict[int, int]) -> Value:
        """A step for a section; `before` is what the step before gives, or the weight."""
        fused = self.fused
        is_product = node is fused.steps[0]
        found = columns_of(fused.steps[0])
        assert found is not None
        place = found[0]
        operands: list[Value | None] = []
        for index, value in enumerate(node.operands):
            if (is_product and index == 1) or (not is_product and value is not None and not value.is_constant):
                operands.append(before)
            elif value is not None and index in columns:
                operands.append(self._part(value, columns[index], section))
            else:
                operands.append(value)
        whole = fused.steps[0].result.shape
        shape = (*whole[:place], section[1] - section[0], *whole[place + 1 :])
        first = fused.steps[0]
        assert first.graph is not None
        builder = Builder(first.graph, {"": node.version}, before=first, like=node)
        return builder.op(
            node.op_type, operands, node.attributes, type=TensorType(node.result.dtype, shape), name=node.result.name
        )

    def _part(self, value: Value, dim: int, section: tuple[int, int]) -> Value:
        """The section of a constant."""
        assert value.data is not None
        assert value.graph is not None
        module = self.module
        made = value.graph.add_constant(range_along(value.data, dim, *section), value.name, value.source_name)
        made.sharding, made.memory, made.doc = value.sharding, value.memory, value.doc
        if value.name in module.annotated:
            module.annotated[made.name] = module.annotated[value.name]
        for decision in module.decisions.get(value.name, ()):
            module.decide(made.name, decision)
        return made

    def _take(self, picked: Picked, value: Value) -> None:
        """Let the readers of what was taken of the whole read what was made of the section."""
        fused = self.fused
        result, node = picked.value, picked.node
        atoms = Atoms(value.shape)
        atoms.dims = [list(dim) for dim in fused.dims]
        place, unit, _ = atoms.dims[fused.place][0]
        count = (picked.stop - picked.start) // unit
        atoms.dims[fused.place] = [(place, unit, count)] if count > 1 else []
        assert node.graph is not None
        builder = Builder(node.graph, self.module.opsets, before=node, like=node)
        name, made = result.name, value
        for op_type, argument in atoms.plan(result.shape):
            if op_type == "Transpose":
                shape = tuple(made.shape[dim] for dim in argument)
                perm = {"perm": Ints(argument)}
                made = builder.op("Transpose", [made], perm, type=TensorType(made.dtype, shape), name=name)
            else:
                target = builder.constant(Ints(argument), "shape")
                made = builder.op("Reshape", [made, target], type=TensorType(made.dtype, argument), name=name)
        if result.sharding is not None and made is value:
            made = builder.op("Identity", [made], type=made.type, name=name)
        result.replace_uses(made)
        made.sharding = made.sharding or result.sharding
        if made.node is not None:
            made.source = made.source or result.source
            self._rename(result, made)

    def _rename(self, result: Value, made: Value) -> None:
        """Let what stands for a result have its name, under which the module keeps what it knows of it."""
        name = result.name
        result.rename("")
        made.rename(name)

    def _forget(self, weight: Value) -> None:
        """Take out a weight of which only sections are read."""
        assert weight.graph is not None
        weight.graph.remove_constant(weight)
        for table in (self.module.annotated, self.module.decisions):
            table.pop(weight.name, None)  # type: ignore[attr-defined]


def _perm(node: Node) -> tuple[int, ...]:
    perm = node.attributes.get("perm")
    rank = len(node.inputs[0].shape)
    return perm if isinstance(perm, Ints) else tuple(reversed(range(rank)))
