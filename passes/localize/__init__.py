"""localize: from whole-tensor shapes with shardings to per-device shapes with collectives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from irpar.analysis.completion.flow import Flow, completed_flow
from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.explanation.origins import cutting_names
from irpar.analysis.explanation.reasons import Origins, reason_of_program
from irpar.analysis.into_loops import layouts_for_loops, move_into_loops
from irpar.ir import DOMAIN, Builder, Decision, DType, Graph, Module, Node, TensorType, Value, clone_node, clone_value
from irpar.ir.state_rules import states_of
from irpar.ops.collectives import COLLECTIVES, collective_axes, number_collectives
from irpar.ops.coords import COORDS, block_start
from irpar.ops.effects import is_compute
from irpar.ops.local_node import localized
from irpar.ops.local_programs.program import ProgramWriter
from irpar.ops.neutral import first_only
from irpar.ops.updates import is_for_plans, write_out_functions, written_out
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import (
    Axis,
    IrparError,
    Mesh,
    Sharding,
    block_sizes,
    ceil_div,
    is_even,
    local_shape,
    permuted_shapes,
)

from .shared_constants import share_small_constants


@dataclass(frozen=True)
class Localize(Pass):
    """Rewrite the graph as the program that each device runs.

    Before: global view, operands are sharded as their readers need them (insert-redistribution).
    After: local view: types are per-device blocks, AllSlice is a Slice at an offset computed from `irpar.coords`,
    MakePartial a Where on the position along its axes, target shapes and the like are the local ones; a node that works
    along dims which are cut is a local program, with collectives of its own; in the place of an optimizer's update is
    what it stands for; what only rearranges elements for the trips of a loop, such as the Transpose of a weight, is in
    its body, for all of these would be there at once before it. There is one local graph for each distinct program: one
    when every cut divides, more when blocks differ in size. Constants keep their full tensors; who writes or runs a
    part slices; but where parameters are state, devices slice small constants themselves, so that programs do not
    differ by them.
    """

    name = "localize"
    takes_out = "each device computes with numbers of its own in its place"

    def run(self, module: Module) -> PassResult:
        """Replace the global graph by local ones."""
        share_small_constants(module, network_of(module.network))
        flow = completed_flow(module, self.name)
        for node in flow.nodes:
            if not flow.runs_as_it_lies(node) or not _reads_as_said(node):
                raise IrparError(
                    f"{node.title} cannot run on blocks as its operands and results lie",
                    where=repr(node),
                    notes=tuple(f"%{value.name} {value.sharding}" for value in (*node.inputs, *node.results)),
                    do="run insert-redistribution between complete-sharding and localize",
                )
        origins = Origins(module)
        graphs = [_Localizer(module, flow, ranks, origins).run() for ranks in distinct_programs(flow)]
        if len(graphs) > 1:
            for number, graph in enumerate(graphs):
                graph.name = f"{flow.graph.name}.{number}"
        module.graphs = graphs
        write_out_functions(module)
        for graph in graphs:
            move_into_loops(graph, layouts_for_loops(graph))
        return PassResult(True, statistics={"programs": len(graphs)})


def _reads_as_said(node: Node) -> bool:
    """Whether a node reads its operands as its strategy says, if it has one."""
    if node.strategy is None:
        return True
    pairs = zip(node.operands, node.strategy.operands, strict=False)
    return all(
        said is None or value is None or value.sharding is None or said.allows(value.sharding) for value, said in pairs
    )


def distinct_programs(flow: Flow) -> list[tuple[int, ...]]:
    """The ranks that share a program: those whose blocks have equal sizes in every dim that does not divide.

    A dim of 10 over tp=4 has blocks 3, 3, 3, 1: ranks 0, 1, 2 share a program, rank 3 has its own.
    """
    mesh = flow.mesh
    uneven: dict[tuple[int, tuple[Axis, ...]], None] = {}
    for value in flow.values():
        if value.sharding is not None and value.sharding.all_axes:
            for size, dim in zip(value.shape, value.sharding.dims, strict=True):
                if dim.axes and not is_even(size, mesh.group_size(dim.axes)):
                    uneven[size, dim.axes] = None
    around = [(axes, _blocks_around(mesh, axes, block_sizes(size, mesh.group_size(axes)))) for size, axes in uneven]
    permutes = [node for node in flow.graph.walk() if _is_uneven_permute(node)] if uneven else []
    programs: dict[tuple[object, ...], list[int]] = {}
    for rank, coords in enumerate(mesh.all_coords()):
        key = tuple(kinds[mesh.position(coords, axes)] for axes, kinds in around)
        shapes = tuple(tuple(_operand_shapes(node, coords)) for node in permutes)
        programs.setdefault((key, shapes), []).append(rank)
    return [tuple(ranks) for ranks in programs.values()]


def _blocks_around(mesh: Mesh, axes: tuple[Axis, ...], blocks: list[int]) -> list[tuple[int, ...]]:
    """Per position what is around it: its block, and those of each group that a collective over minor axes may join.

    Groups of equal blocks have one number.
    """
    found: list[list[int]] = [[] for _ in blocks]
    for count in range(len(axes) + 1):
        group = mesh.group_size(axes[len(axes) - count :])
        numbers: dict[tuple[int, ...], int] = {}
        for first in range(0, len(blocks), group):
            number = numbers.setdefault(tuple(blocks[first : first + group]), len(numbers))
            for position in range(first, first + group):
                found[position].append(number)
    return list(map(tuple, found))


def _operand_shapes(node: Node, coords: Sequence[int]) -> list[int]:
    """The shapes of the operands of a CollectivePermute in the group around a device, one after the other."""
    value = node.inputs[0]
    assert value.sharding is not None
    return permuted_shapes(value.sharding, value.shape, collective_axes(node), coords)


def _is_uneven_permute(node: Node) -> bool:
    if node.identity != (DOMAIN, "CollectivePermute"):
        return False
    value = node.inputs[0]
    assert value.sharding is not None
    return not all(is_even(size, value.sharding.dim_parts(dim)) for dim, size in enumerate(value.shape))


class _Localizer:
    """Makes the local graph of some ranks: a copy, node by node, of which each is then made what a device runs."""

    def __init__(self, module: Module, flow: Flow, ranks: tuple[int, ...], origins: Origins) -> None:
        self.module = module
        self.origins = origins
        self.flow = flow
        self.whole = whole = flow.graph
        self.mesh = flow.mesh
        self.coords = flow.mesh.coords(ranks[0])
        self.local = Graph(whole.name, names=whole.names.heir())
        self.local.view = "local"
        self.local.ranks = ranks
        self.local.doc = whole.doc
        self.local.metadata = dict(whole.metadata) if whole.metadata else None
        self.values: dict[Value, Value] = {}
        self.bounds: dict[tuple[tuple[Axis, ...], int], tuple[Value, Value]] = {}
        self.lists: dict[tuple[int, ...], Value] = {}
        self.types: dict[tuple[TensorType, Sharding], TensorType] = {}
        self.left: dict[Value, None] = {}
        """What nodes that are gone have read."""
        self.has_programs = False

    def run(self) -> Graph:
        """Returns the local graph."""
        for value in self.whole.inputs:
            self.local.adopt_input(self._local_value(value))
        for value in self.whole.constants:
            self.local.adopt_constant(self._local_value(value))
        for node in self.whole:
            self._localize(node, self.local.append(clone_node(node, self.values, self.local.names)))
        self.local.set_outputs([self.values[value] for value in self.whole.outputs], self.whole.output_names)
        self.local.states = states_of(self.whole, self.values)
        self._remove_unread()
        self._keep_names()
        if self.has_programs:
            number_collectives(self.local)
        return self.local

    def _remove_unread(self) -> None:
        """Take out what only nodes that are gone have read: constants, and what was computed for them."""
        waiting = list(self.left)
        while waiting:
            value = waiting.pop()
            if value.is_constant and value.graph is not None and not value.has_uses:
                value.graph.remove_constant(value)
            node = value.node
            if node is None or node.graph is None or not is_compute(node) or node.holds_graphs:
                continue  # What communicates, or may, does so on all devices.
            if not any(result.has_uses for result in node.results):
                waiting.extend(node.inputs)
                node.erase()
        coords = self.local.names.table.get(COORDS)
        if coords is not None and not coords.has_uses:
            self.local.remove_input(coords)

    def _keep_names(self) -> None:
        """Values keep their names, under which the module logs decisions and conflicts; what is new makes way."""
        table = self.local.names.table
        for value, local in self.values.items():
            if local.name != value.name:
                other = table.get(value.name)
                if other is not None:
                    other.rename(self.local.names.fresh(value.name))
                local.rename(value.name)
        known = set(self.values.values())
        for value in (value for body in self.local.graphs() for value in body.values()):
            if value.sharding is not None and value not in known and value.name not in self.module.decisions:
                self._explain(value, known)

    def _explain(self, value: Value, known: set[Value]) -> None:
        """Log that a value is a step on the way to one that the whole graph has.

        An axis that this one does not have comes from what the step is computed of.
        """
        made = value
        while made not in known and (user := next(iter(made.users), None)) is not None and user.results:
            made = user.results[0]
        why = Decision(f"a step of computing %{made.name}", made.name)
        if made not in known:  # Devices still exchange what was computed of it, which nothing reads.
            why = Decision("a step of computing what nothing reads")
        names = cutting_names(value.sharding)
        for name in names:
            is_made_so = made in known and name in cutting_names(made.sharding)
            source = made if is_made_so else self._before(value, known, name)
            self.module.decide(value.name, replace(why, follows=source.name if source else why.follows, axes=(name,)))
        if not names:
            self.module.decide(value.name, why)

    def _before(self, value: Value, known: set[Value], name: str) -> Value | None:
        """The nearest value of the whole graph that a value is computed of and that an axis cuts."""
        waiting = [value]
        for step in waiting:
            if step in known and name in cutting_names(step.sharding):
                return step
            if step not in known and step.node is not None:
                waiting.extend(step.node.inputs)
        return None

    def _local_value(self, value: Value) -> Value:
        made = self.values[value] = clone_value(value)
        self._localize_type(value, made)
        return made

    def _localize_type(self, value: Value, made: Value) -> None:
        if not value.is_static:
            # Its size depends on data, or it is no tensor: whole on every device.
            made.sharding = None
            return
        assert value.sharding is not None, f"{value!r} is not used and has no sharding"
        made.sharding = value.sharding
        made.global_shape = value.shape
        made.type = self._local_type(value.tensor_type, value.sharding)

    def _local_type(self, whole: TensorType, sharding: Sharding) -> TensorType:
        """The type of the device's block; values that are alike have one."""
        known = self.types.get((whole, sharding))
        if known is None:
            shape = local_shape(sharding, whole.static_shape, self.coords)
            known = self.types[whole, sharding] = TensorType(whole.dtype, shape)
        return known

    def _localize(self, node: Node, made: Node) -> None:
        """Let the copy of a node be what a device runs."""
        if node.identity == (DOMAIN, "AllSlice"):
            self._slice(node, made)
            return
        if node.identity == (DOMAIN, "MakePartial"):
            self._make_partial(node, made)
            return
        for value, local in zip(node.results, made.results, strict=True):
            self._localize_type(value, local)
        if not is_compute(node):
            self._uneven_sizes(node, made)
            return
        if node in self.flow.ties:
            for body, copy in zip(node.nested_graphs(), made.nested_graphs(), strict=True):
                self._localize_body(body, copy)
        if self._write_program(node, made):
            return
        if self._is_cut(node):
            assert made.graph is not None
            builder = Builder(made.graph, self.module.opsets, before=made, like=made)
            replaced = localized(node, made, builder)
            if replaced is not None:
                self._replace(node, made, replaced)
                return
        if is_for_plans(node):
            self._replace(node, made, written_out(made, self.module.opsets))

    def _write_program(self, node: Node, made: Node) -> bool:
        """Write the local program of a node where the dims along which it works are cut; False where the node stays."""
        view = self.flow.rule(node)
        if view is None or all(way.program is None for way in view.ways):
            return False
        placement = self.flow.placement_as_it_lies(node)
        if placement is None:
            return False
        view = view.way_of(placement)
        axes = view.program_axes(placement.factors)
        program = view.program
        if program is None or self.mesh.group_size(axes) == 1:
            return False
        assert made.graph is not None
        builder = Builder(made.graph, self.module.opsets, before=made, like=made)
        writer = ProgramWriter(program, node, made, builder, axes, self.local.ranks, view.rule, placement.factors)
        results = program.write(writer)
        for collective in writer.made:
            collective.doc = reason_of_program(self.origins, node, writer.origin, axes, program.manner)
        self.has_programs = True
        if results is None:
            return False
        # What a device has already is read by others under its own name.
        own = [value if value.node in builder.made else builder.op("Identity", [value]) for value in results]
        self._replace(node, made, own)
        return True

    def _localize_body(self, body: Graph, copy: Graph) -> None:
        for value in (*body.inputs, *body.constants):
            self._localize_type(value, self.values[value])
        for node, made in zip(tuple(body), tuple(copy), strict=True):
            self._localize(node, made)

    def _is_cut(self, node: Node) -> bool:
        """Whether an axis of several devices cuts a value of a node."""
        return any(
            value.sharding.mesh.group_size(value.sharding.all_axes) > 1
            for value in (*node.inputs, *node.results)
            if value.sharding is not None
        )

    def _replace(self, node: Node, made: Node, values: Sequence[Value]) -> None:
        read = made.inputs
        for whole, old, new in zip(node.results, made.results, values, strict=True):
            self._localize_type(whole, new)
            new.source = old.source
            old.replace_uses(new)
            self.values[whole] = new
        names = [value.name for value in made.results]
        made.erase()
        for value, name in zip(values, names, strict=True):
            value.rename(name)
        self.left.update(dict.fromkeys(read))

    def _slice(self, node: Node, made: Node) -> None:
        """AllSlice: the block starts at (position along the new axes) * (block size) of what the device holds."""
        (whole,) = node.inputs
        result = node.result
        assert result.sharding is not None
        assert made.graph is not None
        dim = node.attributes["dim"]
        assert isinstance(dim, int)
        axes = collective_axes(node)
        builder = Builder(made.graph, self.module.opsets, before=made, like=node)
        start, stop = self._block_bounds(axes, ceil_div(whole.shape[dim], result.sharding.dim_parts(dim)))
        self._replace(node, made, [builder.op("Slice", [made.inputs[0], start, stop, self._ints([dim])])])

    def _make_partial(self, node: Node, made: Node) -> None:
        """MakePartial: of what all hold, the first keeps it and the others take what changes nothing."""
        (whole,), result = made.inputs, node.result
        assert result.sharding is not None
        assert made.graph is not None
        builder = Builder(made.graph, self.module.opsets, before=made, like=node)
        once = first_only(whole, result.sharding.reduce, self.mesh, collective_axes(node), builder)
        own = builder.op("Identity", [whole], type=whole.type) if once is whole else once
        self._replace(node, made, [own])

    def _block_bounds(self, axes: Sequence[Axis], block: int) -> tuple[Value, Value]:
        """Where the own block of a dim starts and ends, as Slice takes it: int64[1], made once for each cut."""
        builder = Builder(self.local, self.module.opsets)
        known = self.bounds.get((tuple(axes), block))
        if known is not None:
            return known
        offset = block_start(builder, self.mesh, axes, block)
        assert offset.node is not None
        # Beside the offset, which stands before every reader.
        early = Builder(self.local, self.module.opsets, before=offset.node.next)
        type_ = TensorType(DType.I64, (1,))
        start = early.op("Reshape", [offset, self._ints([1])], type=type_)
        stop = early.op("Add", [start, self._ints([block])], type=type_)
        return self.bounds.setdefault((tuple(axes), block), (start, stop))

    def _ints(self, numbers: list[int]) -> Value:
        """A constant int64 list, shared."""
        if tuple(numbers) not in self.lists:
            self.lists[tuple(numbers)] = Builder(self.local, self.module.opsets).constant(numbers)
        return self.lists[tuple(numbers)]

    def _uneven_sizes(self, node: Node, made: Node) -> None:
        """Tell the collective the block sizes of its members where they differ."""
        before, after = node.inputs[0].sharding, node.result.sharding
        assert before is not None
        assert after is not None
        shape = node.inputs[0].shape
        for name, told in COLLECTIVES[node.op_type].uneven.items():
            if told is not None:
                dim, side = told
                self._set_sizes(made, name, shape, before if side == "operand" else after, node.attributes[dim], node)
            elif _is_uneven_permute(node):
                made.set_attribute(name, _operand_shapes(node, self.coords))

    def _set_sizes(
        self, made: Node, name: str, shape: Sequence[int], sharding: Sharding, dim: object, node: Node
    ) -> None:
        assert isinstance(dim, int)
        axes = collective_axes(node)
        cut = sharding.dims[dim].axes
        sizes = block_sizes(shape[dim], self.mesh.group_size(cut))
        count = self.mesh.group_size(axes)
        first = self.mesh.position(self.coords, cut) // count * count
        mine = sizes[first : first + count]
        if len(set(mine)) > 1:
            made.set_attribute(name, mine)
