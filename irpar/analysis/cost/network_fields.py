"""The fields of a network file, checked: the form is in docs/network.md."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from irpar.sharding import nearest_names

from .device import RATES, Device
from .network import Disk, FieldError, Link, Network, Speed
from .network_algorithms import ALGORITHMS

Path = tuple[str | int, ...]

_NETWORK = {
    "name": False,
    "launch": False,
    "links": True,
    "axes": False,
    "device": False,
    "host": False,
    "host_link": False,
    "disk": False,
}
_LINK = {"name": True, "latency": True, "bandwidth": True, "devices": False, "algorithms": False, "kinds": False}
_SPEED = {"latency": True, "bandwidth": True}
_DEVICE = {
    "flops": True,
    "memory_bandwidth": True,
    "memory": False,
    "efficiency": False,
    "launch": False,
    "uses_tf32": False,
}
_DISK = {"read": True, "write": True, "capacity": False}
"""The keys of each table, and whether they must be there."""


def network_of_fields(fields: Any, text: str | None = None) -> Network:
    """The network that plain data describes.

    Args:
        fields: as a network file has them.
        text: what names it; None: the fields themselves as JSON.

    Raises:
        FieldError: a field is missing, unknown, or cannot be.
    """
    table = _table((), fields, _NETWORK)
    links = tuple(_link(("links", index), entry) for index, entry in enumerate(_list(("links",), table["links"])))
    _check_order(links)
    name = _text(("name",), table.get("name", text or "of a file"))
    return Network(
        text=text or json.dumps(fields, separators=(",", ":"), ensure_ascii=False),
        name=name,
        links=links,
        launch=_seconds(("launch",), table.get("launch", 0)),
        axes=_axes(table.get("axes", {}), [link.name for link in links]),
        device=_device(("device",), table["device"]) if "device" in table else None,
        host=_device(("host",), table["host"]) if "host" in table else None,
        host_link=_host_link(table["host_link"]) if "host_link" in table else None,
        disk=_disk(table["disk"]) if "disk" in table else None,
    )


def _link(path: Path, value: Any) -> Link:
    table = _table(path, value, _LINK)
    devices = table.get("devices")
    if devices is not None and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 2):
        raise _wrong((*path, "devices"), devices, "a whole number of 2 or more, or leave it out: all devices")
    kinds = _names((*path, "kinds"), table.get("kinds", {}), ALGORITHMS, "kind of collective")
    return Link(
        name=_text((*path, "name"), table["name"]),
        speed=_speed(path, table),
        devices=devices,
        algorithms=_algorithms((*path, "algorithms"), table.get("algorithms", {})),
        kinds={kind: _speed(at, _table(at, kinds[kind], _SPEED)) for kind in kinds for at in [(*path, "kinds", kind)]},
    )


def _speed(path: Path, table: Mapping[str, Any]) -> Speed:
    latency = _seconds((*path, "latency"), table["latency"])
    return Speed(latency, _positive((*path, "bandwidth"), table["bandwidth"], "bytes a second, such as 25e9"))


def _algorithms(path: Path, value: Any) -> dict[str, tuple[str, ...]]:
    made = {}
    for kind, given in _names(path, value, ALGORITHMS, "kind of collective").items():
        names = [given] if isinstance(given, str) else _list((*path, kind), given)
        for name in names:
            if name not in ALGORITHMS[kind]:
                raise _wrong((*path, kind), name, " or ".join(ALGORITHMS[kind]))
        made[kind] = tuple(names)
    return made


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


def _axes(value: Any, links: Sequence[str]) -> dict[str, str]:
    made = {}
    for axis, link in _dict(("axes",), value).items():
        if link not in links:
            raise _wrong(("axes", axis), link, f"the name of a link: {', '.join(links)}")
        made[axis] = link
    return made


def _host_link(value: Any) -> Speed:
    path: Path = ("host_link",)
    return _speed(path, _table(path, value, _SPEED))


def _disk(value: Any) -> Disk:
    path: Path = ("disk",)
    table = _table(path, value, _DISK)
    read, write = (_positive((*path, key), table[key], "bytes a second, such as 5e9") for key in ("read", "write"))
    capacity = table.get("capacity")
    return Disk(read, write, None if capacity is None else _positive((*path, "capacity"), capacity, "bytes"))


def _device(path: Path, value: Any) -> Device:
    table = _table(path, value, _DEVICE)
    rates = _names((*path, "flops"), table["flops"], RATES, "type")
    if "f32" not in rates:
        raise FieldError((*path, "flops"), f"the {path[0]} has no rate for f32", do="give it: flops: {f32: 20e12}")
    efficiency = _positive((*path, "efficiency"), table.get("efficiency", 1), "a number above 0 up to 1")
    if efficiency > 1:
        raise _wrong((*path, "efficiency"), efficiency, "a number above 0 up to 1")
    if not isinstance(table.get("uses_tf32", False), bool):
        raise _wrong((*path, "uses_tf32"), table["uses_tf32"], "true or false")
    memory = table.get("memory")
    return Device(
        flops={name: _positive((*path, "flops", name), rate, "FLOP a second") for name, rate in rates.items()},
        memory_bandwidth=_positive((*path, "memory_bandwidth"), table["memory_bandwidth"], "bytes a second"),
        memory=None if memory is None else _positive((*path, "memory"), memory, "bytes"),
        efficiency=efficiency,
        launch=_seconds((*path, "launch"), table.get("launch", 0)),
        uses_tf32=table.get("uses_tf32", False),
    )


# -- plain data ----------------------------------------------------------------------------------------------------


def _wrong(path: Path, value: Any, expected: str) -> FieldError:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return FieldError(path, f"{path[-1]} is {text if len(text) <= 40 else text[:37] + '...'}", do=f"write {expected}")


def _table(path: Path, value: Any, keys: Mapping[str, bool]) -> Mapping[str, Any]:
    """A table with these keys.

    Raises:
        FieldError: it is none, has others, or lacks one.
    """
    table = _dict(path, value)
    for key in table:
        if key not in keys:
            raise FieldError(
                (*path, key),
                f'there is no field "{key}" here',
                notes=nearest_names(key, keys),
                do=f"choose from {', '.join(keys)}",
            )
    missing = next((key for key, is_needed in keys.items() if is_needed and key not in table), None)
    if missing is not None:
        raise FieldError(path, f"{missing} is missing", do=f"the fields that must be there: {_needed(keys)}")
    return table


def _needed(keys: Mapping[str, bool]) -> str:
    return ", ".join(key for key, is_needed in keys.items() if is_needed)


def _names(path: Path, value: Any, known: Sequence[str] | Mapping[str, Any], what: str) -> Mapping[str, Any]:
    """A table whose keys are some of `known`."""
    table = _dict(path, value)
    for key in table:
        if key not in known:
            raise FieldError(
                (*path, key),
                f'there is no {what} "{key}"',
                notes=nearest_names(key, known),
                do=f"use {', '.join(known)}",
            )
    return table


def _dict(path: Path, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise (
            _wrong(path, value, "a table")
            if path
            else FieldError((), "the network is no table", do="write name: value")
        )
    return value


def _list(path: Path, value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(path, value, "a list with at least one entry")
    return value


def _text(path: Path, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(path, value, "a name")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _seconds(path: Path, value: Any) -> float:
    if not _is_number(value) or not 0 <= value <= 1000:
        raise _wrong(path, value, "seconds, such as 5e-6")
    return float(value)


def _positive(path: Path, value: Any, expected: str) -> float:
    if not _is_number(value) or not 0 < value <= 1e30:
        raise _wrong(path, value, expected)
    return float(value)
