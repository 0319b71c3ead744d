"""Send and Recv: text, types, what the verifier refuses, what is sent and what that costs."""

from pathlib import Path

import pytest

from irpar.analysis.cost.network_lookup import network_of
from irpar.analysis.cost.network_presets import PRESETS
from irpar.ir import Module, VerifyError, verify
from irpar.ir.text.files import parse_module
from irpar.onnx_io.load import load
from irpar.onnx_io.save import save
from irpar.ops.collectives import number_collectives, sent_bytes
from irpar.output.entries import over_text
from irpar.output.plan_entries import collective_entries
from irpar.output.prediction import collective_seconds

SEND = "irpar.Send(%x) {channel=0, pairs=[0, 1, 1, 3, 0, 2], id=0}"
RECV = '%y = irpar.Recv() {channel=0, pairs=[0, 1, 1, 3, 0, 2], dtype="f32", shape=[4], id=1} : f32[4] of [16@x]'
HEAD = """mesh @m = ["x"=4]
graph local @g(%x: f32[4] of [16@x]) -> (%y) opset 21 ranks [0, 1, 2, 3] {
"""


def parsed(send: str = SEND, recv: str = RECV) -> Module:
    return parse_module(f"{HEAD}  {send}\n  {recv}\n}}\n")


def test_text_and_verifier() -> None:
    module = parsed()
    verify(module)
    assert str(module).strip() == f"{HEAD}  {SEND}\n  {RECV}\n}}"


REFUSED = {
    "an unknown rank": (
        SEND.replace("0, 2]", "0, 4]"),
        RECV,
        "names rank 4 in its pairs, where there are ranks 0 to 3",
    ),
    "a pair twice": (SEND.replace("0, 2]", "0, 1]"), RECV, "has the pair from rank 0 to rank 1 twice"),
    "to itself": (SEND.replace("0, 2]", "2, 2]"), RECV, "has a pair that sends from rank 2 to itself"),
    "half a pair": (SEND.replace("0, 2]", "0]"), RECV, "has no attribute pairs, sources and targets in turn"),
    "no channel": (SEND.replace("channel=0, ", ""), RECV, "has no attribute channel, a number from 0 to 16,383"),
    "no id": (SEND.replace(", id=0", ""), RECV, "has no attribute id, a number"),
    "two sources": (
        SEND.replace("0, 2]", "2, 1]"),
        RECV.replace("0, 2]", "2, 1]"),
        "has 2 pairs that send to rank 1, which can take one tensor",
    ),
    "nobody takes": (
        SEND,
        RECV.replace(", 0, 2]", "]"),
        "sends to rank 2, whose program has no irpar.Recv of that pair and channel",
    ),
    "nobody sends": (
        SEND.replace(", 0, 2]", "]"),
        RECV,
        "takes from rank 0, whose program has no irpar.Send of that pair and channel",
    ),
    "another channel": (SEND, RECV.replace("channel=0", "channel=1"), "has no irpar.Recv of that pair and channel"),
    "another dtype": (
        SEND,
        RECV.replace('"f32"', '"f64"').replace(": f32", ": f64"),
        "sends f32[4], where f64[4] is taken, to rank 1",
    ),
    "another shape": (
        SEND,
        RECV.replace("shape=[4]", "shape=[3]").replace("f32[4] of [16@x]", "f32[3] of [12@x]"),
        "sends f32[4], where f32[3] is taken, to rank 1",
    ),
    "no dtype": (SEND, RECV.replace('"f32"', '"f33"'), "has no attribute dtype, such as f32"),
    "no shape": (SEND, RECV.replace("shape=[4]", "shape=[-4]"), "has no attribute shape, sizes from 0"),
    "its result": (SEND, RECV.replace("shape=[4]", "shape=[3]"), "takes f32[3], but its result is f32[4]"),
    "its dtype": (SEND, RECV.replace('"f32"', '"f64"'), "takes f64[4], but its result is f32[4]"),
    "an operand": (SEND, RECV.replace("Recv()", "Recv(%x)"), "has not no operand and one result"),
    "a result": (f"%z = {SEND} : f32[4] of [16@x]", RECV, "has not one operand and no result"),
    "one id for both": (SEND, RECV.replace("id=1", "id=0"), "has id 0, which"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    send, recv, text = REFUSED[what]
    with pytest.raises(VerifyError) as error:
        verify(parsed(send, recv))
    assert text in str(error.value)


def test_refused_in_global_view() -> None:
    text = (
        f"{HEAD}  {SEND}\n  {RECV}\n}}".replace("local ", "")
        .replace(" of [16@x]", "")
        .replace(" ranks [0, 1, 2, 3]", "")
    )
    with pytest.raises(VerifyError, match="stands in local graphs only"):
        verify(parse_module(text))


def test_other_programs_need_not_be_here() -> None:
    """A rank that loads its own part alone cannot see who takes what it sends."""
    text = f"{HEAD}  {SEND}\n  {RECV}\n}}".replace("ranks [0, 1, 2, 3]", "ranks [0]")
    verify(parse_module(text.replace("0, 1, 1, 3, 0, 2", "0, 1, 3, 0")))


def test_new_ids_leave_channels_as_they_are() -> None:
    module = parsed(SEND.replace("id=0", "id=7"), RECV.replace("id=1", "id=9"))
    number_collectives(module.graph)
    assert str(module) == str(parsed())


def test_onnx_keeps_them(tmp_path: Path) -> None:
    module = parsed()
    save(module, tmp_path / "model.onnx")
    found = load(tmp_path / "model.onnx")
    verify(found)
    assert str(found).splitlines()[2:4] == str(module).splitlines()[2:4]


def test_plan_and_cost() -> None:
    """The first rank sends its 16 bytes twice."""
    module = parsed()
    send, recv = module.graph
    assert (sent_bytes(send, module.mesh), sent_bytes(recv, module.mesh)) == (32, 0)
    sent, taken = collective_entries(module, module.mesh)
    assert sent["pairs"] == [0, 1, 1, 3, 0, 2]
    assert (sent["kind"], sent["value"], sent["bytes"], sent["sent_bytes"], sent["group_size"]) == (
        "send",
        "x",
        16,
        32,
        4,
    )
    assert (taken["kind"], taken["value"], taken["bytes"], taken["sent_bytes"], taken["id"]) == ("recv", "y", 16, 0, 1)
    assert over_text(sent) == "ranks 0 to 1, 1 to 3, 0 to 2"
    assert over_text({**sent, "pairs": [0, 1] * 9}) == "ranks 0 to 1, 0 to 1, 0 to 1, 6 more"
    network = next(each for each in map(network_of, PRESETS) if each.knows_seconds)
    once = network.seconds_between(0, 1, 16)
    assert collective_seconds(network, sent, module.mesh) == pytest.approx(network.launch + 2 * once)
    assert collective_seconds(network, taken, module.mesh) == 0
