"""The fields of a network file, as typed records: the form is in docs/network.md."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, defstruct, structs

from irpar.files.records import MisfitError, Path, expected_at, fields_of, options_of, read_record, type_at, value_at
from irpar.sharding import nearest_names

from .device import RATES, Device
from .network import Disk, FieldError, Link, Network, Speed
from .network_algorithms import ALGORITHMS

_Name = Annotated[str, Meta(min_length=1, description="a name")]
_Seconds = Annotated[float, Meta(ge=0, le=1000, description="seconds, such as 5e-6")]
_BytesASecond = Annotated[float, Meta(ge=1, le=1e30, description="bytes a second, such as 25e9")]
_Bytes = Annotated[float, Meta(gt=0, le=1e30, description="bytes")]
_Flops = Annotated[float, Meta(ge=1, le=1e30, description="FLOP a second")]
_Efficiency = Annotated[float, Meta(gt=0, le=1, description="a number above 0 up to 1")]
_Devices = Annotated[int, Meta(ge=2, description="a whole number of 2 or more, or leave it out: all devices")]


class _Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the file."""


class _Speed(_Record, frozen=True):
    """What is sent, and how fast."""

    latency: _Seconds
    bandwidth: _BytesASecond


def _algorithms_of(kind: str) -> Any:
    names = tuple(ALGORITHMS[kind])
    one = Literal[names]  # type: ignore[valid-type]
    return Annotated[one | Annotated[list[one], Meta(min_length=1)], Meta(description=" or ".join(names))]  # type: ignore[valid-type]


def _table(name: str, fields: Mapping[str, Any]) -> type[Struct]:
    """A record whose fields may all be left out."""
    listed = [(field, kind | UnsetType, UNSET) for field, kind in fields.items()]
    return defstruct(name, listed, bases=(_Record,), frozen=True)


_Algorithms = _table("_Algorithms", {kind: _algorithms_of(kind) for kind in ALGORITHMS})
_Kinds = _table("_Kinds", dict.fromkeys(ALGORITHMS, _Speed))
_Rates = _table("_Rates", dict.fromkeys(RATES, _Flops))
_NOUNS = {_Algorithms: "kind of collective", _Kinds: "kind of collective", _Rates: "type"}
"""What the fields of these tables are."""


class _Link(_Speed, frozen=True, kw_only=True):
    """What joins devices."""

    name: _Name
    devices: _Devices | None = None
    algorithms: _Algorithms = _Algorithms()  # type: ignore[valid-type]
    kinds: _Kinds = _Kinds()  # type: ignore[valid-type]


class _Device(_Record, frozen=True):
    """What computes."""

    flops: _Rates  # type: ignore[valid-type]
    memory_bandwidth: _BytesASecond
    memory: _Bytes | None = None
    efficiency: _Efficiency = 1
    launch: _Seconds = 0
    uses_tf32: bool = False


class _Disk(_Record, frozen=True):
    """Where files lie."""

    read: _BytesASecond
    write: _BytesASecond
    capacity: _Bytes | None = None


class _Network(_Record, frozen=True):
    """The whole file."""

    links: Annotated[list[_Link], Meta(min_length=1, description="a list with at least one entry")]
    name: _Name | UnsetType = UNSET
    launch: _Seconds = 0
    axes: dict[str, str] = {}
    device: _Device | UnsetType = UNSET
    host: _Device | UnsetType = UNSET
    host_link: _Speed | UnsetType = UNSET
    disk: _Disk | UnsetType = UNSET


def network_of_fields(fields: Any, text: str | None = None) -> Network:
    """The network that plain data describes.

    Args:
        fields: as a network file has them.
        text: what names it; None: the fields themselves as JSON.

    Raises:
        FieldError: a field is missing, unknown, or cannot be.
    """
    try:
        found = read_record(fields, _Network)
    except MisfitError as error:
        raise _field_error(error, fields) from None
    links = tuple(map(_link, found.links))
    _check_order(links)
    _check_axes(found.axes, [link.name for link in links])
    return Network(
        text=text or json.dumps(fields, separators=(",", ":"), ensure_ascii=False),
        name=(text or "of a file") if found.name is UNSET else found.name,
        links=links,
        launch=found.launch,
        axes=found.axes,
        device=None if found.device is UNSET else _device("device", found.device),
        host=None if found.host is UNSET else _device("host", found.host),
        host_link=None if found.host_link is UNSET else _speed(found.host_link),
        disk=None if found.disk is UNSET else Disk(**structs.asdict(found.disk)),
    )


def _speed(record: _Speed) -> Speed:
    return Speed(record.latency, record.bandwidth)


def _link(record: _Link) -> Link:
    algorithms = {
        kind: (given,) if isinstance(given, str) else tuple(given) for kind, given in _given(record.algorithms)
    }
    kinds = {kind: _speed(given) for kind, given in _given(record.kinds)}
    return Link(record.name, _speed(record), record.devices, algorithms, kinds)


def _given(table: Struct) -> list[tuple[str, Any]]:
    """The fields of a table that are there."""
    return [(name, value) for name, value in structs.asdict(table).items() if value is not UNSET]


def _device(name: str, record: _Device) -> Device:
    rates = dict(_given(record.flops))
    if "f32" not in rates:
        raise FieldError((name, "flops"), f"the {name} has no rate for f32", do="give it: flops: {f32: 20e12}")
    return Device(**{**structs.asdict(record), "flops": rates})


def _check_order(links: Sequence[Link]) -> None:
    """Each link joins whole groups of the one before it, and the last one joins all.

    Raises:
        FieldError: one does not.
    """
    inside = 1
    for index, link in enumerate(links):
        at: Path = ("links", index, "devices")
        if link.name in [other.name for other in links[:index]]:
            raise FieldError(
                ("links", index, "name"), f'two links are called "{link.name}"', do="give each a name of its own"
            )
        if index == len(links) - 1:
            if link.devices is not None:
                raise FieldError(
                    at,
                    f"nothing joins more than {link.devices} devices",
                    do="leave out `devices` of the last link: it joins all there are",
                )
        elif link.devices is None:
            raise FieldError(
                at[:2], f'link "{link.name}" joins all devices, but others follow', do="say how many: devices: 8"
            )
        elif link.devices % inside or link.devices == inside:
            raise FieldError(
                at,
                f"{link.devices} devices are not several whole groups of the {inside} that the link before joins",
                do="begin with the innermost link; each joins a multiple of the devices of the one before",
            )
        else:
            inside = link.devices


def _check_axes(axes: Mapping[str, str], links: Sequence[str]) -> None:
    for axis, link in axes.items():
        if link not in links:
            raise _wrong(("axes", axis), link, f"the name of a link: {', '.join(links)}")


def _field_error(error: MisfitError, fields: Any) -> FieldError:
    """What is wrong with a field, and what may stand there."""
    misfit = error.misfit
    path, table = misfit.path, type_at(_Network, misfit.path)
    if misfit.what == "missing":
        needed = [field.name for field in structs.fields(_struct(table)) if field.required]
        return FieldError(path, f"{misfit.field} is missing", do=f"the fields that must be there: {', '.join(needed)}")
    if misfit.what == "unknown":
        known = fields_of(_struct(table))
        noun = _NOUNS.get(_struct(table))
        text = f'there is no field "{misfit.field}" here' if noun is None else f'there is no {noun} "{misfit.field}"'
        notes = nearest_names(misfit.field, known)
        return FieldError((*path, misfit.field), text, notes=notes, do=f"choose from {', '.join(known)}")
    if not path:
        return FieldError((), "the network is no table", do="write name: value")
    return _wrong(path, value_at(fields, path), _expected(table, path))


def _expected(kind: Any, path: Path) -> str:
    if any(map(fields_of, options_of(kind))):
        return "a table"
    return expected_at(_Network, path) or _PLAIN.get(kind, "a table")


_PLAIN = {bool: "true or false", str: "a text"}


def _struct(kind: Any) -> type[Struct]:
    """The record in a type that may be left out."""
    return next(option for option in options_of(kind) if isinstance(option, type) and issubclass(option, Struct))


def _wrong(path: Path, value: Any, expected: str) -> FieldError:
    text = json.dumps(value, ensure_ascii=False, default=str)
    name = next(key for key in reversed(path) if isinstance(key, str))
    return FieldError(path, f"{name} is {text if len(text) <= 40 else text[:37] + '...'}", do=f"write {expected}")
