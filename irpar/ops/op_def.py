"""What irpar knows of an operator, and where that is looked up."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from irpar.ir import DOMAIN, Builder, Node, Type, Value

if TYPE_CHECKING:
    from .gradients.writer import GradientWriter
    from .local_programs.program import LocalProgram
    from .rule import FactorRule

Infer = Callable[[Node], Sequence[Type] | None]
Rule = Callable[[Node], "FactorRule | None"]
Cost = Callable[[Node], int]
Predicate = Callable[[Node], bool]
Gradient = Callable[[Node, Sequence[Value | None], "GradientWriter"], Sequence[Value | None]]
"""Writes the gradients of a node's operands; see `OpDef.gradient`."""
Decompose = Callable[[Node, "GradientWriter"], Sequence[Value]]
"""Writes what a node computes in other operators; see `OpDef.decompose`."""
Localize = Callable[[Node, Node, Builder], Sequence[Value] | None]
"""Mends the local copy of a node; see `OpDef.localize`."""

FAMILIES = (
    "elementwise",
    "matmul",
    "reduction",
    "normalization",
    "shape",
    "position",
    "indexing",
    "tensor_scatter",
    "attention",
    "convolution",
    "channels_last",
    "pooling",
    "resize",
    "vision",
    "signal",
    "recurrent",
    "linear_attention",
    "quantized",
    "loss",
    "optimizer",
    "updates",
    "random",
    "sequence",
    "text",
    "classic",
    "fused",
    "fused_kernel",
    "fused_attention",
    "fused_products",
    "gated",
    "block_quantized",
    "qlinear",
    "collectives",
    "memory_copies",
)


@dataclass(frozen=True)
class OpDef:
    """What irpar knows of one operator.

    Attributes:
        domain, name: the operator; versions are told apart inside the functions by `node.version`.
        infer: result types from operand types, constants and attributes; None where it cannot tell.
        rule: the factor rule of a node with static operand and result types; None: only full tensors.
        flops: floating-point operations of a node with static types (an add or a multiply counts 1).
        localize: mends the local copy of a node where the rule does not say it all. Called as
            `localize(whole, local, builder)` after the local types are set: `whole` is the node of the global view,
            whose operands carry whole types and the shardings that the node runs with; `local` stands in the local
            graph already; `builder` inserts before it. Returns None when it only changed operands or attributes of
            `local`, else one value for each result of `local`, of the same type: the caller lets these take over
            uses, names and facts of the results and erases `local`.
        local_program: what it does for factors that take more than to run on blocks.
        other_programs: more of them: with rules of their own (`LocalProgram.rule`), or for nodes along whose dims
            `local_program` does not work.
        view: the result is the first operand's memory under another shape: no element is touched.
        moves_elements: results hold elements of the first operand alone; other operands only say which and where.
        rule_looks_back: the rule reads which node gives an operand, too: it is asked again of nodes that look alike.
        looks_up: of these one whose first operand is a table: it reads no more of it than it gives.
        reads_sizes: it reads the sizes of its operands, and none of their elements.
        is_elementwise: each element of the result is made of those at its place; operands broadcast.
        random: equal operands need not give equal results; or asks that of a node.
        collective: it changes how its operand is sharded and, all devices taken together, none of its numbers.
        communicates: other ranks take part in it: collectives but for those that send nothing, their started forms
            and the wait for them, and what is sent from rank to rank.
        point_to_point: of those that communicate: between pairs of ranks.
        copies: it copies between memories of one rank, or begins to.
        starts: its result is in flight until it is waited for.
        waits: it gives what was in flight.
        gradient: writes the gradients of the operands that need one: called as `gradient(node, of_results, writer)`
            with the gradients of the results, None for those that nothing depends on (one of them has one); returns an
            entry for each operand. `zero` of `gradients/zero.py` where the derivative is zero wherever there is one.
        decompose: of an operator without `gradient`: writes what it computes in ONNX's own operators that have one,
            called as `decompose(node, writer)`; returns a value for each result. autodiff takes these in its place.
        runs_decomposed: whether engines without a kernel of it compute these, too.
    """

    domain: str
    name: str
    infer: Infer | None = None
    rule: Rule | None = None
    flops: Cost | None = None
    localize: Localize | None = None
    local_program: "LocalProgram | None" = None
    other_programs: "tuple[LocalProgram, ...]" = ()
    _: KW_ONLY
    view: bool = False
    moves_elements: bool = False
    rule_looks_back: bool = False
    looks_up: bool = False
    reads_sizes: bool = False
    is_elementwise: bool = False
    random: bool | Predicate = False
    collective: bool = False
    communicates: bool = False
    point_to_point: bool = False
    copies: bool = False
    starts: bool = False
    waits: bool = False
    gradient: Gradient | None = None
    decompose: Decompose | None = None
    runs_decomposed: bool = True

    @cached_property
    def is_compute(self) -> bool:
        """True for what computes: no collective, no copy, nothing that other ranks take part in."""
        return not (self.collective or self.communicates or self.copies)


DEFINITIONS: dict[tuple[str, str], OpDef] = {}
"""By domain and operator; `define` fills it."""
_UNKNOWN = OpDef("", "")
"""What is known of an operator without a definition."""
_NEWER = OpDef(DOMAIN, "", communicates=True)
"""And of one in irpar's own domain: other ranks may wait for it."""


@cache
def _load() -> None:
    """Import all families, and those of other packages (entry point group `irpar.ops`)."""
    for family in FAMILIES:
        import_module(f"{__package__}.{family}")
    for entry in entry_points(group="irpar.ops"):
        entry.load()


def _loaded(key: tuple[str, str]) -> OpDef | None:
    """The first look-up loads all families; those that follow, a hundred for each node, are the table's own."""
    global _look_up
    _load()
    _look_up = DEFINITIONS.get
    return DEFINITIONS.get(key)


_look_up: Callable[[tuple[str, str]], OpDef | None] = _loaded


def definition(node: Node) -> OpDef | None:
    """The definition of a node's operator, or None."""
    return None if node.callee is not None else _look_up((node.domain, node.op_type))


def traits(node: Node) -> OpDef:
    """The definition of a node's operator; of calls and operators that irpar does not know one without any trait."""
    found = None if node.callee is not None else _look_up((node.domain, node.op_type))
    if found is not None:
        return found
    return _NEWER if node.domain == DOMAIN and not node.is_return else _UNKNOWN


def traits_of_operator(domain: str, name: str) -> OpDef:
    """The same of an operator by its name."""
    _load()
    return DEFINITIONS.get((domain, name), _UNKNOWN)


def definitions() -> tuple[OpDef, ...]:
    """All definitions."""
    _load()
    return tuple(DEFINITIONS.values())
