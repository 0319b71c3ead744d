"""The file of `--shardings`: YAML or JSON, read with line numbers into annotations. The form is in docs/shardings.md.

mesh: {dp: 2, tp: 4}
tensors:
  x: [[dp], null]
  h.*.fc.weight: [null, [tp]]
ops:
  /fc1/MatMul: {in: [[2, 1], [1, 4]]}
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from irpar.ir import Annotation, Module, Node, Value, tensor_type
from irpar.ir.annotate import NamedValues, apply_to, matching
from irpar.sharding import DimSpec, IrparError, Mesh, nearest_names

from .cuts import Counts, CutsError, match_cuts
from .yaml_nodes import TAG, Tables, Words, compose, is_null, text_of

SECTIONS = ("mesh", "tensors", "ops")
PLACES = ("in", "out")
_TENSOR_FORM = 'write one entry for each dim: null, an axis, or a list of axes such as ["dp", "tp"] or ["tp", "?"]'
_OP_FORM = 'write the cuts of each operand and result, such as {"in": [[2, 1], [1, 4]], "out": [[2, 4]]}'


class ShardingsError(IrparError):
    """A --shardings file that cannot be read, or does not fit the model."""


_WORDS = Words(ShardingsError, "the shardings", "are", _TENSOR_FORM)


@dataclass(frozen=True)
class OpCuts:
    """One entry of `ops`.

    Attributes:
        pattern: name or glob of nodes.
        cuts: for "in" and "out" the cut counts of each operand or result; None where one is left free.
        text: the entry, as messages show it.
        where: file and line.
    """

    pattern: str
    cuts: dict[str, tuple[Counts | None, ...]]
    text: str
    where: str


@dataclass(frozen=True)
class ShardingsFile:
    """What a --shardings file says.

    Attributes:
        mesh: the mesh; None where the file has none.
        mesh_where: file and line of the mesh.
        tensors: the entries of `tensors`.
        ops: the entries of `ops`.
    """

    mesh: Mesh | None
    mesh_where: str
    tensors: tuple[Annotation, ...]
    ops: tuple[OpCuts, ...]

    def agreed_mesh(self, given: Mesh | None) -> Mesh | None:
        """The mesh of the file or the one that was given; None where there is neither.

        Raises:
            ShardingsError: they differ.
        """
        if self.mesh is None or given is None or self.mesh == given:
            return given or self.mesh
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
        named = NamedValues(module)
        found = [(annotation, named.matches(annotation)) for annotation in self.tensors]
        if self.ops or any(_has_no_rank(value) for _, values in found for value in values):
            _infer_types(module)
        for annotation, values in found:
            apply_to(module, annotation, module.mesh, values)
        if self.ops:
            nodes = _named_nodes(module)
            for entry in self.ops:
                _annotate_ops(module, entry, nodes)


def _has_no_rank(value: Value) -> bool:
    type_ = tensor_type(value.type)
    return type_ is None or type_.shape is None


def _infer_types(module: Module) -> None:
    from irpar.passes.infer_types import InferTypes

    InferTypes().run(module)


# -- ops ----------------------------------------------------------------------------------------------------------


def _named_nodes(module: Module) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for graph in module.graphs:
        for node in graph:
            if name := node.source or node.name:
                found.setdefault(name, []).append(node)
    return found


def _annotate_ops(module: Module, entry: OpCuts, nodes: dict[str, list[Node]]) -> None:
    matched = matching(entry.pattern, nodes)
    if not matched:
        raise ShardingsError(
            f'no op is called "{entry.pattern}"',
            where=f"{entry.text}      {entry.where}",
            notes=nearest_names(entry.pattern, nodes),
            do="write the name or a glob of nodes of the model",
        )
    for node in matched:
        try:
            tensors = match_cuts(node, list(_given(node, entry)), module.mesh)
        except CutsError as error:
            where = f"{entry.text}      {entry.where}"
            raise ShardingsError(error.what, where=where, notes=error.notes, do=error.do) from None
        for value, spec in tensors:
            name = value.source or value.name
            apply_to(
                module,
                Annotation(name, tuple(spec), entry.where, f'by the cuts of op "{entry.pattern}"'),
                module.mesh,
                [value],
            )


def _given(node: Node, entry: OpCuts) -> Iterator[tuple[Value, int, Counts]]:
    """The tensors that an entry gives cuts for, with their places and counts."""
    operands = [(value, place) for place, value in enumerate(node.operands) if value is not None]
    results = [(value, place) for place, value in enumerate(node.results, len(node.operands))]
    for key, listed in entry.cuts.items():
        values, word = (operands, "operand") if key == "in" else (results, "result")
        if len(listed) != len(values):
            raise CutsError(
                f"{node.label} has {len(values)} {word}s, the entry has cuts for {len(listed)}",
                notes=(f"the {word}s: {', '.join(f'{value.name} {value.type}' for value, _ in values)}",),
                do=f"write one list for each {word}, null for one that is left free",
            )
        for (value, place), counts in zip(values, listed, strict=True):
            if counts is not None:
                yield value, place, counts


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
        return ShardingsFile(
            mesh=None if mesh_node is None else self.mesh(mesh_table),
            mesh_where="" if mesh_node is None else self.where(mesh_node),
            tensors=tuple(self.tensors(sections["tensors"][1])) if "tensors" in sections else (),
            ops=tuple(self.ops(sections["ops"][1])) if "ops" in sections else (),
        )

    def mesh(self, table: Any) -> Mesh:
        do = 'write each axis with its size, such as {"dp": 2, "tp": 4}'
        axes: dict[str, int] = {}
        for axis, _, size in self.table(table, "the mesh", do):
            number = self.integer(size)
            if number is None:
                raise self.error(f"mesh axis {axis} has the size {text_of(size)}", size, do)
            axes[axis] = number
        if not axes:
            raise self.error("the mesh has no axes", table, do)
        try:
            return Mesh(axes)
        except IrparError as error:
            raise self.error(error.what, table, error.do) from None

    def tensors(self, table: Any) -> Iterator[Annotation]:
        for pattern, key, value in self.table(table, "tensors", 'write name: [...], such as "x": [["dp"], null]'):
            if not isinstance(value, SequenceNode):
                raise self.error(
                    f'"{pattern}" has no list of dims', key, _TENSOR_FORM, f'"{pattern}": {text_of(value)}'
                )
            spec = tuple(self.dim(dim, pattern, value) for dim in value.value)
            yield Annotation(pattern, spec, self.where(key))

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

    def ops(self, table: Any) -> Iterator[OpCuts]:
        for pattern, key, value in self.table(table, "ops", f"write name: {{...}}; {_OP_FORM}"):
            cuts: dict[str, tuple[Counts | None, ...]] = {}
            for place, place_node, listed in self.table(value, f'"{pattern}"', _OP_FORM):
                if place not in PLACES:
                    raise self.error(f'"{pattern}" has no "{place}"', place_node, 'choose from "in" and "out"')
                if not isinstance(listed, SequenceNode):
                    raise self.error(f'"{place}" of "{pattern}" is no list', place_node, _OP_FORM)
                cuts[place] = tuple(self.counts(item) for item in listed.value)
            if not cuts:
                raise self.error(f'"{pattern}" has no cuts', key, _OP_FORM)
            yield OpCuts(pattern, cuts, f'"{pattern}": {text_of(value)}', self.where(key))

    def counts(self, node: Any) -> Counts | None:
        if is_null(node):
            return None
        numbers = [self.integer(item) for item in node.value] if isinstance(node, SequenceNode) else [None]
        if any(number is None or number < 1 for number in numbers):
            raise self.error(f"{text_of(node)} is no list of cuts", node, "write a number of 1 or more for each dim")
        return tuple(number for number in numbers if number is not None)

    def integer(self, node: Any) -> int | None:
        """A whole number in decimal, else None."""
        is_number = isinstance(node, ScalarNode) and node.tag == TAG + "int" and re.fullmatch(r"-?\d{1,9}", node.value)
        return int(node.value) if is_number else None
