"""infer-types: find the types of all values."""

from dataclasses import dataclass
from typing import ClassVar

from irpar.analysis.engines import unknown_notes
from irpar.analysis.types.inference import infer_module
from irpar.ir import UNKNOWN, Module
from irpar.pass_manager import Pass, PassResult


@dataclass(frozen=True)
class InferTypes(Pass):
    """Infer result types in one sweep, by irpar's operator definitions, else by ONNX's inference of single nodes.

    Before: inputs and constants have types. After: every result has the most that its operands say of it; what they do
    not say stays as the model declares it. Declared shapes that cannot be are replaced, with a note; operators that no
    engine knows are noted too.

    Bodies of If, Loop and Scan are inferred with the types that flow into them; functions without knowing their calls.
    """

    name: ClassVar[str] = "infer-types"

    def run(self, module: Module) -> PassResult:
        """Infer all graphs and functions.

        Raises:
            TypeInferenceError: a dtype is not the declared one, or operands do not fit each other.
        """
        inference = infer_module(module)
        unknown = sum(value.type == UNKNOWN for graph in module.graphs for value in graph.values())
        statistics: dict[str, int | float] = {"inferred": inference.inferred, "unknown": unknown}
        if inference.contradictions:
            statistics["contradictions"] = inference.contradictions
        notes = (*inference.notes, *unknown_notes(module.graphs))
        return PassResult(inference.inferred > 0, notes, statistics)
