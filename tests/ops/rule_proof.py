"""Factor rules against the numbers: cut a factor, run every block, put the results together as the rule says."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from irpar.ir import ArrayTensor, Builder, Graph, Node, Tensor, TensorType, Value, clone_node, plain_attribute
from irpar.ir.attributes import Floats, Ints, Strings
from irpar.ir.clone import clone_graph
from irpar.kernels import lookup
from irpar.ops import FactorRule, Kind
from irpar.ops.coords import COORDS
from irpar.ops.local_node import localized
from irpar.ops.updates import is_for_plans, write_out
from irpar.runtime.engines.ort_versions import ALWAYS_LOADED
from irpar.sharding import Axis, Mesh, Reduction, Sharding, filled_blocks, local_region

Array = np.ndarray[Any, Any]
Engine = Callable[[Graph, Mapping[str, Array], Mapping[str, int]], list[Array]]
REDUCTIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.logical_and,
    "or": np.logical_or,
}


@dataclass(frozen=True)
class Constant:
    """An operand whose numbers a definition may read."""

    array: Array


@dataclass(frozen=True)
class Sample:
    """One node with data.

    Attributes:
        op: operator.
        operands: arrays, Constants, or None where left out.
        attributes: of the node.
        version: opset version.
        results: number of results.
        tolerance: absolute and relative.
        domain: of the operator; `version` is then that of the domain.
    """

    op: str
    operands: tuple[Array | Constant | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    version: int = 21
    results: int = 1
    tolerance: float = 1e-4
    domain: str = ""

    def __str__(self) -> str:
        shapes = "-".join(
            "none" if array is None else "x".join(map(str, array.shape)) or "scalar" for array in self.arrays
        )
        attributes = ",".join(f"{name}={value}" for name, value in self.attributes.items())
        return f"{self.operator}{self.version}[{shapes}]{{{attributes}}}"

    @property
    def operator(self) -> str:
        """The operator with its domain, as `Node.operator` has it."""
        return f"{self.domain}.{self.op}" if self.domain else self.op

    @property
    def opsets(self) -> dict[str, int]:
        """Versions by domain, those of ONNX's own included: `localize` inserts its operators."""
        return {"": 21, self.domain: self.version}

    @property
    def arrays(self) -> list[Array | None]:
        """The operands' numbers."""
        return [operand.array if isinstance(operand, Constant) else operand for operand in self.operands]

    @cached_property
    def node(self) -> Node:
        """The node in a graph of its own, its results typed by what ONNX Runtime gives."""
        graph = Graph("sample")
        values: list[Value | None] = []
        for operand in self.operands:
            if operand is None:
                values.append(None)
            elif isinstance(operand, Constant):
                values.append(graph.add_constant(ArrayTensor(operand.array), "constant"))
            else:
                values.append(graph.add_input("operand", ArrayTensor(operand).type))
        node = graph.append(
            Node(self.op, values, self.attributes, results=self.results, domain=self.domain, version=self.version)
        )
        graph.set_outputs(node.results)
        expected = run(graph, self.feeds(graph), self.opsets)
        for value, array in zip(node.results, expected, strict=True):
            value.type = ArrayTensor(array).type
        return node

    def feeds(self, graph: Graph) -> dict[str, Array]:
        """The numbers of the graph's inputs, in order."""
        arrays = [operand for operand in self.operands if isinstance(operand, np.ndarray)]
        return {value.name: array for value, array in zip(graph.inputs, arrays, strict=True)}

    @cached_property
    def whole(self) -> list[Array]:
        """The results over full tensors."""
        return self.whole_by(run)

    def whole_by(self, engine: "Engine") -> list[Array]:
        """The results over full tensors by one engine."""
        graph = self.node.graph
        assert graph is not None
        return engine(graph, self.feeds(graph), self.opsets)


# -- running a graph ------------------------------------------------------------------------------------------------


NEWEST = ALWAYS_LOADED
"""Of ONNX's operator sets the newest that is tried in ONNX Runtime: with each that irpar allows the same."""


class NoKernelError(Exception):
    """irpar has no kernel for an operator."""


def run(graph: Graph, feeds: Mapping[str, Array], versions: Mapping[str, int] | int) -> list[Array]:
    """The results of a graph by ONNX Runtime; where it lacks an operator, by irpar's kernels or ONNX's reference.

    Args:
        graph: a graph of nodes of known versions.
        feeds: the numbers of its inputs.
        versions: by domain, or that of ONNX's own operators.
    """
    opsets = {"": versions} if isinstance(versions, int) else versions
    graph = _runnable(graph)
    model = _model(graph, opsets)
    if opsets[""] <= NEWEST:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        try:
            session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            return list(session.run(None, dict(feeds)))
        except ort.capi.onnxruntime_pybind11_state.NotImplemented:
            pass
        except ort.capi.onnxruntime_pybind11_state.Fail as error:
            if "is not a registered function/op" not in str(error):
                raise
    if any(node.domain not in ("", "ai.onnx.ml") for node in graph):
        return run_kernels(graph, feeds, opsets)
    with np.errstate(all="ignore"):
        return [np.asarray(found) for found in ReferenceEvaluator(model).run(None, dict(feeds))]


def run_kernels(graph: Graph, feeds: Mapping[str, Array], opsets: Mapping[str, int]) -> list[Array]:
    """The results of a graph by irpar's kernels.

    Raises:
        NoKernelError: there is none for an operator.
    """
    graph = _runnable(graph)
    numbers: dict[Value, Array] = {value: feeds[value.name] for value in graph.inputs}
    for value in graph.constants:
        assert value.data is not None
        numbers[value] = value.data.numpy()
    for node in graph:
        kernel = lookup(node.domain, node.op_type, opsets[node.domain])
        if kernel is None:
            raise NoKernelError(node.operator)
        attributes = {name: plain_attribute(attribute) for name, attribute in node.attributes.items()}
        operands = [None if value is None else numbers[value] for value in node.operands]
        numbers.update(zip(node.results, kernel(np, operands, attributes, len(node.results)), strict=True))
    return [np.asarray(numbers[value]) for value in graph.outputs]


def _runnable(graph: Graph) -> Graph:
    """The graph as devices run it: what only plans have is written out."""
    if not any(is_for_plans(node) for node in graph):
        return graph
    made = clone_graph(graph)
    write_out(made, {"": NEWEST})
    return made


def _model(graph: Graph, opsets: Mapping[str, int]) -> onnx.ModelProto:
    nodes = [
        helper.make_node(
            node.op_type,
            ["" if value is None else value.name for value in node.operands],
            [value.name for value in node.results],
            domain=node.domain,
            **{name: _plain(value) for name, value in node.attributes.items()},
        )
        for node in graph
    ]
    constants = []
    for value in graph.constants:
        assert value.data is not None
        constants.append(numpy_helper.from_array(np.array(value.data.numpy()), value.name))
    body = helper.make_graph(
        nodes, "body", [_info(value) for value in graph.inputs], [_info(value) for value in graph.outputs], constants
    )
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return helper.make_model(body, ir_version=10, opset_imports=imports)


def _info(value: Value) -> onnx.ValueInfoProto:
    if not isinstance(value.type, TensorType):
        return onnx.ValueInfoProto(name=value.name)
    return helper.make_tensor_value_info(value.name, value.dtype.value, value.shape)


def _plain(value: object) -> object:
    if isinstance(value, Tensor):
        return numpy_helper.from_array(np.array(value.numpy()))
    return list(value) if isinstance(value, (Ints, Floats, Strings)) else value


# -- cutting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """Mesh axes for the factors of a rule: the factor under proof over `cut`, the majors before it one axis each."""

    rule: FactorRule
    mesh: Mesh
    axes: Mapping[int, Axis]

    def sharding(self, factors: Sequence[Sequence[int]], *, is_result: bool) -> Sharding:
        """How a tensor of these factors lies."""
        dims = [[self.axes[factor] for factor in dim if factor in self.axes] for dim in factors]
        partial = [axis for factor, axis in self.axes.items() if self.rule.kinds[factor] is Kind.REDUCE]
        return Sharding.of_axes(self.mesh, dims, partial if is_result else (), self.rule.reduce)


def cut(rule: FactorRule, node: Node, factor: int, parts: int) -> Cut | None:
    """A way to shard a factor into `parts`, or None where there is none, or where a block would be empty.

    A minor factor of a compound dim can only be cut when the ones before it are cut down to single indices; a factor of
    a compound dim must divide.
    """
    return None if filled_blocks(rule.sizes[factor], parts) < parts else _cut(rule, node, factor, parts)


def cut_with_empty_block(rule: FactorRule, node: Node, factor: int) -> Cut | None:
    """A way to shard a factor into as few parts as leave a device without elements, or None where it must divide."""
    size = rule.sizes[factor]
    parts = next(parts for parts in itertools.count(2) if filled_blocks(size, parts) < parts)
    return _cut(rule, node, factor, parts)


def _cut(rule: FactorRule, node: Node, factor: int, parts: int) -> Cut | None:
    majors: dict[int, None] = {}
    must_divide = False
    waiting = [factor]
    while waiting:
        found, divides = _majors(rule, node, waiting.pop())
        waiting.extend(set(found) - set(majors))
        majors.update(dict.fromkeys(found))
        must_divide |= divides
    if must_divide and rule.sizes[factor] % parts:
        return None
    if any(rule.kinds[major] in (Kind.REPLICATE, Kind.PERMUTE) for major in majors):
        return None
    sizes = {f"major{major}": rule.sizes[major] for major in majors}
    axes = {major: Axis(f"major{major}") for major in majors}
    return Cut(rule, Mesh({**sizes, "cut": parts}), {**axes, factor: Axis("cut")})


def _majors(rule: FactorRule, node: Node, factor: int) -> tuple[list[int], bool]:
    """The factors before this one in its dims, and whether it must divide evenly."""
    tensors = (*rule.operands, *rule.results)
    values = (*node.operands, *node.results)
    majors: list[int] = []
    must_divide = False
    for tensor, dim, index in rule.places[factor]:
        majors.extend(tensors[tensor][dim][:index])
        value = values[tensor]
        assert value is not None
        must_divide |= len(tensors[tensor][dim]) > 1 or value.shape[dim] != rule.sizes[factor]
    return majors, must_divide


def run_cut(sample: Sample, how: Cut, engine: Engine = run) -> list[Array]:
    """The results put together from what all devices compute on their blocks.

    Args:
        sample: the node.
        how: it is sharded.
        engine: what runs the blocks: `run` or `run_kernels`.

    Raises:
        AssertionError: blocks have other shapes than the rule says, or copies differ.
    """
    whole = sample.node
    rule = how.rule
    for value, factors in zip(whole.operands, rule.operands, strict=True):
        if value is not None:
            value.sharding = how.sharding(factors, is_result=False)
    shardings = [how.sharding(factors, is_result=True) for factors in rule.results]
    blocks = {coords: run_block(sample, whole, how, shardings, coords, engine) for coords in how.mesh.all_coords()}
    return [
        _assemble(sharding, value.shape, {coords: found[index] for coords, found in blocks.items()})
        for index, (sharding, value) in enumerate(zip(shardings, whole.results, strict=True))
    ]


def run_block(
    sample: Sample, whole: Node, how: Cut, shardings: Sequence[Sharding], coords: tuple[int, ...], engine: Engine
) -> list[Array]:
    """What the device at `coords` computes: the local copy of the node, mended by the op's `localize`."""
    graph = Graph("block")
    graph.view = "local"
    graph.ranks = (how.mesh.rank(coords),)
    values: dict[Value, Value] = {}
    feeds: dict[str, Array] = {}
    for value, array in zip(whole.operands, sample.arrays, strict=True):
        if value is None or array is None or value in values:
            continue
        assert value.sharding is not None
        block = np.array(_block(array, local_region(value.sharding, value.shape, coords)))
        made = values[value] = (
            graph.add_input(value.name) if value.data is None else graph.add_constant(ArrayTensor(block), value.name)
        )
        made.type, made.global_shape, made.sharding = ArrayTensor(block).type, value.shape, value.sharding
        if made.data is None:
            feeds[made.name] = block
    local = graph.append(clone_node(whole, values, graph.names))
    expected = []
    for result, value, sharding in zip(local.results, whole.results, shardings, strict=True):
        shape = tuple(stop - start for start, stop in local_region(sharding, value.shape, coords))
        result.type = TensorType(value.dtype, shape)
        result.global_shape, result.sharding = value.shape, sharding
        expected.append(shape)
    _localize(whole, local, sample.opsets)
    for node in graph:
        # With 0 groups or heads ONNX's inference divides by zero and takes the process down.
        assert all(node.attributes.get(name, 1) != 0 for name in ("group", "num_heads", "q_num_heads", "kv_num_heads"))
    if COORDS in graph.names.table:
        feeds[COORDS] = np.asarray(coords, np.int64)
    found = engine(graph, feeds, sample.opsets)
    assert [array.shape for array in found] == expected
    return found


def _localize(whole: Node, local: Node, opsets: dict[str, int]) -> None:
    graph = local.graph
    assert graph is not None
    graph.set_outputs(local.results)
    replaced = localized(whole, local, Builder(graph, opsets, before=local, like=local))
    if replaced is not None:
        assert [value.type for value in replaced] == [value.type for value in local.results]
        local.replace(replaced)


def _block(array: Array, region: Sequence[tuple[int, int]]) -> Array:
    return array[tuple(slice(start, stop) for start, stop in region)]


def _assemble(sharding: Sharding, shape: tuple[int, ...], blocks: Mapping[tuple[int, ...], Array]) -> Array:
    """The full result: blocks side by side, partial ones reduced, copies compared."""
    reduction = REDUCTIONS[sharding.reduce]
    groups: dict[tuple[tuple[int, int], ...], dict[int, Array]] = {}
    for coords, block in blocks.items():
        members = groups.setdefault(local_region(sharding, shape, coords), {})
        position = sharding.mesh.position(coords, sharding.partial)
        if position in members:
            assert close(block, members[position], 1e-6)
        members.setdefault(position, block)
    result = np.empty(shape, next(iter(blocks.values())).dtype)
    for region, members in groups.items():
        total, *others = members.values()
        for other in others:
            total = reduction(total, other)
        result[tuple(slice(start, stop) for start, stop in region)] = total
    return result


def same(sample: Sample, found: Sequence[Array], engine: Engine = run) -> bool:
    """True where results agree with those of the engine over full tensors."""
    whole = sample.whole if engine is run else sample.whole_by(engine)
    return all(close(a, b, sample.tolerance) for a, b in zip(found, whole, strict=True))


def close(a: Array, b: Array, tolerance: float) -> bool:
    """True where numbers agree, absolute and relative; strings must be equal."""
    if a.dtype.kind not in "biufV":
        return bool(np.array_equal(a, b))
    return bool(np.allclose(a.astype(np.float64), b.astype(np.float64), tolerance, tolerance, equal_nan=True))


# -- what is forbidden ----------------------------------------------------------------------------------------------


def relaxed(rule: FactorRule, factor: int) -> Iterator[tuple[str, FactorRule]]:
    """The rule with a forbidden factor allowed, in each of the ways that there are."""
    reductions: tuple[Reduction, ...] = ("sum", "max", "min", "prod")

    def kinds(kind: Kind) -> tuple[Kind, ...]:
        return tuple(kind if index == factor else old for index, old in enumerate(rule.kinds))

    yield "pass", replace(rule, kinds=kinds(Kind.PASS))
    if not any(factor in dim for factors in rule.results for dim in factors):
        for reduce in reductions:
            yield reduce, replace(rule, kinds=kinds(Kind.REDUCE), reduce=reduce)


def with_factor(rule: FactorRule, operand: int, dim: int, size: int) -> FactorRule:
    """The rule with one more factor, last and forbidden, for a dim of an operand that has none."""
    factors = list(rule.operands[operand])
    factors[dim] = (len(rule.sizes),)
    operands = (*rule.operands[:operand], tuple(factors), *rule.operands[operand + 1 :])
    return replace(rule, operands=operands, sizes=(*rule.sizes, size), kinds=(*rule.kinds, Kind.REPLICATE))


def taking_empty_blocks(rule: FactorRule, factor: int) -> FactorRule:
    """The rule with a factor of which engines are said to take blocks without elements."""
    return replace(rule, runs_empty=rule.runs_empty | {factor})


def works_by(sample: Sample, rule: FactorRule, factor: int, parts: int) -> str | None:
    """The way in which a forbidden factor would give the right numbers, or None where each is wrong or fails."""
    for way, changed in relaxed(rule, factor):
        how = cut(changed, sample.node, factor, parts)
        if how is None:
            continue
        try:
            found = run_cut(sample, how)
        except Exception:  # an operator that refuses its block proves the ban as well as a wrong number
            continue
        if same(sample, found):
            return way
    return None
