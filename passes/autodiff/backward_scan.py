"""The gradient of a Loop or a Scan: a Scan from the last trip to the first.

Where a Loop may have no trips at all it is a Loop, which ONNX Runtime runs no times; a Scan over nothing it refuses.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from irpar.analysis.looping import Looping, Slices, runs_alike
from irpar.analysis.types.control_flow import FLAG
from irpar.ir import Builder, Graph, Ints, Node, Value, tensor_type
from irpar.ir.clone import clone_node
from irpar.ir.graph import captured_or_read
from irpar.ops.effects import is_deterministic
from irpar.ops.facts import text_attribute
from irpar.ops.gradients.writer import GradientWriter, NoGradientError

from .dependence import dependents, is_real

if TYPE_CHECKING:
    from .reverse import Reverse


Product = tuple[tuple[Value, ...], str]
"""Tensors of a trip, and the equation of the Einsum that makes them a part of a gradient: two matrices of which it is
the product over all rows, or the one that it is the sum of rows of."""


TRIP = "T"
"""The letter of trips in equations."""


class BackwardScan:
    """Writes it: the backward pass of one trip, behind the body first, then moved to a body of its own.

    What the backward pass reads of the trip becomes a result that the forward collects, and is scanned from the last
    trip to the first; what may have other sizes in each trip is computed again, Loops in there as a whole. Carried are
    the gradients of what the forward carries, and the sums for what it reads from outside.

    Args:
        reverse: of the graph around it.
        looping: the Loop or Scan.
        captured: values from outside whose gradients are asked for.
        of_results: the gradients of its results.
        writer: writes behind the graph around it.
    """

    def __init__(
        self,
        reverse: "Reverse",
        looping: Looping,
        captured: Sequence[Value],
        of_results: Sequence[Value | None],
        writer: GradientWriter,
    ) -> None:
        self.reverse = reverse
        self.looping = looping
        self.captured = captured
        self.of = dict(zip(looping.node.results, of_results, strict=True))
        self.writer = writer
        self.body = Graph(f"{looping.body.name}_backward", names=looping.body.names)
        self.scanned: list[tuple[Value, int, bool]] = []
        self.there: dict[Value, Value] = {}

    def write(self) -> Iterator[tuple[Value, Value | None]]:
        """Insert it.

        Returns:
            The values outside that get a gradient, with these.
        """
        looping, reverse = self.looping, self.reverse
        active = self._active()
        inside = [looping.carried[index][1] for index in active]
        elements = [slices for slices in looping.read if slices.outside in reverse.depends]
        wanted = [*inside, *(slices.inside for slices in elements), *self.captured]
        carried = self._with_gradient(active)
        states = {index: self.body.add_input("", looping.carried[index][1].type) for index in carried}
        sums = {value: self.body.add_input("", value.type) for value in self.captured}
        seeds = [(looping.carried[index][2], state) for index, state in states.items()]
        for slices in looping.collected:
            of = self.of.get(slices.outside)
            if of is not None:
                seeds.append((slices.inside, self._scan(of, slices)))
        last = looping.body.last
        found = reverse.inner(looping.body, wanted).run(seeds)
        self._move(last)
        inner = GradientWriter(self.body, reverse.opsets)
        late = self._summed_late(found, sums) if not looping.may_be_empty else {}
        outputs = [found.get(looping.carried[index][1]) or inner.zeros(states[index]) for index in carried]
        outputs += [inner.add(sum_, found[value]) if value in found else sum_ for value, sum_ in sums.items()]
        collected = [slices for slices in elements if slices.inside in found]
        outputs += [found[slices.inside] for slices in collected]
        pairs = [pair for products in late.values() for pair in products]
        rows = list(dict.fromkeys(value for factors, _ in pairs for value in factors))
        fresh = [value for value in rows if self._stacked(value) is None]
        outputs += fresh
        if not self.scanned:
            self._count_trips()
        self._return(outputs, inner)
        starts = self._starts([*states], [*sums])
        results = [Value("", value.type) for value in (*states.values(), *sums)]
        if looping.may_be_empty:
            node = self._loop(starts, results)
        else:
            node = self._scan_node(starts, results, collected, fresh)
        stacks = dict(zip(fresh, node.results[len(node.results) - len(fresh) :], strict=True))
        for value, products in late.items():
            yield value, self._products(products, stacks)
        targets = [*(looping.carried[index][0] for index in carried), *sums, *(slices.outside for slices in collected)]
        for target, gradient in zip(targets, node.results[: len(node.results) - len(fresh)], strict=True):
            if target is not None:
                yield target, gradient

    def _active(self) -> list[int]:
        """The carried values that depend on something whose gradient is asked for, from some trip on."""
        looping, depends, straight = self.looping, self.reverse.depends, self.reverse.straight_through
        active = [
            index for index, (start, _, _) in enumerate(looping.carried) if start is not None and start in depends
        ]
        read = [slices.inside for slices in looping.read if slices.outside in depends]
        while True:
            inside = [looping.carried[index][1] for index in active]
            found = dependents(looping.body, [*inside, *read, *self.captured], straight_through=straight)
            more = [
                index
                for index, (_, _, out) in enumerate(looping.carried)
                if index not in active and out in found and is_real(out.type)
            ]
            if not more:
                return sorted(index for index in active if is_real(looping.carried[index][1].type))
            active += more

    def _with_gradient(self, active: Sequence[int]) -> list[int]:
        """Those of them that a result with a gradient depends on."""
        looping, straight = self.looping, self.reverse.straight_through
        reached = {index for index in active if self.of.get(looping.finals[index]) is not None}
        ends = {slices.inside for slices in looping.collected if self.of.get(slices.outside) is not None}
        reaches = {
            index: dependents(looping.body, [looping.carried[index][1]], straight_through=straight) for index in active
        }
        while True:
            out = ends | {looping.carried[index][2] for index in reached}
            more = {index for index in active if index not in reached and reaches[index] & out}
            if not more:
                return sorted(reached)
            reached |= more

    def _scan(self, outside: Value, slices: Slices) -> Value:
        """Let the backward scan a tensor that the forward reads or collects; the slice in its body."""
        self.scanned.append((outside, slices.axis, not slices.backwards))
        return self.body.add_input("", slices.inside.type)

    def _move(self, last: Node | None) -> None:
        """Take the nodes behind the forward's over; what they read of a trip is scanned."""
        forward = self.looping.body
        behind: list[Node] = []
        node = forward.last
        while node is not None and node is not last:
            behind.append(node)
            node = node.previous
        for node in reversed(behind):
            self.body.append(node.detach())
        for value in tuple(forward.constants):
            self.reverse.graph.lift_constant(value)
        first = self.body.first
        for graph in (self.body, *(inner for node in self.body for inner in _graphs_in(node))):
            for node in (*graph, graph.return_node):
                for index, value in enumerate(node.operands):
                    if value is not None and value.owner is forward:
                        node.set_operand(index, self._there(value, first))

    def _there(self, value: Value, first: Node | None) -> Value:
        """The same value of the same trip, in the backward's body: saved, or computed again before its first node."""
        known = self.there.get(value)
        if known is None:
            made = value.node
            if made is not None and first is not None and self._varies(value) and is_deterministic(made):
                self._compute_again(made, first)
                return self.there[value]
            known = self.there[value] = self._saved(value)
        return known

    def _varies(self, value: Value) -> bool:
        """Whether a value may have other sizes in each trip: what a Loop in there collects has one for each of its."""
        node = value.node
        if node is None or node.identity != ("", "Loop"):
            return _may_vary(value)
        (body,) = node.nested_graphs()
        is_collected = node.results.index(value) >= len(body.inputs) - 2
        if not is_collected or not runs_alike(node, self.looping.body):
            return is_collected or _may_vary(value)
        shape = value.tensor_type.shape
        return shape is None or None in shape[1:]

    def _compute_again(self, node: Node, first: Node) -> None:
        """Put a copy of a node that gives other sizes in each trip, which cannot be collected, into the backward."""
        forward = self.looping.body
        read = dict.fromkeys(captured_or_read(node))
        values = {value: self._there(value, first) for value in read if value.owner is forward}
        copy = clone_node(node, values, self.body.names)
        for result in copy.results:
            result.source = None
        self.body.insert_before(first, copy)
        for inner in (copy, *(inner for graph in _graphs_in(copy) for inner in graph)):
            inner.phase = "backward"
        self.there.update(zip(node.results, copy.results, strict=True))

    def _saved(self, value: Value) -> Value:
        """The same value of the same trip, scanned."""
        looping = self.looping
        for slices in looping.read:
            if slices.inside is value:
                return self._scan(slices.outside, slices)
        self._refuse_growing(value)
        slices = looping.collect(value)
        return self._scan(slices.outside, Slices(slices.outside, value, slices.axis, slices.backwards))

    def _refuse_growing(self, value: Value) -> None:
        """Refuse to save a carried value of which trips have other sizes: they cannot be collected.

        Raises:
            NoGradientError: naming it.
        """
        for start, inside, _ in self.looping.carried:
            before, then = tensor_type(start.type) if start is not None else None, tensor_type(inside.type)
            if inside is value and before is not None and then is not None and before.is_static and not then.is_static:
                raise NoGradientError(f"%{value.name} has other sizes in later trips, so that they cannot be saved")

    def _count_trips(self) -> None:
        """Let something be scanned, so that there are as many trips."""
        number = self.looping.number
        assert number is not None, "a Scan reads something"
        slices = self.looping.collect(number)
        self._scan(slices.outside, Slices(slices.outside, number))

    def _return(self, outputs: Sequence[Value], inner: GradientWriter) -> None:
        """Let the body give values; each is one that it computes, and no other is the same."""
        given: list[Value] = []
        for value in outputs:
            is_own = value.node is not None and value.owner is self.body and value not in given
            given.append(value if is_own else inner.op("Identity", [value]))
        self.body.set_outputs(given, [value.name for value in given])

    def _starts(self, carried: Sequence[int], sums: Sequence[Value]) -> list[Value]:
        """What is carried into the last trip."""
        writer, finals = self.writer, self.looping.finals
        starts = [self.of.get(finals[index]) or writer.zeros(finals[index]) for index in carried]
        return starts + [writer.zeros(value) for value in sums]

    # -- gradients of weights as one product ------------------------------------------------------------------------

    def _summed_late(self, found: dict[Value, Value], sums: dict[Value, Value]) -> dict[Value, list[Product]]:
        """The captured values whose gradients are sums of products of two matrices of a trip, or of the rows of one:
        weights and biases.

        dw = dw + MatMul(Transpose(h), dz) in each trip is one product of all h and all dz behind the Scan. These need
        not be carried: they are taken out of `sums`.
        """
        late = {}
        for value in list(sums):
            products = _products_of(found[value], self.body) if value in found else None
            if products is not None and not any(_may_vary(factor) for factors, _ in products for factor in factors):
                late[value] = products
                self.body.remove_input(sums.pop(value))
        return late

    def _stacked(self, value: Value) -> Value | None:
        """All trips of a slice, the first trip first along dim 0, where that is there already."""
        if value in self.body.inputs:
            place = self.body.inputs.index(value) - (len(self.body.inputs) - len(self.scanned))
            if place >= 0:
                outside, axis, is_turned = self.scanned[place]
                return outside if axis == 0 and is_turned else None
        return None

    def _products(self, products: Sequence[Product], stacks: dict[Value, Value]) -> Value:
        """The sum over trips and rows of the products of two stacks."""
        total: Value | None = None
        for values, equation in products:
            factors = [self._stacked(value) or stacks[value] for value in values]
            if len(factors) == 1:
                made = self.writer.sum(factors[0], [0, 1], keep=False)
            else:
                terms, result = equation.split("->")
                over_trips = ",".join(f"{TRIP}{term}" for term in terms.split(","))
                made = self.writer.einsum(factors, f"{over_trips}->{result}")
            total = made if total is None else self.writer.add(total, made)
        assert total is not None
        return total

    def _scan_node(
        self, starts: Sequence[Value], results: Sequence[Value], collected: Sequence[Slices], rows: Sequence[Value]
    ) -> Node:
        """Insert a Scan, which also collects rows: the first trip first."""
        results = [*results, *(Value("", slices.outside.type) for slices in collected)]
        for value in rows:
            results.append(Value("", value.tensor_type.with_shape((self.looping.trips, *self.writer.dims(value)))))
        attributes: dict[str, object] = {
            "body": self.body,
            "num_scan_inputs": len(self.scanned),
            "scan_input_axes": Ints(axis for _, axis, _ in self.scanned),
            "scan_input_directions": Ints(int(backwards) for _, _, backwards in self.scanned),
        }
        if collected or rows:
            attributes["scan_output_axes"] = Ints([*(slices.axis for slices in collected), *[0] * len(rows)])
            turned = [int(not slices.backwards) for slices in collected]
            attributes["scan_output_directions"] = Ints([*turned, *[1] * len(rows)])
        operands = [*starts, *(outside for outside, _, _ in self.scanned)]
        return self.writer.node("Scan", operands, attributes, results=results)

    def _loop(self, starts: Sequence[Value], results: Sequence[Value]) -> Node:
        """Insert a Loop, whose body takes the slices of a trip itself."""
        writer, body = self.writer, self.body
        outside = self.scanned[0][0]
        trips = writer.squeeze(writer.op("Shape", [outside], {"start": 0, "end": 1}), [0])
        last = writer.sub(trips, 1)
        slices = body.inputs[len(starts) :]
        number, goes_on = body.add_input("trip", last.type), body.add_input("goes_on", FLAG)
        front = Builder(body, self.reverse.opsets, before=body.first, like=writer.like)
        place = front.op("Sub", [last, number], type=last.type)
        for (saved, axis, _), inside in zip(self.scanned, slices, strict=True):
            inside.replace_uses(front.op("Gather", [saved, place], {"axis": axis}, type=inside.type))
            body.remove_input(inside)
        for made in front.made:
            made.phase = "backward"
        body.inputs[:] = [number, goes_on, *body.inputs[:-2]]
        for index, value in enumerate(body.inputs):
            value.index = index
        still = GradientWriter(body, self.reverse.opsets).op("Identity", [goes_on])
        body.set_outputs([still, *body.outputs], [still.name, *body.output_names])
        always = writer.constant(True, "always")
        return writer.node("Loop", [trips, always, *starts], {"body": body}, results=results)


def _may_vary(value: Value) -> bool:
    """Whether a value may have other sizes in each trip."""
    found = tensor_type(value.type)
    return found is None or found.shape is None or None in found.shape


def _products_of(gradient: Value, body: Graph) -> list[Product] | None:
    """The products of two tensors of a trip that a gradient is the sum of; None where it is something else.

    [n, i] and [n, j] of MatMul(Transpose([n, i]), [n, j]); [a, b, i] and [a, b, j] of Einsum "abi,abj->ij".
    """
    node = gradient.node
    if node is None or node.graph is not body:
        return None
    if node.identity == ("", "Add"):
        parts = [_products_of(value, body) for value in node.inputs]
        return None if None in parts else [pair for part in parts if part is not None for pair in part]
    if node.identity == ("", "ReduceSum"):
        return _sum_of_rows(node, body)
    if node.identity == ("", "Einsum"):
        return _einsum_of(node, body)
    if node.identity != ("", "MatMul"):
        return None
    turned, right = node.inputs
    source = turned.node
    if source is None or source.graph is not body or source.identity != ("", "Transpose"):
        return None
    left = source.inputs[0]
    found = [tensor_type(value.type) for value in (left, right)]
    are_matrices = all(type_ is not None and type_.rank == 2 for type_ in found)
    return [((left, right), "ni,nj->ij")] if are_matrices and left.owner is body and right.owner is body else None


def _einsum_of(node: Node, body: Graph) -> list[Product] | None:
    equation = text_attribute(node, "equation", "").replace(" ", "")
    is_plain = "->" in equation and "." not in equation and TRIP not in equation
    if len(node.inputs) != 2 or not is_plain or any(value.owner is not body for value in node.inputs):
        return None
    return [((node.inputs[0], node.inputs[1]), equation)]


def _sum_of_rows(node: Node, body: Graph) -> list[Product] | None:
    rows, axes = node.inputs
    found = tensor_type(rows.type)
    is_matrix = found is not None and found.rank == 2 and rows.owner is body
    is_first = axes.data is not None and axes.data.numpy().tolist() == [0] and not node.attributes.get("keepdims", 1)
    return [((rows,), "")] if is_matrix and is_first else None


def _graphs_in(node: Node) -> Iterator[Graph]:
    for graph in node.nested_graphs():
        yield from graph.graphs()
