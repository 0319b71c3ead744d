"""Passes over a model of many equal layers, which plan a few of them for all."""

import itertools
from dataclasses import dataclass

from irpar.analysis.layers.chain import FIRST, LAST, Chain, find_chain
from irpar.analysis.layers.fold import folded_module
from irpar.analysis.layers.unfold import unfold
from irpar.analysis.layers.units import NotAlike
from irpar.ir import Module
from irpar.ir.repeats import NeedsAllLayersError
from irpar.pass_manager import PipelineRun
from irpar.sharding import IrparError

FOLDED = frozenset(
    {"split-weights", "split-bias", "complete-sharding", "insert-redistribution", "simplify-collectives", "localize"}
)
"""Passes that do to a layer what is in it and beside it asks for, and no layer further off."""

WHOLE = frozenset({"zero"})
"""Passes before those that look at the whole model, and leave layers as alike as they were."""


def plan_layers_once(run: PipelineRun) -> None:
    """Run the passes that make programs, up to the first that looks across layers, with a few of many equal layers.

    What they make of layers is the same: those beside each other come out alike, and it is checked that they do. Where
    they do not, or nothing is repeated, no pass but `zero` runs here.

    Args:
        run: a pipeline that has come to a normalised module with a mesh.
    """
    if not _may_fold(run):
        return
    run.advance(lambda pass_: pass_.name in WHOLE)
    try:
        chains = _chains(run.module)
        if not chains:
            return
        beside = run.beside(chains[-1].folded)
        beside.advance(lambda pass_: pass_.name in FOLDED)
        for each in reversed(chains):
            unfold(beside.module, each.whole, each.chain)
    except NotAlike as error:
        run.note(f"equal layers were planned each for itself: {error}")
    except NeedsAllLayersError as error:
        run.note(f"equal layers were planned each for itself: {error.what}")
    except IrparError:
        return  # The whole model meets that too, where nobody has left out what the message should name.
    else:
        run.take_over(beside)
        for layers in (each.chain.layers for each in chains):
            run.note(f"{layers.count} equal layers of {layers.size} nodes were planned as {FIRST + LAST} of them")
        if run.instrumentation.verify_each:
            from irpar.ir.verifier import verify

            verify(run.module)


@dataclass(frozen=True)
class _Folded:
    """A chain of layers of which a module has a few.

    Attributes:
        whole: the module with all of them.
        chain: them.
        folded: the module with a few.
    """

    whole: Module
    chain: Chain
    folded: Module


def _chains(module: Module) -> list[_Folded]:
    """The chains of a module, as an encoder and a decoder have one each: each is looked for with the others folded.

    Raises:
        NotAlike: there is one, but its layers are told apart by something.
    """
    found: list[_Folded] = []
    while True:
        try:
            chain = find_chain(module)
        except NotAlike:
            if found:
                return found
            raise
        if chain is None:
            return found
        found.append(_Folded(module, chain, folded_module(module, chain)))
        module = found[-1].folded


def _may_fold(run: PipelineRun) -> bool:
    """Whether the next passes can, as far as that shows without a look at layers."""
    module = run.module
    names = [pass_.name for pass_ in itertools.dropwhile(lambda pass_: pass_.name in WHOLE, run.left)]
    first = next((index for index, name in enumerate(names) if name not in FOLDED), len(names))
    is_plain = not (module.functions or module.run_as_said or module.annotations)
    return (
        "localize" in names[:first]
        and is_plain
        and not module.is_local
        and module.memory_limit is None
        and not run.instrumentation.looks_at_modules
        and not any(node.holds_graphs for node in module.graph)  # What leaves a loop depends on what is held in all.
    )
