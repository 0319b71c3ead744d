"""The file of `--network`: YAML or JSON, read with line numbers. The form is in docs/network.md.

name: two workstations
links:
  - {name: pcie, devices: 2, latency: 6e-6, bandwidth: 25e9}
  - {name: ethernet, latency: 30e-6, bandwidth: 1.25e9}
device: {flops: {f32: 20e12}, memory_bandwidth: 0.9e12}
"""

import math
import os
import re
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, SequenceNode

from irpar.files.yaml_nodes import TAG, Tables, Words, compose, text_of
from irpar.sharding import IrparError, nearest_names

from .network import FieldError, Network
from .network_fields import network_of_fields
from .network_lookup import network_of
from .network_presets import PRESETS

_DO = "write the fields that docs/network.md names, such as links: [{name: nvlink, latency: 3e-6, bandwidth: 450e9}]"
_MOST_VALUES = 10_000
_SUFFIXES = frozenset({".yaml", ".yml", ".json"})


class NetworkError(IrparError):
    """A --network that is neither a preset nor a file that can be read."""


def find_network(given: str | os.PathLike[str] | Network) -> Network:
    """The network that --network means: the name of a preset, or the path of a file.

    Raises:
        IrparError: it is neither, or the file cannot be used; names its line.
    """
    if isinstance(given, Network):
        return given
    text = os.fspath(given)
    if isinstance(given, str) and text in PRESETS:
        return network_of(text)
    path = Path(text)
    if path.suffix in _SUFFIXES or _is_there(path) or len(path.parts) > 1:
        return read_network(path)
    begun = [name for name in PRESETS if text and name.startswith(text)]
    raise NetworkError(
        f'there is no network "{text if len(text) <= 60 else text[:57] + "..."}", and no such file',
        notes=(f"nearest names: {', '.join(begun)}",) if begun else nearest_names(text, PRESETS),
        do=f"use {', '.join(PRESETS)}, or a file such as `irpar calibrate -o here.yaml` writes",
    )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # Such as a name that is too long for a file.
        return False


def read_network(path: str | Path) -> Network:
    """Read a network file.

    Raises:
        NetworkError: it cannot be read, or a field cannot be; names file and line.
    """
    path = Path(path)
    root = compose(path, _WORDS)
    if root is None:
        raise NetworkError("the network file is empty", where=str(path), do=_DO)
    reader = _Reader(path, _WORDS)
    fields = reader.value(root, ())
    try:
        if isinstance(fields, dict):
            fields.setdefault("name", path.stem)
        made = network_of_fields(fields)
    except FieldError as error:
        raise reader.error(error.what, reader.node(error.path), error.do, notes=error.notes) from None
    # The one object of this text, so that what was worked out for it is kept.
    return network_of(made.text)


_WORDS = Words(NetworkError, "the network file", "is", _DO)


class _Reader(Tables):
    """Turns nodes into plain data, and remembers the node of each path."""

    def __init__(self, path: Path, words: Words) -> None:
        super().__init__(path, words)
        self._nodes: dict[tuple[str | int, ...], Any] = {}
        self._count = 0

    def node(self, path: tuple[str | int, ...]) -> Any:
        """The node at a path, or the nearest one around it."""
        while path not in self._nodes:
            path = path[:-1]
        return self._nodes[path]

    def value(self, node: Any, path: tuple[str | int, ...]) -> Any:
        """Plain data."""
        self._nodes[path] = node
        self._count += 1
        if len(path) > 8 or self._count > _MOST_VALUES:
            raise self.error("the network file is nested too deep, or has too many fields", node, _DO)
        if isinstance(node, MappingNode):
            made = {}
            for key, key_node, child in self.table(node, "a network", _DO):
                made[key] = self.value(child, (*path, key))
                self._nodes[*path, key] = key_node
            return made
        if isinstance(node, SequenceNode):
            return [self.value(child, (*path, index)) for index, child in enumerate(node.value)]
        return self.scalar(node)

    def scalar(self, node: Any) -> Any:
        text = str(node.value)
        match str(node.tag).removeprefix(TAG):
            case "null":
                return None
            case "bool":
                return text.lower() in ("true", "yes", "on")
            case "int" | "float":
                return self.number(text, node)
        # YAML 1.1 and 1.2 differ on whether 1e9 is a number; here it is one, unless it is in quotes.
        return self.number(text, node) if node.style is None and _NUMBER.fullmatch(text) else text

    def number(self, text: str, node: Any) -> int | float:
        """A decimal number.

        Raises:
            NetworkError: it is written otherwise, or is infinite.
        """
        if _NUMBER.fullmatch(text):
            if re.fullmatch(r"[+-]?[0-9]{1,18}", text):
                return int(text)
            if math.isfinite(float(text)):
                return float(text)
        raise self.error(f"{text_of(node)} is no number that can be used", node, "write a decimal number such as 25e9")


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
