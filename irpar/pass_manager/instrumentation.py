"""What can be watched while a pipeline runs: printed and dumped IR, verification, progress; tables of what it took."""

import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from irpar.ir import ExternalTensor, Module, without_metadata
from irpar.sharding import IrparError, listed, nearest_names

from .pipeline import Pass, format_pass
from .progress import Progress

if TYPE_CHECKING:
    from irpar.ir.text.files import TextFolder

EXTENSION = ".irpar"
"""File name extension of IR text."""
_DUMPED_DATA = "tensors.data"
"""What the dumps of a run name where the numbers are not in the text."""
_DUMP = re.compile(r"\d\d+-[\w-]+\.irpar|" + re.escape(_DUMPED_DATA))


@dataclass
class Instrumentation:
    """What to do around each pass.

    Attributes:
        print_ir_before, print_ir_after: names of passes before and after which the IR is printed.
        print_ir_after_all: print it after every pass.
        print_ir_after_change: print it after every pass that changed something.
        dump_ir: a folder that gets one numbered file a pass, `00-start.irpar` first, in place of earlier dumps, and the
            numbers that these do not hold, so that all of them can be read back; None: no dumps.
        verify_each: run the verifier after each pass; what it finds counts as a bug of that pass.
        reproducer: the folder for the file that replays a failure; "temporary": the system's folder for temporary
            files; None: no file is written, and the copy of the module that it takes is not made.
        progress: called when a pass starts and when it ends.
        observe: called after each pass with it and the module, which it only looks at.
        stream: where the IR is printed, without metadata; None: standard error.
    """

    print_ir_before: Collection[str] = ()
    print_ir_after: Collection[str] = ()
    print_ir_after_all: bool = False
    print_ir_after_change: bool = False
    dump_ir: Path | None = None
    verify_each: bool = False
    reproducer: Path | Literal["temporary"] | None = "temporary"
    progress: Callable[[Progress], None] | None = None
    observe: Callable[[Pass, Module], None] | None = None
    stream: TextIO | None = None
    _texts: "TextFolder | None" = field(default=None, init=False, repr=False, compare=False)

    def check(self, names: Sequence[str]) -> None:
        """Refuse to print around a pass that the pipeline does not have.

        Raises:
            IrparError: naming it, and the nearest name.
        """
        for name in (*self.print_ir_before, *self.print_ir_after):
            if name not in names:
                raise IrparError(
                    f'the pipeline has no pass "{name}" to print the IR at',
                    notes=nearest_names(name, names),
                    do=f"choose from the passes of this pipeline: {', '.join(dict.fromkeys(names))}",
                )

    @property
    def looks_at_modules(self) -> bool:
        """Whether it prints, dumps or hands on what passes leave."""
        printed = self.print_ir_before or self.print_ir_after or self.print_ir_after_all or self.print_ir_after_change
        return bool(printed) or self.dump_ir is not None or self.observe is not None

    def at_start(self, module: Module) -> None:
        """Before the first pass."""
        if self.dump_ir is not None:
            self._texts = _dump_folder(self.dump_ir, module)
            self._dump(module, 0, "start")

    def before(self, pass_: Pass, module: Module) -> None:
        """Before a pass."""
        if pass_.name in self.print_ir_before:
            self._print(module, f"before {format_pass(pass_)}")

    def after(self, pass_: Pass, index: int, module: Module, changed: bool) -> None:
        """After a pass that did not fail."""
        printed = self.print_ir_after_all or pass_.name in self.print_ir_after
        if printed or (changed and self.print_ir_after_change):
            self._print(module, f"after {format_pass(pass_)}{'' if changed else ', which changed nothing'}")
        if self.dump_ir is not None:
            self._dump(module, index + 1, pass_.name)
        if self.observe is not None:
            self.observe(pass_, module)

    def report(self, progress: Progress) -> None:
        """Tell who listens."""
        if self.progress is not None:
            self.progress(progress)

    def _print(self, module: Module, title: str) -> None:
        stream = self.stream or sys.stderr
        stream.write(f"// ----- {title} -----\n{str(without_metadata(module)).rstrip()}\n\n")

    def _dump(self, module: Module, number: int, name: str) -> None:
        assert self._texts is not None
        self._texts.write(module, f"{number:02}-{name}{EXTENSION}")


def _dump_folder(folder: Path, module: Module) -> "TextFolder":
    """The folder for dumps, without earlier ones: their numbers would be of another file.

    Raises:
        IrparError: it holds something else, or the numbers of the module itself.
    """
    from irpar.ir.text.files import TextFolder

    check_dump_folder(folder)
    constants = (value.data for graph in module.all_graphs() for value in graph.constants if value.data is not None)
    bases = (base for data in (*constants, *module.fixed.values()) for base in data.bases)
    if any(isinstance(base, ExternalTensor) and base.path.resolve().parent == folder.resolve() for base in bases):
        raise IrparError(
            "the dumps would replace the file that the module reads its numbers from",
            where=str(folder / _DUMPED_DATA),
            do="give a new or empty folder",
        )
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        entry.unlink()
    return TextFolder(folder, _DUMPED_DATA)


def check_dump_folder(folder: Path) -> None:
    """Refuse a folder for dumps that holds anything but earlier dumps.

    Raises:
        IrparError: naming what is in there.
    """
    if not folder.is_dir():
        return
    others = sorted(entry.name for entry in folder.iterdir() if not _DUMP.fullmatch(entry.name))
    if others:
        raise IrparError(
            f"the folder for dumps holds something else: {listed(others, 1)}",
            where=str(folder),
            do="give a new or empty folder",
        )
