"""The module: graphs, functions and meshes of one model."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from irpar.sharding import ArgumentError, DimSpec, IrparError, Mesh, described, listed, require, spelled, with_priority

from .decisions import Conflict, Decision, Gone
from .function import Function
from .graph import Graph
from .state import StateKind
from .tensor import Tensor

if TYPE_CHECKING:
    from .annotate import NamedValues
    from .annotation import Annotation
    from .text.files import Printed

IRPAR_OPSET = 1
"""Version of irpar's own operator domain."""
_INPUTS_SHOWN = 4
DEFAULT_NETWORK = "bytes"
"""The network that counts what is sent."""


def _check_spec(pattern: str, spec: object) -> None:
    """Refuse what is no list with an entry a dim.

    Raises:
        ArgumentError: naming what was given, and what to write.
    """
    do = 'write a list, one entry a dim: an axis, a list of axes, or None: ["tp", None]'
    if isinstance(spec, str):
        do = f'write a list, one entry a dim: ["{spec}", None]'
    if isinstance(spec, str) or not isinstance(spec, Sequence):
        raise ArgumentError(f'the sharding of "{pattern}" is {described(spec)}', do=do)
    for dim in spec:
        words = [] if dim is None else [dim] if isinstance(dim, str) or not isinstance(dim, Sequence) else dim
        for word in words:
            require(f'an axis in the sharding of "{pattern}"', word, str, do)


class Module:
    """One model: a graph in global view, or (after localize) the distinct local graphs of its ranks.

    Attributes:
        graphs: one global graph, or local graphs whose `ranks` together are all ranks of the mesh.
        functions: (domain, name, overload) to function.
        meshes: name to mesh; all are views of one device list.
        opsets: domain to opset version, "" for ai.onnx.
        ir_version, producer, doc, metadata: as in ONNX.
        source: the file that the module was loaded from.
        annotations: what `shard` was told before the module had a mesh.
        annotated: value name to the annotation that decided its sharding.
        decisions: value name to why it is sharded so; a log that passes write, not part of the program.
        run_as_said: name of a node in the source model to what says how it runs; a log as well.
        gone: value name to its annotation, where passes have taken the value out since; a log as well.
        dim_names: name of an input or result to the symbols that its dims were before they got sizes, None for others.
        whole: name of a node's first result to why the node runs on full tensors; a log as well.
        placed: name of an input or constant to why it lies in the memory where it does; a log as well.
        fixed: name of an input to the only value that it takes: `irpar.inputs.fixed` has put that in its place.
        literals: names of constants that are no initializers in the source model, but nodes: no parameters.
        conflicts: name of what a collective gives to the conflict that it resolves; a log as well.
        free_results: names of results that nobody but complete-sharding has sharded: they may leave otherwise.
        network: what communication is taken to cost, as `irpar.analysis.cost.network_lookup.network_of` reads it: the
            name of a preset, or the fields of a network file as JSON.
        repeats: in a module with a few of many equal layers, name of a value of the one that stands for others to how
            many layers that are, itself included; empty in any other.
        memory_limit: bytes that a rank may hold; passes that only make programs faster do not act where that would
            break it. None: no limit.
    """

    __slots__ = (
        "_named_values",
        "annotated",
        "annotations",
        "conflicts",
        "decisions",
        "dim_names",
        "doc",
        "fixed",
        "free_results",
        "functions",
        "gone",
        "graphs",
        "ir_version",
        "literals",
        "memory_limit",
        "meshes",
        "metadata",
        "network",
        "opsets",
        "placed",
        "producer",
        "repeats",
        "run_as_said",
        "source",
        "whole",
    )

    def __init__(self, graph: Graph | None = None, *, opsets: dict[str, int] | None = None) -> None:
        self.graphs: list[Graph] = [graph if graph is not None else Graph()]
        self.functions: dict[tuple[str, str, str], Function] = {}
        self.meshes: dict[str, Mesh] = {}
        self.opsets: dict[str, int] = dict(opsets or {})
        self.ir_version = 10
        self.producer: tuple[str, str] = ("", "")
        self.doc = ""
        self.metadata: dict[str, str] = {}
        self.source: Path | None = None
        self.annotations: list[Annotation] = []
        self.annotated: dict[str, Annotation] = {}
        self.decisions: dict[str, list[Decision]] = {}
        self.run_as_said: dict[str, Annotation] = {}
        self.gone: dict[str, Gone] = {}
        self.dim_names: dict[str, tuple[str | None, ...]] = {}
        self.whole: dict[str, str] = {}
        self.placed: dict[str, str] = {}
        self.fixed: dict[str, Tensor] = {}
        self.literals: set[str] = set()
        self.free_results: set[str] = set()
        self.conflicts: dict[str, Conflict] = {}
        self.network = DEFAULT_NETWORK
        self.repeats: dict[str, int] = {}
        self.memory_limit: int | None = None
        self._named_values: NamedValues | None = None

    @property
    def graph(self) -> Graph:
        """The global graph, or the first of the local ones."""
        return self.graphs[0]

    @property
    def is_local(self) -> bool:
        """True after localize."""
        return self.graph.view == "local"

    @property
    def mesh(self) -> Mesh:
        """The only mesh.

        Raises:
            IrparError: the module has none, or several.
        """
        if len(self.meshes) != 1:
            raise IrparError(
                f"the module has {len(self.meshes) or 'no'} mesh{'es' if self.meshes else ''}, one is needed",
                do=spelled("give a mesh: --mesh dp=2,tp=4", 'give a mesh: irpar.partition(module, "dp=2,tp=4")'),
            )
        return next(iter(self.meshes.values()))

    def set_mesh(self, mesh: Mesh | Mapping[str, int] | str) -> None:
        """Add a mesh, or agree with the one of the same name; apply the annotations that waited for it.

        Raises:
            IrparError: another mesh has that name, or an annotation does not fit.
        """
        from .annotate import apply

        mesh = Mesh.of(mesh)
        known = self.meshes.setdefault(mesh.name, mesh)
        if known != mesh:
            raise IrparError(
                f"mesh {mesh} does not agree with mesh {known}, which the annotations were written for",
                do="use the same axes and sizes in both places, or leave one out",
            )
        waiting, self.annotations = self.annotations, []
        for annotation in waiting:
            apply(self, annotation, mesh)

    @property
    def named_values(self) -> "NamedValues":
        """The values by the names that annotations may call them; made once, and again after the graphs changed."""
        from .annotate import NamedValues

        if self._named_values is None or not self._named_values.is_of(self):
            self._named_values = NamedValues(self)
        return self._named_values

    def forget_names(self) -> None:
        """Let go of `named_values`, and of the values that a pass has erased with it."""
        self._named_values = None

    def all_graphs(self) -> Iterator[Graph]:
        """Every graph: main, local, function bodies, and all graphs nested in these."""
        for graph in self.graphs:
            yield from graph.graphs()
        for function in self.functions.values():
            yield from function.graph.graphs()

    def shard(self, pattern: str, spec: Sequence[DimSpec], *, priority: int = 0) -> int:
        """Annotate the values of the source model whose names match a glob; see `irpar.ir.annotate`.

        Args:
            pattern: name or glob.
            spec: for each dim None, an axis, or a list of axes, "?" and "priority=1".
            priority: of the dims that are sharded or open and have none of their own; 0 goes first in completion.

        Returns:
            How many values the pattern matches.

        Raises:
            IrparError: it matches none, or the spec does not fit.
        """
        from .annotate import annotate
        from .annotation import Annotation, AnnotationError

        require("the name of what is annotated", pattern, str, 'write a name or glob: "h.*.fc.weight"')
        _check_spec(pattern, spec)
        try:
            dims = with_priority(spec, priority)
        except IrparError as error:
            raise AnnotationError(error.what, where=f'"{pattern}"', do=error.do) from None
        return annotate(self, Annotation(pattern, tuple(dims)))

    def add_state(
        self,
        name: str,
        output: str | None = None,
        *,
        kind: StateKind = "cache",
        data: Tensor | np.ndarray[Any, Any] | None = None,
        parameter: str | None = None,
    ) -> None:
        """Let an input keep its value from run to run: it stays on its rank, with one sharding before and after.

        Args:
            name: of an input; or of a weight, which becomes an input that begins with its numbers.
            output: the result that replaces it after a run; None: it stays as it is.
            kind: see `irpar.ir.state.State`.
            data: the full tensor or array before the first run; None: the weight's numbers, or zeros.
            parameter: the name of the parameter that a moment or a master copy belongs to.

        Raises:
            StateError: there is no such input or result, or they do not fit each other.
        """
        from .state_rules import add_state

        add_state(self, name, output, kind=kind, data=data, parameter=parameter)

    def __repr__(self) -> str:
        inputs = listed([repr(value) for value in self.graph.inputs], _INPUTS_SHOWN)
        nodes = sum(map(len, self.graphs))
        mesh = "".join(f" over {mesh}" for mesh in self.meshes.values())
        kind = f"local module{mesh}, {len(self.graphs)} programs" if self.is_local else f"module{mesh}"
        return f"<{kind}: {self.graph.name or 'unnamed'}, {nodes:,} nodes, inputs {inputs or 'none'}>"

    def _repr_html_(self) -> str:
        from irpar.tables.html import report_html

        from .tables import print_module

        return report_html(lambda page: print_module(page, self))

    def decide(self, name: str, decision: Decision) -> None:
        """Log why a value is sharded so."""
        self.decisions.setdefault(name, []).append(decision)

    def decision(self, name: str, axis: str | None = None) -> Decision | None:
        """Why a value is sharded by an axis: a decision about this axis goes before one about the sharding altogether.

        Without an axis, the first decision about the value.
        """
        known = self.decisions.get(name, ())
        if axis is None:
            return known[0] if known else None
        about = (decision for decision in known if axis in decision.axes)
        return next(about, next((decision for decision in known if not decision.axes), None))

    def chain(self, name: str, axis: str | None = None) -> list[tuple[str, Decision]]:
        """The decisions that lead to a value's cut by an axis, from the value back to an annotation."""
        found: dict[str, Decision] = {}
        step: str | None = name
        while step is not None and step not in found:
            decision = self.decision(step, axis)
            if decision is None:
                break
            found[step] = decision
            step = decision.follows
        return list(found.items())

    def printed(self) -> "Printed":
        """The text form, with the tensors that it names but does not hold."""
        from .text.files import print_module

        return print_module(self)

    def __str__(self) -> str:
        return self.printed().text
