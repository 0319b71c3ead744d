"""Masks among what is trained: tables of floats that an exporter wrote as it wrote weights."""

from collections.abc import Iterable

from irpar.ir import Value

_PASSES_ON = frozenset(("Add", "Cast", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze", "Where"))
_STEPS = 6
"""Nodes between a mask and the Softmax."""


def masks_among(parameters: Iterable[Value]) -> list[str]:
    """Names of parameters with rows and columns that are added to what a Softmax takes, and are nothing else."""
    return [value.source_name for value in parameters if _is_table(value) and _is_for_softmax(value)]


def _is_table(value: Value) -> bool:
    return value.is_static and len(value.shape) >= 2 and min(value.shape[-2:]) > 1


def _is_for_softmax(value: Value) -> bool:
    waiting, reaches = {value}, False
    for _ in range(_STEPS):
        users = {user for each in waiting for user in each.users}
        others = {user for user in users if user.op_type not in _PASSES_ON or user.domain}
        if any(user.identity != ("", "Softmax") for user in others):
            return False
        reaches = reaches or bool(others)
        waiting = {result for user in users - others for result in user.results}
    return reaches and not waiting
