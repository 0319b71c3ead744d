"""The inputs of a run: those of --inputs FILE, and those of --input NAME=VALUE."""

import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def given_inputs(
    specs: Sequence[Mapping[str, Any]],
    file: Path | None,
    texts: Sequence[str] | None,
    optional: Collection[str] = (),
) -> dict[str, Any] | None:
    """Arrays by name; None where neither option is given.

    Args:
        specs: `inputs` of plan.json.
        file: the .npz file of --inputs.
        texts: of --input; they go before what the file has.
        optional: inputs that may be left out, such as state, which then begins as the program says.

    Raises:
        IrparError: the file or a text cannot be read, or does not fit.
    """
    from irpar.files.regular_file import open_file
    from irpar.inputs.values import settings, value_of
    from irpar.ir import dtype_of_text

    from .npz_file import read_npz

    if file is None and not texts:
        return None
    known = {spec["name"]: spec for spec in specs}
    values = {
        name: value_of(name, text, dtype_of_text(known[name]["dtype"] or ""), known[name]["shape"])
        for name, text in settings("--input", texts or (), known).items()
    }
    if file is None:
        return values
    # A file that is no .npz is told by what reads it.
    names: set[str] = set()
    with suppress(OSError, zipfile.BadZipFile), open_file(file) as opened, zipfile.ZipFile(opened) as members:
        names = {entry.removesuffix(".npy") for entry in members.namelist()}
    told = {name for name, spec in known.items() if _is_known(spec, values)} | set(optional)
    expected = [spec for name, spec in known.items() if name in names or name not in told]
    return {**read_npz(file, expected), **values}


def _is_known(spec: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether an input has a value without the file."""
    return spec["name"] in values or spec.get("value") is not None
