"""A partition judged node by node: each tensor that it has by what the original's node makes of the partition's own.

Where rounding is amplified the two sides may be far from each other, and both right: a quantiser whose operand lies
beside a step gives another whole number for a difference in the last place, and every tensor behind it differs. So the
nodes of the original are computed, one after the other, from the tensors of the partition that they read; each result
must be, within the rounding of that one node, what the partition has. Where all are, the outputs of the two sides may
differ only by what nodes decided otherwise (see `decides`): then the original is computed with these decisions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from irpar.ir import DOMAIN, Graph, Node, Value, captured_or_read, tensor_type
from irpar.ops import traits
from irpar.ops.collectives import WAIT
from irpar.ops.memory_copies import COPY, START
from irpar.sharding import IrparError
from irpar.units import count_text

from .arithmetic import REALS
from .comparison import Arrays, Difference, compare_rounding, misfit
from .original import Original, first_line
from .yardstick import Judgement, Jumps, StepYardstick

if TYPE_CHECKING:
    from irpar.runtime.executor import Executor

TENSORS_AT_ONCE = 256
"""How many tensors are judged in one run of the partition."""

_STEPS = frozenset(
    {
        *("Round", "Floor", "Ceil", "Sign", "Mod", "Hardmax", "Shrink", "ThresholdedRelu"),
        *("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QAttention"),
    }
)
"""Operators whose floats jump where their operands pass a step, or that quantise inside."""
_INSIDE = frozenset({"DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "QAttention"})
"""Operators of these that quantise inside: one step there moves all of a row."""
_GRIDS = frozenset({"Round", "Floor", "Ceil", "QuantizeLinear", "DynamicQuantizeLinear", "Cast"})
"""Operators that give the whole number beside an operand: past a step lies the next one."""
_REDUCED_OR_MOVED = ("AllReduce", "AllGather", "ReduceScatter", "AllToAll")
_WHOLE = frozenset({*_REDUCED_OR_MOVED, *(f"{name}Start" for name in _REDUCED_OR_MOVED), WAIT, COPY, START})
"""Operators whose results are the tensor that they read, in another sharding or memory; a permutation may send edges
alone."""


@dataclass(frozen=True)
class Steps:
    """What is found node by node.

    Attributes:
        first: the first tensor that is not what the original's nodes make of the partition's own.
        node: what makes it.
        compared: how many tensors before it are.
        doubted: names of tensors, to what cannot be told of them.
        is_whole: all tensors could be judged.
    """

    first: Difference | None
    node: str
    compared: int
    doubted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_whole: bool = True


@dataclass(frozen=True)
class _Step:
    """The results of one node that the partition has, by name, and which of its other tensors they are made of."""

    node: Node
    results: Mapping[str, Value]
    operands: Mapping[str, Value]
    decides: bool
    jumps: Jumps
    moved: Mapping[str, tuple[str, ...]]
    """Names of results, to those of what collectives make of them."""


class StepByStep:
    """The nodes of the original beside the tensors of a partition.

    Args:
        executor: runs the partition.
        original: the model that it was made of.
        inputs: full arrays by name.
    """

    def __init__(self, executor: "Executor", original: Original, inputs: Arrays) -> None:
        self._executor = executor
        self._original = original
        self._inputs = inputs
        self._steps = tuple(_steps(executor, original))
        self._without_numbers: list[_Step] = []
        """Those whose results have infinities or NaNs that are right, and that the original's node has not."""

    def walk(self) -> Steps:
        """Judge the tensors in the order of the original, up to the first that differs."""
        compared, unjudged, doubted = 0, 0, dict[str, tuple[str, ...]]()
        for batch in _batches(self._steps):
            names = [name for step in batch for name in (*step.operands, *step.results) if name not in self._inputs]
            names += [other for step in batch for others in step.moved.values() for other in others]
            held = {**self._inputs, **self._executor.run(self._inputs, fetch=dict.fromkeys(names))}
            for step in batch:
                yardstick = StepYardstick(self._original, {name: held[name] for name in step.operands}, step.jumps)
                try:
                    judged = yardstick.judge_step({name: held[name] for name in step.results})
                    for moved in _each_moved(step, held):
                        if all(found.is_equal for found in judged.differences.values()):
                            again = yardstick.judge_step(moved)
                            judged = replace(judged, differences={**judged.differences, **again.differences})
                except IrparError as error:
                    why = f"{step.node.label} cannot be computed alone: {first_line(error)}"
                    doubted |= dict.fromkeys(step.results, (why,))
                    unjudged += 1
                    continue
                for found in judged.differences.values():
                    if not found.is_equal:
                        return Steps(found, step.node.label, compared, doubted)
                    compared += 1
                doubted |= judged.doubted
                self._without_numbers += [step] * bool(judged.without_numbers)
        return Steps(None, "", compared, doubted, is_whole=not unjudged)

    def first_copy(self) -> tuple[Difference | None, str]:
        """The first tensor that ranks hold different copies of, and the node that makes it; None and "" without one."""
        from irpar.runtime.errors import ReplicaError

        found: tuple[Difference | None, str] = None, ""
        for batch in _batches(self._steps):
            makers = {
                name: step.node.label
                for step in batch
                for result in step.results
                for name in (result, *step.moved.get(result, ()))
            }
            try:
                self._executor.run(self._inputs, fetch=makers, check_replicas=True)
            except ReplicaError as error:
                found = misfit(error.value, error.what), makers.get(error.value, "")
                if error.value in makers:
                    break
        return found

    def decided(self, names: Sequence[str]) -> tuple[Judgement, str]:
        """Judge outputs by the original with the decisions of the partition, and its infinities.

        Args:
            names: of outputs.

        Returns:
            How they differ from that, and what decisions are others; nothing and "" where none are.
        """
        deciding = [step for step in self._steps if step.decides]
        given_up = [step for step in self._without_numbers if step not in deciding]
        decisions = [name for step in (*deciding, *given_up) for name in step.results]
        # All from one run: what it fuses decides what lies beside a step.
        held = self._executor.run(self._inputs, fetch=decisions)
        others = self._otherwise(deciding, held)
        if not others and not given_up:
            return Judgement({}), ""
        given = {**self._inputs, **{name: held[name] for name in decisions}}
        try:
            judged = StepYardstick(self._original, given).judge_step({name: held[name] for name in names})
        except IrparError:
            return Judgement({}), ""
        return judged, " and ".join(filter(None, [_deciding_text(others, len(deciding)), _range_text(given_up)]))

    def _otherwise(self, deciding: Sequence[_Step], held: Mapping[str, Any]) -> list[_Step]:
        """The steps whose results are others than the original's."""
        computed = self._original.computed()
        names = [name for step in deciding for name in step.results if name in computed]
        plain = self._original.run(self._inputs, fetch=names, optimized=False) if names else {}
        differs = {name for name in names if not compare_rounding(name, held[name], plain[name]).is_equal}
        return [step for step in deciding if not differs.isdisjoint(step.results)]


def _each_moved(step: _Step, held: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The results as collectives left them, one at a time."""
    for name, others in step.moved.items():
        for other in others:
            yield {name: held[other]}


def _deciding_text(steps: Sequence[_Step], among: int) -> str:
    if not steps:
        return ""
    decide = "decides" if len(steps) == 1 else "decide"
    return (
        f"{len(steps)} of {count_text(among, 'node')} that quantise, round or compare {decide} otherwise than in ONNX "
        f"Runtime, beside a step (the first: {steps[0].node.label})"
    )


def _range_text(steps: Sequence[_Step]) -> str:
    if not steps:
        return ""
    give = "gives" if len(steps) == 1 else "give"
    return (
        f"{count_text(len(steps), 'node')} {give} infinities or NaNs that are right in the partition's order "
        f"(the first: {steps[0].node.label})"
    )


def decides(node: Node) -> bool:
    """Whether a result jumps where an operand passes a step: an integer or code that is made of floats, a rounding."""
    if node.op_type in _STEPS:
        return True
    bodies = [*node.nested_graphs(), *([node.callee.graph] if node.callee is not None else ())]
    if bodies:
        return any(decides(inner) for body in bodies for inner in body)
    if traits(node).reads_sizes:
        return False
    return any(_is_real(value) for value in node.inputs) and not all(_is_real(value) for value in node.results)


def _jumps(deciding: Sequence[Node]) -> Jumps:
    """How what some nodes that decide make together jumps; NONE also where it may do so in any way, as in bodies."""
    if not deciding or any(
        node.op_type in _INSIDE or node.callee is not None or any(True for _ in node.nested_graphs())
        for node in deciding
    ):
        return Jumps.NONE
    return Jumps.GRID if all(node.op_type in _GRIDS for node in deciding) else Jumps.STEPS


def _is_real(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is None or type_.dtype in REALS


def _steps(executor: "Executor", original: Original) -> Iterator[_Step]:
    """The nodes whose results the partition has."""
    nodes = original.nodes
    held = _held(executor)
    outputs = dict(zip(nodes.graph.outputs, nodes.graph.output_names, strict=True))
    given = {spec.name for spec in executor.outputs}
    moved = _moved([part.graph for part in executor.parts])
    cut: dict[Value, str] = {value: value.source_name for value in nodes.graph.inputs}
    for node in nodes.graph:
        results = {}
        for value in node.results:
            name = outputs[value] if outputs.get(value) in given else value.source_name
            # What nothing reads ONNX Runtime does not give of a node alone.
            if value.has_uses and (name in held or name in given) and nodes.has(value, name):
                results[name] = value
        if not results:
            continue
        between = nodes.between(cut, results.values())
        read = dict.fromkeys(value for inner in between for value in captured_or_read(inner) if value in cut)
        deciding = [inner for inner in between if decides(inner)]
        others = {name: moved[value.source_name] for name, value in results.items() if value.source_name in moved}
        yield _Step(node, results, {cut[value]: value for value in read}, bool(deciding), _jumps(deciding), others)
        cut |= {value: name for name, value in results.items()}


def _held(executor: "Executor") -> set[str]:
    """The source names of tensors that the ranks have all blocks of.

    Where blocks are empty a term of a sum is a constant, which a function of communication may have taken in.
    """
    from irpar.runtime.layout import makes_whole

    names = [{value.source_name for value in part.graph.values()} for part in executor.parts]
    found = set()
    for value in executor.parts[0].graph.values():
        type_ = tensor_type(value.type)
        if type_ is None:
            continue
        shape = type_.shape if value.global_shape is None else value.global_shape
        have = [part for part, known in zip(executor.parts, names, strict=True) if value.source_name in known]
        ranks = [rank for part in have for rank in part.ranks]
        is_known = shape is not None and all(isinstance(dim, int) for dim in shape)
        if len(have) == len(names) or not is_known or makes_whole(ranks, value.sharding, shape):  # type: ignore[arg-type]
            found.add(value.source_name)
    return found


def _moved(graphs: Sequence[Graph]) -> Mapping[str, tuple[str, ...]]:
    """Source names, to the names of what collectives make of these values, where all graphs call it alike.

    What nothing but a collective reads may be right, and what that gives be wrong.
    """
    sources = {value.source_name for graph in graphs for value in graph.values()}
    found: dict[str, tuple[str, ...]] = {}
    named = [{value.name: value for value in graph.values()} for graph in graphs]
    first = {value.source: value for value in reversed([*graphs[0].values()]) if value.source}
    # Of other values of a source, as a local program makes them, the name does not tell what they are.
    known = set(first.values())
    for node in graphs[0]:
        if node.domain != DOMAIN or node.op_type not in _WHOLE or node.inputs[0] not in known:
            continue
        value = node.result
        known.add(value)
        alike = [values.get(value.name) for values in named]
        if value.name in sources or value.sharding is None or tensor_type(value.type) is None:
            continue
        if all(other and other.source == value.source and other.sharding == value.sharding for other in alike):
            found[value.source_name] = (*found.get(value.source_name, ()), value.name)
    return found


def _batches(steps: Sequence[_Step]) -> Iterator[Sequence[_Step]]:
    for start in range(0, len(steps), TENSORS_AT_ONCE):
        yield steps[start : start + TENSORS_AT_ONCE]
