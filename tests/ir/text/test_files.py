"""The text form: golden files, round trips of random modules, files, and texts broken at random."""

import re
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irpar.ir import (
    ArrayTensor,
    ExternalTensor,
    Graph,
    LazyTensor,
    Module,
    Node,
    TensorType,
    TextError,
    Value,
    VerifyError,
    parse_module,
    print_module,
    read_text,
    same_module,
    verify,
    write_text,
)
from irpar.ir.dtypes import DType
from irpar.sharding import Axis, IrparError
from tests.budget import budget
from tests.ir.random_modules import modules
from tests.patience import patient

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.irpar"))
SLOW_DRAWS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def normal(text: str) -> str:
    """The text without comments, and with single spaces where columns are aligned."""
    lines = [re.sub(r"(?<=\S)  +", " ", line.split("//")[0]).rstrip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_text_prints_back_and_is_valid(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    module = read_text(path)
    expected = normal(text) if path.stem == "design" else text
    assert print_module(module).text == expected
    verify(module)


def test_the_example_of_the_design_means_what_it_says() -> None:
    module = parse_module(GOLDEN[[path.stem for path in GOLDEN].index("design")].read_text())
    graph = module.graph
    w1, p, y = graph.value("w1"), graph.value("p"), graph.value("y")
    assert module.opsets == {"": 21}
    assert w1.source == "fc1.weight"
    assert w1.sharding is not None
    assert w1.sharding.spec() == [None, ["tp"]]
    assert isinstance(w1.data, ExternalTensor)
    assert (w1.data.name, w1.data.offset, w1.data.length) == ("mlp.bin", 0, 65536)
    assert p.sharding is not None
    assert (p.sharding.spec(), p.sharding.partial, p.sharding.reduce) == ([["dp"], None], (Axis("tp"),), "sum")
    assert y.node is not None
    assert (y.node.domain, y.node.attributes["id"]) == ("irpar", 0)
    assert graph.output_names == ["y"]


def test_what_the_documentation_shows_parses() -> None:
    text = (Path(__file__).parents[3] / "docs" / "text.md").read_text(encoding="utf-8")
    example = text[text.index("    mesh @m") : text.index("    from irpar.ir")]
    golden = read_text(next(path for path in GOLDEN if path.stem == "design"))
    assert str(parse_module(example)) == str(golden)
    constants = re.findall(r"^    (%. = constant : .*)$", text, re.MULTILINE)
    attributes = re.search(r"\{axis=-1.*?\n.*?\)\}", text, re.DOTALL)
    assert attributes is not None
    node = "%n = Op() " + attributes.group().replace("{ ... }", "{ %y = Op(%i) : i64[] }") + " : ?"
    lines = "\n".join([*constants, node])
    module = parse_module(f'mesh @m = ["tp"=2]\ngraph local @g() -> () {{\n{lines}\n}}')
    assert len(module.graph.constants) == len(constants) == 6
    with pytest.raises(TextError) as caught:
        parse_module(
            "mesh @m = []\ngraph @g(%x: f32[8]) -> () {\n  %y = Relu(%x, %z) : f32[8]\n}", filename="mlp.irpar"
        )
    assert textwrap.indent(str(caught.value), "    ") in text


@settings(max_examples=budget(150), deadline=None, suppress_health_check=SLOW_DRAWS)
@given(modules())
def test_random_modules_round_trip(module: Module) -> None:
    printed = print_module(module)
    parsed = parse_module(printed.text, resources=printed.resources)
    assert same_module(module, parsed) is None
    again = print_module(parsed)
    assert again.text == printed.text


def test_sources_and_names_of_nodes_survive_in_every_combination() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    for source in (None, "", "s"):
        for name in ("", "s", "n"):
            for result_source in (None, "", "own", "r"):
                node = graph.append(Node("Op", [x], source=source, name=name, results=[Value("v")]))
                node.result.source = node.result.name if result_source == "own" else result_source
    module = Module(graph)
    assert same_module(module, parse_module(str(module))) is None


def test_imported_and_made_nodes_read_short() -> None:
    module = parse_module(
        "graph @g(%x: f32[2]) -> (%b) opset 21 {\n"
        '  %a = Relu(%x) : f32[2] from "/relu"\n'
        '  %b = Neg(%a) : f32[2] for "/relu"\n'
        "}\n"
    )
    relu, neg = module.graph
    assert (relu.source, relu.name, relu.result.source) == ("/relu", "/relu", "a")
    assert (neg.source, neg.name, neg.result.source) == ("/relu", "", None)


def test_a_tensor_in_memory_that_is_big_is_a_resource() -> None:
    graph = Graph("g")
    data = ArrayTensor(np.arange(17, dtype=np.float32))
    graph.add_constant(data, "big")
    graph.add_constant(data, "same")
    graph.add_constant(ArrayTensor(np.arange(16, dtype=np.int8)), "small")
    printed = print_module(Module(graph))
    assert printed.text.count('data("#1", 0, 68)') == 2
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]" in printed.text
    assert printed.resources == {"#1": data}
    with pytest.raises(IrparError, match="does not hold tensor #1"):
        parse_module(printed.text)
    with pytest.raises(IrparError, match=r"tensor #1 is f32\[17\] of 68 bytes"):
        parse_module(printed.text.replace("f32[17]", "f32[18]"), resources=printed.resources)


def test_printing_reads_no_numbers_from_files() -> None:
    graph = Graph("g")
    graph.add_constant(ExternalTensor(DType.F32, (2,), Path("/nowhere/w.bin"), "w.bin", 0, 8), "file")

    def load() -> np.ndarray:
        raise AssertionError

    graph.add_constant(LazyTensor(DType.F32, (17,), load), "lazy")
    assert 'data("w.bin", 0, 8)' in str(Module(graph))


def test_write_and_read(tmp_path: Path) -> None:
    graph = Graph("g")
    numbers = np.arange(100, dtype=np.int16).reshape(10, 10)
    graph.add_constant(ArrayTensor(numbers), "a")
    graph.add_constant(ArrayTensor(numbers).slice([(2, 4), (0, 10)]), "part")
    graph.add_constant(ArrayTensor(np.arange(33).astype(DType.I4.numpy)), "packed")
    (tmp_path / "w.bin").write_bytes(np.arange(20, dtype=np.float32).tobytes())
    near = ExternalTensor(DType.F32, (20,), tmp_path / "w.bin", "w.bin", 0, 80)
    far = ExternalTensor(DType.F32, (20,), tmp_path / "w.bin", "elsewhere.bin", 0, 80)
    graph.add_constant(near, "near")
    graph.add_constant(far, "far")
    module = Module(graph)
    path = tmp_path / "module.irpar"
    write_text(module, path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["module.irpar", "module.irpar.data", "w.bin"]
    assert 'data("w.bin", 0, 80)' in path.read_text()
    back = read_text(path)
    assert same_module(module, back) is None
    data = back.graph.value("a").data
    assert isinstance(data, ExternalTensor)
    assert data.numpy().tolist() == numbers.tolist()
    assert back.graph.value("far").data.numpy()[19] == 19.0  # type: ignore[union-attr]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "m.irpar"
    path.write_text("// before")
    graph = Graph("g")

    def load() -> np.ndarray:
        raise IrparError("lost")

    graph.add_constant(LazyTensor(DType.F32, (17,), load), "lazy")
    with pytest.raises(IrparError, match="lost"):
        write_text(Module(graph), path)
    assert [file.name for file in tmp_path.iterdir()] == ["m.irpar"]
    assert path.read_text() == "// before"
    with pytest.raises(IrparError, match="cannot write"):
        write_text(Module(Graph("g")), tmp_path / "no" / "m.irpar")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(IrparError, match="cannot read"):
        read_text(tmp_path / "none.irpar")
    (tmp_path / "binary.irpar").write_bytes(b"graph \xff")
    with pytest.raises(IrparError, match="not UTF-8"):
        read_text(tmp_path / "binary.irpar")


# -- texts broken at random ---------------------------------------------------------------------------------------

TEXTS = [path.read_text(encoding="utf-8") for path in GOLDEN]
PIECES = [*'%@"(){}[]<>,=:|?._-> \n/\\0', "->", "//", "graph", "f32[", "8@tp", "nan", "0x", "\0", "é", "seq<", "1e999"]


@st.composite
def broken_texts(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.sampled_from([0, 0, 1, 2, 20])))
        other = draw(st.integers(0, len(text)))
        put = draw(st.sampled_from([*PIECES, text[other : other + 15], ""]))
        text = text[:start] + put + text[stop:]
    return text


@settings(max_examples=budget(400), deadline=None, suppress_health_check=SLOW_DRAWS)
@given(broken_texts())
def test_broken_texts_are_refused_or_read_never_crash(text: str) -> None:
    try:
        module = parse_module(text)
    except TextError as error:
        # Any other exception is a fault; one without a place is no help.
        if not re.search(r"<text>:\d+:\d+", str(error)):
            raise
        return
    printed = print_module(module)
    again = parse_module(printed.text, resources=printed.resources)
    assert same_module(module, again) is None
    try:
        verify(module)
    except VerifyError:
        return


@settings(max_examples=budget(200), deadline=None)
@given(st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=20).map("".join))
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(IrparError, match=r"<text>:\d+:\d+"):
        parse_module(text)


@pytest.mark.slow
def test_100000_nodes_in_seconds() -> None:
    count = 100_000
    lines = [f"  %v{i + 1} = Add(%v{i}, %v0) : f32[8, 64]" for i in range(count)]
    text = "\n".join(["graph @g(%v0: f32[8, 64]) -> (%v9) opset 21 {", *lines, "}\n"])
    start = time.perf_counter()
    module = parse_module(text)
    assert print_module(module).text == text
    verify(module)
    # Seconds on a slow machine; a quadratic step would take minutes.
    assert time.perf_counter() - start < patient(60)
