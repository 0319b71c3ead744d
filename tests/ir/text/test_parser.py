"""Messages of the parser: place, line, caret, and what was expected."""

import pytest

from irpar.ir import TextError, parse_module
from irpar.ir.text.lexer import quote, quote_bytes, value_reference


def in_graph(line: str) -> str:
    return f'mesh @m = ["dp"=2, "tp"=4]\ngraph @g(%x: f32[8, 64]) -> () opset 21 {{\n  {line}\n}}\n'


def test_an_error_shows_file_line_column_and_caret() -> None:
    with pytest.raises(TextError) as caught:
        parse_module(in_graph("%y = Relu(%x, %z) : f32[8]"), filename="mlp.irpar")
    assert str(caught.value) == (
        "%z is not defined above\n  mlp.irpar:3:17\n      %y = Relu(%x, %z) : f32[8]\n                    ^\n"
        "  do: mend the text there; docs/text.md says how each line is written"
    )


def test_a_long_line_is_shown_around_the_caret() -> None:
    with pytest.raises(TextError) as caught:
        parse_module(in_graph("%y = Relu(" + "%x, " * 100 + "7)"))
    line, caret = caught.value.notes
    assert len(line) < 120
    assert line[caret.index("^")] == "7"


MESSAGES = {
    "": "expected a graph, found the end of the text",
    "nonsense": "expected one of module, mesh, annotate, function, graph, log, found `nonsense`",
    "graph @g() -> () {": "expected a node or `}`, found the end of the text",
    'graph @g() -> () { %x = "Op() }': "this string does not end on its line",
    "graph @g() -> () ; {}": "unexpected character ';'",
    'module {fixed={"a": tensor(i64[] 1), "a": tensor(i64[] 2)}}': 'key "a" twice',
    "module {fixed={a: tensor(i64[] 1)}}": "the name of an input in quotes",
    'module {fixed={"a": 1}}': "expected `tensor`",
    'module {fixed={"a": tensor(i64[n] [1])}}': r"a constant cannot be i64[n]",
    "graph @g(%x) -> (%y) {}": "%y is not defined above",
    "graph @g(%x, %x) -> () {}": "%x is defined already",
    'graph @g(%"") -> () {}': "a value needs a name",
    "graph @g() -> () {} graph local @h() -> () opset 2 {}": "graphs of one module have the same opsets",
    'graph @g() -> () opset 1, "" 2 {}': "this domain has an opset already",
    'mesh @m = ["a"=2, "a"=2]': 'axis "a" twice',
    'mesh @m = ["a"=0]': "mesh axis a has size 0",
    'mesh @m = ["a"=2] devices [1]': "has 2 places but its device list is",
    'mesh @m = ["a"=2] mesh @m = []': "a mesh of that name is there already",
    'annotate "x" [1]': r"expected `[`, found `1`",
    "module {memory_limit=1, memory_limit=2}": "fact memory_limit twice",
    "module {colour=1}": "no such fact of a module: colour",
    "function @f() -> () {} function @f() -> () {} graph @g() -> () {}": "this function is there already",
    in_graph("%y = call @d.F(%x) : ?"): "no such function in this text",
    in_graph("%x = Relu(%x) : ?"): "%x is defined already",
    in_graph("%a, %a = Split(%x) : ?, ?"): "%a is defined already",
    in_graph("%a = If(%x) {b=graph() -> (%a) {\n %a = Relu(%x) : ?\n}} : ?"): "%a is defined already",
    in_graph("%y = Relu(%x)"): "expected `:`, found `}`",
    in_graph("%y = Relu(%x : f32[8]"): "expected `,` or `)`, found `:`",
    in_graph("%a, %b = constant : f32[] 1.0"): "a constant is one value",
    in_graph("%a = constant : f32[n] [1.0]"): "a constant cannot be f32[n]",
    in_graph("%a = constant : f32[2] [1.0]"): "1 elements for f32[2], which has 2",
    in_graph("%a = constant : f32[2, 2] [[1.0], [2.0, 3.0, 4.0]]"): "the brackets do not follow the shape [2, 2]",
    in_graph("%a = constant : f32[2] [[1.0, 2.0]]"): "more brackets than the 1 dims",
    in_graph("%a = constant : i8[1] [128]"): "128 does not fit i8",
    in_graph("%a = constant : u4[1] [-1]"): "-1 does not fit u4",
    in_graph("%a = constant : f16[1] [1e6]"): "1000000.0 does not fit f16",
    in_graph("%a = constant : f4e2m1[1] [100.0]"): "100.0 does not fit f4e2m1",
    in_graph("%a = constant : f6e2m3[1] [100.0]"): "100.0 does not fit f6e2m3",
    in_graph("%a = constant : f8e8m0[1] [-1.0]"): "-1.0 does not fit f8e8m0",
    in_graph("%a = constant : f64[] 1e999"): "this number does not fit 64 bits",
    in_graph("%a = constant : f32[] 0x100000000"): "these bits do not fit f32",
    in_graph('%a = constant : str[1] ["\\ud800"]'): r"\ud800 is half a surrogate pair",
    in_graph('%a = constant : str[1] ["\\q"]'): r"unknown escape \q in a string",
    in_graph('%a = constant : f32[1] data("w", -1, 4)'): "an offset and a length of 0 or more",
    in_graph("%a = constant : f32[1] slice([0:3] of f32[2] [1.0, 2.0])"): "these ranges of f32[2] do not make f32[1]",
    in_graph("%a = constant : f32[1] whole [1.0]"): "`whole` stands after a tensor type with `of [...]`",
    in_graph("%y = Relu(%x) : f33[8]"): "no type `f33`",
    in_graph("%y = Relu(%x) : f32[8 64]"): "expected `,` or `]` after a dim",
    in_graph("%y = Relu(%x) : f32[8@]"): "expected a mesh axis such as @tp, @(dp,tp) or @tp:(2)4",
    in_graph("%y = Relu(%x) : f32[8@dp!-1]"): "expected a priority such as 64@tp!1: a number from 0 to 999999999",
    in_graph("%y = Relu(%x) : f32[8@dp!first]"): "expected a priority such as 64@tp!1: a number from 0 to 999999999",
    in_graph("%y = Relu(%x) : f32[8?!1000000000]"): "expected a priority such as 64@tp!1",
    in_graph("%y = Relu(%x) : f32[8@dp!1!2]"): "expected `,` or `]` after a dim",
    in_graph("%y = Relu(%x) : f32[8@dp!1?]"): "expected `,` or `]` after a dim",
    in_graph("%y = Relu(%x) : f32[8@mp]"): 'no axis "mp" in mesh dp=2,tp=4',
    in_graph("%y = Relu(%x) : f32[8@dp, 8@dp]"): "mesh axis dp is used twice in one sharding",
    in_graph("%y = Relu(%x) : f32[8@tp:(3)2]"): "sub-axis tp:(3)2 does not fit axis tp of size 4",
    in_graph("%y = Relu(%x) : f32[8] partial(mean: dp)"): "expected (REDUCTION: AXIS, ...)",
    in_graph("%y = Relu(%x) : f32[8@dp] replicated"): "whose dims are not sharded",
    in_graph("%y = Relu(%x) : f32[8@dp] of [8@dp]"): "stands in its `of [...]`",
    in_graph("%y = Relu(%x) : f32[4] of [n]"): "the global shape of a local value is made of ints",
    in_graph("%y = Relu(%x) : f32[*] replicated"): "only a tensor of known rank has a sharding",
    in_graph("%y = Relu(%x) : f32[8] on @m"): "`on @mesh` stands after a sharding",
    in_graph("%y = Relu(%x) : f32[8@dp] on @k"): "no such mesh",
    in_graph("%y = Relu(%x) : f32[8] in moon"): "expected one of device, host, disk",
    in_graph("%y = Relu(%x) {a=1, a=2} : ?"): "attribute a twice",
    in_graph("%y = Relu(%x) {a=[]} : ?"): "an empty list has a type",
    in_graph("%y = Relu(%x) {a=[1, 2.0]} : ?"): "a list holds values of one kind",
    in_graph("%y = Relu(%x) {a=f32[8@dp]} : ?"): "no sharding can stand here",
    in_graph("%y = Relu(%x) {| phase=later} : ?"): "expected one of forward, backward, optimizer",
    in_graph("%y = Relu(%x) {| colour=red} : ?"): "no such fact of a node: colour",
    in_graph("irpar.Return(%x)"): "the results of a graph stand in its head",
    in_graph("from(%x)"): "expected an operator, found `from`",
    in_graph("%y = Relu(%x) : f32[" + "9" * 5000 + "]"): "a number in a dim does not fit 64 bits",
    in_graph("%y = Relu(%x) {a=" + "9" * 5000 + "} : ?"): "expected an integer",
    in_graph("%y = Relu(%x) : " + "seq<" * 1000): "types nest deeper than 32 levels",
    in_graph("%y = Relu(%x) : f32[" + "(" * 1000): "a dim nests deeper than 50 levels",
    in_graph("%y = Relu(%x) {a=" + "graph() -> () {\nOp() {a=" * 1000): "graphs nest deeper than 64 levels",
    in_graph("%y = Relu(%x) : f32[" + ", ".join("1" * 100) + "]"): "more than 64 dims",
    in_graph("%a = constant : f32[] " + "[" * 10000): "more brackets than the 0 dims",
    in_graph("%a = constant : f32[3] join(0, 1, f32[2] [1.0, 2.0])"): "these tensors make f32[2], not f32[3]",
    in_graph("%a = constant : f32[2] join(1, 1, f32[2] [1.0, 2.0])"): "join needs tensors that have the dim 1",
    in_graph("%a = constant : f32[2] join(0, 3, f32[2] [1.0, 2.0])"): "does not stand beside",
    in_graph("%a = constant : f32[1] join(0, 1, f32[1] join(0, 1, f32[1] [1.0]))"): "a join in a slice or a join",
    in_graph("%a = constant : f32[1] " + "slice([0:1] of f32[1] " * 2): "a slice of a slice",
    "graph @g(%x: f32[8@dp]) -> () {}": "a sharding needs a mesh, and there are 0",
    'mesh @a = ["dp"=2] mesh @b = [] graph @g(%x: f32[8@dp]) -> () {}': "a sharding needs a mesh, and there are 2",
}


@pytest.mark.parametrize(("text", "message"), MESSAGES.items(), ids=range(len(MESSAGES)))
def test_messages(text: str, message: str) -> None:
    with pytest.raises(TextError) as caught:
        parse_module(text)
    assert message in str(caught.value)
    assert "<text>:" in str(caught.value)


def test_spaces_comments_and_line_ends_do_not_matter() -> None:
    plain = in_graph('%y = Relu(%x) {a=1} : f32[8@dp, 64] from "r"')
    loose = (
        '// before\r\nmesh@m=["dp"=2,"tp"=4]graph @g ( %x:f32[ 8 ,64 ] )->( )opset 21{//c\n%y\n=Relu ( %x )\t{ a = 1 }:'
        'f32[8 // ] \n @dp , // 63]\n 64 ]from"r"}// end'
    )
    assert str(parse_module(loose)) == plain


def test_a_known_clause_is_read_on_where_more_follows() -> None:
    text = in_graph("%a = Op(%x) : f32[8, 64]\n  %b = Op(%x) : f32[8, 64]  // so far known\n    replicated in host")
    b = parse_module(text).graph.value("b")
    assert b.memory == "host"
    assert b.sharding is not None


def test_a_second_mesh_changes_what_a_clause_means() -> None:
    text = (
        'mesh @a = ["dp"=2]\nfunction @f(%x: f32[8@dp]) -> () {\n}\n'
        'mesh @b = ["dp"=4]\ngraph @g(%x: f32[8@dp]) -> () {\n}\n'
    )
    with pytest.raises(TextError, match="say which: on @mesh"):
        parse_module(text)


@pytest.mark.parametrize(
    "name", ["x", "h.0/fc1/w", "/fc/MatMul_output_0", "t:0", "onnx::Add_1", "a-b", "3", "a$b", "_", "x:0:1"]
)
def test_usual_names_need_no_quotes(name: str) -> None:
    assert value_reference(name) == f"%{name}"


@pytest.mark.parametrize("name", ["a b", "a//b", "a->b", "a-", "x:", "x:y", "::", "é", 'a"b', "a,b", "", "//"])
def test_other_names_are_quoted(name: str) -> None:
    assert value_reference(name).startswith('%"')


def test_strings_stay_on_a_line() -> None:
    assert quote('a"\\\n\t\u2028\ud800\U000e0001é') == '"a\\"\\\\\\n\\t\\u2028\\ud800\\U000e0001é"'
    assert quote_bytes(b'a"\\\n\xff') == r'b"a\x22\x5c\x0a\xff"'
