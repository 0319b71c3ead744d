"""Numbers for an input, as people write them: `sr=16000`, `x=[[1, 2], [3, 4]]`, `x=rows.npy`."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irpar.files.regular_file import open_file
from irpar.ir import DType
from irpar.sharding import IrparError, nearest_names, spelled

Array = np.ndarray[Any, Any]
Dims = Sequence[Any] | None


class InputValueError(IrparError):
    """A value that cannot be that of an input."""


def settings(option: str, texts: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Names and the texts of their values, from `NAME=VALUE`.

    Args:
        option: what the texts were given to, for messages.
        texts: those.
        known: names that there are; a name may have "=" in it.

    Raises:
        InputValueError: a text has another form, there is no such name, or it comes twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        places = [place for place, letter in enumerate(text) if letter == "="]
        if not places or not places[0]:
            file = f", or --inputs {text}" if option == "--input" and text.endswith(".npz") else ""
            raise InputValueError(
                f'cannot read {option} "{text}"', do=f"write NAME=VALUE, such as {option} sr=16000{file}"
            )
        place = next((place for place in places if text[:place] in known), places[0])
        name = text[:place]
        if name not in known:
            names = ", ".join(list(known)[:8]) or "none"
            raise InputValueError(
                f'there is no input "{name}"', notes=(*nearest_names(name, known), f"inputs: {names}"), do="name one"
            )
        if name in found:
            raise InputValueError(f"{option} gives {name} twice", do="give each input once")
        found[name] = text[place + 1 :]
    return found


def value_of(name: str, text: str, dtype: DType | None, shape: Dims) -> Array:
    """The array that a text means: JSON, or the path of a .npy file.

    Args:
        name: of the input.
        text: the part after "=".
        dtype: of the input.
        shape: of the input; None, or an entry that is no int, where it is not known.

    Raises:
        InputValueError: it means none, or one that does not fit.
    """
    if text.endswith(".npy"):
        return array_of(name, _file(name, Path(text), dtype), dtype, shape)
    try:
        value = json.loads(text, parse_float=lambda number: _float(name, number))
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError:
        if dtype is not DType.STR:
            raise InputValueError(
                f'the value of input {name} is "{text}", which is neither a number nor a list',
                do="write it as JSON: 1, 0.5, true, [1, 2, 3], or give FILE.npy",
            ) from None
        value = text
    return array_of(name, value, dtype, shape)


def array_of(name: str, value: Any, dtype: DType | None, shape: Dims) -> Array:
    """A value as an array of an input's dtype and shape; a single number fills a full tensor.

    Raises:
        InputValueError: it is not of that dtype, not in its range, or not of that shape.
    """
    if dtype is None:
        do = spelled("leave it out here, and give it from Python", "leave it out here, and give it to the run")
        raise InputValueError(f"input {name} is no tensor", do=do)
    try:
        given = np.asarray(value)
    except RecursionError:
        raise _too_deep(name) from None
    except ValueError as error:
        if "maximum number of dimension" in str(error):
            raise _too_deep(name) from None
        raise InputValueError(f"the value of input {name} is ragged", do="give rows of equal lengths") from None
    array = _converted(name, given, dtype)
    known = None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)
    if known is None:
        return array
    if array.ndim == 0 and None not in known:
        return np.full(known, array)  # type: ignore[arg-type]
    if len(known) != array.ndim or any(dim not in (None, size) for dim, size in zip(known, array.shape, strict=True)):
        expected = ", ".join("_" if dim is None else str(dim) for dim in known)
        raise InputValueError(
            f"the value of input {name} has shape {list(array.shape)}, expected [{expected}]",
            do="give a value of that shape, or one number for all of it",
        )
    return array


def _float(name: str, text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise InputValueError(f"the value of input {name} has {text[:40]}, which is too large", do="give less")
    return number


def _too_deep(name: str) -> InputValueError:
    return InputValueError(f"the value of input {name} is nested too deep", do="give a list for each dim, and no more")


def _converted(name: str, given: Array, dtype: DType) -> Array:
    """Numbers as a dtype that holds them.

    Raises:
        InputValueError: it does not.
    """
    if given.dtype == dtype.numpy and dtype is not DType.STR:
        return given
    kind = given.dtype.kind
    if dtype is DType.STR and kind in "UO" and all(isinstance(text, str) for text in given.reshape(-1).tolist()):
        _check_texts(name, given)
        return given.astype(object)
    whole = kind in "iu" or (kind == "f" and bool(np.all(np.isfinite(given) & (np.floor(given) == given))))
    fits = {
        "bool": dtype is DType.BOOL and (kind == "b" or (whole and bool(np.isin(given, (0, 1)).all()))),
        "integer": dtype.is_integer and whole and _in_range(given, dtype),
        "float": (dtype.is_float or dtype in (DType.C64, DType.C128)) and kind in "iuf",
    }
    if not any(fits.values()):
        shown = str(given.reshape(-1)[0]) if given.size == 1 else f"of {given.dtype}"
        raise InputValueError(
            f"the value of input {name} is {shown}, which is no {dtype}", do=f"give what {dtype} can hold"
        )
    with np.errstate(over="ignore"):
        made: Array = given.astype(dtype.numpy)
    lost = given[np.isfinite(given) & ~np.isfinite(made)] if fits["float"] else np.empty(0)
    if lost.size:
        raise InputValueError(
            f"the value of input {name} has {lost[0]}, which is too large for {dtype}", do=f"give what {dtype} can hold"
        )
    return made


def _check_texts(name: str, given: Array) -> None:
    """Refuse texts with half a character, which models and plans cannot hold.

    Raises:
        InputValueError: there is one.
    """
    for text in given.reshape(-1).tolist():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputValueError(
                f"the value of input {name} has {text[:40]!a}, which is no text of Unicode: it has half a character",
                do="give whole characters, or both halves of one",
            ) from None


def _in_range(given: Array, dtype: DType) -> bool:
    least = 0 if dtype.text.startswith("u") else -(1 << (dtype.bits - 1))
    most = (1 << (dtype.bits - (0 if dtype.text.startswith("u") else 1))) - 1
    return all(least <= int(number) <= most for number in (given.min(), given.max())) if given.size else True


def _file(name: str, path: Path, dtype: DType | None) -> Array:
    do = 'write it with numpy.save("x.npy", array)'
    try:
        with open_file(path) as file:
            array: Array = np.load(file, allow_pickle=False)
    except OSError as error:
        raise InputValueError(
            f"cannot read the value of input {name}: {error.strerror or error}", where=str(path), do=do
        ) from None
    except (ValueError, EOFError):
        raise InputValueError(f"the value of input {name} is in no .npy file", where=str(path), do=do) from None
    if not isinstance(array, np.ndarray):
        raise InputValueError(f"the value of input {name} is in no .npy file", where=str(path), do=do)
    # numpy writes dtypes that it does not know itself (bfloat16 ...) as bare bytes.
    if array.dtype.kind == "V" and dtype is not None and np.dtype(dtype.numpy).itemsize == array.dtype.itemsize:
        return array.view(dtype.numpy)
    return array


def same_numbers(one: Any, other: Array) -> bool:
    """Whether two values are the same, NaNs included."""
    one = np.asarray(one)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(np.array_equal(one, other, equal_nan=other.dtype.kind in "fc"))


def plain(array: Array) -> Any:
    """An array as JSON has it."""
    values: Any = (array.astype(np.float64) if array.dtype.kind == "V" else array).tolist()
    return values


def shown(array: Array) -> str:
    """An array in a message: its numbers where they are few."""
    text = json.dumps(plain(array), default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."


def fitting(values: Mapping[str, Any], inputs: Mapping[str, tuple[DType | None, Dims]]) -> dict[str, Array]:
    """Values by name as arrays of the inputs.

    Raises:
        InputValueError: there is no such input, or a value does not fit.
    """
    for name in values:
        if name not in inputs:
            raise InputValueError(
                f'there is no input "{name}"', notes=nearest_names(name, inputs), do=f"name one: {', '.join(inputs)}"
            )
    return {name: array_of(name, value, *inputs[name]) for name, value in values.items()}
