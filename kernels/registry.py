"""The table of kernels: which function computes which version of which operator.

A kernel function states its operator in its signature: operands are positional (`None` when an optional one is absent),
ONNX attributes are keyword-only parameters whose defaults are ONNX's, `n_outputs` is asked for where it matters, `out`
where the function can write its result into an array that it is given (`outs` where it has several), `kept` where it
makes something of constants:

    @kernel("Concat", since=4)
    def concat(xp, *operands, axis): ...

All operands are arrays of `xp`, but for those that are declared otherwise. What a function reads as numbers (a shape,
axes, a count) is a `HostArray`: numpy's, whatever `xp` is, so that reading it waits for no device. Of a `ShapeArray` it
reads shape and dtype alone, so that it may be an array of either module:

    @kernel("Expand", since=8)
    def expand(xp, x: Array, shape: HostArray): ...

`Kernel` checks a call against that signature, so that a function body handles only what is particular to it. A function
reports a problem with a plain `ValueError`; the caller sees a `KernelError` that names the operator and its operands.

Memory that a function needs beside its results it takes from `SCRATCH` (see `scratch.py`), and what it takes at most it
declares: `@kernel("Conv", since=1, scratch=_scratch_bytes)`. Who plans memory reserves as much while the node runs. It
declares what it allocates itself, too, as expressions of arrays do, where that is large (see `temporaries.py`):
`@kernel("PRelu", since=7, temporaries=arrays_like(2.5, 0))`.

The families of kernels, a file each, are loaded when one of their operators is looked up, as `families` says.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, get_args

import numpy as np

from .families import OPERATORS
from .scratch import SCRATCH
from .table import Table

Array: TypeAlias = Any  # a numpy.ndarray or a cupy.ndarray
HostArray: TypeAlias = Annotated[Any, "host"]  # an operand whose numbers the function reads: always a numpy.ndarray
ShapeArray: TypeAlias = Annotated[Any, "shape"]  # an operand of which the function reads shape and dtype: of any module
ArrayModule: TypeAlias = Any  # numpy or cupy
Function: TypeAlias = Callable[..., Any]
KeptBytes: TypeAlias = Callable[[Sequence[tuple[int, ...] | None], Mapping[str, Any], int], int]
"""What a function keeps at most of its operands, by their shapes, the node's attributes and the bytes of an element."""


@dataclass(frozen=True, slots=True)
class Shaped:
    """What is known of an operand or a result before anything runs.

    Attributes:
        shape, dtype: of the array.
        is_strided: whether its elements may lie otherwise than one after the other, as those of a view do.
        is_constant: whether it is the same array in all runs, so that what is made of it can be kept.
    """

    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    is_strided: bool = False
    is_constant: bool = False

    @property
    def elements(self) -> int:
        """How many it has."""
        return math.prod(self.shape)


ScratchBytes: TypeAlias = Callable[[Sequence[Shaped | None], Sequence[Shaped], Mapping[str, Any]], int]
"""What a function takes at most of `SCRATCH`, or allocates itself, by the node's operands, results and attributes."""

_NOT_ATTRIBUTES = ("n_outputs", "out", "outs", "kept")
_REPORTED = (ValueError, TypeError, IndexError, KeyError, ZeroDivisionError, OverflowError, NotImplementedError)


class KernelError(ValueError):
    """A kernel cannot compute a node: wrong shapes or dtypes, or an attribute value that is not supported.

    Attributes:
        op_type: the operator's name, for example `"MatMul"`.
        problem: what is wrong, without the operator's name.
    """

    def __init__(self, op_type: str, problem: str) -> None:
        super().__init__(f"{op_type}: {problem}")
        self.op_type = op_type
        self.problem = problem


class Kept:
    """What a kernel makes of the constant operands of one node, and keeps from run to run.

    Args:
        constant: places of the operands that are the same arrays in all runs.
    """

    def __init__(self, constant: Iterable[int] = ()) -> None:
        self._constant = frozenset(constant)
        self._made: dict[tuple[int, str], Any] = {}

    def of(self, place: int, what: str, make: Callable[[], Any]) -> Any:
        """What `make` makes of the operand at a place alone, by a name of it; once, if that is constant."""
        if (place, what) in self._made:
            return self._made[place, what]
        made = make()
        if place in self._constant:
            self._made[place, what] = made
        return made

    def keeps(self, place: int) -> bool:
        """Whether the operand at a place is constant."""
        return place in self._constant

    def frozen(self) -> "Kept":
        """What is kept so far, where nothing that is made can be kept."""
        found = Kept()
        found._made.update(self._made)
        return found


@dataclass(frozen=True)
class Signature:
    """What a kernel function accepts, read from its Python signature.

    Attributes:
        operands: names of the positional operands, the required ones first.
        required: how many operands must be present.
        variadic: whether any number of operands may follow.
        attributes: names of the ONNX attributes that the function knows.
        required_attributes: those of them that have no default.
        wants_n_outputs: whether the function must know how many results the node has.
        writes_out: whether the function takes `out`: its one result is that array or a new one, never a view of an
            operand. Where the function is elementwise `out` may be an operand of the result's shape, else it shares no
            memory with any.
        writes_outs: whether the function takes `outs`, an array or None for each result; holds for each as `writes_out`
            does for one.
        keeps: whether the function takes `kept`, a `Kept` of its node.
        host: places of the operands that must be numpy arrays.
        shape_only: places of the operands that may be arrays of any module.
    """

    operands: tuple[str, ...]
    required: int
    variadic: bool
    attributes: frozenset[str]
    required_attributes: frozenset[str]
    wants_n_outputs: bool
    writes_out: bool = False
    writes_outs: bool = False
    keeps: bool = False
    host: frozenset[int] = frozenset()
    shape_only: frozenset[int] = frozenset()

    @classmethod
    def of(cls, function: Function) -> "Signature":
        """Read the signature of `function(xp, *operands, **attributes)`."""
        parameters = list(inspect.signature(function).parameters.values())[1:]
        operands = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in _NOT_ATTRIBUTES]
        return cls(
            operands=tuple(p.name for p in operands),
            required=sum(p.default is p.empty for p in operands),
            variadic=any(p.kind is p.VAR_POSITIONAL for p in parameters),
            attributes=frozenset(p.name for p in keywords),
            required_attributes=frozenset(p.name for p in keywords if p.default is p.empty),
            wants_n_outputs=any(p.name == "n_outputs" for p in parameters),
            writes_out=any(p.name == "out" for p in parameters),
            writes_outs=any(p.name == "outs" for p in parameters),
            keeps=any(p.name == "kept" for p in parameters),
            host=frozenset(place for place, p in enumerate(operands) if _is_declared(p.annotation, HostArray)),
            shape_only=frozenset(place for place, p in enumerate(operands) if _is_declared(p.annotation, ShapeArray)),
        )


def _is_declared(annotation: Any, kind: Any) -> bool:
    """Whether a parameter is declared as `kind`, or as `kind | None`."""
    return bool(annotation == kind or kind in get_args(annotation))


@dataclass(frozen=True)
class Kernel:
    """One operator version computed with arrays.

    Attributes:
        domain: the operator's domain, `""` for ONNX's own.
        op_type: the operator's name.
        since: the first operator-set version that this function computes.
        function: `function(xp, *operands, **attributes)`, giving one array or a tuple of arrays.
        signature: what the function accepts.
        kept_bytes: what it keeps at most of constant operands from run to run; None for nothing.
        scratch: what it takes at most of `SCRATCH` on a processor; None for nothing.
        temporaries: what it allocates at most itself beside its results on a processor, but for some 100 KB; None for
            nothing.
        gives_views: whether its results are always views of its first operand.
    """

    domain: str
    op_type: str
    since: int
    function: Function
    signature: Signature
    kept_bytes: KeptBytes | None = None
    scratch: ScratchBytes | None = None
    temporaries: ScratchBytes | None = None
    gives_views: bool = False

    def scratch_bytes(
        self, operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
    ) -> int:
        """What a call takes at most of `SCRATCH` on a processor; 0 for a call that will be refused."""
        return _bound(self.scratch, operands, results, attributes)

    def temporary_bytes(
        self, operands: Sequence[Shaped | None], results: Sequence[Shaped], attributes: Mapping[str, Any]
    ) -> int:
        """What a call allocates at most itself on a processor; 0 for a call that will be refused."""
        return _bound(self.temporaries, operands, results, attributes)

    def __call__(
        self,
        xp: ArrayModule,
        inputs: Sequence[Array | None],
        attributes: Mapping[str, Any],
        n_outputs: int,
        out: Array | Sequence[Array | None] | None = None,
        kept: Kept | None = None,
        scratch: Array | None = None,
    ) -> tuple[Array, ...]:
        """Compute the node's results.

        Args:
            xp: the array module that owns the inputs, `numpy` or `cupy`; see `signature` for those that are numpy's.
            inputs: the operands in order; `None` for an optional one that is absent. None but `out` is written to.
            attributes: the attributes that the node sets, as Python values (int, float, str, tuples of those, arrays).
            n_outputs: how many results the node has.
            out: where the result goes, if the function writes into what it is given and the result fits there; where
                the node has several results an array or None for each.
            kept: what the function keeps of this node from run to run, if it keeps anything.
            scratch: bytes for what the function needs beside its results; None: it finds them itself.

        Returns:
            `n_outputs` arrays with ONNX's result dtypes; some may be views of inputs, and some of `out`.

        Raises:
            KernelError: an operand or an attribute is missing, has an unsupported value, or does not fit the others.
        """
        keywords = self._keywords(attributes)
        if self.signature.wants_n_outputs:
            keywords["n_outputs"] = n_outputs
        if out is not None and self.signature.writes_out:
            keywords["out"] = out
        if out is not None and self.signature.writes_outs:
            keywords["outs"] = out if isinstance(out, tuple) else (out,)
        if kept is not None and self.signature.keeps:
            keywords["kept"] = kept
        operands = self._operands(inputs)
        try:
            with np.errstate(all="ignore"):
                if scratch is None:
                    results = self.function(xp, *operands, **keywords)
                else:
                    with SCRATCH.lent(scratch):
                        results = self.function(xp, *operands, **keywords)
        except _REPORTED as error:
            raise KernelError(self.op_type, f"{error}\n  operands: {_describe(inputs)}") from error
        if not isinstance(results, tuple):
            results = (results,)
        if len(results) < n_outputs:
            raise KernelError(self.op_type, f"the node has {n_outputs} results, this version gives {len(results)}")
        return tuple(xp.asarray(result) for result in results[:n_outputs])

    def _keywords(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        unknown = attributes.keys() - self.signature.attributes
        if unknown:
            raise KernelError(self.op_type, f"attribute {_names(unknown)} is not supported at version {self.since}")
        missing = self.signature.required_attributes - attributes.keys()
        if missing:
            raise KernelError(self.op_type, f"attribute {_names(missing)} is missing")
        return dict(attributes)

    def _operands(self, inputs: Sequence[Array | None]) -> Sequence[Array | None]:
        signature = self.signature
        if len(inputs) > len(signature.operands) and not signature.variadic:
            limit = len(signature.operands)
            raise KernelError(self.op_type, f"{len(inputs)} operands given, version {self.since} takes at most {limit}")
        for index in range(signature.required):
            if index >= len(inputs) or inputs[index] is None:
                raise KernelError(self.op_type, f"operand {index} ({signature.operands[index]}) is missing")
        if signature.variadic and (not inputs or any(operand is None for operand in inputs)):
            raise KernelError(self.op_type, "needs at least one operand, and none may be absent")
        return inputs


def _bound(
    declared: ScratchBytes | None,
    operands: Sequence[Shaped | None],
    results: Sequence[Shaped],
    attributes: Mapping[str, Any],
) -> int:
    if declared is None:
        return 0
    try:
        return declared(operands, results, attributes)
    except _REPORTED:
        return 0


_TABLE: Table[Kernel] = Table(__package__, OPERATORS)


def register(
    op_type: str,
    since: int,
    function: Function,
    domain: str = "",
    kept_bytes: KeptBytes | None = None,
    scratch: ScratchBytes | None = None,
    temporaries: ScratchBytes | None = None,
    gives_views: bool = False,
) -> None:
    """Enter `function` as the kernel of `op_type` from operator-set version `since` on."""
    signature = Signature.of(function)
    entry = Kernel(domain, op_type, since, function, signature, kept_bytes, scratch, temporaries, gives_views)
    _TABLE.enter(entry, function.__module__)


def kernel(
    op_type: str,
    since: int,
    domain: str = "",
    kept_bytes: KeptBytes | None = None,
    scratch: ScratchBytes | None = None,
    temporaries: ScratchBytes | None = None,
    gives_views: bool = False,
) -> Callable[[Function], Function]:
    """Decorator form of `register`; may be stacked where one function computes several operators."""

    def enter(function: Function) -> Function:
        register(op_type, since, function, domain, kept_bytes, scratch, temporaries, gives_views)
        return function

    return enter


def has_kernel(domain: str, op_type: str, version: int) -> bool:
    """True where `lookup` finds a kernel; loads none."""
    return _TABLE.has(domain, op_type, version)


def lookup(domain: str, op_type: str, version: int) -> Kernel | None:
    """The kernel with the greatest since-version that is not above `version`, or None.

    Args:
        domain: the operator's domain; `"ai.onnx"` and `""` are the same.
        op_type: the operator's name.
        version: the version of that domain's operator set that the model imports.
    """
    return _TABLE.find(domain, op_type, version)


def supported() -> list[tuple[str, str]]:
    """All (domain, op type) pairs that have a kernel, sorted."""
    return _TABLE.all()


def _names(names: Sequence[str] | set[str] | frozenset[str]) -> str:
    return ", ".join(repr(name) for name in sorted(names))


def _describe(inputs: Sequence[Array | None]) -> str:
    return ", ".join("absent" if x is None else f"{x.dtype}{list(x.shape)}" for x in inputs) or "none"
