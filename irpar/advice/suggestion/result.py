"""What `irpar inspect --suggest` and `irpar.suggest` give: what to shard, why, and what comes of it."""

import os
from dataclasses import dataclass
from pathlib import Path

from irpar.analysis.cost.figures import Figures
from irpar.annotations.named import infer_undeclared_types
from irpar.ir import Annotation, Module
from irpar.sharding import DimSpec, Mesh
from irpar.tables.display import ROWS, report_text
from irpar.units import count_text, share_text

from .file import Spec, check_target, text_of, write
from .report import TensorGroup


@dataclass(frozen=True)
class Prediction:
    """What the partition will cost, from the passes themselves; no weight was read.

    Attributes:
        flops, weight_bytes: of the model on one device.
        flops_per_rank, weight_bytes_per_rank: of the rank that has most.
        by_kind: kind of collective to how many and the bytes that a device sends for them.
    """

    flops: int
    weight_bytes: int
    flops_per_rank: int
    weight_bytes_per_rank: int
    by_kind: dict[str, dict[str, int]]

    @property
    def collectives(self) -> int:
        """Collectives in each step."""
        return sum(kind["collectives"] for kind in self.by_kind.values())

    @property
    def sent_bytes(self) -> int:
        """What a device sends in each step."""
        return sum(kind["sent_bytes"] for kind in self.by_kind.values())

    @property
    def figures(self) -> Figures:
        """Those of the rank that has most."""
        return Figures(self.weight_bytes_per_rank, self.flops_per_rank, self.sent_bytes, self.collectives)


@dataclass(frozen=True, repr=False)
class Suggestion:
    """What to cut, and what comes of it.

    Attributes:
        mesh: the mesh that it is for.
        tensors: name to sharding of all that is annotated: inputs, weights, and values that are kept replicated.
        lines: the same as a --shardings file says it, with globs where they mean exactly that.
        comments: the reasons of lines that have one.
        cut: inputs and weights that lie in parts, completion's own decisions included.
        whole: weights that every rank holds whole, those of most bytes first.
        notes: what should be known beside this.
        prediction: what it costs.
        model: what the model is called.
    """

    mesh: Mesh
    tensors: dict[str, Spec]
    lines: dict[str, Spec]
    comments: dict[str, str]
    cut: tuple[TensorGroup, ...]
    whole: tuple[TensorGroup, ...]
    notes: tuple[str, ...]
    prediction: Prediction
    model: str = "the model"

    def __repr__(self) -> str:
        found = self.prediction
        weights = share_text(found.weight_bytes_per_rank, found.weight_bytes)
        held = f", {weights} of the weights on each rank" if weights else ""
        sent = f"{count_text(found.collectives, 'collective')} that send {found.sent_bytes:,} bytes a device"
        return f"<suggestion for {self.model} over {self.mesh}: {count_text(len(self.lines), 'line')}{held}, {sent}>"

    def __str__(self) -> str:
        from .tables import print_suggestion

        return report_text(lambda console: print_suggestion(console, self, None, self.model))

    def _repr_html_(self) -> str:
        from irpar.tables.html import report_html

        from .tables import print_suggestion

        return report_html(lambda page: print_suggestion(page, self, ROWS, self.model))

    def text(self, path: str | os.PathLike[str] = "shardings.yaml") -> str:
        """The --shardings file that says so: YAML with the reasons, or JSON where that is the path's extension."""
        return text_of(Path(path), self.mesh, self.lines, self.comments, self.model)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the --shardings file.

        Raises:
            IrparError: the path holds something else, or a --shardings file that is not to be replaced.
        """
        check_target(Path(path), None, force=force)
        write(Path(path), self.text(path))

    def apply(self, module: Module) -> int:
        """Annotate a module, and give it the mesh; types that the model does not declare are inferred first.

        Returns:
            How many annotations it gets.

        Raises:
            IrparError: it is another model, or is annotated otherwise.
        """
        infer_undeclared_types(module)
        found = [
            module.named_values.matches(Annotation(pattern, dims_of(spec))) for pattern, spec in self.lines.items()
        ]
        module.set_mesh(self.mesh)
        for pattern, spec in self.lines.items():
            module.shard(pattern, dims_of(spec))
        return len(found)


def dims_of(spec: Spec) -> tuple[DimSpec, ...]:
    """A sharding as annotations have it."""
    return tuple(None if axes is None else list(axes) for axes in spec)
