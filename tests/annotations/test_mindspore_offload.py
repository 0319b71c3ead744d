"""What MindSpore says of offloading, the pass store does."""

from typing import Any

import pytest

import irpar
from irpar.annotations.mindspore import set_offload_context
from irpar.ir import Module, clone_module
from irpar.ir.text.files import parse_module, print_module
from irpar.models import build
from irpar.module_pipeline import default_pipeline
from irpar.pass_manager.default_pipeline import DEFAULT_PIPELINE
from irpar.sharding import IrparError, Mesh


def model(network: str = "h100-nvlink-ib") -> Module:
    module = irpar.load(build("mlp"))
    module.set_mesh(Mesh({"d": 1}))
    module.network = network
    return module


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "store{weights=auto, state=auto, activations=auto}"),
        ({"offload_param": "cpu", "auto_offload": False}, "store{weights=host, state=host}"),
        ({"offload_checkpoint": "disk", "auto_offload": False}, "store{activations=disk}"),
        ({"offload_param": "disk"}, "store{weights=disk, state=disk, activations=auto}"),
        (
            {"offload_cpu_size": "100GB", "cpu_ratio": 0.5, "offload_disk_size": "1000GB", "offload_path": "/ssd"},
            "store{weights=auto, state=auto, activations=auto, host-gb=53.687091, disk-gb=1073.741824, path=/ssd}",
        ),
        ({"hbm_ratio": 0.5}, "store{weights=auto, state=auto, activations=auto, limit-gb=40}"),
        ({"enable_aio": True, "aio_queue_size": 8, "enable_pinned_mem": False}, "store{weights=auto, state=auto, a"),
    ],
)
def test_the_pipeline_has_what_is_said(config: dict[str, Any], said: str) -> None:
    module = model()
    set_offload_context(module, config)
    assert said in default_pipeline(module)
    printed = print_module(clone_module(module))
    assert said in default_pipeline(parse_module(printed.text, resources=printed.resources))


def test_off_takes_it_back() -> None:
    module = model()
    set_offload_context(module, {"offload_param": "cpu"})
    set_offload_context(module, {}, memory_offload="OFF")
    assert default_pipeline(module) == DEFAULT_PIPELINE


def test_parameters_lie_in_host_memory() -> None:
    module = model()
    set_offload_context(module, {"offload_param": "cpu", "auto_offload": False})
    made = irpar.partition(module).module
    assert made is not None
    assert {value.memory for value in made.graph.constants if value.tensor_type.nbytes > 1000} == {"host"}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ([], r"offload_config is \[\], no dict"),
        ({"offload_pram": "cpu"}, "no entry 'offload_pram'"),
        ({"offload_param": "npu"}, "offload_param is 'npu'"),
        ({"offload_cpu_size": 512}, "offload_cpu_size is 512"),
        ({"offload_disk_size": "12MB"}, "offload_disk_size is '12MB'"),
        ({"hbm_ratio": 0}, "hbm_ratio is 0"),
        ({"auto_offload": "yes"}, "auto_offload is 'yes'"),
        ({"aio_queue_size": 0}, "aio_queue_size is 0"),
        ({"offload_path": 3}, "offload_path is 3"),
        ({"auto_offload": False}, "auto_offload is off, and nothing else says"),
        ({"cpu_ratio": 0.5}, "cpu_ratio is 0.5, and nothing says of what"),
        ({"hbm_ratio": 0.5}, "hbm_ratio is 0.5, and the network bytes does not know of what"),
    ],
)
def test_what_cannot_be_is_refused(config: Any, told: str) -> None:
    with pytest.raises(IrparError, match=told):
        set_offload_context(model("bytes"), config)


def test_it_is_on_or_off() -> None:
    with pytest.raises(IrparError, match="memory_offload is 'on'"):
        set_offload_context(model(), {}, memory_offload="on")
