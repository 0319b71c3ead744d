"""add-loss: the loss of a model's output as one more result."""

from dataclasses import dataclass
from typing import Literal, get_args

from irpar.errors import IrparError, listed, nearest_names
from irpar.ir import Dim, DType, Graph, Ints, Module, Node, TensorType, Value, tensor_type
from irpar.ir.added_input import add_named_input
from irpar.ir.state import LOSS
from irpar.ops.facts import int_attribute
from irpar.ops.gradients.writer import GradientWriter
from irpar.pass_manager import Pass, PassResult
from irpar.sharding import option

TARGET = "target"
"""The name of the input that the output is compared with."""
COUNTED = "loss_targets"
"""The name of the result that says which share of the targets counts."""
MASK = "sample_mask"
"""The name of the input that says which samples count."""
IGNORED = -1
"""The class number of what does not count, where none is given."""
LossKind = Literal["cross_entropy", "mse", "bce"]
LOSSES: tuple[str, ...] = get_args(LossKind)
CROSS_ENTROPY = "cross_entropy"
_OUTPUT = "output:"
"""Before the name of an output that is the loss already."""
_PROBABILITIES = {CROSS_ENTROPY: ("Softmax", "LogSoftmax"), "bce": ("Sigmoid",)}
"""What an output may come from that is no score any more: the loss takes what went in there."""


_KEEP_CLASSES = ("Identity", "Transpose")
_LAYOUT = (*_KEEP_CLASSES, "Squeeze", "Unsqueeze", "Reshape", "Flatten")
_ELEMENTWISE = ("Add", "Clip", "Div", "Max", "Min", "Mul", "Sub")
_FEW = 4
"""Nodes that are looked at for what makes probabilities."""


class LossError(IrparError):
    """A loss that does not fit the model."""


@dataclass(frozen=True)
class AddLoss(Pass):
    """Compare an output of the model with a new input `target`, or take it as the loss that it is.

    Before: global view, types are inferred, no function is called, ONNX's operators are of opset 18 or newer. After:
    the last result is `loss`, one number: the mean over all targets.

    Attributes:
        kind: `cross_entropy` of scores and class numbers (int64, of the output's shape without its classes); `mse`,
            the mean of squared differences; `bce`, binary cross entropy of scores and targets from 0 to 1; or
            `output:NAME`, a result that is the loss already. Where the output is a Sigmoid's result, or that
            of a Softmax or LogSoftmax over the classes, the scores are what went in there; also behind Cast and
            Transpose, of bce behind Reshape and the like too.
        output: the result that is compared; "": the only one of floats, or the first of them.
        class_axis: of the output, where its classes are.
        ignore_index: the class number of targets that do not count; None: all count.
        label_smoothing: how much of each target is spread over all classes.
        counted: whether one more result says of which share of the targets it is the mean, where some are ignored;
            the mean of none then is 0.
        masked: whether one more input, `sample_mask`, says of each sample whether it counts; counted as well.
    """

    name = "add-loss"
    kind: str = CROSS_ENTROPY
    output: str = ""
    class_axis: int = -1
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    counted: bool = False
    masked: bool = False

    def run(self, module: Module) -> PassResult:
        """Write the loss.

        Raises:
            LossError: there is no such loss or output, or they do not fit each other.
            TakenNameError: the model has a tensor called `target`.
        """
        graph = module.graph
        self._check(graph)
        writer = GradientWriter(graph, module.opsets)
        writer.phase = "forward"
        notes: tuple[str, ...] = ()
        results: dict[str, Value] = {}
        if self.kind.startswith(_OUTPUT):
            if self.masked:
                raise LossError(
                    f"the model computes its loss itself ({self.kind}): no sample can be left out of it",
                    do="let irpar compute the loss, of an output with a row for each sample: cross_entropy, mse or bce",
                )
            results[LOSS] = _single(output_of(graph, self.kind.removeprefix(_OUTPUT)))
        else:
            results, notes = self._compared(graph, writer)
        for name, value in results.items():
            if value.node in writer.made:
                value.rename(name)
        graph.set_outputs([*graph.outputs, *results.values()], [*graph.output_names, *results])
        return PassResult(True, notes)

    def _check(self, graph: Graph) -> None:
        """Refuse options that mean nothing, alone or together.

        Raises:
            LossError: saying which.
        """
        if self.kind not in LOSSES and not self.kind.startswith(_OUTPUT):
            raise LossError(
                f'there is no loss "{self.kind}"',
                notes=nearest_names(self.kind, LOSSES),
                do=f"use {listed(LOSSES, 5)}, or output:NAME where the model computes its loss itself",
            )
        if LOSS in graph.output_names and self.kind != f"output:{LOSS}":
            raise LossError(
                f'the model has an output called "{LOSS}" already, which is what training adds',
                do=f"rename it, or use {option('loss', f'output:{LOSS}')} if it is the loss",
            )
        if not 0 <= self.label_smoothing < 1:
            raise LossError(f"label smoothing of {self.label_smoothing}", do="give a number from 0 to below 1")
        if self.kind == CROSS_ENTROPY:
            return
        if self.label_smoothing or self.ignore_index is not None:
            raise LossError(
                f"{self.kind} has no label smoothing and ignores no targets", do="leave them out, or use cross_entropy"
            )
        if self.class_axis != -1:
            raise LossError(f"{self.kind} has no axis of classes", do="leave it out, or use cross_entropy")
        if self.kind.startswith(_OUTPUT) and self.output not in ("", self.kind.removeprefix(_OUTPUT)):
            raise LossError(
                f'{self.kind} names the output, and "{self.output}" is named, too', do="leave out one of the two"
            )

    def _compared(self, graph: Graph, w: GradientWriter) -> tuple[dict[str, Value], tuple[str, ...]]:
        """The results that compare an output with the target, by name; lines about what it is taken of."""
        output = output_of(graph, self.output)
        scores, maker = _scores(output, self.kind, self.class_axis, w)
        notes: tuple[str, ...] = ()
        if maker is not None:
            notes = (f"the loss is taken of what goes into the {maker.op_type} that makes {_name(graph, output)}",)
        elif (maker := _made_of(output, self.kind)) is not None:
            what = f"{_name(graph, output)} is taken as scores, and is made by a {maker.op_type}"
            notes = (f"{what}: if these are probabilities, train an output before it",)
        dims = w.dims(scores)
        dtype = scores.dtype
        wide = w.cast(scores, DType.F32) if dtype in (DType.F16, DType.BF16) else scores
        if self.kind == CROSS_ENTROPY:
            if len(dims) == 1:
                others = f"{option('loss', 'bce')} and {option('loss', 'mse')} take a number of each sample"
                notes += (f"the one dim of {_name(graph, output)} is that of classes, for a single sample; {others}",)
            return self._cross_entropy(graph, wide, dims, w), notes
        target = add_named_input(graph, TARGET, TensorType(dtype, dims))
        wanted = w.cast(target, wide.dtype)
        if self.kind == "mse":
            difference = w.sub(wide, wanted)
            each = w.mul(difference, difference)
        else:
            each = w.sub(w.op("Softplus", [wide]), w.mul(wide, wanted))
        if self.masked:
            return self._masked_mean(graph, each, w), notes
        return {LOSS: w.op("ReduceMean", [each], {"keepdims": 0})}, notes

    def _masked_mean(self, graph: Graph, each: Value, w: GradientWriter) -> dict[str, Value]:
        """The mean over samples that count, 0 where none does, and which share of them does."""
        counts = w.cast(_mask(graph, w.dims(each), w), each.dtype)
        rest = list(range(1, len(w.dims(each))))
        rows = w.op("ReduceMean", [each, w.ints(rest)], {"keepdims": 0}) if rest else each
        total = w.op("ReduceSum", [w.mul(rows, counts)], {"keepdims": 0})
        count = w.op("ReduceSum", [counts], {"keepdims": 0})
        return {
            LOSS: w.div(total, w.op("Max", [count, w.number(1, count)])),
            COUNTED: w.op("ReduceMean", [counts], {"keepdims": 0}),
        }

    def _cross_entropy(self, graph: Graph, scores: Value, dims: tuple[Dim, ...], w: GradientWriter) -> dict[str, Value]:
        """The results, by name, of scores of those dims.

        Raises:
            LossError: they have no such axis of classes.
        """
        rank = len(dims)
        if not rank or not -rank <= self.class_axis < rank:
            raise LossError(
                f"the scores have {rank} dims, and no axis {self.class_axis} of classes",
                do=f"give the axis of the classes: {option('class_axis', 'DIM')}",
            )
        axis = self.class_axis % rank
        rest = [dim for dim in range(rank) if dim != axis]
        target = add_named_input(graph, TARGET, TensorType(DType.I64, tuple(dims[dim] for dim in rest)))
        if not rest:  # One row of scores.
            scores, labels = w.unsqueeze(scores, [0]), w.unsqueeze(target, [0])
        else:
            scores, labels = w.transpose(scores, [rest[0], axis, *rest[1:]]), target
        if self.masked:
            ignore = IGNORED if self.ignore_index is None else self.ignore_index
            mask = w.unsqueeze(_mask(graph, w.dims(labels), w), list(range(1, len(w.dims(labels)))))
            return self._counted_loss(scores, w.where(mask, labels, w.constant(ignore)), ignore, w)
        if self.counted and self.ignore_index is not None:
            return self._counted_loss(scores, labels, self.ignore_index, w)
        ignored = {} if self.ignore_index is None else {"ignore_index": self.ignore_index}
        loss = w.op("SoftmaxCrossEntropyLoss", [scores, labels], ignored)
        if not self.label_smoothing:
            return {LOSS: loss}
        if self.ignore_index is None:
            spread = w.op("ReduceMean", [_smooth(scores, w)], {"keepdims": 0})
        else:
            counted = _rows(scores, labels, self.ignore_index, w)
            total = w.op("ReduceSum", [w.mul(_smooth(scores, w), counted)], {"keepdims": 0})
            spread = w.div(total, w.op("ReduceSum", [counted], {"keepdims": 0}))
        return {LOSS: self._smoothed(loss, spread, w)}

    def _counted_loss(self, scores: Value, labels: Value, ignore: int, w: GradientWriter) -> dict[str, Value]:
        """The mean over targets that count, 0 where none does, and which share of them does."""
        rows = _rows(scores, labels, ignore, w)
        count = w.op("ReduceSum", [rows], {"keepdims": 0})
        ignored = {"ignore_index": ignore, "reduction": "sum"}
        loss = w.op("SoftmaxCrossEntropyLoss", [scores, labels], ignored)
        if self.label_smoothing:
            spread = w.op("ReduceSum", [w.mul(_smooth(scores, w), rows)], {"keepdims": 0})
            loss = self._smoothed(loss, spread, w)
        return {
            LOSS: w.div(loss, w.op("Max", [count, w.number(1, count)])),
            COUNTED: w.op("ReduceMean", [rows], {"keepdims": 0}),
        }

    def _smoothed(self, loss: Value, spread: Value, w: GradientWriter) -> Value:
        return w.sub(w.mul(loss, 1 - self.label_smoothing), w.mul(spread, self.label_smoothing))


def _rows(scores: Value, labels: Value, ignore: int, w: GradientWriter) -> Value:
    """1 of targets that count, 0 of others."""
    ignored = w.op("Equal", [labels, w.constant(ignore)])
    return w.where(ignored, w.number(0, scores), w.number(1, scores))


def _mask(graph: Graph, dims: tuple[Dim, ...], w: GradientWriter) -> Value:
    """The input that says which samples count.

    Raises:
        LossError: there are no samples.
    """
    if not dims:
        raise LossError(
            "the output has no dim that counts samples: none can be left out",
            do="train a model whose inputs are batches",
        )
    return add_named_input(graph, MASK, TensorType(DType.BOOL, dims[:1]))


def _smooth(scores: Value, w: GradientWriter) -> Value:
    """The mean of the log-probabilities of each row."""
    return w.op("ReduceMean", [w.op("LogSoftmax", [scores], {"axis": 1}), w.ints([1])], {"keepdims": 0})


def output_of(graph: Graph, name: str) -> Value:
    """The result of that name; of none the first one of floats.

    Raises:
        LossError: there is none.
    """
    named = dict(zip(graph.output_names, graph.outputs, strict=True))
    floats = {known: value for known, value in named.items() if _is_float(value)}
    if not name:
        if not floats:
            raise LossError("no output of the model is of floats", do="train a model with an output of floats")
        return next(iter(floats.values()))
    if name not in named:
        raise LossError(
            f'the model has no output "{name}"',
            notes=nearest_names(name, named),
            do=f"name one of {listed(list(floats), 5)}",
        )
    if name not in floats:
        raise LossError(f'the output "{name}" is {named[name].type}', do="name an output of floats")
    return named[name]


def _is_float(value: Value) -> bool:
    found = tensor_type(value.type)
    return found is not None and found.dtype.is_float


def _name(graph: Graph, output: Value) -> str:
    return graph.output_names[graph.outputs.index(output)]


def _single(value: Value) -> Value:
    """A result that is the loss already.

    Raises:
        LossError: it is no single number.
    """
    if value.tensor_type.shape != ():
        raise LossError(
            f"the loss {value.source_name} is {value.type}, and no single number",
            do="let the model take its mean or sum",
        )
    return value


def _scores(output: Value, kind: str, class_axis: int, w: GradientWriter) -> tuple[Value, Node | None]:
    """The scores behind an output: what went into the operator that made probabilities of them, class by class, laid
    out as the output is; and that operator, if there is one."""
    moved: list[Node] = []
    value, rank = output, output.tensor_type.rank
    axis = class_axis % rank if rank else 0
    while value.node is not None and _only_moves(value.node, kind):
        moved.append(value.node)
        axis = _perm(value.node)[axis] if value.node.op_type == "Transpose" and rank else axis
        value = value.node.inputs[0]
    node = value.node
    if node is None or node.domain != "" or node.op_type not in _PROBABILITIES.get(kind, ()):
        return output, None
    if kind == CROSS_ENTROPY and (not rank or int_attribute(node, "axis", -1) % rank != axis):
        return output, None
    scores = node.inputs[0]
    for step in reversed(moved):
        scores = w.op(step.op_type, [scores, *step.operands[1:]], step.attributes, type=step.results[0].type)
    return scores, node


def _only_moves(node: Node, kind: str) -> bool:
    """Whether scores may go through a node as probabilities do: of classes it must be told where they are."""
    if node.domain != "" or len(node.results) != 1:
        return False
    if node.op_type == "Cast":
        return _is_float(node.inputs[0]) and _is_float(node.results[0])
    return node.op_type in (_KEEP_CLASSES if kind == CROSS_ENTROPY else _LAYOUT)


def _perm(node: Node) -> tuple[int, ...]:
    perm = node.attributes.get("perm")
    return perm if isinstance(perm, Ints) else tuple(reversed(range(node.inputs[0].tensor_type.rank or 0)))


def _made_of(output: Value, kind: str) -> Node | None:
    """The operator that makes probabilities a few elementwise nodes before an output; None where there is none."""
    value: Value | None = output
    for _ in range(_FEW):
        node = None if value is None else value.node
        if node is None or node.domain != "":
            return None
        if node.op_type in _PROBABILITIES.get(kind, ()):
            return node
        if not (node.op_type in _ELEMENTWISE or _only_moves(node, "bce")):
            return None
        computed = [each for each in node.inputs if not each.is_constant]
        value = computed[0] if len(computed) == 1 else None
    return None
