"""The Scan of opset 8, which had a batch dim, said with Loops: the version converter drops that dim."""

from collections.abc import Sequence

import onnx
from onnx import TensorProto, helper

from .errors import OnnxError

Nodes = list[onnx.NodeProto]


def rewrite_scans(graph: onnx.GraphProto) -> None:
    """Replace every Scan in a graph of opset 8, and in the graphs nested in it.

    Raises:
        OnnxError: a Scan has sequence lengths, which differ within the batch.
    """
    nodes: Nodes = []
    for node in graph.node:
        for attribute in node.attribute:
            for nested in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                rewrite_scans(nested)
        is_scan = node.op_type == "Scan" and node.domain in ("", "ai.onnx")
        nodes.extend(_Rewrite(node).nodes() if is_scan else [node])
    del graph.node[:]
    graph.node.extend(nodes)


class _Rewrite:
    """One Scan: a Loop over the batch, whose body takes a row of each operand and is a Loop over its steps."""

    def __init__(self, node: onnx.NodeProto) -> None:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        where = f'node "{node.name}"' if node.name else f'Scan of "{"".join(node.output[:1])}"'
        if "body" not in attributes or "num_scan_inputs" not in attributes:
            raise OnnxError("Scan lacks body or num_scan_inputs", where=where, do="export the model again")
        self.node = node
        self.body = attributes["body"].g
        count = attributes["num_scan_inputs"].i
        operands = list(node.input[1:])
        outputs = len(self.body.output)
        fits = 1 <= count <= len(operands) == len(self.body.input) and len(node.output) <= outputs
        if not fits or len(operands) - count > outputs:
            raise OnnxError("Scan and its body do not fit each other", where=where, do="export the model again")
        if node.input[0]:
            raise OnnxError(
                "Scan of opset 8 with sequence lengths is not supported",
                where=where,
                do="export the model again with opset 13 or newer",
            )
        self.states, self.rows = operands[:-count], operands[-count:]
        self.directions = [*attributes["directions"].ints] if "directions" in attributes else [0] * count
        self.results = [name or self.name(f"unused{index}") for index, name in enumerate(node.output)]
        self.results += [self.name(f"unused{index}") for index in range(len(self.results), outputs)]

    def name(self, part: str) -> str:
        """A name that nothing else in the model has: made of a result's."""
        return f"{next(filter(None, self.node.output), 'scan')}/scan/{part}"

    def nodes(self) -> Nodes:
        """What stands in the place of the Scan."""
        zero, one, yes, shape = (self.name(part) for part in ("zero", "one", "true", "shape"))
        loop = helper.make_node(
            "Loop", [self.name("batch"), yes], self.results, name=self.node.name, body=self._over_batch(yes)
        )
        return [
            _constant(zero, TensorProto.INT64, 0),
            _constant(one, TensorProto.INT64, 1),
            _constant(yes, TensorProto.BOOL, 1),
            helper.make_node("Shape", [self.rows[0]], [shape]),
            helper.make_node("Gather", [shape, zero], [self.name("batch")]),
            helper.make_node("Gather", [shape, one], [self.name("length")]),
            loop,
        ]

    def _over_batch(self, yes: str) -> onnx.GraphProto:
        number, states, rows = self.name("b"), self._names("state", self.states), self._names("row", self.rows)
        parts = [self.name(f"out{index}") for index in range(len(self.results))]
        nodes = [
            helper.make_node("Gather", [whole, number], [part])
            for whole, part in zip((*self.states, *self.rows), (*states, *rows), strict=True)
        ]
        nodes.append(helper.make_node("Loop", [self.name("length"), yes, *states], parts, body=self._over_steps(rows)))
        outputs = [_value(part, output) for part, output in zip(parts, self.body.output, strict=True)]
        return self._loop_body("b", nodes, [], outputs)

    def _over_steps(self, rows: Sequence[str]) -> onnx.GraphProto:
        states, steps = self.body.input[: len(self.states)], self.body.input[len(self.states) :]
        nodes: Nodes = []
        for index, (row, step) in enumerate(zip(rows, steps, strict=True)):
            place = self.name("t")
            if self.directions[index]:
                last, place = self.name(f"last{index}"), self.name(f"back{index}")
                nodes.append(helper.make_node("Sub", [self.name("length"), self.name("one")], [last]))
                nodes.append(helper.make_node("Sub", [last, self.name("t")], [place]))
            nodes.append(helper.make_node("Gather", [row, place], [step.name]))
        made = self._loop_body("t", [*nodes, *self.body.node], list(states), list(self.body.output))
        made.initializer.extend(self.body.initializer)
        made.value_info.extend(self.body.value_info)
        return made

    def _loop_body(
        self,
        counter: str,
        nodes: Nodes,
        inputs: Sequence[onnx.ValueInfoProto],
        outputs: Sequence[onnx.ValueInfoProto],
    ) -> onnx.GraphProto:
        """A Loop body that always goes on."""
        number = helper.make_tensor_value_info(self.name(counter), TensorProto.INT64, [])
        given, kept = (
            helper.make_tensor_value_info(self.name(f"{counter}_{part}"), TensorProto.BOOL, [])
            for part in ("goes_on", "kept")
        )
        again = helper.make_node("Identity", [given.name], [kept.name])
        return helper.make_graph([*nodes, again], self.body.name or "body", [number, given, *inputs], [kept, *outputs])

    def _names(self, part: str, wholes: Sequence[str]) -> list[str]:
        return [self.name(f"{part}{index}") for index in range(len(wholes))]


def _constant(name: str, dtype: int, number: int) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=helper.make_tensor(name, dtype, [], [number]))


def _value(name: str, like: onnx.ValueInfoProto) -> onnx.ValueInfoProto:
    """A value of the same dtype and unknown shape."""
    return helper.make_tensor_value_info(name, like.type.tensor_type.elem_type, None)
