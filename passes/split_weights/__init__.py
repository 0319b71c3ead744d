"""split-weights: weights that hold several side by side become several."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from irpar.analysis.cost.model import Cost
from irpar.analysis.weights.atoms import Atoms, follow
from irpar.analysis.weights.dynamic_products import take_products_apart
from irpar.analysis.weights.finer_blocks import take_finer_blocks
from irpar.analysis.weights.flat_scales import unflatten_scales
from irpar.analysis.weights.fused_weights import (
    FusedWeight,
    Passage,
    Picked,
    beside,
    columns_of,
    constant_behind,
    fused_weights,
    is_single_number,
    weights_taken_apart,
    with_columns,
)
from irpar.analysis.weights.packed_attention import take_packed_apart
from irpar.analysis.weights.sequence_caches import can_be_opened, open_sequence_caches, sequence_caches
from irpar.ir import ArrayTensor, Builder, Module, Node, SlicedTensor, TensorType, Value, range_along, with_dim
from irpar.ops.facts import needed
from irpar.pass_manager import Pass, PassResult

from ..complete_sharding import cost_of_completion, propagated
from ..raise_opset import RaiseOpset
from ..simplify_layout import SimplifyLayout
from ..split_bias import split_biases
from .heads import take_heads_apart
from .parallel_sums import add_products_first


@dataclass(frozen=True)
class SplitWeights(Pass):
    """Replace a product of which Split, Slice or Gather take sections apart by one product for each section.

    Before: global view, types are inferred. After: q, k and v (or gate and up) of one matrix are products of their own
    with blocks of that matrix, which stay views of its file; biases and elementwise operators behind it go along. A cut
    of the columns of the matrix is then one of each section, so that each device has its own heads of q, of k and of v:
    a contiguous block of the whole is no block of any of them. join-weights puts them together again, device by device.

    A weight that several products read, as tied layers do, is split where all of them take the same sections apart, and
    they share the sections. Before that, scales of weights of 4 bits that lie in one dim get the dims of columns and
    of blocks (`flat_scales`), attention that reads q, k and v side by side gets three operands (`packed_attention`),
    products that quantise their data become two nodes (`dynamic_products`), attention over caches that are sharded
    along the sequence becomes ONNX's operators (`sequence_caches`), of opset 18 where those of the model are older, and
    blocks of quantized weights that do not divide over the ranks become smaller (`finer_blocks`). After it, weights of
    which columns or rows are heads that do not divide over the ranks get a dim of heads (`heads`), and
    products that are added to a third value one after the other are added first (`parallel_sums`). A weight stays one
    where another node reads it, where something between it and its readers is annotated, where readers overlap, and
    where it is annotated with a cut that does not divide each section.
    """

    name = "split-weights"
    takes_out = "it is taken apart into sections, which are sharded so"

    def run(self, module: Module) -> PassResult:
        """Split in all graphs."""
        if module.is_local or module.annotations:
            return PassResult(False)  # Annotations that wait for a mesh name the weights as they are.
        scales, packed, dynamic, caches = give_operands(module)
        finer = take_finer_blocks(module, partial(propagated, module))
        count = 0
        made: Made = {}
        for find in (weights_taken_apart, fused_weights):
            found = [fused for graph in module.all_graphs() for fused in find(graph)]
            stays = {
                fused.read for fused in found if not all(_divides(value, dim, fused) for value, dim in _weights(fused))
            }
            for fused in found:
                if fused.read not in stays:
                    _Split(module, fused, made).run()
                    count += 1
        if count:
            # Where sections were taken out of the middle of a chain of Reshape and Transpose, its ends meet.
            SimplifyLayout().run(module)
        sums = add_products_first(module, _cost)
        heads = take_heads_apart(module, _cost)
        told: dict[str, int | float] = {"weights": count, "scales": scales, "finer blocks": finer, "heads": heads}
        told |= {"sums": sums, "attentions": packed, "products": dynamic, "caches": caches}
        return PassResult(any(told.values()), statistics=told)


def _cost(work: Module) -> Cost:
    """What the passes behind this one would let a module send; they change it."""
    split_biases(work)
    return cost_of_completion(work)


def give_operands(module: Module) -> list[int]:
    """Write operators so that they can be sharded: `flat_scales`, `packed_attention`, `dynamic_products`,
    `sequence_caches`.

    Returns:
        How often each has been done.
    """
    caches = [node for graph in module.all_graphs() for node in sequence_caches(graph)]
    if any(can_be_opened(module, node) for node in caches):
        RaiseOpset().run(module)
    ways = (unflatten_scales, take_packed_apart, take_products_apart, open_sequence_caches)
    return [sum(way(module, graph) for graph in module.all_graphs()) for way in ways]


def _weights(fused: FusedWeight) -> list[tuple[Value, int]]:
    """The constants that have the columns, and their dims of them."""
    found = {fused.weight: fused.dim}
    read: list[tuple[Value | None, int]] = [pair for each in fused.start for pair in each.beside]
    read += [(step.operands[index], dim) for step, columns in _columns(fused) for index, dim in columns.items()]
    for value, dim in read:
        for constant, at in _constants(value, dim):
            found.setdefault(constant, at)
    return list(found.items())


def _constants(value: Value | None, dim: int) -> Iterator[tuple[Value, int]]:
    """The constants that a value is made of that have a dim of it, and which dim of theirs."""
    behind = constant_behind(value, dim)
    if behind is not None:
        yield behind[:2]
        for each in behind[2]:
            yield from each.beside


def _columns(fused: FusedWeight) -> list[tuple[Node, dict[int, int]]]:
    """The steps, and which operands of each have the columns at which dim."""
    if not fused.steps:
        return []
    product, *others = fused.steps
    place, columns = _product(fused)
    listed = [(product, columns)]
    for step in others:
        own = _before(fused, step)
        # One behind a Reshape has no columns beside it.
        is_alone = all(is_single_number(value) for index, value in enumerate(step.operands) if index != own)
        listed.append((step, {own: place} if is_alone else beside(step, needed(step, own), place) or {}))
    return listed


def _before(fused: FusedWeight, step: Node) -> int:
    """Which operand of a step the one before gives; of the product, which the weight is."""
    number = fused.steps.index(step)
    if number == 0:
        return _own(fused)
    value = fused.steps[number - 1].result
    return step.operands.index(value) if value in step.operands else 0


def _reads_more(fused: FusedWeight) -> bool:
    """Whether a step behind the product reads something that is computed, beside what the step before gives."""
    return any(sum(not value.is_constant for value in step.inputs) > 1 for step in fused.steps[1:])


def _product(fused: FusedWeight) -> tuple[int, dict[int, int]]:
    """The dim of the product's result that the columns are, and the operands that have them."""
    product = fused.steps[0]
    found = columns_of(product, _own(fused))
    assert found is not None
    return found


def _own(fused: FusedWeight) -> int:
    """Which operand of the product the weight is."""
    return fused.steps[0].operands.index(fused.read)


def _divides(value: Value, dim: int, fused: FusedWeight) -> bool:
    """Whether the cut that a weight is annotated with divides each section."""
    parts = 1 if value.sharding is None else value.sharding.dim_parts(dim)
    return all((stop - start) % parts == 0 for start, stop in fused.sections)


Made = dict[tuple[Value, int, tuple[int, int]], Value]
"""By what is read, the dim of it, and the section: what is read instead."""


class _Split:
    """Splits one weight for one of the products that read it.

    Attributes:
        made: what products before it have of the same weights.
        passages: what constants of the columns go through.
    """

    def __init__(self, module: Module, fused: FusedWeight, made: "Made") -> None:
        self.module = module
        self.fused = fused
        self.made = made
        self.named: set[Value] = set()
        self.passages: dict[Node, None] = {}

    def run(self) -> None:
        """Make the products of all sections, and take out the one that was."""
        fused = self.fused
        weights = [value for value, _ in _weights(fused)]
        columns = dict(_columns(fused))
        for section in fused.sections:
            read = [one for one in fused.picked if (one.start, one.stop) == section and one.value.has_uses]
            value = self._section(section, columns) if read else None
            for picked in read:
                assert value is not None
                self._take(picked, value)
        path = (*(picked.node for picked in fused.picked), *reversed(fused.path))
        for node in dict.fromkeys((*path, *reversed(self.passages))):
            if not any(value.has_uses for value in node.results):
                node.erase()
        for weight in weights:
            if not weight.has_uses:
                self._forget(weight)

    def _section(self, section: tuple[int, int], columns: dict[Node, dict[int, int]]) -> Value:
        """What the last step gives of a section."""
        fused = self.fused
        dim = fused.start[-1].dim if fused.start else fused.dim
        value = self._read(fused.read, dim, section)
        for node in fused.steps:
            value = self._step(node, value, section, columns[node])
        return value

    def _read(self, value: Value, dim: int, section: tuple[int, int]) -> Value:
        """What is read of a section of what is made of a constant; products that share it share that too."""
        known = self.made.get((value, dim, section))
        behind = constant_behind(value, dim)
        assert behind is not None
        constant, at, passages = behind
        self.passages.update(dict.fromkeys(each.node for each in passages))
        if known is not None:
            return known
        made = self._part(constant, at, section)
        for each in passages:
            made = self._pass_on(each, made, section)
        self.made[value, dim, section] = made
        return made

    def _pass_on(self, passage: Passage, before: Value, section: tuple[int, int]) -> Value:
        """What a node that the whole goes through gives of a section."""
        node = passage.node
        assert node.graph is not None
        operands: list[Value | None] = [before]
        for index, value in enumerate(node.operands[1:], 1):
            at = passage.columns.get(index)
            operands.append(value if at is None or value is None else self._part(value, at, section))
        type_ = TensorType(node.result.dtype, with_dim(node.result.shape, passage.dim, section[1] - section[0]))
        builder = Builder(node.graph, {node.domain: node.version}, before=node, like=node)
        name = node.result.name
        return builder.op(node.op_type, operands, node.attributes, type=type_, domain=node.domain, name=name)

    def _step(self, node: Node, before: Value, section: tuple[int, int], columns: dict[int, int]) -> Value:
        """A step for a section; `before` is what the step before gives, or the weight."""
        fused = self.fused
        first, before_at = fused.steps[0], _before(fused, node)
        operands: list[Value | None] = []
        for index, value in enumerate(node.operands):
            if index == before_at:
                operands.append(before)
            elif value is not None and index in columns:
                operands.append(self._read(value, columns[index], section))
            else:
                operands.append(value)
        shape = with_dim(first.result.shape, _product(self.fused)[0], section[1] - section[0])
        assert first.graph is not None
        # Steps that read a number of their own stand where they stood: it may be made behind the product.
        place = node if _reads_more(fused) else first
        builder = Builder(first.graph, {node.domain: node.version}, before=place, like=node)
        type_, attributes = TensorType(node.result.dtype, shape), with_columns(node, section[1] - section[0])
        name = node.result.name
        made = builder.op(node.op_type, operands, attributes, type=type_, domain=node.domain, name=name)
        assert made.node is not None
        made.node.strategy = node.strategy
        return made

    def _part(self, value: Value, dim: int, section: tuple[int, int]) -> Value:
        """The section of a constant."""
        known = self.made.get((value, dim, section))
        if known is not None:
            return known
        assert value.data is not None
        assert value.graph is not None
        module = self.module
        # Of what irpar computed or took apart, a part is no value of the model: the name is one of another shape.
        source = None if isinstance(value.data, (ArrayTensor, SlicedTensor)) else value.source_name
        made = value.graph.add_constant(range_along(value.data, dim, *section), value.name, source)
        made.sharding, made.memory, made.doc = value.sharding, value.memory, value.doc
        if value.name in module.annotated:
            module.annotated[made.name] = module.annotated[value.name]
        for decision in module.decisions.get(value.name, ()):
            module.decide(made.name, decision)
        self.made[value, dim, section] = made
        return made

    def _take(self, picked: Picked, value: Value) -> None:
        """Let the readers of what was taken of the whole read what was made of the section."""
        fused = self.fused
        result, node = picked.value, picked.node
        atoms = Atoms(value.shape)
        atoms.dims = [list(dim) for dim in fused.dims]
        ((place, unit, _),) = fused.dims[fused.place]
        count = (picked.stop - picked.start) // unit
        atoms.dims[fused.place] = [(place, unit, count)] if count > 1 else []
        assert node.graph is not None
        builder = Builder(node.graph, self.module.opsets, before=node, like=node)
        name = result.name
        made = follow(atoms.plan(result.shape), value, name, builder)
        if made in self.named or (made.is_constant and result.sharding is not None):
            made = builder.op("Identity", [made], type=made.type, name=name)
        self.named.add(made)
        result.replace_uses(made)
        made.sharding = made.sharding or result.sharding
        made.source = made.source or result.source
        # Under its name the module keeps what it knows of the result.
        result.rename("")
        made.rename(name)

    def _forget(self, weight: Value) -> None:
        """Take out a weight of which only sections are read."""
        assert weight.graph is not None
        weight.graph.remove_constant(weight)
        self.module.decisions.pop(weight.name, None)
