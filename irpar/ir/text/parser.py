"""Reads the text form. `docs/text.md` gives the grammar; `printer.py` writes it."""

from collections.abc import Callable
from dataclasses import replace
from typing import cast, get_args

from irpar.ir.function import Function
from irpar.ir.graph import DOMAIN, Graph, Node, Phase, Place
from irpar.ir.module import Module
from irpar.ir.state import STATE_KINDS, State, StateKind
from irpar.ir.tensor import Tensor
from irpar.ir.value import Names, Value

from .attribute_reader import AttributeReader
from .defaults import default_call_version, default_version
from .header import HeaderReader
from .lexer import MOST_VERSION, RESERVED, Lexer
from .logs import WORD as LOG
from .logs import read_log
from .tensors import LiteralReader, Resolve
from .types import ClauseReader

TOP_LEVEL = ("module", "mesh", "annotate", "function", "graph", LOG)
"""The words with which the parts of a text begin."""
_MAX_GRAPH_DEPTH = 64
_PHASES: tuple[str, ...] = get_args(Phase)
_PLACES: tuple[str, ...] = get_args(Place)


class Parser:
    """Reads one module.

    Args:
        text: the text.
        filename: what messages call it.
        resolve: finds the tensors that are not in the text.
    """

    def __init__(self, text: str, filename: str, resolve: Resolve) -> None:
        self.lexer = Lexer(text, filename)
        self.module = Module()
        self.module.graphs = []
        self.header = HeaderReader(self.lexer, self.module, lambda: self.literals.typed())
        self.clauses = ClauseReader(self.lexer, self.module.meshes)
        self.literals = LiteralReader(self.lexer, lambda: self.clauses.type(), resolve)
        self.attributes = AttributeReader(self.lexer, self.literals, self._nested_graph)
        self.calls: list[tuple[Node, tuple[str, str, str], int]] = []
        self.opsets: dict[str, int] = {}
        self.names = Names()
        self.depth = 0

    def parse(self) -> Module:
        """Read the whole text.

        Raises:
            TextError: at the first place that is not the text form.
        """
        lexer = self.lexer
        parts = (self.header.module, self._mesh, self.header.annotation, self._function, self._main_graph, self._log)
        readers: dict[str, Callable[[], None]] = dict(zip(TOP_LEVEL, parts, strict=True))
        while lexer.kind != "end":
            reader = readers.get(lexer.token)
            if reader is None:
                raise lexer.expected(f"one of {', '.join(readers)}")
            reader()
        if not self.module.graphs:
            raise lexer.expected("a graph")
        for node, key, position in self.calls:
            callee = self.module.functions.get(key)
            if callee is None:
                raise lexer.error("no such function in this text", position)
            node.callee = callee
        return self.module

    def _log(self) -> None:
        read_log(self.lexer, self.module)

    def _mesh(self) -> None:
        self.header.mesh()
        # Known clauses may mean another mesh now.
        self.clauses = ClauseReader(self.lexer, self.module.meshes)

    # -- functions and graphs ---------------------------------------------------------------------------------------

    def _key(self) -> tuple[str, str, str]:
        """Read `@domain.name:overload`."""
        lexer = self.lexer
        quoted = lexer.token.startswith('@"')
        start = lexer.start
        name = lexer.symbol("a function such as @domain.Name")
        domain = ""
        if not quoted:
            domain, _, name = name.rpartition(".")
        elif lexer.accept("."):
            domain, name = name, lexer.string("the function's name in quotes")
        if not name:
            raise lexer.error("a function needs a name", start)
        return domain, name, lexer.word("an overload") if lexer.accept(":") else ""

    def _function(self) -> None:
        lexer = self.lexer
        lexer.advance()
        start = lexer.start
        key = self._key()
        if key in self.module.functions:
            raise lexer.error("this function is there already", start)
        domain, name, overload = key
        graph = Graph(name)
        function = Function(domain, name, graph, overload=overload)
        self.module.functions[key] = function
        outputs = self._signature(graph)

        def parameter() -> None:
            at = lexer.start
            parameter_name = lexer.word("an attribute name")
            if parameter_name in function.attributes:
                raise lexer.error("this attribute is there already", at)
            function.attributes[parameter_name] = self.attributes.read() if lexer.accept("=") else None

        self.names = graph.names
        if lexer.accept("attributes"):
            lexer.expect("{")
            self.header.items("}", parameter)
        function.opsets = self.opsets = self.header.opsets()
        function.doc, function.metadata = self._documentation()
        if lexer.accept("body"):
            graph.view = "local" if lexer.accept("local") else "global"
            graph.name = lexer.symbol("the name of the body such as @body")
            self._graph_facts(graph)
        self._body(graph, outputs)

    def _main_graph(self) -> None:
        lexer, module = self.lexer, self.module
        graph, outputs = self._graph_head(Names())
        start = lexer.start
        opsets = self.header.opsets()
        if module.graphs and opsets != module.opsets:
            raise lexer.error("graphs of one module have the same opsets", start)
        module.opsets = self.opsets = opsets
        module.graphs.append(graph)
        self.names = graph.names
        self._graph_facts(graph)
        self._body(graph, outputs)

    def _nested_graph(self) -> Graph:
        if self.depth == _MAX_GRAPH_DEPTH:
            raise self.lexer.error(f"graphs nest deeper than {_MAX_GRAPH_DEPTH} levels")
        self.depth += 1
        graph, outputs = self._graph_head(self.names)
        self._graph_facts(graph)
        self._body(graph, outputs)
        self.depth -= 1
        return graph

    def _graph_head(self, names: Names) -> tuple[Graph, list[tuple[str, int, str]]]:
        """Read `graph local @name(inputs) -> (outputs)`; the outputs are looked up after the body."""
        lexer = self.lexer
        lexer.expect("graph")
        is_local = lexer.accept("local")
        graph = Graph(lexer.symbol("the graph's name") if lexer.kind == "symbol" else "", names=names)
        graph.view = "local" if is_local else "global"
        return graph, self._signature(graph)

    def _signature(self, graph: Graph) -> list[tuple[str, int, str]]:
        lexer = self.lexer
        outputs: list[tuple[str, int, str]] = []

        def parameter() -> None:
            state = self._state() if lexer.accept("state") else None
            value = self._fresh(graph.names)
            start = lexer.start
            if lexer.accept(":"):
                start = lexer.start
                self.clauses.read().give(value)
                self._value_facts(value)
            if state is not None:
                data = self._placed_literal(value, start) if lexer.accept("=") else None
                graph.states[value] = replace(state, data=data)
            value.source = lexer.string() if lexer.accept("from") else None
            value.graph, value.index = graph, len(graph.inputs)
            graph.inputs.append(value)
            graph.names.claim(value)

        def output() -> None:
            at = lexer.start
            name = lexer.value_name()
            outputs.append((name, at, lexer.string() if lexer.accept("as") else name))
            if lexer.accept("replaces"):
                self._replaces(graph, len(outputs) - 1)

        lexer.expect("(")
        self.header.items(")", parameter)
        lexer.expect("->")
        lexer.expect("(")
        self.header.items(")", output)
        return outputs

    def _state(self) -> State:
        """Read the kind of a state, and what it belongs to: `moment of "w"`."""
        lexer = self.lexer
        start = lexer.start
        kind = lexer.word("a kind of state")
        if kind not in STATE_KINDS:
            raise lexer.error("no such kind of state", start, do=f"use one of {', '.join(STATE_KINDS)}")
        return State(cast(StateKind, kind), parameter=lexer.string() if lexer.accept("of") else None)

    def _replaces(self, graph: Graph, index: int) -> None:
        """Read which state a result replaces."""
        at = self.lexer.start
        name = self.lexer.value_name()
        value = graph.names.table.get(name)
        if value is None or value not in graph.states:
            raise self.lexer.error(f"%{name} is no state of this graph", at, do="write `state KIND` before the input")
        if graph.states[value].output is not None:
            raise self.lexer.error(f"%{name} is replaced already", at, do="let one result replace it")
        graph.states[value] = replace(graph.states[value], output=index)

    def _graph_facts(self, graph: Graph) -> None:
        if self.lexer.accept("ranks"):
            graph.ranks = self.header.integers()
        graph.doc, graph.metadata = self._documentation()

    def _documentation(self) -> tuple[str, dict[str, str] | None]:
        doc = self.lexer.string() if self.lexer.accept("doc") else ""
        return doc, self.header.metadata() if self.lexer.accept("meta") else None

    def _body(self, graph: Graph, outputs: list[tuple[str, int, str]]) -> None:
        lexer = self.lexer
        lexer.expect("{")
        while not lexer.accept("}"):
            if lexer.kind == "end":
                raise lexer.expected("a node or `}`")
            self._statement(graph)
        graph.set_outputs([self._lookup(name, at) for name, at, _ in outputs], [outside for _, _, outside in outputs])

    # -- values, constants and nodes --------------------------------------------------------------------------------

    def _fresh(self, names: Names) -> Value:
        """Read the name of a value that is defined here."""
        start = self.lexer.start
        name = self.lexer.value_name()
        if name in names.table:
            raise self.lexer.error(f"%{name} is defined already", start, do="give each value its own name")
        return Value(name)

    def _lookup(self, name: str, position: int) -> Value:
        value = self.names.table.get(name)
        if value is None:
            raise self.lexer.error(f"%{name} is not defined above", position)
        return value

    def _value_facts(self, value: Value) -> None:
        lexer = self.lexer

        def fact() -> None:
            name = lexer.take("name", "doc or meta")
            lexer.expect("=")
            if name == "doc":
                value.doc = lexer.string()
            elif name == "meta":
                value.metadata = self.header.metadata()
            else:
                raise lexer.error(f"no such fact of a value: {name}", do="use doc or meta")

        if lexer.accept("{"):
            self.header.items("}", fact)

    def _statement(self, graph: Graph) -> None:
        lexer = self.lexer
        results: list[Value] = []
        places: list[int] = []
        if lexer.kind == "value":
            places.append(lexer.start)
            results.append(self._fresh(graph.names))
            while lexer.accept(","):
                places.append(lexer.start)
                results.append(self._fresh(graph.names))
            lexer.expect("=")
        if results and lexer.token == "constant":
            if len(results) > 1:
                raise lexer.error("a constant is one value", places[1])
            self._constant(graph, results[0])
        else:
            node = self._node(results)
            for value, place in zip(results, places, strict=True):
                # The table is asked again: a nested graph, or the list itself, may have taken the name meanwhile.
                if graph.names.table.setdefault(value.name, value) is not value:
                    raise lexer.error(f"%{value.name} is defined already", place, do="give each value its own name")
            graph.append(node)

    def _constant(self, graph: Graph, value: Value) -> None:
        lexer = self.lexer
        lexer.advance()
        lexer.expect(":")
        start = lexer.start
        self.clauses.read().give(value)
        value.data = self._placed_literal(value, start)
        self._value_facts(value)
        value.source = lexer.string() if lexer.accept("from") else None
        value.graph = graph
        graph.constants[value] = None
        graph.names.claim(value)

    def _placed_literal(self, value: Value, start: int) -> Tensor:
        lexer, literals = self.lexer, self.literals
        if lexer.accept("tensor"):
            lexer.expect("(")
            data = literals.typed()
            lexer.expect(")")
            return data
        at = lexer.start
        if not lexer.accept("whole"):
            return literals.literal(literals.static(value.type, start))
        type_ = getattr(value.type, "with_shape", None)
        if value.global_shape is None or type_ is None:
            raise lexer.error("`whole` stands after a tensor type with `of [...]`", at)
        return literals.literal(literals.static(type_(value.global_shape), start))

    def _node(self, results: list[Value]) -> Node:
        lexer = self.lexer
        start = lexer.start
        key = None
        version = None
        if lexer.accept("call"):
            start = lexer.start
            key = self._key()
            domain, op_type, _ = key
        else:
            domain, op_type = self._operator()
            if lexer.accept(":"):
                version = lexer.integer("an opset version", 0, MOST_VERSION)
            else:
                version = default_version(self.opsets, domain)
        operands = self._operands()
        if (domain, op_type) == (DOMAIN, "Return"):
            raise lexer.error("the results of a graph stand in its head, not in a Return", start)
        node = Node(op_type, operands, domain=domain, version=version or 0, results=results)
        if key is not None:
            node.version = default_call_version(self.opsets, domain)
            self.calls.append((node, key, start))
        if lexer.accept("{"):
            self._braces(node)
        if results:
            lexer.expect(":")
            for index, value in enumerate(results):
                if index:
                    lexer.expect(",")
                self.clauses.read().give(value)
                if lexer.token == "{":
                    self._value_facts(value)
        self._provenance(node)
        return node

    def _operator(self) -> tuple[str, str]:
        lexer = self.lexer
        start = lexer.start
        if lexer.kind == "name":
            if lexer.token in RESERVED:
                raise lexer.expected("an operator")
            domain, _, op_type = lexer.take("name", "an operator").rpartition(".")
        else:
            domain, op_type = "", lexer.string("an operator")
            if lexer.accept("."):
                domain, op_type = op_type, lexer.string("an operator in quotes")
        if not op_type:
            raise lexer.error("an operator needs a name", start)
        return domain, op_type

    def _operands(self) -> list[Value | None]:
        lexer = self.lexer
        found: list[Value | None] = []
        lexer.expect("(")
        if lexer.accept(")"):
            return found
        while True:
            if lexer.kind == "value":
                start = lexer.start
                found.append(self._lookup(lexer.value_name(), start))
            elif not lexer.accept("_"):
                raise lexer.expected("a value such as %x, or _")
            else:
                found.append(None)
            if not lexer.accept(","):
                break
        if lexer.token != ")":
            raise lexer.expected("`,` or `)`")
        lexer.advance()
        return found

    def _braces(self, node: Node) -> None:
        """Read `attribute=value, ... | fact=value, ...}`."""
        lexer = self.lexer
        while lexer.token not in ("|", "}"):
            if node.attributes:
                lexer.expect(",")
            start = lexer.start
            name = lexer.word("an attribute name")
            if name in node.attributes:
                raise lexer.error(f"attribute {name} twice", start)
            lexer.expect("=")
            node.attributes[name] = self.attributes.read()
        for nested in node.nested_graphs():
            nested.parent = node
        if lexer.accept("|"):
            self.header.items("}", lambda: self._fact(node))
        else:
            lexer.expect("}")

    def _fact(self, node: Node) -> None:
        lexer = self.lexer
        name = lexer.take("name", "phase, stage, place or version")
        lexer.expect("=")
        if name in ("stage", "version"):
            setattr(node, name, lexer.integer())
            return
        known = {"phase": _PHASES, "place": _PLACES}.get(name)
        if known is None:
            raise lexer.error(f"no such fact of a node: {name}", do="use phase, stage, place or version")
        if lexer.token not in known:
            raise lexer.expected(f"one of {', '.join(known)}")
        setattr(node, name, lexer.take("name", name))

    def _provenance(self, node: Node) -> None:
        lexer = self.lexer
        is_imported = lexer.token == "from"
        if is_imported or lexer.token == "for":
            lexer.advance()
            node.source = lexer.string("the name of an imported node in quotes")
        if is_imported:
            node.name = node.source or ""
            for value in node.results:
                value.source = value.name
        if lexer.accept("as"):
            for index, value in enumerate(node.results):
                if index:
                    lexer.expect(",")
                value.source = None if lexer.accept("_") else lexer.string("a name in quotes, or _")
        if lexer.accept("scope"):
            node.scope = lexer.string("a scope in quotes")
        if lexer.accept("name"):
            node.name = lexer.string("a name in quotes")
        if lexer.token in ("doc", "meta"):
            node.doc, node.metadata = self._documentation()


def parse(text: str, filename: str, resolve: Resolve) -> Module:
    """Read a module.

    Raises:
        TextError: the text is not the text form.
    """
    return Parser(text, filename, resolve).parse()
