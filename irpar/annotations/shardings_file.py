"""The file of `--shardings`: YAML or JSON, read with line numbers into annotations. The form is in docs/shardings.md.

mesh: {dp: 2, tp: 4}
tensors:
  x: [[dp], null]
  h.*.fc.weight: [null, [tp]]
  h.*.fc.bias: {placements: [Replicate(), Shard(0)]}
  y: {layout: [dp, unsharded]}
ops:
  /fc1/MatMul: {in: [[2, 1], [1, 4]]}
layout: {rules: {batch: dp, hidden: tp}, names: {h.*.fc.weight: [embed, hidden]}}
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from irpar.files.yaml_nodes import TAG, Tables, Words, compose, is_null, text_of
from irpar.ir import Annotation, Module
from irpar.ir.annotate import apply_to
from irpar.sharding import DimSpec, IrparError, Mesh, is_priority, with_priority
from irpar.sharding.sharding import MOST_PRIORITY

from .devices import SpellingError
from .mesh_tensorflow import DimNames, LayoutRules, Names, read_rules
from .named import infer_undeclared_types, rank_of
from .pytorch_dtensor import Placements, read_placements
from .strategies import OpCuts, Strategy, annotate_ops, named_nodes
from .tensorflow_dtensor import SpecLayout, read_layout

SECTIONS = ("mesh", "tensors", "ops", "layout")
PLACES = ("in", "out")
_TENSOR_FORM = 'write one entry for each dim: null, an axis, or a list of axes such as ["dp", "tp"] or ["tp", "?"]'
_PRIORITY_FORM = (
    'write {"cut": [null, ["tp"]], "priority": 1}, {"placements": ["Replicate()", "Shard(1)"]} '
    'or {"layout": ["unsharded", "tp"]}'
)
TENSOR_KEYS = ("cut", "placements", "layout")
_PRIORITY_DO = f'write a whole number from 0 (first) to {MOST_PRIORITY}, such as "priority": 1'
_OP_FORM = 'write the cuts of each operand and result, such as {"in": [[2, 1], [1, 4]], "out": [[2, 4]]}'
_MESH_FORM = (
    'write each axis with its size, such as {"dp": 2, "tp": 4}; device ids, where wanted: "devices": [3, 1, ...]; '
    "or only how many devices there are: 8"
)
_LAYOUT_FORM = (
    'write {"rules": {"batch": "dp"}, "names": {"h.*.fc.weight": ["embed", "hidden"]}}, or "batch:dp;hidden:tp"'
)


class ShardingsError(IrparError):
    """A --shardings file that cannot be read, or does not fit the model."""


_WORDS = Words(ShardingsError, "the shardings", "are", _TENSOR_FORM)


@dataclass(frozen=True)
class ShardingsFile:
    """What a --shardings file says.

    Attributes:
        mesh: the mesh; None where the file has none.
        mesh_where: file and line of the mesh.
        tensors: the entries of `tensors`.
        ops: the entries of `ops`.
        layout: the rules of `layout`; None where the file has none.
        others: the entries of `tensors` that are placements or layouts.
        is_count: whether the mesh is only a number of devices, with which every mesh of so many agrees.
    """

    mesh: Mesh | None
    mesh_where: str
    tensors: tuple[Annotation, ...]
    ops: tuple[OpCuts, ...]
    layout: LayoutRules | None = None
    others: tuple[Placements | SpecLayout, ...] = ()
    is_count: bool = False

    @property
    def entries(self) -> int:
        """How many annotations the file has, each layout rule counted as one."""
        return (
            len(self.tensors)
            + len(self.others)
            + len(self.ops)
            + (0 if self.layout is None else len(self.layout.rules))
        )

    def agreed_mesh(self, given: Mesh | None) -> Mesh | None:
        """The mesh of the file or the one that was given; None where there is neither.

        Raises:
            ShardingsError: they differ.
        """
        if self.mesh is None or given is None or self.mesh == given:
            return given or self.mesh
        if self.is_count and self.mesh.size == given.size:
            return given
        raise ShardingsError(
            f"--mesh {given} does not agree with the mesh {self.mesh} of the shardings",
            where=self.mesh_where,
            do="leave out one of the two, or make them equal (the order of the axes counts)",
        )

    def annotate(self, module: Module) -> None:
        """Set the shardings of all values that the file names. The module must have its mesh.

        Types are inferred first where an entry names a value whose rank is not known yet.

        Raises:
            IrparError: an entry matches nothing or does not fit; names file and line.
        """
        named = module.named_values
        found = [(annotation, named.matches(annotation)) for annotation in self.tensors]
        if self.ops or any(rank_of(value) is None for _, values in found for value in values):
            infer_undeclared_types(module)
        for annotation, values in found:
            apply_to(module, annotation, module.mesh, values)
        for entry in self.others:
            entry.annotate(module)
        if self.ops:
            nodes = named_nodes(module)
            for cuts in self.ops:
                annotate_ops(module, cuts, nodes)
        if self.layout is not None:
            self.layout.annotate(module)


# -- reading ------------------------------------------------------------------------------------------------------


def read_shardings(path: str | Path) -> ShardingsFile:
    """Read a --shardings file.

    Raises:
        ShardingsError: it cannot be read, or something in it has another form; names file and line.
    """
    path = Path(path)
    return _Reader(path, _WORDS).file(compose(path, _WORDS))


class _Reader(Tables):
    """Turns YAML nodes into entries; every message names the line."""

    def file(self, root: Any) -> ShardingsFile:
        do = f"write a table with the keys {', '.join(SECTIONS)}"
        if root is None:
            raise ShardingsError("the shardings file is empty", where=str(self.path), do=do)
        sections = {key: (key_node, value) for key, key_node, value in self.table(root, "the shardings", do)}
        for name, (node, _) in sections.items():
            if name not in SECTIONS:
                raise self.error(f'there is no section "{name}"', node, f"choose from {', '.join(SECTIONS)}")
        mesh_node, mesh_table = sections.get("mesh", (None, None))
        tensors = tuple(self.tensors(sections["tensors"][1])) if "tensors" in sections else ()
        return ShardingsFile(
            mesh=None if mesh_node is None else self.mesh(mesh_table),
            mesh_where="" if mesh_node is None else self.where(mesh_node),
            tensors=tuple(entry for entry in tensors if isinstance(entry, Annotation)),
            ops=tuple(self.ops(sections["ops"][1])) if "ops" in sections else (),
            layout=self.layout(*sections["layout"]) if "layout" in sections else None,
            others=tuple(entry for entry in tensors if not isinstance(entry, Annotation)),
            is_count=isinstance(mesh_table, ScalarNode),
        )

    def mesh(self, table: Any) -> Mesh:
        axes: dict[str, int] = {}
        devices: tuple[int, ...] | None = None
        if isinstance(table, ScalarNode) and (count := self.integer(table)) is not None:
            return self.made_mesh({"d0": count}, None, table)
        for axis, _, size in self.table(table, "the mesh", _MESH_FORM):
            if axis == "devices" and isinstance(size, SequenceNode):
                devices = self.devices(size)
                continue
            number = self.integer(size)
            if number is None:
                raise self.error(f"mesh axis {axis} has the size {text_of(size)}", size, _MESH_FORM)
            axes[axis] = number
        if not axes:
            raise self.error("the mesh has no axes", table, _MESH_FORM)
        return self.made_mesh(axes, devices, table)

    def made_mesh(self, axes: dict[str, int], devices: tuple[int, ...] | None, node: Any) -> Mesh:
        try:
            return Mesh(axes, devices)
        except IrparError as error:
            raise self.error(error.what, node, error.do) from None

    def devices(self, listed: Any) -> tuple[int, ...]:
        """Device ids, rank by rank."""
        ids = [self.integer(item) for item in listed.value]
        if any(number is None for number in ids):
            raise self.error(f"the mesh has the devices {text_of(listed)}", listed, _MESH_FORM)
        return tuple(number for number in ids if number is not None)

    # -- layout ----------------------------------------------------------------------------------------------------

    def layout(self, key: Any, node: Any) -> LayoutRules:
        where = self.where(key)
        if isinstance(node, ScalarNode) and node.tag == TAG + "str":
            return LayoutRules(self.rules(node), (), where)
        parts = {name: (place, value) for name, place, value in self.table(node, "layout", _LAYOUT_FORM)}
        for name, (place, _) in parts.items():
            if name not in ("rules", "names"):
                raise self.error(f'layout has no "{name}"', place, _LAYOUT_FORM)
        if "rules" not in parts:
            raise self.error("layout has no rules", key, _LAYOUT_FORM)
        names = tuple(self.names(parts["names"][1])) if "names" in parts else ()
        return LayoutRules(self.rules(parts["rules"][1]), names, where)

    def rules(self, node: Any) -> dict[str, tuple[str, ...]]:
        """`batch:dp;hidden:tp`, or a table from names of dims to an axis or a list of axes."""
        try:
            if isinstance(node, ScalarNode) and node.tag == TAG + "str":
                return read_rules(str(node.value))
        except IrparError as error:
            raise self.error(error.what, node, error.do) from None
        found: dict[str, tuple[str, ...]] = {}
        for name, key, value in self.table(node, "the rules of layout", _LAYOUT_FORM):
            axes = self.dim(value, name, value)
            if axes is None or any(axis == "?" or is_priority(axis) for axis in axes):
                raise self.error(f'the rule of "{name}" is no axis: {text_of(value)}', key, _LAYOUT_FORM)
            found[name] = tuple(axes)
        if not found:
            raise self.error("layout has no rules", node, _LAYOUT_FORM)
        return found

    def names(self, table: Any) -> Iterator[DimNames]:
        for pattern, key, value in self.table(table, "the names of layout", _LAYOUT_FORM):
            if not isinstance(value, SequenceNode):
                raise self.error(f'"{pattern}" has no list of names', key, _LAYOUT_FORM)
            names: Names = tuple(None if is_null(item) else self.dim_name(item) for item in value.value)
            yield DimNames(pattern, names, self.where(key))

    def dim_name(self, node: Any) -> str:
        if not isinstance(node, ScalarNode):
            raise self.error(f"{text_of(node)} is no name of a dim", node, _LAYOUT_FORM)
        return str(node.value)

    # -- tensors ---------------------------------------------------------------------------------------------------

    def tensors(self, table: Any) -> Iterator[Annotation | Placements | SpecLayout]:
        for pattern, key, value in self.table(table, "tensors", 'write name: [...], such as "x": [["dp"], null]'):
            kind, dims, priority = self.said(pattern, value) if isinstance(value, MappingNode) else ("cut", value, 0)
            if kind != "cut":
                yield self.as_elsewhere(kind, pattern, key, dims, priority)
                continue
            if not isinstance(dims, SequenceNode):
                raise self.error(
                    f'"{pattern}" has no list of dims', key, _TENSOR_FORM, f'"{pattern}": {text_of(value)}'
                )
            spec = with_priority([self.dim(dim, pattern, dims) for dim in dims.value], priority)
            yield Annotation(pattern, tuple(spec), self.where(key))

    def said(self, pattern: str, entry: Any) -> tuple[str, Any, int]:
        """Of `{cut: [...], priority: 1}`, `{placements: [...]}`, `{layout: [...]}`, which; the list; the number."""
        text = f'"{pattern}": {text_of(entry)}'
        parts = {name: (key, value) for name, key, value in self.table(entry, f'"{pattern}"', _PRIORITY_FORM)}
        for name, (key, _) in parts.items():
            if name not in (*TENSOR_KEYS, "priority"):
                raise self.error(f'"{pattern}" has no "{name}"', key, _PRIORITY_FORM, text)
        kinds = [name for name in TENSOR_KEYS if name in parts]
        if len(kinds) != 1:
            what = f"has {' and '.join(kinds)}" if kinds else 'has no "cut"'
            raise self.error(f'"{pattern}" {what}', entry, _PRIORITY_FORM, text)
        priority = self.priority(parts["priority"][1], text) if "priority" in parts else 0
        return kinds[0], parts[kinds[0]][1], priority

    def as_elsewhere(self, kind: str, pattern: str, key: Any, node: Any, priority: int) -> Placements | SpecLayout:
        """An entry in PyTorch's or TensorFlow's words: a list of texts, or one text as these print it."""
        text, where = f'"{pattern}": {{"{kind}": {text_of(node)}}}', self.where(key)
        items = node.value if isinstance(node, SequenceNode) else []
        given: Any = [None if is_null(item) else getattr(item, "value", None) for item in items]
        if isinstance(node, ScalarNode) and node.tag == TAG + "str":
            given = str(node.value)
        elif not isinstance(node, SequenceNode) or not all(isinstance(item, ScalarNode) for item in items):
            raise self.error(f'"{kind}" of "{pattern}" is no list', key, _PRIORITY_FORM, text)
        try:
            if kind == "layout":
                return read_layout(pattern, given, text, where, priority)
            return Placements(pattern, read_placements(given, ""), text, where, priority)
        except SpellingError as error:
            raise self.error(error.what, key, error.do, text) from None

    def priority(self, node: Any, text: str) -> int:
        """A priority; `text` is the entry that has it."""
        number = self.integer(node)
        if number is None or not 0 <= number <= MOST_PRIORITY:
            raise self.error(f"{text_of(node)} is no priority", node, _PRIORITY_DO, text)
        return number

    def dim(self, node: Any, pattern: str, whole: Any) -> DimSpec:
        """null, an axis, or a list of axes."""
        if is_null(node):
            return None
        nodes = node.value if isinstance(node, SequenceNode) else [node]
        for axis in nodes:
            if isinstance(axis, ScalarNode) and axis.tag == TAG + "str":
                continue
            do = 'put the question mark in quotes: "?"' if isinstance(axis, MappingNode) else _TENSOR_FORM
            text = f'"{pattern}": {text_of(whole)}'
            raise self.error(f"{text_of(axis)} is no mesh axis", axis, do, text)
        return [str(axis.value) for axis in nodes]

    # -- ops -------------------------------------------------------------------------------------------------------

    def ops(self, table: Any) -> Iterator[OpCuts]:
        for pattern, key, value in self.table(table, "ops", f"write name: {{...}}; {_OP_FORM}"):
            cuts: dict[str, tuple[Strategy | None, ...]] = {}
            text, priority = f'"{pattern}": {text_of(value)}', 0
            for place, place_node, listed in self.table(value, f'"{pattern}"', _OP_FORM):
                if place == "priority":
                    priority = self.priority(listed, text)
                    continue
                if place not in PLACES:
                    do = 'choose from "in", "out" and "priority"'
                    raise self.error(f'"{pattern}" has no "{place}"', place_node, do)
                if not isinstance(listed, SequenceNode):
                    raise self.error(f'"{place}" of "{pattern}" is no list', place_node, _OP_FORM)
                cuts[place] = tuple(self.strategy(item) for item in listed.value)
            if not cuts:
                raise self.error(f'"{pattern}" has no cuts', key, _OP_FORM)
            yield OpCuts(pattern, cuts, text, self.where(key), ShardingsError, priority)

    def strategy(self, node: Any) -> Strategy | None:
        """Counts or axes of one tensor."""
        if is_null(node):
            return None
        dims = node.value if isinstance(node, SequenceNode) else ()
        if dims and not any(isinstance(dim, ScalarNode) and dim.tag == TAG + "int" for dim in dims):
            return tuple(self.dim(dim, "ops", node) for dim in dims)
        numbers = [self.integer(item) for item in dims] if isinstance(node, SequenceNode) else [None]
        if any(number is None or number < 1 for number in numbers):
            do = "write a number of 1 or more for each dim, or axes for each"
            raise self.error(f"{text_of(node)} is no list of cuts", node, do)
        return tuple(number for number in numbers if number is not None)

    def integer(self, node: Any) -> int | None:
        """A whole number in decimal, else None."""
        is_number = (
            isinstance(node, ScalarNode) and node.tag == TAG + "int" and re.fullmatch(r"-?[0-9]{1,9}", node.value)
        )
        return int(node.value) if is_number else None
