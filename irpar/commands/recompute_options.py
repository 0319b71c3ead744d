"""Options of commands that make programs which compute results again rather than hold them."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from irpar.errors import IrparError

from .model_target import require_folder

if TYPE_CHECKING:
    from irpar.passes.recompute import Recompute as RecomputePass

_PANEL = "Recompute"
METHOD, SECONDS = "auto", 30
"""How, and how long, is searched where nothing else is asked for."""

Recompute = Annotated[
    list[str] | None,
    typer.Option(
        "--recompute",
        metavar="GLOB",
        help="Scopes or nodes of the model, such as h.*/mlp*, whose results are computed again in the backward pass "
        "rather than held. May be repeated.",
        rich_help_panel=_PANEL,
    ),
]
MemoryBudget = Annotated[
    float | None,
    typer.Option(
        "--memory-budget",
        metavar="SHARE",
        help="What a rank may hold, as a share of what it would hold: as much is computed again as that takes.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
MemoryBudgetGb = Annotated[
    float | None,
    typer.Option(
        "--memory-budget-gb",
        metavar="GB",
        help="The same in GB.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
RecomputeMethod = Annotated[
    str,
    typer.Option(
        "--recompute-method",
        metavar="NAME",
        help="How what is computed again for a budget is found: auto, optimal, chain, sqrt or sweep.",
        rich_help_panel=_PANEL,
    ),
]
RecomputeSeconds = Annotated[
    float,
    typer.Option(
        "--recompute-seconds", metavar="N", help="The most seconds that this is searched.", rich_help_panel=_PANEL
    ),
]


def recompute_of(given: Mapping[str, Any]) -> "RecomputePass | None":
    """The pass that a command is asked for; None where it is not asked that something is computed again.

    Args:
        given: its arguments by name.

    Raises:
        IrparError: the options contradict each other.
    """
    asked = {
        "--recompute": given["recompute"],
        "--memory-budget": given["memory_budget"],
        "--memory-budget-gb": given["memory_budget_gb"],
    }
    said = [option for option, value in asked.items() if value not in (None, [])]
    has_budget = given["memory_budget"] is not None or given["memory_budget_gb"] is not None
    for option, default in {"recompute_method": METHOD, "recompute_seconds": SECONDS}.items():
        if given[option] != default and not has_budget:
            name = f"--{option.replace('_', '-')}"
            raise IrparError(
                f"{name} without a budget, so nothing is searched", do=f"add --memory-budget 0.5, or leave out {name}"
            )
    if not said:
        return None
    if len(said) != 1:
        raise IrparError(
            f"{' and '.join(said)} both say what is computed again",
            do="give one of --recompute GLOB, --memory-budget 0.5 and --memory-budget-gb 24",
        )
    _check_numbers(given)
    if given["pipeline"] is not None:
        raise IrparError(
            f"{said[0]} and --pipeline both say what runs",
            do=f"write recompute{{budget=0.5}} into the pipeline, after localize, and leave out {said[0]}",
        )
    require_folder(given["out"], said[0])
    from irpar.analysis.recompute import METHODS
    from irpar.passes.recompute import Recompute

    from .options import choice

    method: Any = choice("--recompute-method", given["recompute_method"], METHODS)
    return Recompute(
        tuple(given["recompute"] or ()),
        given["memory_budget"] or 0,
        given["memory_budget_gb"] or 0,
        method,
        given["recompute_seconds"],
    )


def _check_numbers(given: Mapping[str, Any]) -> None:
    """Refuse budgets and times that cannot be.

    Raises:
        IrparError: naming the option.
    """
    share, size, seconds = given["memory_budget"], given["memory_budget_gb"], given["recompute_seconds"]
    if share is not None and not 0 < share <= 1:
        raise IrparError(
            f"--memory-budget {share:g}", do="give a share of the peak without recompute: above 0, up to 1"
        )
    if size is not None and not 0 < size < math.inf:
        raise IrparError(f"--memory-budget-gb {size:g}", do="give a number of GB above 0")
    if not 0 < seconds < math.inf:
        raise IrparError(f"--recompute-seconds {seconds:g}", do="give a number of seconds above 0")
