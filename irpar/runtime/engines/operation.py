"""What engines make of a node."""

from collections.abc import Callable, Sequence
from typing import Any

from irpar.ir import Value

Environment = dict[Value, Any]


Operation = Callable[[list[Any], Environment], Sequence[Any]]
