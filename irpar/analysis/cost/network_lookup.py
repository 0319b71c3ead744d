"""The network of a name, a file or a preset."""

import json
from functools import lru_cache

from irpar.sharding import IrparError, nearest_names

from .network import BYTES, Network


@lru_cache(maxsize=64)
def network_of(text: str) -> Network:
    """The network of a preset's name, or of the fields of a network file as JSON; the same object for the same text.

    Raises:
        IrparError: there is no such preset, or a field cannot be.
    """
    from .network_fields import network_of_fields
    from .network_presets import PRESETS

    if text == BYTES.text:
        return BYTES
    if text in PRESETS:
        return network_of_fields(PRESETS[text], text)
    if not text.startswith("{"):
        raise IrparError(
            f'there is no network "{text}"',
            notes=nearest_names(text, PRESETS),
            do=f"use {', '.join(PRESETS)}, or a file such as `irpar calibrate -o here.yaml` writes",
        )
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise IrparError(f"the network is not JSON: {error}", do="give a preset or a network file") from None
    return network_of_fields(fields)
