"""The lines of the text form outside of graphs: module facts, meshes, annotations, opsets, metadata."""

from collections.abc import Callable
from typing import TypeVar

from irpar.ir.annotation import Annotation
from irpar.ir.module import Module
from irpar.ir.tensor import Tensor
from irpar.sharding import DimSpec, IrparError, Mesh
from irpar.units import MOST_BYTES

from .lexer import MOST_VERSION, Lexer

_FACTS = "ir_version, producer, doc, network, memory_limit, fixed or meta"

T = TypeVar("T")


class HeaderReader:
    """Reads these lines out of a lexer into a module; `tensor` reads a type and the numbers that follow it."""

    def __init__(self, lexer: Lexer, module: Module, tensor: Callable[[], Tensor]) -> None:
        self.lexer = lexer
        self.made = module
        self.tensor = tensor

    def items(self, close: str, item: Callable[[], None]) -> None:
        """Read items with commas between them up to a closing bracket; the opening one is past."""
        lexer = self.lexer
        if lexer.accept(close):
            return
        item()
        while lexer.accept(","):
            item()
        if lexer.token != close:
            raise lexer.expected(f"`,` or `{close}`")
        lexer.advance()

    def module(self) -> None:
        """Read `module {ir_version=10, ...}`."""
        lexer, module = self.lexer, self.made
        named: set[str] = set()

        def fact() -> None:
            start = lexer.start
            name = lexer.take("name", _FACTS)
            if name in named:
                raise lexer.error(f"fact {name} twice", start)
            named.add(name)
            lexer.expect("=")
            if name == "ir_version":
                module.ir_version = lexer.integer("an IR version", 0, MOST_VERSION)
            elif name == "producer":
                lexer.expect("[")
                producer = lexer.string()
                lexer.expect(",")
                module.producer = (producer, lexer.string())
                lexer.expect("]")
            elif name == "doc":
                module.doc = lexer.string()
            elif name == "network":
                module.network = lexer.string()
            elif name == "memory_limit":
                module.memory_limit = lexer.integer("bytes that a rank may hold", 0, MOST_BYTES)
            elif name == "fixed":
                module.fixed = self.fixed()
            elif name == "meta":
                module.metadata = self.metadata()
            else:
                raise lexer.error(f"no such fact of a module: {name}", do=f"use {_FACTS}")

        lexer.advance()
        lexer.expect("{")
        self.items("}", fact)

    def mesh(self) -> None:
        """Read `mesh @m = ["dp"=2] devices [...]`."""
        lexer = self.lexer
        lexer.advance()
        start = lexer.start
        name = lexer.symbol("the name of the mesh such as @m")
        axes: dict[str, int] = {}

        def axis() -> None:
            at = lexer.start
            axis_name = lexer.string('an axis such as "dp"=2')
            if axis_name in axes:
                raise lexer.error(f'axis "{axis_name}" twice', at)
            lexer.expect("=")
            axes[axis_name] = lexer.integer("the size of the axis")

        lexer.expect("=")
        lexer.expect("[")
        self.items("]", axis)
        devices = self.integers() if lexer.accept("devices") else None
        if name in self.made.meshes:
            raise lexer.error("a mesh of that name is there already", start)
        try:
            self.made.meshes[name] = Mesh(axes, devices, name)
        except IrparError as error:
            raise lexer.error(error.what, start, do=error.do) from None

    def integers(self) -> tuple[int, ...]:
        """Read `[0, 1]`."""
        found: list[int] = []
        self.lexer.expect("[")
        self.items("]", lambda: found.append(self.lexer.integer()))
        return tuple(found)

    def annotation(self) -> None:
        """Read `annotate "pattern" [["dp"], null] at "place"`."""
        lexer = self.lexer
        lexer.advance()
        pattern = lexer.string("a name or glob in quotes")
        spec: list[DimSpec] = []

        def dim() -> None:
            if lexer.accept("null"):
                spec.append(None)
            elif lexer.kind == "string":
                spec.append(lexer.string())
            else:
                axes: list[str] = []
                lexer.expect("[")
                self.items("]", lambda: axes.append(lexer.string("an axis in quotes")))
                spec.append(axes)

        lexer.expect("[")
        self.items("]", dim)
        where = lexer.string("a place in quotes") if lexer.accept("at") else ""
        self.made.annotations.append(Annotation(pattern, tuple(spec), where))

    def metadata(self) -> dict[str, str]:
        """Read `{"key": "value"}`."""
        return self._entries("a key in quotes", lambda: self.lexer.string("a value in quotes"))

    def fixed(self) -> dict[str, Tensor]:
        """Read `{"input": tensor(i64[] 16000)}`."""
        lexer = self.lexer

        def tensor() -> Tensor:
            lexer.expect("tensor")
            lexer.expect("(")
            made = self.tensor()
            lexer.expect(")")
            return made

        return self._entries("the name of an input in quotes", tensor)

    def _entries(self, what: str, value: Callable[[], T]) -> dict[str, T]:
        """Read `{"key": value, ...}`; `what` a key is, for messages."""
        lexer = self.lexer
        found: dict[str, T] = {}

        def entry() -> None:
            at = lexer.start
            key = lexer.string(what)
            if key in found:
                raise lexer.error(f'key "{key}" twice', at)
            lexer.expect(":")
            found[key] = value()

        lexer.expect("{")
        self.items("}", entry)
        return found

    def opsets(self) -> dict[str, int]:
        """Read `opset 21, "domain" 1`; nothing where there is none."""
        lexer = self.lexer
        found: dict[str, int] = {}
        if not lexer.accept("opset"):
            return found
        while True:
            at = lexer.start
            domain = lexer.string() if lexer.kind == "string" else ""
            if domain in found:
                raise lexer.error("this domain has an opset already", at)
            found[domain] = lexer.integer("an opset version", 0, MOST_VERSION)
            if not lexer.accept(","):
                return found
