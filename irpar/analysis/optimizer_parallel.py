"""How optimizer state is sharded, as a module says it: all of it, and which parameters stay as they are.

What is said stands in the metadata of the module, so that clones, text and ONNX files have it; the default pipeline
gets the pass `zero` where it is said how, and `zero` reads which parameters it leaves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from irpar.ir import Module
from irpar.sharding import IrparError, Mesh

from .said import read_said, write_said

SAID = "irpar.optimizer_parallel"
"""The entry of a module's metadata."""


@dataclass(frozen=True)
class OptimizerParallel:
    """What a module says.

    Attributes:
        stage: of ZeRO; 0: nothing is said of it.
        regather: whether stage 3 gathers parameters again in the backward pass.
        group: ranks over which a parameter is sharded at most, neighbours; -1: all along the axes.
        threshold_kb: parameters of which a rank holds fewer than so many times 1,000 bytes stay as they are.
        axes: mesh axes, major first.
        whole: names of parameters that stay as they are.
    """

    stage: int = 0
    regather: bool = True
    group: int = -1
    threshold_kb: float = 0
    axes: tuple[str, ...] = ("dp",)
    whole: tuple[str, ...] = ()

    def axes_on(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes and sub-axes of a group, the minor ones first to be taken.

        >>> said = OptimizerParallel(3, axes=("pod", "dp"), group=4)
        >>> said.axes_on(Mesh({"pod": 2, "dp": 8})), said.axes_on(Mesh({"pod": 4, "dp": 2}))
        (('dp:(2)4',), ('pod:(2)2', 'dp'))

        Raises:
            IrparError: the mesh has no groups of that size.
        """
        sizes = dict(mesh.axes)
        if self.group < 0 or not sizes.keys() >= set(self.axes):
            return self.axes  # What the mesh lacks the pass refuses.
        found: list[str] = []
        left = min(self.group, prod(sizes[axis] for axis in self.axes))
        for axis in reversed(self.axes):
            size = sizes[axis]
            if left % size and size % left:
                raise IrparError(
                    f"groups of {self.group} ranks do not fit the {size} of {axis} in the mesh {mesh}",
                    do=f"give a size that divides {size} or that it divides, or -1 for all",
                )
            if left > 1:
                found.insert(0, axis if left >= size else f"{axis}:({size // left}){left}")
            left = max(1, left // size)
        return tuple(found)


def optimizer_parallel_said(module: Module) -> OptimizerParallel:
    """What a module says.

    Raises:
        IrparError: its metadata cannot be read.
    """
    do = "take it out, and say anew how optimizer state is sharded (irpar.annotations.mindspore)"
    return read_said(module, SAID, OptimizerParallel, do) or OptimizerParallel()


def say_optimizer_parallel(module: Module, said: OptimizerParallel) -> None:
    """Say how optimizer state is sharded; which parameters stay as they are was said, and stays so."""
    write_said(module, SAID, replace(said, whole=optimizer_parallel_said(module).whole))


def say_whole(module: Module, parameters: Mapping[str, bool]) -> None:
    """Say of parameters whether they stay as they are."""
    said = optimizer_parallel_said(module)
    kept = {**dict.fromkeys(said.whole, True), **parameters}
    whole = tuple(name for name, is_whole in kept.items() if is_whole)
    write_said(module, SAID, replace(said, whole=whole))
