"""accumulate: gradients summed over micro-batches before one update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from irpar.analysis.completion.flow import require_global
from irpar.analysis.trips import Trips, When, say_trips
from irpar.errors import IrparError, listed
from irpar.globs import matching_names
from irpar.ir import Dim, Graph, Module, Value, captured_or_read, tensor_type
from irpar.ir.annotate import matches
from irpar.ir.annotation import Annotation, AnnotationError
from irpar.ir.state import LOSS
from irpar.ir.state_rules import replace_outputs
from irpar.ops.effects import draws_random_numbers
from irpar.ops.gradients.writer import GradientWriter
from irpar.pass_manager import Pass, PassResult
from irpar.passes.add_loss import COUNTED, MASK, TARGET
from irpar.passes.autodiff import GRAD
from irpar.sharding import Sharding, spelled

PREFIX = "micro_batch."
"""Before the names of what the loop has of a tensor in each trip."""
MOST = 2**31 - 1
"""Micro-batches; with more the sizes of what is stacked may leave 64 bits."""


class AccumulateError(IrparError):
    """Micro-batches that cannot be."""


@dataclass(frozen=True)
class Accumulate(Pass):
    """Compute the gradients of a step over micro-batches, one after the other, and add them up.

    Before: global view, after autodiff of the loss with outputs kept: results `loss`, `grad.<parameter>` and what
    replaces state, and the input `grad.loss`. After: inputs that are samples are [micro-batches, b, ...]; one Scan over
    them, whose body holds all nodes that depend on samples or on what a trip leaves to the next; what does not is
    computed before it. Gradients are sums over the trips, in float32 where they are of narrower floats, and the loss is
    a mean of theirs: of all targets that count together where the graph says how many do (the result `loss_targets`),
    else of equal micro-batches. State that the step replaces, such as running statistics or the counter that masks of
    dropout are made of, goes from trip to trip; other results are stacked.

    s, l = Scan(0, 0, xs : [4, 8, 64]) { s, l, x : [8, 64] -> s + grad(x), l + loss(x) / 4 }

    Attributes:
        micro_batches: how many.
        undivided: names or globs of inputs that each trip reads whole. So are all inputs whose first dim is not that of
            `target` or, where there is none, of the first input with dims.
        reduce: when gradients are reduced of which a rank then holds a share: once a `step`, of which ranks hold all
            that micro-batches add up; in each `micro-batch`, which sends more; auto: once, where ranks have the memory.
        gather: when parameters are gathered that `zero` shards; likewise.
    """

    name = "accumulate"
    micro_batches: int
    undivided: tuple[str, ...] = ()
    reduce: When = "auto"
    gather: When = "auto"

    def run(self, module: Module) -> PassResult:
        """Write the loop.

        Raises:
            AccumulateError: the number or a name does not fit, the graph has no gradients, or no batch.
            IrparError: the module is in local view already.
        """
        if not 1 <= self.micro_batches <= MOST:
            raise AccumulateError(f"{self.micro_batches} micro-batches", do=f"give a number from 1 to {MOST}")
        require_global(module, self.name)
        _check(module.graph)
        samples = self.samples(module)
        if self.micro_batches == 1:
            return PassResult(False)
        whole = [name for name in self._given(module) if name not in {value.source_name for value in samples}]
        _Loop(module, self.micro_batches, samples).write()
        say_trips(module, Trips(self.reduce, self.gather))
        notes = (f"each of the {self.micro_batches} micro-batches reads {listed(whole, 5)} whole",) if whole else ()
        return PassResult(True, notes, {"inputs": len(samples)})

    def samples(self, module: Module) -> list[Value]:
        """The inputs of which each trip reads its own.

        Raises:
            AccumulateError: there are none, or a name of `undivided` matches none, or the target
                alone would be divided.
        """
        given = self._given(module)
        left = {name for pattern in self.undivided for name in _named(pattern, given)}
        rows = {name: _first_dim(value) for name, value in given.items() if name not in left}
        batch = rows.get(TARGET) or next((size for size in rows.values() if size is not None), None)
        found = [given[name] for name, size in rows.items() if size is not None and size == batch]
        if not found:
            raise AccumulateError(
                "no input has a first dim that counts samples: there is nothing to divide into micro-batches",
                notes=tuple(f"{name} is {value.type}" for name, value in given.items()),
                do="train a model whose inputs are batches, or leave out micro-batches",
            )
        left_out = [name for name, size in rows.items() if size is not None and size != batch]
        if left_out and TARGET in rows and {value.source_name for value in found} <= {TARGET, MASK}:
            raise AccumulateError(
                f"only {TARGET} would be divided into micro-batches: the first dims of other inputs are not its own",
                notes=tuple(f"{name} is {given[name].type}" for name in (TARGET, *left_out)),
                do="let the model give its output with the samples in front, not merged with another dim; or say that "
                "micro-batches share these inputs: "
                + spelled(f"--undivided {left_out[0]}", f'undivided=["{left_out[0]}"]'),
            )
        return found

    def _given(self, module: Module) -> dict[str, Value]:
        """The inputs of the model and the target, by name."""
        graph = module.graph
        gradients = {name for name in graph.output_names if name.startswith(GRAD)}
        return {
            value.source_name: value
            for value in graph.inputs
            if value not in graph.states
            and value.source_name not in module.fixed
            and GRAD + value.source_name not in gradients
            and not value.source_name.startswith(GRAD)
        }


def _check(graph: Graph) -> None:
    """Refuse a graph without gradients of a loss.

    Raises:
        AccumulateError: see there.
    """
    if _seed(graph) is None or LOSS not in graph.output_names:
        raise AccumulateError(
            "the graph has no gradients of a loss: there is nothing to add up",
            do=f"run add-loss and autodiff{{outputs=[{LOSS}], keep-outputs=true}} before it, the optimizer after it; "
            "or let irpar train make the step: --micro-batches",
        )


def _seed(graph: Graph) -> Value | None:
    """What the gradient of the loss begins with."""
    return next((value for value in graph.inputs if value.source_name == GRAD + LOSS), None)


def _named(pattern: str, known: Mapping[str, Value]) -> list[str]:
    """The inputs that a name or glob is of.

    Raises:
        AccumulateError: it is of none.
    """
    found = matching_names(pattern, known)
    if not found:
        raise AccumulateError(f'undivided "{pattern}" matches no input', do=f"name one of {listed(list(known), 5)}")
    return found


def _first_dim(value: Value) -> Dim:
    found = tensor_type(value.type)
    return found.shape[0] if found is not None and found.shape else None


def _annotated(module: Module, annotation: Annotation) -> list[Value]:
    """What an annotation that waits for a mesh is about; nothing is known of one whose value is yet to come."""
    try:
        return matches(module, annotation)
    except AnnotationError:
        return []


class _Loop:
    """Moves the nodes of a step into the body of a Scan.

    Attributes:
        module, graph: what is rewritten.
        trips: how many.
        samples: the inputs that are scanned.
        body: of the Scan.
        before: writes in front of the Scan, and behind it once it is there.
        inside: writes at the end of its body.
        starts: what carried values begin as.
        ends: what a trip leaves of each of them to the next, by the name of the result that it becomes.
        annotated: for each annotation that waits for a mesh what it is about.
    """

    def __init__(self, module: Module, trips: int, samples: Sequence[Value]) -> None:
        self.module = module
        self.graph = module.graph
        self.trips = trips
        self.samples = samples
        self.body = Graph("micro_batch", names=self.graph.names)
        self.before = GradientWriter(self.graph, module.opsets)
        self.inside = GradientWriter(self.body, module.opsets)
        self.starts: list[Value] = []
        self.ends: dict[str, Value] = {}
        # Asked while the graph has all values: the body has no node yet when its inputs change.
        self.annotated = [_annotated(module, annotation) for annotation in module.annotations]

    def write(self) -> None:
        """Write the Scan, and let the graph give what it ends as."""
        graph = self.graph
        outputs = dict(zip(graph.output_names, graph.outputs, strict=True))
        replaced = {
            graph.output_names[state.output]: value for value, state in graph.states.items() if state.output is not None
        }
        sums = [name for name in outputs if name in (LOSS, COUNTED) or name.startswith(GRAD)]
        counted = outputs.get(COUNTED)
        seed = _seed(graph)
        assert seed is not None
        self._move({*self.samples, *replaced.values(), *([seed] if counted is not None else ())})
        self._weigh(seed, counted)
        for name, state in replaced.items():
            self._carry(name, state, outputs[name])
        first = {outputs[name]: name for name in reversed(sums)}
        for value, name in reversed(first.items()):
            self._add_up(name, value, counted)
        rest = [name for name in outputs if name not in replaced and name not in sums]
        found = self._scan({name: self._stacked(name, outputs[name]) for name in rest})
        for name in first.values() if counted is not None else ():
            if name != COUNTED:
                found[name] = self.before.div(found[name], self.before.cast(found[COUNTED], found[name].dtype))
        for name, value in found.items():
            value.rename(name)
        found |= {name: found[first[outputs[name]]] for name in sums}
        replace_outputs(graph, [(name, found[name]) for name in outputs if name != COUNTED])

    def _move(self, varying: set[Value]) -> None:
        """Move what depends on a trip into the body, and what draws random numbers."""
        for node in tuple(self.graph):
            if draws_random_numbers(node) or not varying.isdisjoint(captured_or_read(node)):
                varying.update(node.results)
                self.body.append(node.detach())

    def _weigh(self, seed: Value, counted: Value | None) -> None:
        """Let a micro-batch count as often as it has targets that count; where that is not told, all alike."""
        uses = seed.uses
        if counted is None:
            writer, factor = GradientWriter(self.graph, self.module.opsets, before=self.graph.first), 1 / self.trips
            writer.phase = "backward"
            seed.replace_uses(writer.mul(seed, factor), only=uses)
            return
        readers = {node for node, _ in uses}
        first = next((node for node in self.body if node in readers), None)
        writer = GradientWriter(self.body, self.module.opsets, before=first)
        writer.phase = "backward"
        share = writer.mul(writer.cast(counted, seed.dtype), 1 / self.trips)
        seed.replace_uses(writer.mul(seed, share), only=uses)

    def _carry(self, name: str, state: Value, after: Value) -> None:
        """Let a trip find a state as the one before left it."""
        self.starts.append(state)
        self._read_inside(state, self.body.add_input(PREFIX + state.name, state.type))
        self.ends[name] = self._own(after)

    def _add_up(self, name: str, value: Value, counted: Value | None) -> None:
        """Let the trips add up a gradient, the loss, or the number of targets that count."""
        inside = self._behind(value, counted if name == LOSS else None)
        term = inside.widened(value)
        if name == LOSS:
            term = term if counted is None else inside.mul(term, inside.cast(counted, term.dtype))
        if name in (LOSS, COUNTED):
            term = inside.mul(term, 1 / self.trips)
        sizes = self.before.shape_of(value if value.is_static else self._parameter(name))
        self.starts.append(self.before.op("Expand", [self.before.number(0, term), sizes], type=term.type))
        total = self.body.add_input(f"{PREFIX}sum.{name}", term.type)
        value.rename(PREFIX + name)
        self.ends[name] = inside.add(total, term)

    def _behind(self, value: Value, other: Value | None) -> GradientWriter:
        """Writes right behind what makes values: a gradient is held no longer than until it is added."""
        makers = [each.node for each in (value, other) if each is not None and each.node is not None]
        own = [node for node in makers if node.graph is self.body]
        if not own:
            return self.inside
        last = own[0] if len(own) == 1 or self.body.is_before(own[1], own[0]) else own[1]
        writer = GradientWriter(self.body, self.module.opsets, before=last.next)
        writer.phase = "backward"
        return writer

    def _parameter(self, name: str) -> Value:
        """What a gradient is of."""
        return next(value for value in self.graph.values() if GRAD + value.source_name == name)

    def _own(self, value: Value) -> Value:
        """A value as the body can give it: it computes that itself."""
        made = value if value.node is not None and value.node.graph is self.body else None
        return made if made is not None and made not in self.ends.values() else self.inside.op("Identity", [value])

    def _stacked(self, name: str, value: Value) -> Value:
        """What the body gives of each trip."""
        made = self._own(value)
        if value.node is not None and value.name == name:
            value.rename(PREFIX + name)
        return made

    def _read_inside(self, value: Value, inner: Value) -> None:
        """Let the body read its own value instead of one of the graph."""
        value.replace_uses(inner, only=[use for use in value.uses if use[0] is not self.graph.return_node])

    def _scan(self, stacked: Mapping[str, Value]) -> dict[str, Value]:
        """Write the Scan.

        Args:
            stacked: what the body gives of each trip, by name.

        Returns:
            What the carried values end as, and all trips of the others.
        """
        for value in self.samples:
            self._read_inside(value, self.body.add_input(PREFIX + value.name, value.type))
            self._lead(value)
        given = {**self.ends, **stacked}
        self.body.set_outputs(list(given.values()), [PREFIX + name for name in given])
        results = [Value("", value.type) for value in self.ends.values()]
        for value in stacked.values():
            dims = self.before.dims(value)
            results.append(Value("", value.tensor_type.with_shape((self.trips, *dims))))
        attributes = {"body": self.body, "num_scan_inputs": len(self.samples)}
        node = self.before.node("Scan", [*self.starts, *self.samples], attributes, results=results)
        return dict(zip(given, node.results, strict=True))

    def _lead(self, value: Value) -> None:
        """Give an input a first dim that counts micro-batches, which is not sharded."""
        value.type = value.tensor_type.with_shape((self.trips, *self.before.dims(value)))
        known = self.module.annotated.get(value.name)
        if known is not None:
            self.module.annotated[value.name] = replace(known, spec=(None, *known.spec))
        if value.sharding is not None:
            value.sharding = Sharding.of_spec(value.sharding.mesh, [None, *value.sharding.spec()])
        waiting = self.module.annotations
        for place, annotation in enumerate(waiting):
            if self.annotated[place] == [value] and len(annotation.spec) == len(value.shape) - 1:
                waiting[place] = replace(annotation, spec=(None, *annotation.spec))
