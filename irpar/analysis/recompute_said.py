"""What is to be computed again, as a module says it.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; the default pipeline
gets a pass `recompute` for each.
"""

import json
from dataclasses import asdict, dataclass

from irpar.files.records import MisfitError, read_record
from irpar.ir import Module
from irpar.sharding import IrparError

SAID = "irpar.recompute_said"
"""The entry of a module's metadata."""


@dataclass(frozen=True)
class RecomputeSaid:
    """One thing that is said.

    Attributes:
        match: scope, node or value of the model, or a glob.
        mp_comm_recompute, parallel_optimizer_comm_recompute: as of the pass.
    """

    match: str
    mp_comm_recompute: bool = True
    parallel_optimizer_comm_recompute: bool = False


@dataclass(frozen=True)
class _All:
    said: tuple[RecomputeSaid, ...] = ()


def recompute_said(module: Module) -> tuple[RecomputeSaid, ...]:
    """What a module says, in the order in which it was said.

    Raises:
        IrparError: its metadata cannot be read.
    """
    text = module.metadata.get(SAID)
    if text is None:
        return ()
    try:
        return read_record(json.loads(text), _All).said
    except (ValueError, RecursionError, MisfitError) as error:
        raise IrparError(
            f"the metadata {SAID} of the module cannot be read: {error}",
            do="take it out, and say anew what is computed again (irpar.annotations.mindspore)",
        ) from None


def say_recompute(module: Module, said: RecomputeSaid, is_on: bool) -> None:
    """Say of something that it is computed again, or that it is not; what was said of it before is forgotten."""
    kept = tuple(each for each in recompute_said(module) if each.match != said.match)
    module.metadata[SAID] = json.dumps(asdict(_All((*kept, said) if is_on else kept)))
