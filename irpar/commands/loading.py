"""The first step of several commands: a model, its sizes, its mesh and its annotations."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from irpar.ir import Module
from irpar.sharding import IrparError, Mesh

from .options import bind_of, mesh_of

if TYPE_CHECKING:
    from irpar.annotations.shardings_file import ShardingsFile


def load_model(
    path: Path,
    bind: Sequence[str] | None,
    *,
    set_: Sequence[str] | None = None,
    configuration: str = "none",
    mesh: Mesh | None = None,
) -> Module:
    """Read an ONNX model and bind its symbols.

    Args:
        path: the .onnx file.
        bind: the texts of --bind.
        set_: the texts of --set.
        configuration: the device configuration whose annotations are read; empty: the only one.
        mesh: what these are said with, if known.

    Raises:
        IrparError: the file is no model, a symbol or an input is not in it, or the annotations cannot be read.
    """
    from irpar.api import load

    module = load(path, bind=bind_of(bind), configuration=configuration or None, mesh=mesh)
    if set_:
        from irpar.inputs.fixed import fix_inputs, values_of

        fix_inputs(module, values_of(module, set_))
    return module


def annotate_model(module: Module, mesh: str | None, shardings: Path | None, *, needs_mesh: bool = True) -> int:
    """Give a module its mesh and its annotations.

    Args:
        module: from `load_model`; it may have a mesh already.
        mesh: the text of --mesh.
        shardings: the file of --shardings.
        needs_mesh: refuse where there is no mesh from anywhere.

    Returns:
        How many entries the file has.

    Raises:
        IrparError: the mesh or an entry does not fit, or there is no mesh.
    """
    file, agreed = shardings_of(mesh, shardings)
    return annotate_by(module, file, agreed, needs_mesh=needs_mesh)


def shardings_of(mesh: str | None, shardings: Path | None) -> "tuple[ShardingsFile, Mesh | None]":
    """What --shardings says, nothing where it is not given, and the mesh that --mesh and the file agree on.

    Raises:
        IrparError: the file cannot be read, or the two do not agree.
    """
    from irpar.annotations.shardings_file import ShardingsFile, read_shardings

    file = read_shardings(shardings) if shardings is not None else ShardingsFile(None, "", (), ())
    return file, file.agreed_mesh(mesh_of(mesh))


def annotate_by(module: Module, file: "ShardingsFile", mesh: Mesh | None, *, needs_mesh: bool = True) -> int:
    """As `annotate_model`, with what `shardings_of` gives."""
    from irpar.annotations.named import infer_undeclared_types, infer_where_annotated

    if mesh is not None:
        module.set_mesh(mesh)
    elif not module.meshes and (needs_mesh or file.entries):
        raise IrparError(
            "there is no mesh to shard the model over",
            do="give the devices: --mesh dp=2,tp=4, or a mesh in the --shardings file",
        )
    if file.entries > len(file.tensors):
        infer_undeclared_types(module)
    infer_where_annotated(module, file.tensors)
    file.annotate(module)
    return file.entries
