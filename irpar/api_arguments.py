"""What the Python interface is given, checked: a wrong type is reported in words before anything runs."""

import os
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from irpar.sharding import ArgumentError, IrparError, described, option, require, spelled

PATH = (str, os.PathLike)
MODEL = "give the path of an .onnx file, its bytes, or a ModelProto"


def check_model(model: object) -> None:
    """A path, bytes, or a ModelProto.

    Raises:
        ArgumentError: it is none of these, or a path that no file can have.
    """
    if isinstance(model, PATH):
        _check_text("the model", model)
    elif not isinstance(model, (bytes, bytearray, memoryview)):
        import onnx

        require("the model", model, onnx.ModelProto, MODEL)


def check_sizes(bind: object) -> None:
    """Names with whole numbers, or None.

    Raises:
        ArgumentError: it is no mapping, or one of something else.
    """
    if bind is None:
        return
    do = 'write names and sizes: bind={"batch": 8, "seq": 128}'
    require("bind", bind, Mapping, do)
    assert isinstance(bind, Mapping)
    for name, size in bind.items():
        require("a name in bind", name, str, do)
        require(f'the size of "{name}" in bind', size, Integral, do)


def check_names(name: str, given: object) -> None:
    """A list of names.

    Raises:
        ArgumentError: it is one text, or no list of texts.
    """
    do = f'write a list of names or globs: {name}=["h.*.weight"]'
    if isinstance(given, str):
        raise ArgumentError(f"{name} is {described(given)}", do=do)
    require(name, given, Sequence, do)
    assert isinstance(given, Sequence)
    for each in given:
        require(f"a name in {name}", each, str, do)


def check_values(values: object) -> None:
    """Names with values, or None.

    Raises:
        ArgumentError: it is no mapping, or a name is no text.
    """
    if values is None:
        return
    do = 'write inputs and their values: set={"sr": 16000}'
    require("set", values, Mapping, do)
    assert isinstance(values, Mapping)
    for name in values:
        require("a name in set", name, str, do)


def check_partition(pipeline: object, network: object, most: object) -> None:
    """The options of `partition`.

    Raises:
        ArgumentError: one has the wrong type.
    """
    from irpar.analysis.cost.network import Network
    from irpar.pass_manager import PassManager

    if pipeline is not None:
        do = 'write passes as text, such as "infer-types,localize", or give a PassManager'
        require("pipeline", pipeline, (str, PassManager), do)
    if network is not None:
        require(
            "network", network, (*PATH, Network), "give the name of a preset, the path of a network file, or a Network"
        )
        if isinstance(network, PATH):
            _check_text("network", network)
    if most is not None:
        require("max_redistribution_mb", most, Real, "give megabytes as a number")


def check_path(name: str, given: object) -> None:
    """A path.

    Raises:
        ArgumentError: it is something else, or no file can have it.
    """
    require(name, given, PATH, "give a path")
    assert isinstance(given, PATH)
    _check_text(name, given)


def _check_text(name: str, path: "str | os.PathLike[Any]") -> None:
    """Refuse paths that the system's calls do not take."""
    text = os.fspath(path)
    if not isinstance(text, str):
        raise ArgumentError(f"{name} is a path of bytes", do="give it as text: os.fsdecode(path)")
    try:
        encoded = os.fsencode(text)
    except UnicodeEncodeError:
        raise ArgumentError(f"{name} is {text[:40]!a}, which is no text of Unicode", do="give a path") from None
    if b"\0" in encoded:
        raise ArgumentError(f"{name} is {text[:40]!a}, and no path has a null character", do="leave it out")


def check_weights(weights: object) -> None:
    """What `save` may do with weights.

    Raises:
        IrparError: there is no such choice.
    """
    if weights not in ("copy", "none"):
        raise IrparError(f"weights is {described(weights)}", do='write weights="copy" or weights="none"')


COLLECTIVES = ("irpar", "com.microsoft", "tensorrt")
"""Whose operators may be written; commands that plan nothing do not import what knows them."""


def check_collectives(collectives: object, stubs: object) -> None:
    """Whose operators `save` may write, and whether with stand-ins for irpar's.

    Raises:
        IrparError: there is no such choice, or the two do not go together.
    """
    if collectives not in COLLECTIVES:
        do = "write " + " or ".join(option("collectives", name) for name in COLLECTIVES)
        raise IrparError(f"{spelled('--collectives', 'collectives')} is {described(collectives)}", do=do)
    require("stubs", stubs, bool, "write True or False")
    if stubs and collectives != COLLECTIVES[0]:
        raise IrparError(
            f"{option('stubs')} gives irpar's own operators, and {option('collectives', str(collectives))} writes none",
            do="leave one of the two out",
        )


def check_run(engine: object, group: object, timeout: object, results: object = "host") -> None:
    """The options of what runs a partition.

    Raises:
        ArgumentError: one has the wrong type.
    """
    if engine is not None:
        require("engine", engine, str, 'name one: engine="ort", "numpy" or "cupy"')
    require("group", group, str, 'name one: group="threads", "processes", "mpi" or "nccl"')
    if timeout is not None:
        require("timeout", timeout, Real, "give seconds as a number")
    if results not in ("host", "owned", "borrowed"):
        raise ArgumentError(
            f"results is {described(results)}", do='name what to give: results="host", "owned" or "borrowed"'
        )


def check_inputs(inputs: object) -> None:
    """Arrays by name.

    Raises:
        ArgumentError: it is no mapping, or a name is no text.
    """
    do = 'give a dict of arrays by name: {"input_ids": array}'
    if not isinstance(inputs, Mapping):
        raise ArgumentError(f"inputs is {described(inputs)}", do=do)
    for name in inputs:
        require("the name of an input", name, str, do)


def check_comparison(inputs: object, tolerance: object, seed: object, model: object) -> None:
    """The options of `verify` and `bisect`.

    Raises:
        ArgumentError: one has the wrong type.
    """
    if inputs is not None:
        check_inputs(inputs)
    if tolerance is not None:
        require("tolerance", tolerance, Real, "give the largest difference that counts as equal, such as 1e-4")
    require("seed", seed, Integral, "give a whole number")
    if model is not None:
        check_path("model", model)


def check_annotations(module: Any, annotations: object) -> None:
    """What `annotate` is given.

    Raises:
        ArgumentError: one has the wrong type.
    """
    check_module(module)
    require("annotations", annotations, Mapping, 'write names with specs: {"h.*.fc.weight": [None, "tp"]}')


def check_module(module: object) -> None:
    """A module.

    Raises:
        ArgumentError: it is something else.
    """
    from irpar.ir import Module

    require("module", module, Module, 'load a model first: module = irpar.load("model.onnx")')
