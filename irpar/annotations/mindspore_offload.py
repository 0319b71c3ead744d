"""MindSpore's `set_offload_context`: what lies in the host's memory or on disk."""

import re
from collections.abc import Mapping
from typing import Any

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.store_said import StoreSaid, say_store
from irpar.ir import Module
from irpar.sharding import nearest_names

from .devices import SpellingError

_PLACES = {"cpu": "host", "disk": "disk"}
_GB = 1.073741824
"""What MindSpore calls a GB, in units of 10**9 bytes."""
_DIGITS = 6
"""Of sizes in GB, behind the point."""
_SIZES = ("offload_cpu_size", "offload_disk_size", "aio_block_size", "host_mem_block_size")
_RATIOS = ("hbm_ratio", "cpu_ratio")
_FLAGS = ("auto_offload", "enable_pinned_mem", "enable_aio")
_ENTRIES = (*_SIZES, *_RATIOS, *_FLAGS, "offload_param", "offload_checkpoint", "offload_path", "aio_queue_size")


def set_offload_context(module: Module, offload_config: Mapping[str, Any], memory_offload: str = "ON") -> None:
    """Say where parameters and what the backward pass reads lie.

    >>> set_offload_context(step, {"offload_param": "cpu", "auto_offload": False})      # doctest: +SKIP
    >>> set_offload_context(step, {"offload_cpu_size": "512GB", "hbm_ratio": 0.9})      # doctest: +SKIP

    The default pipeline then has the pass `store`. What is said last holds.

    Args:
        module: a model, or a step of training.
        offload_config: `auto_offload` (True): what has to leave the device does; False: all that is said. Where to:
            `offload_param` ("cpu" or "disk"): parameters, and what an optimizer keeps; `offload_checkpoint`: what the
            backward pass reads. `offload_cpu_size`, `offload_disk_size` ("512GB"): what there is of it, of which
            `cpu_ratio` is used; `hbm_ratio`: what is used of the device's memory. `offload_path`: the folder of files.
            `enable_pinned_mem`, `enable_aio`, `aio_block_size`, `aio_queue_size` and `host_mem_block_size` are taken
            and change nothing: memory that is copied from is pinned, and disks are read with several requests at once.
        memory_offload: as MindSpore's `set_context` has it: "OFF" takes back what was said.

    Raises:
        SpellingError: an entry that there is not, or that cannot be.
    """
    if memory_offload not in ("ON", "OFF"):
        raise SpellingError(f"memory_offload is {memory_offload!r}", do='write "ON" or "OFF"')
    config = _checked(offload_config)
    if memory_offload == "OFF":
        say_store(module, None)
        return
    auto = config.get("auto_offload", True)
    memory, saved = (_PLACES.get(config.get(name, "")) for name in ("offload_param", "offload_checkpoint"))
    if not auto and memory is None and saved is None:
        raise SpellingError(
            "auto_offload is off, and nothing else says what leaves the device",
            where="set_offload_context",
            do='add "offload_param": "cpu", or leave out "auto_offload"',
        )
    default = "auto" if auto else "device"
    said = StoreSaid(
        memory or default,
        memory or default,
        saved or default,
        host_gb=round(_gb(config, "offload_cpu_size") * _share_of_host(config), _DIGITS),
        disk_gb=_gb(config, "offload_disk_size"),
        limit_gb=_limit_gb(module, config.get("hbm_ratio", 1.0)),
        path=config.get("offload_path", ""),
    )
    say_store(module, said)


def _checked(config: Any) -> dict[str, Any]:
    where = "set_offload_context"
    if not isinstance(config, Mapping):
        raise SpellingError(f"offload_config is {config!r}, no dict", where=where, do='write {"offload_param": "cpu"}')
    for name, value in config.items():
        if name not in _ENTRIES:
            raise SpellingError(
                f"offload_config has no entry {name!r}",
                where=where,
                notes=nearest_names(str(name), _ENTRIES),
                do=f"choose from {', '.join(_ENTRIES)}",
            )
        problem = _problem(name, value)
        if problem:
            raise SpellingError(f"{name} is {value!r}", where=where, do=problem)
    return dict(config)


def _problem(name: str, value: Any) -> str:
    """What to write instead of a value that an entry cannot have; empty where it can."""
    if name in _SIZES and not (isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?GB", value)):
        return 'write a size in GB, such as "512GB"'
    if name in _RATIOS and not (isinstance(value, int | float) and type(value) is not bool and 0 < value <= 1):
        return "write a number above 0, up to 1"
    if name in _FLAGS and type(value) is not bool:
        return "write True or False"
    if name in ("offload_param", "offload_checkpoint") and value not in ("", *_PLACES):
        return 'write "cpu" or "disk"'
    if name == "offload_path" and not isinstance(value, str):
        return "write the path of a folder"
    if name == "aio_queue_size" and (type(value) is not int or value < 1):
        return "write a number of requests"
    return ""


def _gb(config: Mapping[str, Any], name: str) -> float:
    return round(float(config[name].removesuffix("GB")) * _GB, _DIGITS) if name in config else 0.0


def _share_of_host(config: Mapping[str, Any]) -> float:
    share = float(config.get("cpu_ratio", 1.0))
    if share < 1 and "offload_cpu_size" not in config:
        raise SpellingError(
            f"cpu_ratio is {share:g}, and nothing says of what",
            where="set_offload_context",
            do='add "offload_cpu_size": "512GB"',
        )
    return share


def _limit_gb(module: Module, share: float) -> float:
    """What may be used of the device's memory; 0: all of it."""
    if share == 1:
        return 0.0
    memory = network_of(module.network).memory
    if memory is None:
        raise SpellingError(
            f"hbm_ratio is {share:g}, and the network {network_of(module.network).name} does not know of what",
            where="set_offload_context",
            do="choose a network whose device has a memory before, or leave it out",
        )
    return memory * share / 1e9
