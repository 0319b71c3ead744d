"""What notebooks show of a module: its inputs, results, annotations and operators."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.text import Text

from irpar.tables.display import ROWS, table
from irpar.units import bytes_text, sharding_text

from .annotation import spec_json
from .module import Module
from .types import tensor_type
from .value import Value

if TYPE_CHECKING:
    from rich.console import Console


def print_module(console: "Console", module: Module) -> None:
    """Name, size, inputs and results with their shardings, annotations, operators; at most `ROWS` lines of each."""
    console.print(Text(repr(module), style="bold"))
    held = sum(value.data.nbytes for graph in module.graphs for value in graph.constants if value.data is not None)
    console.print(f"constants: {bytes_text(held)}")
    graph = module.graph
    _print_values(console, "input", graph.inputs)
    _print_values(console, "output", graph.outputs, graph.output_names)
    annotations = {known.pattern: known for known in (*module.annotated.values(), *module.annotations)}
    if annotations:
        made = table("annotation", "sharding")
        for known in list(annotations.values())[:ROWS]:
            made.add_row(known.pattern, spec_json(known.spec))
        _print_cut_off(console, made, len(annotations))
    counted = Counter(node.operator for each in module.graphs for node in each.walk())
    made = table("operator", "nodes", right=("nodes",))
    for operator, number in counted.most_common(ROWS):
        made.add_row(operator, f"{number:,}")
    _print_cut_off(console, made, len(counted))


def _print_values(console: "Console", title: str, values: Iterable[Value], names: Iterable[str] | None = None) -> None:
    made = table(title, "type", "sharding")
    known = list(values)
    for value, name in list(zip(known, names or [value.source_name for value in known], strict=True))[:ROWS]:
        made.add_row(name, str(value.type), _sharding(value))
    _print_cut_off(console, made, len(known))


def _sharding(value: Value) -> str:
    type_ = tensor_type(value.type)
    if value.sharding is None or type_ is None:
        return ""
    return sharding_text(value.sharding.spec(), value.global_shape or type_.shape)


def _print_cut_off(console: "Console", made: object, count: int) -> None:
    console.print(made)
    if count > ROWS:
        console.print(f"{count - ROWS:,} more")
