"""Which of several runs, and which process of several, runs which tests: those of a file together, the long ones first.

pytest-xdist's own groups are marks that it writes into the ids of tests, which pytest 9.2 does not let it.
"""

import re
from collections.abc import Iterable
from zlib import crc32

import pytest
from xdist.scheduler import LoadScopeScheduling

WITH_CASES = {
    "tests/kernels/test_conformance.py",
    "tests/kernels/test_device.py",
    "tests/kernels/test_out.py",
    "tests/kernels/test_scratch.py",
    "tests/onnx_io/test_backend_cases.py",
    "tests/ops/test_infer.py",
    "tests/runtime/test_conformance.py",
}
"""Files with ONNX's own cases, which take some ten seconds to make: one process makes them."""

APART = {"tests/ops/gradients/test_sharded.py", "tests/test_random_attributes.py"}
"""Files of many minutes in make test-all whose tests share nothing: each goes where there is room."""

LONG = (
    "tests/onnx_io/test_cut_cases.py",
    "tests/test_fused_communication.py",
    "tests/test_random_attributes.py",
    "tests/models/test_training_groups.py",
    "tests/training/test_zero_families.py",
    "tests/analysis/redistribution/test_every_pair.py",
    "tests/kernels/cuda/test_attention_gradient.py",
    "tests/kernels/cuda/test_few_rows.py",
    "tests/kernels/cuda/test_channels_last.py",
    "tests/runtime/groups/mpi/test_group.py",
    "tests/test_docs.py",
    "tests/runtime/groups/test_process_faults.py",
    "tests/advice/suggestion/test_suggest.py",
    "tests/runtime/groups/test_again.py",
    "tests/test_process.py",
    "tests/runtime/groups/wire/test_wired.py",
    "tests/cache/test_partitions.py",
    "tests/training/test_micro_batches.py",
    "cases of ONNX",
    "tests/ops/test_rules.py",
    "tests/test_families.py",
    "tests/test_exports.py",
    "tests/test_hostile.py",
    "tests/runtime/groups/test_process_launch.py",
    "tests/ops/local_programs/test_nodes.py",
    "tests/test_odd_shardings.py",
    "tests/test_random_programs.py",
    "tests/runtime/groups/test_processes.py",
    "tests/test_partition.py",
)
"""Files of more than ten seconds, the first nine of minutes in make test-all, where they have all their tests.

Begun last, one of them would leave the other processes idle.
"""


def together(node: str) -> str:
    """What a test of this id runs with in one process, which makes once what they share."""
    file = node.partition("::")[0]
    if file in APART:
        return node
    return "cases of ONNX" if file in WITH_CASES else file


def place(node: str) -> int:
    """When a test of this id begins: with its file, the long ones first."""
    group = together(node).partition("::")[0]
    return LONG.index(group) if group in LONG else len(LONG)


def in_part(nodes: Iterable[str], text: str) -> set[str]:
    """The tests of one of several runs that together run all, each file in one of them; long files are dealt in turn.

    Args:
        nodes: ids of all.
        text: which part of how many, such as `3/8`.
    """
    told = re.fullmatch(r"(\d{1,3})/(\d{1,3})", text)
    part, parts = map(int, told.groups()) if told else (0, 0)
    if not 0 < part <= parts:
        raise pytest.UsageError(f'IRPAR_TEST_PART is "{text}"; give the part and how many there are, such as 3/8')
    return {node for node in nodes if _turn(together(node)) % parts == part - 1}


def _turn(group: str) -> int:
    return LONG.index(group) if group in LONG else crc32(group.encode())


class Distribution(LoadScopeScheduling):
    """Hands out files in the order in which the tests were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return together(nodeid)
