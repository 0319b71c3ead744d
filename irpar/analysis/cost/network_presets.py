"""The networks that have a name, in the form of a network file (docs/network.md). Each number says where it is from."""

from collections.abc import Mapping
from typing import Any

_NCCL = {"all_gather": "ring", "reduce_scatter": "ring", "all_reduce": ["ring", "tree"], "broadcast": "ring"}
"""What NCCL has: rings for all, beside them trees for all-reduce (NCCL, src/graph/tuning.cc); the rest are sends."""

_H100_NVLINK_IB: Mapping[str, Any] = {
    "name": "H100 SXM, 8 to a node by NVLink, nodes by NDR InfiniBand",
    # NCCL, src/graph/tuning.cc: baseLat of ring, protocol Simple, the one for large messages.
    "launch": 8.4e-6,
    "links": [
        {
            "name": "nvlink",
            "devices": 8,  # NVIDIA DGX H100 data sheet: 8 GPUs, all joined by NVSwitch.
            "latency": 3.4e-6,  # NCCL, src/graph/tuning.cc: hwLat of NVLink, ring, Simple.
            "bandwidth": 450e9,  # NVIDIA H100 data sheet: NVLink 900 GB/s, which counts both directions.
            "algorithms": _NCCL,
        },
        {
            "name": "infiniband",
            "latency": 9.6e-6,  # NCCL, src/graph/tuning.cc: hwLat of the network, ring, Simple.
            "bandwidth": 50e9,  # NVIDIA DGX H100 data sheet: one ConnectX-7 of 400 Gb/s for each GPU.
            "algorithms": _NCCL,
        },
    ],
    "device": {
        # NVIDIA H100 data sheet and Hopper white paper, SXM5; tensor cores without sparsity.
        "flops": {
            "f64": 66.9e12,
            "f32": 66.9e12,
            "tf32": 494.7e12,
            "bf16": 989.4e12,
            "f16": 989.4e12,
            "f8": 1978.9e12,
            "i8": 1978.9e12,
        },
        "memory_bandwidth": 3.35e12,  # The same data sheet: HBM3.
        "memory": 80e9,  # The same.
        # Megatron-LM tells of up to 47% of the peak on H100 over a whole step of training (its README).
        "efficiency": 0.5,
        "launch": 2e-6,  # A planning figure for one of many kernels in a queue.
    },
    # NVIDIA DGX H100 data sheet: two Intel Xeon Platinum 8480C, 2 TB, eight NVMe drives of 3.84 TB for 8 GPUs.
    "host": {
        "flops": {"f64": 0.896e12, "f32": 1.792e12},  # An eighth of two sockets of 7.168 TFLOP/s; see cpu-ethernet.
        "memory_bandwidth": 76.8e9,  # An eighth of two sockets with 8 channels of DDR5-4800, 8 bytes each.
        "memory": 250e9,  # An eighth.
        "efficiency": 0.5,  # A planning figure.
    },
    # NVIDIA H100 data sheet: PCIe Gen5 128 GB/s, which counts both directions. Latency: as of PCI in NCCL's tuning.cc.
    "host_link": {"latency": 5.7e-6, "bandwidth": 64e9},
    # Rates: planning figures for an NVMe drive on PCIe Gen4.
    "disk": {"read": 6.5e9, "write": 3.5e9, "capacity": 3.84e12},
}

_A100_PCIE: Mapping[str, Any] = {
    "name": "A100 80GB PCIe, 4 to a node, nodes by one HDR InfiniBand adapter",
    "launch": 8.4e-6,  # As for H100.
    "links": [
        {
            "name": "pcie",
            "devices": 4,  # A choice: servers take 2 to 10 of these cards.
            "latency": 5.7e-6,  # NCCL, src/graph/tuning.cc: hwLat of PCI, ring, Simple.
            "bandwidth": 32e9,  # NVIDIA A100 data sheet: PCIe Gen4 64 GB/s, which counts both directions.
            "algorithms": _NCCL,
        },
        {
            "name": "infiniband",
            "latency": 9.6e-6,  # As for H100.
            # NVIDIA ConnectX-6 data sheet: 200 Gb/s, which the 4 GPUs of the node share (a choice, like their number).
            "bandwidth": 6.25e9,
            "algorithms": _NCCL,
        },
    ],
    "device": {
        # NVIDIA A100 data sheet; tensor cores without sparsity. There is no 8-bit float: it computes as f16.
        "flops": {"f64": 19.5e12, "f32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "f16": 312e12, "i8": 624e12},
        "memory_bandwidth": 1.935e12,  # The same data sheet: 80GB PCIe, HBM2e.
        "memory": 80e9,  # The same.
        # Megatron-LM's paper (Narayanan et al. 2021) has 44 to 52% of the peak on A100 over a whole step of training.
        "efficiency": 0.5,
        "launch": 2e-6,  # As for H100.
    },
    # A choice: one AMD EPYC 7763 for the 4 cards, 512 GB, one NVMe drive of 3.84 TB; a quarter of each.
    "host": {
        # AMD's product page: 64 cores, 2.45 GHz. A core does 32 f32 operations a cycle (two AVX2 FMA units).
        "flops": {"f64": 0.627e12, "f32": 1.254e12},
        "memory_bandwidth": 51.2e9,  # AMD's product page: 8 channels of DDR4-3200, 8 bytes each.
        "memory": 128e9,
        "efficiency": 0.5,  # A planning figure.
    },
    "host_link": {"latency": 5.7e-6, "bandwidth": 32e9},  # As the link pcie.
    "disk": {"read": 1.625e9, "write": 0.875e9, "capacity": 0.96e12},  # Rates: as for H100, a quarter.
}

_CPU_ETHERNET: Mapping[str, Any] = {
    "name": "one-socket servers (Intel Xeon Platinum 8480+), joined by Ethernet of 25 Gb/s",
    "launch": 0,
    "links": [
        {
            "name": "ethernet",
            # A planning figure for kernel TCP and one switch, half of a round trip; `ping` tells yours.
            "latency": 30e-6,
            "bandwidth": 3.125e9,  # IEEE 802.3by: 25 Gb/s in each direction.
        }
    ],
    "device": {
        # Intel's product page: 56 cores, 2.0 GHz. A core does 64 f32 operations a cycle (two AVX-512 FMA units), twice
        # that in f16, and with AMX 2048 in bf16 and 4096 in i8 (Intel, Optimization Reference Manual).
        "flops": {"f64": 3.584e12, "f32": 7.168e12, "bf16": 229.4e12, "f16": 14.34e12, "i8": 458.8e12},
        "memory_bandwidth": 307.2e9,  # Intel's product page: 8 channels of DDR5-4800, 8 bytes each.
        "memory": 256e9,  # A choice: 8 modules of 32 GB.
        "efficiency": 0.5,  # A planning figure; `irpar calibrate` measures.
        "launch": 5e-6,  # A planning figure: what ONNX Runtime takes for a small node; `irpar calibrate` measures.
    },
    "disk": {"read": 6.5e9, "write": 3.5e9, "capacity": 3.84e12},  # A choice: one drive, as for H100.
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "bytes": {},
    "h100-nvlink-ib": _H100_NVLINK_IB,
    "a100-pcie": _A100_PCIE,
    "cpu-ethernet": _CPU_ETHERNET,
}
"""Name to fields; `bytes` has none, it counts what is sent."""
