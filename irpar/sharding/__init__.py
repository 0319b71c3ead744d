"""Meshes and shardings: pure data, knows nothing else of irpar."""

from irpar.arguments import ArgumentError, described, require
from irpar.asked import asked_by_command, option, spelled
from irpar.errors import IrparError, ShardingError, listed, nearest_names, nearest_or_first_names

from .axes import common_atoms, join_axes, split_axis
from .blocks import (
    Region,
    all_regions,
    block_range,
    block_sizes,
    ceil_div,
    ceil_shape,
    filled_blocks,
    is_even,
    local_region,
    local_shape,
    minor_gather_is_aligned,
)
from .mesh import Axis, Mesh
from .permutation import is_permutation, permutation, permuted_shapes
from .sharding import (
    REDUCTIONS,
    DimSharding,
    DimSpec,
    Reduction,
    Sharding,
    are_disjoint,
    check_disjoint,
    is_priority,
    with_priority,
)

__all__ = [
    "REDUCTIONS",
    "ArgumentError",
    "Axis",
    "DimSharding",
    "DimSpec",
    "IrparError",
    "Mesh",
    "Reduction",
    "Region",
    "Sharding",
    "ShardingError",
    "all_regions",
    "are_disjoint",
    "asked_by_command",
    "block_range",
    "block_sizes",
    "ceil_div",
    "ceil_shape",
    "check_disjoint",
    "common_atoms",
    "described",
    "filled_blocks",
    "is_even",
    "is_permutation",
    "is_priority",
    "join_axes",
    "listed",
    "local_region",
    "local_shape",
    "minor_gather_is_aligned",
    "nearest_names",
    "nearest_or_first_names",
    "option",
    "permutation",
    "permuted_shapes",
    "require",
    "spelled",
    "split_axis",
    "with_priority",
]
