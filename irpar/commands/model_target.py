"""The file that a command is to write: above all an .onnx file."""

from pathlib import Path

from irpar.errors import IrparError


def require_folder(out: Path, option: str) -> None:
    """Refuse an option about what is held where the order is not written.

    Raises:
        IrparError: what is written is a model for any runtime.
    """
    if out.suffix == ".onnx":
        raise IrparError(
            "an .onnx file leaves the order, and so what is held, to who runs it",
            do=f"give a folder, or leave out {option}",
        )


def refuse_existing(path: Path, force: bool) -> None:
    """Refuse to replace a file.

    Raises:
        IrparError: it is there, and nobody said that it may be replaced.
    """
    if path.exists() and not force:
        raise IrparError("the file exists", where=str(path), do="give another file, or --force")


def check_model_target(out: Path, model: Path, what: str, force: bool) -> None:
    """Refuse a file that must not be replaced, and one for its weights beside it.

    Args:
        out: the model that is written.
        model: the one that is read.
        what: is written, for messages.
        force: whether a file that is there may be replaced.

    Raises:
        IrparError: saying why.
    """
    from irpar.files.atomic import check_file
    from irpar.onnx_io import data_file

    check_file(out, what)
    if model.exists() and out.resolve() == model.resolve():
        raise IrparError(f"{what} would replace the model", where=str(out), do="give another file")
    for target in (out, data_file(out)):
        check_file(target, what)
        refuse_existing(target, force)
