"""Memory spaces in local programs: copies between them, what the verifier asks, and what passes leave where it is."""

import pytest

from irpar.ir import Module, VerifyError, parse_module, print_module, verify
from irpar.ops.memory_copies import CopyWriter, copied_bytes, node_place, number_copies, put
from irpar.pass_manager import PassManager

HEAD = 'mesh @m = ["x"=1]\n'


def module_of(lines: str, head: str = "(%x: f32[4], %h: f32[4] in host) -> (%y)") -> Module:
    return parse_module(f"{HEAD}graph local @g{head} opset 21 ranks [0] {{\n{lines}\n}}\n")


GOOD = """\
  %d = irpar.Copy(%h) {to="device"} : f32[4]
  %s = irpar.CopyStart(%h) {id=3, to="device"} : inflight<f32[4]>
  %b = irpar.CopyStart(%x) {id=4, to="host"} : inflight<f32[4]> in host
  %a = Add(%x, %d) : f32[4]
  %c = irpar.Wait(%b) {id=4} : f32[4] in host
  %g = Add(%h, %c) {| place=host} : f32[4] in host
  %n = Size(%g) : i64[]
  %e = irpar.Wait(%s) {id=3} : f32[4]
  %w = irpar.Copy(%g) {id=5, to="disk"} : f32[4] in disk
  %r = irpar.Copy(%w) {id=6, to="device"} : f32[4]
  %ae = Add(%a, %e) : f32[4]
  %y = Add(%ae, %r) : f32[4]"""


def test_a_program_over_three_memories_is_valid_and_reads_back() -> None:
    module = module_of(GOOD)
    verify(module)
    text = print_module(module).text
    assert print_module(parse_module(text)).text == text
    assert '%s = irpar.CopyStart(%h) {id=3, to="device"} : inflight<f32[4]>' in text
    assert "%c = irpar.Wait(%b) {id=4} : f32[4] in host" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("  %y = Add(%x, %h) : f32[4]", "runs on the device and reads %h, which lies on the host: copy it first"),
        ("  %y = Neg(%x) {| place=host} : f32[4] in host", "runs on the host and reads %x, which lies on the device"),
        ("  %y = Neg(%x) : f32[4] in host", "runs on the device, but its result %y lies on the host"),
        ("  %y = Neg(%h) {| place=host} : f32[4]", "runs on the host, but its result %y lies on the device"),
        ('  %y = irpar.Copy(%x) {to="device"} : f32[4]', "copies %x to the device, where it lies already"),
        ('  %y = irpar.Copy(%x) {to="moon"} : f32[4]', """to='moon'; copies go to "device", "host" or "disk\""""),
        ('  %y = irpar.Copy(%h) {to="device"} : f32[4] in host', "copies to the device, but %y lies in host"),
        ('  %y = irpar.Copy(%h) {to="device"} : f32[8]', "gives f32[8], where a copy of %h is f32[4]"),
        ('  %y = irpar.Copy(%h) {to="device", axis=1} : f32[4]', "has the attribute axis; a copy has to and id"),
        (
            '  %s = irpar.CopyStart(%h) {to="device"} : inflight<f32[4]>\n  %y = irpar.Wait(%s) : f32[4]',
            "no attribute id",
        ),
        (
            '  %s = irpar.CopyStart(%h) {id=0, to="device"} : inflight<f32[4]>\n  %y = Neg(%x) : f32[4]',
            "is waited for 0 times instead of once",
        ),
        (
            '  %s = irpar.CopyStart(%h) {id=0, to="device"} : inflight<f32[4]>\n  %y = irpar.Wait(%s) {id=1} : f32[4]',
            "is in flight under id 0, and is waited for under id 1",
        ),
        (
            '  %s = irpar.CopyStart(%x) {id=0, to="host"} : inflight<f32[4]> in host\n'
            "  %y = irpar.Wait(%s) {id=0} : f32[4]",
            "waits for what comes to the host, but %y lies in device",
        ),
        ('  %y = irpar.Copy(%x) {id=0, to="disk"} : f32[4] in disk', "is a result, and lies on the disk"),
        (
            '  %a = irpar.Copy(%h) {id=0, to="device"} : f32[4]\n  %y = irpar.Copy(%h) {id=0, to="device"} : f32[4]',
            "has id 0, which",
        ),
        (
            '  %d = irpar.Copy(%x) {id=0, to="disk"} : f32[4] in disk\n  %y = Neg(%d) : f32[4]',
            "reads %d, which lies on the disk",
        ),
        (
            '  %y = irpar.AllReduce(%h) {axes=["x"], reduce="sum", id=0 | place=host} : f32[4] in host',
            "communicates on the host; collectives take place on the device",
        ),
    ],
)
def test_what_breaks_a_rule_is_refused(lines: str, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        verify(module_of(lines))
    assert message in str(caught.value)


def test_copies_stand_in_local_programs_and_not_in_functions() -> None:
    text = 'graph @g(%h: f32[4] in host) -> (%y) opset 21 {\n  %y = irpar.Copy(%h) {to="device"} : f32[4]\n}\n'
    with pytest.raises(VerifyError, match="copies between memories in global view"):
        verify(parse_module(text))


LOOP = """\
  %n = constant : i64[] 3
  %true = constant : bool[] true
  %first = irpar.Copy(%h) {to="device"} : f32[4]
  %y = Loop(%n, %true, %first) {body=graph @body(%i: i64[], %go: bool[], %v: f32[4]) -> (%go, %out) {
    %down = irpar.Copy(%v) {to="host"} : f32[4] in host
    %sum = Add(%down, %h) {| place=host} : f32[4] in host
    %out = irpar.Copy(%sum) {to="device"} : f32[4]
  }} : f32[4]"""


def test_what_decides_how_often_a_body_runs_is_not_read_on_a_disk() -> None:
    lines = """\
  %n = constant : i64[] in disk 3
  %y = Loop(%n, _, %x) {body=graph @body(%i: i64[], %go: bool[], %v: f32[4]) -> (%go, %out) {
    %out = Neg(%v) : f32[4]
  }} : f32[4]"""
    with pytest.raises(VerifyError, match="decides by %n, which lies on the disk"):
        verify(module_of(lines))


def test_bodies_begin_and_end_where_the_node_does() -> None:
    verify(module_of(LOOP))
    wrong = LOOP.replace("  %first", "  %unread").replace("%true, %first", "%true, %h")
    with pytest.raises(VerifyError, match="%h lies on the host, and in the body @body %v on the device"):
        verify(module_of(wrong))


def test_a_node_is_put_on_the_host_with_what_its_bodies_hold() -> None:
    lines = LOOP.replace("%first = ", "%unread = ").replace("%true, %first", "%true, %h")
    plain = lines[: lines.index("    %down")] + "    %out = Add(%v, %h) : f32[4]\n  }} : f32[4]"
    module = module_of(plain)
    (_, loop) = module.graph
    put(loop, "host")
    (body,) = loop.nested_graphs()
    assert [node_place(node) for node in body] == ["host"]
    assert {value.memory for value in (*body.inputs, *loop.results, *next(iter(body)).results)} == {"host"}
    for value in module.graph.constants:
        value.memory = "host"
    verify(module)


def test_the_writer_writes_what_the_verifier_takes() -> None:
    module = module_of("  %y = Neg(%x) : f32[4]")
    graph = module.graph
    (neg,) = graph
    h = graph.inputs[1]
    writer = CopyWriter(graph)
    started = writer.start(h, "device", neg)
    there = writer.wait(started, neg)
    neg.set_operand(0, there)
    back = writer.copy(neg.result, "host")
    graph.set_outputs([back], ["y"])
    verify(module)
    assert print_module(module).text == (
        f'{HEAD}graph local @g(%x: f32[4], %h: f32[4] in host) -> (%y_1 as "y") opset 21 ranks [0] {{\n'
        '  %h_1 = irpar.CopyStart(%h) {to="device", id=0} : inflight<f32[4]>\n'
        "  %h_2 = irpar.Wait(%h_1) {id=0} : f32[4]\n"
        "  %y = Neg(%h_2) : f32[4]\n"
        '  %y_1 = irpar.Copy(%y) {to="host", id=1} : f32[4] in host\n'
        "}\n"
    )
    assert [copied_bytes(node) for node in graph if node.op_type.startswith("Copy")] == [16, 16]


def test_ids_follow_order_and_are_alike_in_all_programs() -> None:
    module = module_of(GOOD)
    assert number_copies(module.graphs)
    ids = {node.result.name: node.attributes.get("id") for node in module.graph if "id" in node.attributes}
    assert ids == {"d": 0, "s": 1, "b": 2, "c": 2, "e": 1, "w": 3, "r": 4}
    verify(module)
    assert not number_copies(module.graphs)


@pytest.mark.parametrize(
    "pipeline", ["cse", "dce", "fold-constants", "simplify-layout", "fuse-kernels", "memory-order"]
)
def test_passes_leave_copies_and_what_the_host_computes_where_they_are(pipeline: str) -> None:
    module = module_of(GOOD)
    PassManager.parse(pipeline).run(module)
    verify(module)
    assert _order(module) == _order(module_of(GOOD))


def _order(module: Module) -> list[str]:
    kinds = ("Copy", "CopyStart", "Wait")
    return [repr(node) for node in module.graph if node.op_type in kinds or node.place == "host"]


def test_equal_nodes_of_two_places_and_equal_copies_stay_apart() -> None:
    lines = """\
  %d = irpar.Copy(%h) {to="device"} : f32[4]
  %again = irpar.Copy(%h) {to="device"} : f32[4]
  %a = Neg(%d) : f32[4]
  %b = Neg(%again) : f32[4]
  %y = Add(%a, %b) : f32[4]"""
    module = module_of(lines)
    PassManager.parse("cse").run(module)
    assert len(module.graph) == 5
