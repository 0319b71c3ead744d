"""Mesh-TensorFlow's layout rules (arXiv 1811.02084): dims have names, and a rule says which mesh axis shards a name."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from irpar.analysis.types.symbols import dim_names
from irpar.ir import Annotation, Module, Value
from irpar.sharding import DimSpec, Mesh, nearest_names

from .devices import SpellingError
from .named import infer_undeclared_types, place, rank_of

Names = tuple[str | None, ...]
"""The name of each dim of a tensor; None where one has none."""


@dataclass(frozen=True)
class DimNames:
    """The names of the dims of the tensors that a name or glob matches, and where they are written."""

    pattern: str
    names: Names
    where: str = ""


@dataclass(frozen=True)
class LayoutRules:
    """Which axes cut dims of a name.

    A dim whose name has a rule is cut by its axes. A dim whose name has none, or that a table leaves without a name, is
    not sharded. A dim without a name of a tensor that no table names is open.

    Attributes:
        rules: name of a dim to axes, major first.
        names: names of dims; those of inputs and results that no entry matches are the symbolic dims of the model.
        where: file and line of the rules, or how they were written.
    """

    rules: Mapping[str, tuple[str, ...]]
    names: tuple[DimNames, ...] = ()
    where: str = ""

    def annotate(self, module: Module, mesh: Mesh | None = None) -> int:
        """Annotate all tensors whose dims have names.

        Inputs and results that are annotated already stay as they are, unless the table names them.

        Args:
            module: the module; without a mesh it keeps the annotations until it has one.
            mesh: the mesh that the rules are written for; the module gets it once all fits.

        Returns:
            How many tensors that are.

        Raises:
            IrparError: names that match no tensor or do not fit it, a rule for a name that no dim has, an axis that the
                mesh lacks, or two dims of one tensor over one axis.
        """
        found = list(self._named(module))
        known = dict.fromkeys(name for _, _, names, _ in found for name in names if name)
        for name in self.rules:
            if name not in known:
                raise SpellingError(
                    f'no tensor has a dim called "{name}"',
                    where=self.where,
                    notes=nearest_names(name, known),
                    do=f"choose from the names: {', '.join(known) or 'none'}; a table of names can add others",
                )
        if mesh is not None:
            module.set_mesh(mesh)
        for entry, value, names, where in found:
            pattern = entry or value.source_name
            said = self._said(pattern, names)
            is_alone, is_implied = pattern == value.source_name, entry is None
            spec = self._spec(names, entry)
            place(module, pattern, spec, [value], said, where=where, is_alone=is_alone, is_implied=is_implied)
        self._stand_behind(module, {value for _, value, _, _ in found})
        return len(found)

    def _stand_behind(self, module: Module, named: Collection[Value]) -> None:
        """Let the entries that go before the rules know what these say of the same inputs and results."""
        for value, names in symbolic_names(module).items():
            known = module.annotated.get(value.name)
            if known is not None and value not in named:
                said = self._said(value.source_name, names)
                rule = Annotation(value.source_name, self._spec(names, None), self.where, said, is_implied=True)
                module.annotated[value.name] = replace(known, behind=rule)

    def _said(self, pattern: str, names: Names) -> str:
        """What the rules are called as an annotation of a tensor."""
        said = f'"{pattern}" [{", ".join(name or "_" for name in names)}] by the layout rules'
        return said if any(name in self.rules for name in names) else f"{said}, which have none of these names"

    def _spec(self, names: Names, entry: str | None) -> tuple[DimSpec, ...]:
        unnamed: DimSpec = ["?"] if entry is None else None
        return tuple(unnamed if name is None else list(self.rules.get(name, ())) or None for name in names)

    def _named(self, module: Module) -> Iterator[tuple[str | None, Value, Names, str]]:
        """Each tensor with names, once: the entry of the table that names it, its names, and where they are told."""
        tensors = module.named_values
        matches = [(entry, tensors.matches(Annotation(entry.pattern, (), entry.where))) for entry in self.names]
        if any(rank_of(value) is None for _, values in matches for value in values):
            infer_undeclared_types(module)
        chosen: dict[Value, DimNames] = {}
        for entry, values in matches:
            for value in values:
                known = chosen.get(value)
                own = (value.source, value.name)
                if known is None or (entry.pattern in own and known.pattern not in own):
                    chosen[value] = entry
                elif known.names != entry.names and (entry.pattern in own) == (known.pattern in own):
                    raise SpellingError(
                        f"the dims of %{value.name} have names twice: {list(known.names)} and {list(entry.names)}",
                        where=entry.where or entry.pattern,
                        do="keep one of the two entries",
                    )
        for value, entry in chosen.items():
            _check_rank(value, entry)
            yield entry.pattern, value, entry.names, entry.where
        for value, names in symbolic_names(module).items():
            if value not in chosen and value.sharding is None:
                yield None, value, names, self.where


def _check_rank(value: Value, entry: DimNames) -> None:
    if rank_of(value) != len(entry.names):
        raise SpellingError(
            f"{len(entry.names)} names for the dims of {value.name}, which is {value.type}",
            where=f"{entry.pattern}: {list(entry.names)}" + (f"      {entry.where}" if entry.where else ""),
            do="write a name for each dim, null for one that has none",
        )


def symbolic_names(module: Module) -> dict[Value, Names]:
    """Inputs and results of the model with symbolic dims, before sizes were bound to them, by the names of these."""
    found: dict[Value, Names] = {}
    for value in dict.fromkeys((*module.graph.inputs, *module.graph.outputs)):
        names = module.dim_names.get(value.name) or dim_names(value)
        if any(names):
            found[value] = names
    return found


def annotate(
    module: Module,
    layout: str | Mapping[str, str | Sequence[str]],
    *,
    mesh_shape: str | Mapping[str, int] | None = None,
    names: Mapping[str, Sequence[str | None]] | None = None,
) -> int:
    """Annotate a model by layout rules.

    >>> annotate(module, "batch:dp;hidden:tp", names={"h.*.fc.weight": ["embed", "hidden"]})     # doctest: +SKIP

    Args:
        module: the module.
        layout: rules as `"batch:dp;hidden:tp"`, or as a table from names of dims to an axis or several.
        mesh_shape: the mesh as `"dp:2;tp:4"` or as a table; must agree with the mesh of the module, if that has one.
        names: name or glob of tensors to the names of their dims, None for a dim without a name. Inputs and results
            that it does not name have their symbolic dims as names.

    Returns:
        How many tensors are annotated.

    Raises:
        IrparError: the rules, the mesh or the names cannot be read, or do not fit the model.
    """
    rules = read_rules(layout)
    mesh = None if mesh_shape is None else read_mesh_shape(mesh_shape)
    for pattern, dims in (names or {}).items():
        if isinstance(dims, str) or not all(name is None or isinstance(name, str) for name in dims):
            raise SpellingError(
                f"{dims!r} does not name the dims of {pattern}", do='write a list, such as ["batch", None]'
            )
    listed = tuple(DimNames(pattern, tuple(dims)) for pattern, dims in (names or {}).items())
    return LayoutRules(rules, listed, f"layout {layout!r}").annotate(module, mesh)


def read_rules(layout: str | Mapping[str, str | Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Layout rules as a table.

    Raises:
        SpellingError: they have another form, or name a dim twice.
    """
    if isinstance(layout, str):
        return {name: (axis,) for name, axis in _pairs(layout, "layout", "batch:dp;hidden:tp")}
    found = {name: (axes,) if isinstance(axes, str) else axes for name, axes in layout.items()}
    for name, axes in found.items():
        if not isinstance(axes, Sequence) or not axes or not all(isinstance(axis, str) for axis in axes):
            raise SpellingError(
                f'the rule of "{name}" is no axis: {axes!r}', do="name an axis, or a list of axes, major first"
            )
    return {name: tuple(axes) for name, axes in found.items()}


def read_mesh_shape(shape: str | Mapping[str, int]) -> Mesh:
    """A mesh from `dp:2;tp:4`.

    Raises:
        IrparError: it has another form, or a size that cannot be.
    """
    if not isinstance(shape, str):
        return Mesh(shape)
    pairs = _pairs(shape, "mesh_shape", "dp:2;tp:4")
    for name, size in pairs:
        if not re.fullmatch(r"[0-9]{1,9}", size):
            raise SpellingError(f'mesh axis {name} has the size "{size}"', where=shape, do="write it as dp:2;tp:4")
    return Mesh({name: int(size) for name, size in pairs})


def _pairs(text: str, what: str, example: str) -> list[tuple[str, str]]:
    """`a:b;c:d` as pairs; commas and brackets around are taken as well, as Mesh-TensorFlow takes them."""
    pairs: list[tuple[str, str]] = []
    for item in re.split(r"[;,]", text.strip().strip("[]")):
        if not item.strip():
            continue
        name, colon, axis = (part.strip() for part in item.rpartition(":"))
        if not colon or not name or not axis:
            raise SpellingError(f'cannot read "{item.strip()}" in {what} "{text}"', do=f"write it as {example}")
        if name in dict(pairs):
            raise SpellingError(f'{what} "{text}" names {name} twice', do="name each once")
        pairs.append((name, axis))
    if not pairs:
        raise SpellingError(f"{what} is empty", do=f"write it as {example}")
    return pairs
