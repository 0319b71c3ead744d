"""Every rule of the verifier is broken once: by text where the text form can say it, else by hand."""

import textwrap
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from irpar.ir import (
    ArrayTensor,
    DType,
    Function,
    Graph,
    Graphs,
    Ints,
    Module,
    Node,
    RefAttribute,
    TensorType,
    Value,
    VerifyError,
    parse_module,
    register_check,
    verify,
)
from irpar.ir import verifier as verifier_module
from irpar.sharding import Axis, DimSharding, Mesh, Sharding

MESH = 'mesh @m = ["dp"=2, "tp"=4]\n'


@pytest.fixture(autouse=True)
def only_rules_of_the_ir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks that operators registered have tests of their own."""
    monkeypatch.setattr(verifier_module, "_CHECKS", {})


def graph_text(body: str, head: str = "(%x: f32[8, 64]) -> ()", mesh: str = MESH, tail: str = "") -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return f"{mesh}graph @g{head} opset 21{tail} {{\n{lines}\n}}\n"


def local_text(body: str, head: str = "() -> ()", ranks: str = "[0, 1, 2, 3]", size: int = 4) -> str:
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    return f'mesh @m = ["tp"={size}]\ngraph local @g{head} opset 21 ranks {ranks} {{\n{lines}\n}}\n'


BROKEN_TEXTS = {
    "fixed input that is none": (
        'module {fixed={"y": tensor(i64[] 3)}}\n' + graph_text("%y = Relu(%x) : f32[8, 64]"),
        'module: "y" is fixed, and no input has that name',
    ),
    "fixed input of another type": (
        'module {fixed={"x": tensor(i64[] 3)}}\n' + graph_text("%y = Relu(%x) : f32[8, 64]"),
        r'module: input "x" is f32\[8, 64\], and is fixed to a tensor that is i64\[\]',
    ),
    "fixed input that is state": (
        'module {fixed={"s": tensor(f32[] 3.0)}}\n'
        + graph_text("%y = Relu(%s) : f32[]", "(state cache %s: f32[]) -> (%y replaces %s)"),
        'module: input "s" is fixed, and is state',
    ),
    "rank of sharding": (
        graph_text("%y = Relu(%x) : f32[8@dp, 64] sharded [_]"),
        r"node|%y: is f32\[8, 64\], but its sharding has 1 dims",
    ),
    "sharding of no tensor": (
        graph_text("%y = Relu(%x) : ? sharded [_@dp]"),
        r"%y: has a sharding, but is \?: only tensors of known rank",
    ),
    "partial of strings": (
        graph_text("%y = Op(%x) : str[8] partial(sum: tp)"),
        r"%y: is str, which cannot be partial\(sum\)",
    ),
    "partial sum of truth values": (graph_text("%y = Op(%x) : bool[8] partial(sum: tp)"), "is bool, which cannot"),
    "partial or of floats": (graph_text("%y = Op(%x) : f32[8] partial(or: tp)"), "is f32, which cannot be partial"),
    "partial max of complex": (graph_text("%y = Op(%x) : c64[8] partial(max: tp)"), "is c64, which cannot be partial"),
    "negative dim": (graph_text("%y = Op(%x) : f32[-8]"), r"%y: has a negative dim in f32\[-8\]"),
    "numbers of another type": (
        graph_text("%c = constant : f32[2] tensor(i64[1] [1])"),
        r"%c: is f32\[2\], but its numbers are i64\[1\]",
    ),
    "whole numbers in a global graph": (
        graph_text("%c = constant : f32[1] of [2@dp] whole [1.0, 2.0]"),
        "has the shape of a whole",
    ),
    "in flight, never waited for": (
        graph_text("%s = irpar.AllReduceStart(%x) : inflight<f32[8, 64]>"),
        "%s: is in flight, and is waited for 0 times",
    ),
    "in flight, waited for twice": (
        graph_text(
            """
            %s = irpar.AllReduceStart(%x) : inflight<f32[8, 64]>
            %a = irpar.Wait(%s) : f32[8, 64]
            %b = irpar.Wait(%s) : f32[8, 64]
            """
        ),
        "%s: is in flight, and is waited for 2 times",
    ),
    "in flight, waited for as another": (
        graph_text(
            """
            %s = irpar.AllReduceStart(%x) {axes=["dp"], id=0, reduce="sum"} : inflight<f32[8, 64]>
            %a = irpar.Wait(%s) {id=1} : f32[8, 64]
            """
        ),
        "%s: is in flight under id 0, and is waited for under id 1",
    ),
    "in flight, read": (
        graph_text(
            """
            %s = irpar.AllReduceStart(%x) : inflight<f32[8, 64]>
            %a = irpar.Wait(%s) : f32[8, 64]
            %b = Relu(%s) : f32[8, 64]
            """
        ),
        r"%s: is in flight, but %b = Relu\(%s\) reads it without waiting",
    ),
    "in flight, returned": (
        graph_text("%s = irpar.AllReduceStart(%x) : inflight<f32[8, 64]>", "(%x: f32[8, 64]) -> (%s)"),
        "is in flight, but .*Return.* reads it without waiting",
    ),
    "an id twice": (
        graph_text(
            """
            %p = Op(%x) : f32[8, 64] partial(sum: dp, tp)
            %q = irpar.AllReduce(%p) {axes=["dp"], reduce="sum", id=3} : f32[8, 64] partial(sum: tp)
            %r = irpar.AllReduce(%q) {axes=["tp"], reduce="sum", id=3} : f32[8, 64] replicated
            """
        ),
        r"node AllReduce of %r \(AllReduce\): has id 3, which .* has too",
    ),
    "nested value read outside": (
        graph_text(
            """
            %y = If(%x) {then_branch=graph @then() -> (%inner) {
              %inner = Relu(%x) : f32[8, 64]
            }} : f32[8, 64]
            %z = Relu(%inner) : f32[8, 64]
            """
        ),
        r"node Relu of %z \(Relu\): reads %inner, which is not visible here: it belongs to nested graph @then",
    ),
    "output names twice": (graph_text("", '(%x: f32[2]) -> (%x, %x as "x")'), "results of @g: share names: x, x"),
    "reference outside of a function": (
        graph_text('%y = Op(%x) {a=ref("b", int)} : f32[2]'),
        "has attribute a that refers to an attribute of a call, outside of a function",
    ),
    "reference to nothing": (
        'function @d.F(%x) -> (%y) attributes {c} {\n  %y = Op(%x) {a=ref("b", int)} : ?\n}\n' + graph_text(""),
        "function @d.F, node Op of %y .*refers to 'b', which the function does not declare",
    ),
    "too many operands": (
        "function @d.F(%x) -> (%x) {\n}\n" + graph_text("%y = call @d.F(%x, %x) : f32[2]"),
        "has 2 operands and 1 results, but <function @d.F> has 1 inputs and 1 outputs",
    ),
    "recursion": (
        "function @d.F(%x) -> (%y) {\n  %y = call @d.G(%x) : ?\n}\n"
        "function @d.G(%x) -> (%y) {\n  %y = call @d.F(%x) : ?\n}\n" + graph_text(""),
        "functions call each other in a circle: F -> G|functions call each other in a circle: G -> F",
    ),
    "two global graphs": (graph_text("") + graph_text("", mesh=""), "module: has 2 graphs"),
    "a rank in two graphs": (
        local_text("", ranks="[0, 1]") + "graph local @h() -> () opset 21 ranks [1] {\n}\n",
        "graph @h: rank 1 runs graph @g already",
    ),
    "a rank outside the mesh": (local_text("", ranks="[4]"), "graph @g: rank 4 is outside the mesh tp=4"),
    "no block": (
        local_text("%y = Op() : f32[2, 3] of [8@tp, 4]"),
        r"%y: is f32\[2, 3\], but .* makes blocks of 4 in dim 1",
    ),
    "a whole in a local graph": (
        local_text("%y = Op() : f32[8, 3] of [8@tp, 3]"),
        r"%y: is f32\[8, 3\], but .* makes blocks of 2 in dim 0: a local graph holds blocks only",
    ),
    "ranks that disagree": (
        local_text("%y = Op() : f32[3] of [10@tp]"),
        r"%y: has blocks of \[1, 3\] in dim 0 on ranks \[0, 1, 2, 3\], which share the graph",
    ),
    "the block of another rank": (
        local_text("%y = Op() : f32[3] of [10@tp]", ranks="[3]"),
        r"%y: is f32\[3\], but .* makes blocks of 1 in dim 0",
    ),
    "cut without the whole": (
        local_text("%y = Op() : f32[8@tp]"),
        "is sharded by .* but the shape of the whole is not",
    ),
    "a whole of another rank": (local_text("%y = Op() : f32[2, 2] of [8@tp]"), "which is no block of"),
    "a whole that nothing shards": (local_text("%y = Op() : f32[2] of [8]"), "but no sharding shards it"),
    "wrong numbers in a local graph": (
        local_text("%c = constant : f32[1] of [4@tp] tensor(f32[3] [1.0, 2.0, 3.0])"),
        r"%c: is f32\[1\], but its numbers are f32\[3\]",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN_TEXTS.values(), ids=BROKEN_TEXTS)
def test_a_broken_rule_is_told(text: str, message: str) -> None:
    module = parse_module(text)
    with pytest.raises(VerifyError, match=message):
        verify(module)


VALID_TEXTS = {
    "waited for": graph_text(
        """
        %s = irpar.AllReduceStart(%x) : inflight<f32[8, 64]>
        %a = irpar.Wait(%s) : f32[8, 64]
        """
    ),
    "reductions": graph_text(
        """
        %a = Op(%x) : bool[8] partial(and: tp)
        %b = Op(%x) : i64[8] partial(or: tp)
        %c = Op(%x) : c64[8] partial(sum: tp)
        %d = Op(%x) : bf16[8] partial(max: tp)
        """
    ),
    "outer values inside": graph_text(
        """
        %y = If(%x) {a=graph() -> (%x) {
        }, b=graph() -> (%z) {
          %z = Relu(%x) : f32[2]
        }} : f32[2]
        """
    ),
    "blocks": local_text("%y = Op() : f32[3, 4] of [10@tp, 4]", ranks="[0, 1, 2]"),
    "the short block": local_text("%y = Op() : f32[1] of [10@tp]", ranks="[3]"),
    "an empty block": local_text("%y = Op() : f32[0] of [6@tp]", ranks="[3]"),
    "no ranks: any block": local_text("%y = Op() : f32[1] of [10@tp]", ranks="[]"),
    "whole and own numbers": local_text(
        """
        %a = constant : f32[1] of [4@tp] whole [1.0, 2.0, 3.0, 4.0]
        %b = constant : f32[1] of [4@tp] [1.0]
        """
    ),
}


@pytest.mark.parametrize("text", VALID_TEXTS.values(), ids=VALID_TEXTS)
def test_valid_texts_pass(text: str) -> None:
    verify(parse_module(text))


# -- what the text form cannot say --------------------------------------------------------------------------------


def small() -> tuple[Module, Graph, Value, Node, Node]:
    """y = Relu(x); z = Neg(y)."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    relu = graph.append(Node("Relu", [x], results=[Value("y", x.type)], version=21))
    neg = graph.append(Node("Neg", [relu.result], results=[Value("z", x.type)], version=21))
    graph.set_outputs([neg.result])
    module = Module(graph, opsets={"": 21})
    verify(module)
    return module, graph, x, relu, neg


def _order(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    graph.insert_after(neg, relu.detach())


def _erased_producer(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.erase_forced()


def _other_graph(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    neg.set_operand(0, Graph("other").add_input("x", x.type))


def _unlisted_use(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x._uses.clear()


def _stale_use(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x._uses[neg, 0] = None


def _use_by_detached(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    Node("Relu", [x])


def _name_taken(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    neg.result.name = "y"


def _numbers_in_result(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    neg.result.data = ArrayTensor(np.zeros(2, np.float32))


def _numbers_in_input(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x.data = ArrayTensor(np.zeros(2, np.float32))


def _constant_without_numbers(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    graph.add_constant(ArrayTensor(np.zeros(2, np.float32)), "c").data = None


def _result_of_another(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    neg.result.node = relu


def _input_index(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x.index = 7


def _memory(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x.memory = "moon"  # type: ignore[assignment]


def _attribute_kind(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.attributes["a"] = {1: 2}  # type: ignore[assignment]


def _truth_value_as_attribute(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.attributes["a"] = True


def _attribute_element(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.attributes["a"] = Ints(["b"])  # type: ignore[list-item]


def _parent(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.attributes["a"] = Graphs([Graph("inner", names=graph.names)])


def _names_of_nested(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    relu.set_attribute("a", Graph("inner"))


def _unknown_function(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    body = Graph("F")
    body.set_outputs([body.add_input("x")])
    graph.append(Function("d", "F", body).call([x]))


def _callee_of_another_name(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    body = Graph("F")
    body.set_outputs([body.add_input("x")])
    relu.callee = Function("d", "F", body)


def _output_names(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    graph.output_names = []


def _return_node(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    graph.append(Node("Return", [x], domain="irpar", results=0))


def _mesh_of_another_module(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    x.sharding = Sharding.replicated(Mesh({"q": 2}, name="other"), 1)


def _overlapping_axes(graph: Graph, x: Value, relu: Node, neg: Node) -> None:
    sharding = Sharding.replicated(Mesh({"q": 4}), 1)
    object.__setattr__(sharding, "dims", (DimSharding((Axis("q"), Axis("q", 1, 2))),))
    # A sharding keeps what it computed from its first, valid dims.
    del sharding.__dict__["all_axes"]
    x.sharding = sharding


BROKEN_BY_HAND: dict[Callable[[Graph, Value, Node, Node], None], str] = {
    _order: r"node Neg of %z \(Neg\): reads %y, which is defined after it",
    _erased_producer: r"node Neg of %z \(Neg\): reads %y, which is in no graph",
    _other_graph: "reads %x, which belongs to another graph, @other",
    _unlisted_use: r"node Relu of %y \(Relu\): reads %x, which does not list the use",
    _stale_use: r"%x: lists a use by %z = Neg\(%y\) that does not read it",
    _use_by_detached: r"%x: is read by .*Relu.*, which is not in this graph",
    _name_taken: "has a name that is empty, or that the graph's name table gives to another value",
    _numbers_in_result: "%z: is a result of a node, but holds numbers",
    _numbers_in_input: "input %x: holds numbers",
    _constant_without_numbers: "constant %c: holds no numbers",
    _result_of_another: "%z: does not know that it is result 0",
    _input_index: "input %x: does not know that it is an input",
    _memory: "%x: is in memory 'moon'; there are device, disk, host",
    _attribute_kind: "has attribute a of a kind that attributes do not have",
    _truth_value_as_attribute: "has attribute a of a kind that attributes do not have: True",
    _attribute_element: "has attribute a, Ints, with the element 'b'",
    _parent: "nested graph @inner: does not know that",
    _names_of_nested: "nested graph @inner: has a name table of its own",
    _unknown_function: "calls <function @d.F>, which is not a function of the module",
    _callee_of_another_name: r"is named \.Relu, but calls <function @d.F>",
    _output_names: "results of @g: are 1, but have 0 names",
    _return_node: "stands among the nodes",
    _mesh_of_another_module: r"is sharded on mesh @other \(q=2\), which the module does not have",
    _overlapping_axes: "cannot be: mesh axis q:.* is used twice",
}


@pytest.mark.parametrize(
    ("break_it", "message"), BROKEN_BY_HAND.items(), ids=[function.__name__[1:] for function in BROKEN_BY_HAND]
)
def test_a_rule_broken_by_hand_is_told(break_it: Callable[..., None], message: str) -> None:
    module, graph, x, relu, neg = small()
    break_it(graph, x, relu, neg)
    with pytest.raises(VerifyError, match=message):
        verify(module)


def test_keys_of_meshes_and_functions() -> None:
    module, *_ = small()
    module.meshes["other"] = Mesh({"q": 2})
    module.functions["", "a", ""] = Function("", "b", Graph("b"))
    with pytest.raises(VerifyError, match=r"(?s)mesh @m is kept under.*function \('', 'b', ''\) is kept under"):
        verify(module)


def test_defaults_of_functions() -> None:
    module, *_ = small()
    function = Function("d", "F", Graph("F"))
    module.functions[function.key] = function
    function.attributes = {"needed": None, "ready": 1, "other": RefAttribute("ready", 2)}
    verify(module)
    function.attributes["bad"] = object()  # type: ignore[assignment]
    with pytest.raises(VerifyError, match=r"function @d\.F: has attribute bad of a kind"):
        verify(module)


def test_the_first_ten_of_many_are_listed() -> None:
    body = "\n".join(f"%v{index} = Op(%x) : str[8] partial(sum: tp)" for index in range(25))
    with pytest.raises(VerifyError) as caught:
        verify(parse_module(graph_text(body)))
    assert caught.value.what == "the IR is not valid: 25 problems, the first 10"
    assert len(caught.value.notes) == 10
    assert caught.value.notes[0].startswith("graph @g, %v0: ")


def test_registered_checks_see_their_nodes_in_nested_graphs_and_functions_too() -> None:
    seen = []

    def check(module: Module, node: Node) -> Iterator[str]:
        seen.append(node.result.name)
        if "axis" not in node.attributes:
            yield "has no axis"

    register_check("my.domain", "Cut", check)
    text = "function @d.F(%x) -> (%f) {\n  %f = my.domain.Cut(%x) {axis=1} : ?\n}\n" + graph_text(
        """
        %a = my.domain.Cut(%x) {axis=1} : f32[2]
        %b = If(%x) {body=graph @inner() -> (%c) {
          %c = my.domain.Cut(%x) : f32[2]
        }} : f32[2]
        %d = Cut(%x) : f32[2]
        """
    )
    with pytest.raises(VerifyError, match=r"1 problem\n  graph @g, node Cut of %c \(Cut\): has no axis"):
        verify(parse_module(text))
    assert seen == ["f", "a", "c"]
