"""The pass manager: pipeline strings, finding passes, instrumentation, failures and their reproducers."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import ClassVar, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from irpar.ir import ArrayTensor, Graph, Module, Node, TensorType, Value, clone_module, verify
from irpar.ir.dtypes import DType
from irpar.ir.text.files import read_text
from irpar.pass_manager import (
    Instrumentation,
    Pass,
    PassFailure,
    PassManager,
    PassResult,
    PipelineError,
    Progress,
    available_passes,
    find_pass,
    manager,
    pipeline,
    read_reproducer,
    reproducer_pipeline,
    without_copies,
)
from irpar.pass_manager.options import OptionError, format_value, parse_value
from irpar.sharding import IrparError


@dataclass(frozen=True)
class Fuse(Pass):
    """A pass with options of every type."""

    name: ClassVar[str] = "fuse-test"
    mode: Literal["auto", "size", "index"] = "auto"
    size_mb: float = 25
    limit: int | None = None
    exact: bool = False
    only: tuple[str, ...] = ()
    title: str = ""

    def run(self, module: Module) -> PassResult:
        return PassResult(False, (f"mode is {self.mode}",), {"fused": 3})


@dataclass(frozen=True)
class Needy(Pass):
    """A pass with an option that must be given, and one that takes any name."""

    name: ClassVar[str] = "needy-test"
    planner: str
    weights: Mapping[str, float] = field(default_factory=dict)

    def run(self, module: Module) -> PassResult:
        return PassResult(False)


@dataclass(frozen=True)
class Grow(Pass):
    """Adds a node."""

    name: ClassVar[str] = "grow-test"

    def run(self, module: Module) -> PassResult:
        graph = module.graph
        made = graph.append(Node("Neg", [graph.outputs[0]], version=21, results=[Value("n", graph.outputs[0].type)]))
        graph.set_outputs([made.result])
        return PassResult(True, statistics={"grown": 1})


@dataclass(frozen=True)
class Crash(Pass):
    """Leaves half of its work, then fails."""

    name: ClassVar[str] = "crash-test"
    how: Literal["bug", "mistake", "invalid"] = "bug"

    def run(self, module: Module) -> PassResult:
        Grow().run(module)
        if self.how == "mistake":
            raise IrparError("the model is wrong", do="mend it")
        if self.how == "invalid":
            module.graph.outputs[0].type = TensorType(DType.I64, (9, 9, 9))
            (node,) = module.graph
            node.set_operand(0, node.result)
            return PassResult(True)
        raise ZeroDivisionError("no luck")


TEST_PASSES = {pass_.name: pass_ for pass_ in (Fuse, Needy, Grow, Crash)}


@pytest.fixture(autouse=True)
def entry_points(monkeypatch):
    """Offer the passes above as another package would."""

    def found(*, group, name=None):
        points = [EntryPoint(key, f"test_pass_manager:{pass_.__name__}", group) for key, pass_ in TEST_PASSES.items()]
        points = [point for point in points if name in (None, point.name)]
        for point in points:
            object.__setattr__(point, "load", lambda key=point.name: TEST_PASSES[key])
        return points

    monkeypatch.setattr(pipeline, "entry_points", found)


def small_module(extra=()):
    graph = Graph("g")
    x = graph.add_input("x", TensorType(DType.F32, (2,)))
    graph.set_outputs([x])
    for name, array in extra:
        graph.add_constant(ArrayTensor(array), name)
    return Module(graph, opsets={"": 21})


# -- pipeline strings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cse",
        "infer-types,fold-constants,cse,dce",
        "bind-dims{batch=8, seq=128}",
        'bind-dims{"a b"=3, "q\\"=,{"=4}',
        'fuse-test{mode=size, size-mb=25.5, limit=3, exact=true, only=[a.*, b], title="it\'s, {odd}"}',
        "fold-constants{max-bytes=12},inline-functions{only=[my.*]}",
        "needy-test{planner=optimal, x.y=0.5}",
    ],
)
def test_pipelines_round_trip(text):
    assert str(PassManager.parse(text)) == text


@given(
    mode=st.sampled_from(["auto", "size", "index"]),
    size=st.floats(allow_nan=False),
    limit=st.none() | st.integers(),
    exact=st.booleans(),
    only=st.lists(st.text(st.characters(codec="utf-8"))),
    title=st.text(st.characters(codec="utf-8")),
)
def test_any_options_round_trip(mode, size, limit, exact, only, title):
    made = Fuse(mode, size, limit, exact, tuple(only), title)
    assert pipeline.parse_pipeline(str(made)) == [made]


def test_defaults_are_not_written_and_spaces_do_not_count():
    (made,) = PassManager.parse("  fuse-test {\n mode = auto , size-mb=25 } ").passes
    assert made == Fuse()
    assert str(made) == "fuse-test"


def test_a_list_is_written_as_a_tuple_is():
    assert str(Fuse(only=["a", "b c"])) == str(Fuse(only=("a", "b c"))) == 'fuse-test{only=[a, "b c"]}'


def check_error(text, *lines):
    with pytest.raises(PipelineError) as error:
        PassManager.parse(text)
    message = str(error.value)
    for line in lines:
        assert line in message, message


def test_errors_show_the_place():
    check_error("cse,fold-consants,dce", 'no pass "fold-consants"', "\n      ^\n", "nearest names: fold-constants")
    check_error("cse,dce{", "expected the name of an option", "  cse,dce{\n          ^")
    check_error("cse dce", 'expected "," after a pass', "  cse dce\n      ^")
    check_error("cse,", "expected the name of a pass")
    check_error("fuse-test{mode}", 'expected "=" after the option "mode"')
    check_error("fuse-test{mode=size size-mb=3}", 'expected "," or "}" after an option')
    check_error('fuse-test{title="a}', "a quoted word without its closing quote")
    check_error("a,\nbb{},\ncse", 'no pass "a"', "  a,\n  ^")


def test_errors_in_a_long_pipeline_show_the_part_around_the_place():
    check_error("cse," * 60 + "nonsense," + "dce," * 60, "...", 'no pass "nonsense"')


def test_unknown_options_list_the_options():
    check_error(
        "fuse-test{size=3}",
        'fuse-test has no option "size"',
        "mode (one of auto, size, index, default auto)",
        "size-mb (a number, default 25)",
        "limit (an integer or none, default none)",
        "only (a list [..] of text, default [])",
    )
    check_error("cse{x=1}", "cse has no options")
    check_error("needy-test", "needy-test needs the option planner")
    check_error("fuse-test{mode=size, mode=auto}", 'option "mode" is given twice')


def test_bad_values_say_what_is_allowed():
    check_error("fuse-test{mode=big}", 'cannot take "big" for mode', "mode: expected one of auto, size, index")
    check_error("fuse-test{size-mb=big}", "size-mb: expected a number")
    check_error("fuse-test{exact=maybe}", "exact: expected true or false")
    check_error("fuse-test{limit=[1, 2]}", 'cannot take "[1, 2]" for limit', "an integer or none")
    check_error("bind-dims{batch=0}", "batch is given the size 0", "\n  ^\n")
    check_error("bind-dims{batch=2.5}", "batch: expected an integer")


@pytest.mark.parametrize(
    ("type_", "raw", "value"),
    [
        (tuple[int, ...], ["1", "2"], (1, 2)),
        (tuple[str, ...], "a", ("a",)),
        (str | None, "none", None),
        (bool, "true", True),
    ],
)
def test_values(type_, raw, value):
    assert parse_value(type_, raw) == value


def test_a_value_without_text_form_is_refused():
    with pytest.raises(OptionError, match="cannot be written as text"):
        parse_value(complex, "1")
    assert format_value((1.0, None, True, "a b")) == '[1, none, true, "a b"]'


# -- finding passes -----------------------------------------------------------------------------------------------


def test_passes_are_found_by_name_in_the_package_and_in_entry_points():
    assert find_pass("fold-constants").name == "fold-constants"
    assert find_pass("fuse-test") is Fuse
    assert {"bind-dims", "cse", "fuse-test"} <= set(available_passes())


@pytest.mark.parametrize("name", ["no-such", "../cse", "os", "Cse", "cse.Cse", ""])
def test_what_is_no_pass_is_not_found(name):
    with pytest.raises(PipelineError, match="no pass"):
        find_pass(name)


def test_an_entry_point_that_is_no_pass_is_refused(monkeypatch):
    monkeypatch.setitem(TEST_PASSES, "odd-test", Module)
    with pytest.raises(PipelineError, match="not a pass"):
        find_pass("odd-test")


def test_every_file_in_passes_holds_the_pass_of_its_name_with_a_docstring():
    for name in set(available_passes()) - TEST_PASSES.keys():
        found = find_pass(name)
        assert found.__doc__, name
        assert not found.__doc__.startswith(f"{found.__name__}("), f"{name} has no docstring of its own"


# -- running ------------------------------------------------------------------------------------------------------


def test_the_result_tells_what_each_pass_did():
    result = PassManager([Grow(), Fuse("size")]).run(small_module())
    assert result.changed
    assert [record.changed for record in result.records] == [True, False]
    assert result.notes == ("fuse-test: mode is size",)
    assert result.records[0].statistics == {"grown": 1}
    assert result.records[1].text == "fuse-test{mode=size}"
    assert result.seconds == sum(record.seconds for record in result.records) > 0
    assert not PassManager([Fuse()]).run(small_module()).changed


def rendered(table):
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    return console.file.getvalue()


def test_tables_of_timings_and_statistics():
    result = PassManager([Grow(), Fuse("size")]).run(small_module())
    timings = rendered(result.timings())
    assert "fuse-test{mode=size}" in timings
    assert "total" in timings
    assert [line.split() for line in rendered(result.statistics()).splitlines()[1:]] == [
        ["grow-test", "grown", "1"],
        ["fuse-test", "fused", "3"],
    ]


def printed(**options):
    stream = io.StringIO()
    watch = Instrumentation(stream=stream, **options)
    PassManager([Grow(), Fuse("size")], watch).run(small_module())
    return [line for line in stream.getvalue().splitlines() if line.startswith("//")], stream.getvalue()


def test_the_ir_is_printed_where_asked():
    assert printed()[1] == ""
    assert printed(print_ir_before={"fuse-test"})[0] == ["// ----- before fuse-test{mode=size} -----"]
    assert printed(print_ir_after={"fuse-test"})[0] == [
        "// ----- after fuse-test{mode=size}, which changed nothing -----"
    ]
    titles, text = printed(print_ir_after_change=True)
    assert titles == ["// ----- after grow-test -----"]
    assert "Neg(%x)" in text
    assert len(printed(print_ir_after_all=True)[0]) == 2


def test_printing_at_a_pass_that_is_not_there_is_refused():
    with pytest.raises(IrparError, match='no pass "grow"') as error:
        printed(print_ir_before={"grow"})
    assert "nearest names: grow-test" in str(error.value)


def test_the_ir_is_dumped_to_numbered_files(tmp_path):
    PassManager([Grow(), Fuse()], Instrumentation(dump_ir=tmp_path / "dump")).run(small_module())
    files = sorted((tmp_path / "dump").iterdir())
    assert [path.name for path in files] == ["00-start.irpar", "01-grow-test.irpar", "02-fuse-test.irpar"]
    assert "Neg" not in files[0].read_text()
    assert "Neg" in files[1].read_text()


def test_every_dump_reads_back_with_numbers_that_lie_once_beside_it(tmp_path):
    weight = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    module = Module()
    x = module.graph.add_input("x", TensorType(DType.F32, (8, 64)))
    w = module.graph.add_constant(ArrayTensor(weight), "w")
    module.opsets = {"": 21}
    y = module.graph.append(Node("MatMul", [x, w], version=21)).result
    y.type = TensorType(DType.F32, (8, 64))
    module.graph.set_outputs([y], ["y"])
    module.shard("w", [None, "tp"])
    module.set_mesh("tp=2")
    dump = tmp_path / "dump"
    pipeline = "complete-sharding,insert-redistribution,localize"
    for _ in range(2):  # The second run replaces what the first left, and more of it.
        (dump / "99-left-over.irpar").parent.mkdir(exist_ok=True)
        (dump / "99-left-over.irpar").write_text("graph @g() -> () { }")
        PassManager.parse(pipeline, Instrumentation(dump_ir=dump)).run(clone_module(module))
        files = sorted(dump.iterdir())
        assert [path.name for path in files[:-1]] == [
            *("00-start.irpar", "01-complete-sharding.irpar", "02-insert-redistribution.irpar", "03-localize.irpar")
        ]
        assert files[-1].stat().st_size == weight.nbytes
        for path in files[:3]:
            (constant,) = read_text(path).graph.constants
            np.testing.assert_array_equal(constant.data.numpy(), weight)
            PassManager.parse("localize" if path == files[2] else pipeline).run(read_text(path))
        verify(read_text(files[3]))
        with pytest.raises(IrparError, match="would replace the file that the module reads"):
            PassManager.parse("cse", Instrumentation(dump_ir=dump)).run(read_text(files[0]))
        assert files[-1].exists()


def test_progress_is_reported():
    seen = []
    PassManager([Grow(), Fuse()], Instrumentation(progress=seen.append)).run(small_module())
    assert [(p.event, p.name, p.index, p.total) for p in seen] == [
        ("start", "grow-test", 0, 2),
        ("end", "grow-test", 0, 2),
        ("start", "fuse-test", 1, 2),
        ("end", "fuse-test", 1, 2),
    ]
    assert isinstance(seen[0], Progress)
    assert seen[1].seconds > 0


# -- failures -----------------------------------------------------------------------------------------------------


def failing(tmp_path, passes, module):
    with pytest.raises(PassFailure) as error:
        PassManager(passes, Instrumentation(reproducer=tmp_path, verify_each=True)).run(module)
    return error.value


def test_a_bug_leaves_a_reproducer_that_fails_again(tmp_path):
    numbers = np.arange(100, dtype=np.float32)
    failure = failing(tmp_path, [Grow(), Crash(), Fuse("size")], small_module([("weights", numbers)]))
    assert "pass crash-test failed: ZeroDivisionError: no luck" in str(failure)
    assert isinstance(failure.__cause__, ZeroDivisionError)
    path = tmp_path / "crash-test.irpar"
    assert str(path) in str(failure)
    assert path.read_text().startswith(
        "// irpar reproducer\n// pipeline: crash-test,fuse-test{mode=size}\n// error: ZeroDivisionError: no luck\n"
    )
    module, text = read_reproducer(path)
    assert len(module.graph) == 1, "the module as the failing pass met it, without what that pass left"
    np.testing.assert_array_equal(module.graph.value("weights").data.numpy(), numbers)
    again = failing(tmp_path, PassManager.parse(text).passes, module)
    assert "ZeroDivisionError" in str(again)
    assert (tmp_path / "crash-test-2.irpar").exists(), "the first reproducer stays"


def test_pipelines_in_a_row_copy_nothing_until_a_pass_fails(tmp_path, monkeypatch):
    copied = []
    monkeypatch.setattr(
        manager, "clone_module", lambda module: copied.append(len(module.graph)) or clone_module(module)
    )
    watch = Instrumentation(reproducer=tmp_path)

    def make(*passes):
        module = small_module()
        for pass_ in passes:
            PassManager([pass_], watch).run(module)
        return module

    assert len(without_copies(lambda: make(Grow(), Grow())).graph) == len(make(Grow(), Grow()).graph)
    assert len(copied) == 2, "only those of the pipelines that run by themselves"
    with pytest.raises(PassFailure) as error:
        without_copies(lambda: without_copies(lambda: make(Grow(), Crash())))
    assert str(tmp_path / "crash-test.irpar") in str(error.value)
    module, text = read_reproducer(tmp_path / "crash-test.irpar")
    assert (len(module.graph), text) == (len(make(Grow()).graph), "crash-test")


def test_a_mistake_of_the_user_goes_through_without_a_reproducer(tmp_path):
    with pytest.raises(IrparError, match="the model is wrong") as error:
        PassManager([Crash("mistake")], Instrumentation(reproducer=tmp_path)).run(small_module())
    assert not isinstance(error.value, PassFailure)
    assert list(tmp_path.iterdir()) == []


def test_what_the_verifier_finds_counts_as_a_bug(tmp_path):
    failure = failing(tmp_path, [Crash("invalid")], small_module())
    assert "pass crash-test left an invalid module" in str(failure)
    assert any("Neg" in note for note in failure.notes), failure.notes
    assert reproducer_pipeline(tmp_path / "crash-test.irpar") == "crash-test{how=invalid}"


def test_without_a_reproducer_no_file_is_written(tmp_path):
    with pytest.raises(PassFailure, match="run again with a reproducer"):
        PassManager([Crash()], Instrumentation(reproducer=None)).run(small_module())


def test_a_reproducer_that_cannot_be_written_does_not_hide_the_failure(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    failure = failing(blocked, [Crash()], small_module())
    assert "ZeroDivisionError" in str(failure)
    assert "no reproducer could be written" in str(failure)


def test_a_file_that_is_no_reproducer_is_refused(tmp_path):
    path = tmp_path / "plain.irpar"
    path.write_text("graph @g() -> () opset 21 {\n}\n")
    assert reproducer_pipeline(path) is None
    with pytest.raises(IrparError, match="is no reproducer"):
        read_reproducer(path)
