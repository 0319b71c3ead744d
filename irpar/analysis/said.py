"""What a module says of itself, as records in its metadata: clones, text and ONNX files have it too."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from irpar.errors import IrparError
from irpar.files.records import MisfitError, read_record
from irpar.ir import Module

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)
else:
    Record = TypeVar("Record")


def read_said(module: Module, entry: str, kind: type[Record], do: str) -> Record | None:
    """What stands under an entry of the metadata; None where nothing is said.

    Args:
        module: it.
        entry: the name of the entry.
        kind: a dataclass.
        do: what to do where it cannot be read.

    Raises:
        IrparError: it cannot be read.
    """
    text = module.metadata.get(entry)
    if text is None:
        return None
    try:
        return read_record(json.loads(text), kind)
    except (ValueError, RecursionError, MisfitError) as error:
        raise IrparError(f"the metadata {entry} of the module cannot be read: {error}", do=do) from None


def write_said(module: Module, entry: str, said: "DataclassInstance") -> None:
    """Let something stand under an entry of the metadata."""
    module.metadata[entry] = json.dumps(asdict(said))
