"""What of a network file is reported, with its place and what may stand there."""

import math
from typing import Any

import pytest

from irpar.analysis.cost.network import FieldError
from irpar.analysis.cost.network_fields import network_of_fields

LINK = {"name": "net", "latency": 1e-6, "bandwidth": 1e9}
DEVICE = {"flops": {"f32": 1e12}, "memory_bandwidth": 5e10}


@pytest.mark.parametrize(
    ("fields", "path", "what", "do"),
    [
        ([], (), "the network is no table", "write name: value"),
        ({}, (), "links is missing", "the fields that must be there: links"),
        ({"links": []}, ("links",), "links is []", "write a list with at least one entry"),
        ({"links": [5]}, ("links", 0), "links is 5", "write a table"),
        (
            {"links": [{**LINK, "latency": True}]},
            ("links", 0, "latency"),
            "latency is true",
            "write seconds, such as 5e-6",
        ),
        ({"links": [{**LINK, "latency": math.nan}]}, ("links", 0, "latency"), "latency is NaN", "write seconds"),
        ({"links": [{**LINK, "bandwidth": 0}]}, ("links", 0, "bandwidth"), "bandwidth is 0", "write bytes a second"),
        (
            {"links": [{**LINK, "bandwidth": 5e-324}]},
            ("links", 0, "bandwidth"),
            "bandwidth is 5e-324",
            "bytes a second",
        ),
        ({"links": [{**LINK, "latency": "\ud800"}]}, ("links", 0, "latency"), "latency is ", "write seconds"),
        ({"links": [{**LINK, "bandwidth": 10**400}]}, ("links", 0, "bandwidth"), "bandwidth is 1000", "bytes a second"),
        ({"links": [{**LINK, "name": ""}]}, ("links", 0, "name"), 'name is ""', "write a name"),
        ({"links": [{**LINK, "devices": 1}]}, ("links", 0, "devices"), "devices is 1", "a whole number of 2 or more"),
        (
            {"links": [{**LINK, "algorithms": {"all_reduce": ["ring", "dubling"]}}]},
            ("links", 0, "algorithms", "all_reduce", 1),
            'all_reduce is "dubling"',
            "write ring or tree or doubling",
        ),
        (
            {"links": [{**LINK, "kinds": {"all_reduce": {"latency": 1e-6}}}]},
            ("links", 0, "kinds", "all_reduce"),
            "bandwidth is missing",
            "the fields that must be there: latency, bandwidth",
        ),
        (
            {"links": [{**LINK, "kinds": {"al_reduce": {}}}]},
            ("links", 0, "kinds", "al_reduce"),
            'there is no kind of collective "al_reduce"',
            "choose from",
        ),
        ({"links": [LINK], "axes": {"tp": 3}}, ("axes", "tp"), "tp is 3", "write a text"),
        ({"links": [LINK], "axes": {"dp": "net", "tp": "x"}}, ("axes", "tp"), 'tp is "x"', "the name of a link: net"),
        ({"links": [LINK], "device": None}, ("device",), "device is null", "write a table"),
        (
            {"links": [LINK], "device": {**DEVICE, "flops": {"f33": 1}}},
            ("device", "flops", "f33"),
            'there is no type "f33"',
            "choose from f64, f32",
        ),
        (
            {"links": [LINK], "device": {**DEVICE, "uses_tf32": 1}},
            ("device", "uses_tf32"),
            "uses_tf32 is 1",
            "write true or false",
        ),
    ],
)
def test_errors(fields: Any, path: tuple[Any, ...], what: str, do: str) -> None:
    with pytest.raises(FieldError) as caught:
        network_of_fields(fields)
    assert caught.value.path == path
    assert caught.value.what.startswith(what)
    assert do in (caught.value.do or "")


def test_a_network_of_all_fields() -> None:
    disk = {"read": 5e9, "write": 3e9}
    host_link = {"latency": 0, "bandwidth": 1}
    fields = {
        "links": [LINK],
        "axes": {"tp": "net"},
        "device": DEVICE,
        "host": DEVICE,
        "host_link": host_link,
        "disk": disk,
    }
    found = network_of_fields(fields)
    assert found.device == found.host
    assert found.device is not None
    assert found.device.flops == {"f32": 1e12}
    assert found.disk is not None
    assert found.disk.capacity is None
    assert found.axes == {"tp": "net"}
    assert found.name == "of a file"
