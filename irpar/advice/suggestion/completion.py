"""A model that is completed again and again, each time with other annotations."""

from collections.abc import Callable

from irpar.analysis.completion.flow import Flow
from irpar.ir import Module, clone_module
from irpar.pass_manager import Instrumentation, PassManager
from irpar.passes.complete_sharding import CompleteSharding
from irpar.passes.split_weights import SplitWeights
from irpar.sharding import Mesh


class Completions:
    """Completes copies of a model, one after the other.

    A copy that has kept its nodes is used again, so that what was found of them, such as their rules, is known.

    Args:
        source: the model, normalised, over no mesh yet; it stays as it is.
        mesh: that it is sharded over.
    """

    def __init__(self, source: Module, mesh: Mesh) -> None:
        self._source = source
        self._mesh = mesh
        self._copy, self._flow = self._new_copy()

    def completed(self, annotate: Callable[[Module], None], watch: Instrumentation) -> tuple[Module, Flow]:
        """The model, completed, and its flow; both hold until the next call.

        Args:
            annotate: gives annotations to the copy.
            watch: of the passes.
        """
        if self._flow.is_current:
            self._clear()
        else:
            self._copy, self._flow = self._new_copy()
        annotate(self._copy)
        completing = _CompleteFlow(self._flow)
        PassManager([SplitWeights(), completing], watch).run(self._copy)
        return self._copy, completing.flow_of(self._copy)

    def _new_copy(self) -> tuple[Module, Flow]:
        module = clone_module(self._source)
        module.set_mesh(self._mesh)
        return module, Flow(module.graph, self._mesh)

    def _clear(self) -> None:
        """Take shardings, and all that was told of them, from the copy."""
        for value in (value for graph in self._copy.all_graphs() for value in graph.values()):
            value.sharding = None
        for told in (self._copy.annotated, self._copy.decisions, self._copy.gone, self._copy.free_results):
            told.clear()


class _CompleteFlow(CompleteSharding):
    """complete-sharding over a flow that is known already, as long as the nodes are the same."""

    def __init__(self, known: Flow) -> None:
        super().__init__()
        object.__setattr__(self, "_known", known)

    def flow_of(self, module: Module) -> Flow:
        known: Flow = self.__dict__["_known"]
        return known if known.is_current else super().flow_of(module)
