"""The first step of several commands: a model, its sizes, its mesh and its annotations."""

from collections.abc import Sequence
from pathlib import Path

from irpar.ir import Module
from irpar.sharding import IrparError

from .options import bind_of, mesh_of


def load_model(path: Path, bind: Sequence[str] | None) -> Module:
    """Read an ONNX model and bind its symbols.

    Raises:
        IrparError: the file is no model, or a symbol is not in it.
    """
    from irpar.api import load

    return load(path, bind=bind_of(bind))


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
    from irpar.api import know_ranks
    from irpar.shardings_file import ShardingsFile, read_shardings

    file = read_shardings(shardings) if shardings is not None else ShardingsFile(None, "", (), ())
    agreed = file.agreed_mesh(mesh_of(mesh))
    if agreed is not None:
        module.set_mesh(agreed)
    elif not module.meshes and (needs_mesh or file.tensors or file.ops):
        raise IrparError(
            "there is no mesh to cut the model over",
            do="give the devices: --mesh dp=2,tp=4, or a mesh in the --shardings file",
        )
    if file.tensors or file.ops:
        know_ranks(module)
    file.annotate(module)
    return len(file.tensors) + len(file.ops)
