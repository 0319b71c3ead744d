"""channels-last: where a region begins and ends, and what becomes of its nodes, in text."""

from typing import Any

import pytest

from irpar.analysis.channels_last.layout import axis_last, last, lies_alike, to_first, to_last

IMAGE = "f32[2, 8, 512, 512]"
TURNED = "f32[2, 512, 512, 8]"
WINDOW = "kernel_shape=[3, 3], pads=[1, 1, 1, 1]"
SAME = "{kernel_shape=[3, 3], strides=[1, 1], dilations=[1, 1], pads=[1, 1, 1, 1], group=1"
ONE = "{kernel_shape=[1, 1], strides=[1, 1], dilations=[1, 1], pads=[0, 0, 0, 0], group=1"
WEIGHT = '%w = constant : f32[8, 8, 3, 3] data("w.bin", 0, 2304)'
TURN_WEIGHT = "%w_last = Transpose(%w) {perm=[0, 2, 3, 1]} : f32[8, 3, 3, 8]"
TURN = f"%x_last = Transpose(%x) {{perm=[0, 2, 3, 1]}} : {TURNED}"
BACK = f"%y = Transpose(%y_last) {{perm=[0, 3, 1, 2]}} : {IMAGE}"


def graph(*lines: str, takes: str = f"%x: {IMAGE}", gives: str = "%y", opset: int = 21) -> str:
    body = "\n".join(f"  {line}" for line in (WEIGHT, *lines))
    return f"graph @g({takes}) -> ({gives}) opset {opset} {{\n{body}\n}}\n"


def conv(result: str, operand: str = "%x", type_: str = IMAGE) -> str:
    return f"{result} = Conv({operand}, %w) {{{WINDOW}}} : {type_}"


def test_a_region_is_turned_where_it_begins_and_ends(check_golden: Any) -> None:
    check_golden(
        "channels-last",
        graph(
            '%v = constant : f32[8, 8, 1, 1] data("w.bin", 0, 256)',
            conv("%a"),
            f"%b = Relu(%a) : {IMAGE}",
            f"%c = Conv(%b, %v) : {IMAGE}",
            f"%d = Add(%c, %x) : {IMAGE}",
            f"%e = Relu(%d) : {IMAGE}",
            "%y = MaxPool(%e) {kernel_shape=[2, 2], strides=[2, 2]} : f32[2, 8, 256, 256]",
        ),
        graph(
            '%v = constant : f32[8, 8, 1, 1] data("w.bin", 0, 256)',
            "%shape = constant : i64[4] [8, 1, 1, 8]",
            TURN_WEIGHT,
            TURN,
            f'%b_last = irpar.ConvChannelsLast(%x_last, %w_last) {SAME}, activation="Relu"}} : {TURNED}',
            "%v_last = Reshape(%v, %shape) : f32[8, 1, 1, 8]",
            f'%e_last = irpar.ConvChannelsLast(%b_last, %v_last, _, %x_last) {ONE}, activation="Relu"}} : {TURNED}',
            '%y_last = irpar.PoolChannelsLast(%e_last) {mode="max", kernel_shape=[2, 2], strides=[2, 2], '
            "dilations=[1, 1], pads=[0, 0, 0, 0]} : f32[2, 256, 256, 8]",
            "%y = Transpose(%y_last) {perm=[0, 3, 1, 2]} : f32[2, 8, 256, 256]",
        ),
    )


def test_a_normalisation_goes_into_the_weights(check_golden: Any) -> None:
    numbers = tuple(f'%{name} = constant : f16[8] data("w.bin", 0, 16)' for name in ("b", "s", "t", "m", "v"))
    weight = '%h = constant : f16[8, 8, 3, 3] data("w.bin", 0, 1152)'
    image, turned = IMAGE.replace("f32", "f16"), TURNED.replace("f32", "f16")
    check_golden(
        "channels-last,dce",
        graph(
            weight,
            *numbers,
            f"%a = Conv(%x, %h, %b) {{{WINDOW}}} : {image}",
            f"%y = BatchNormalization(%a, %s, %t, %m, %v) : {image}",
            takes=f"%x: {image}",
        ),
        graph(
            weight,
            *numbers,
            "%number = constant : f32[] 1e-05",
            "%shape = constant : i64[4] [8, 1, 1, 1]",
            "%h_last = Transpose(%h) {perm=[0, 2, 3, 1]} : f16[8, 3, 3, 8]",
            *(f"%{name}_f32 = Cast(%{name}) {{to=1}} : f32[8]" for name in ("s", "t", "m", "v")),
            "%y_spread = Add(%v_f32, %number) : f32[8]",
            "%y_root = Sqrt(%y_spread) : f32[8]",
            "%y_factor = Div(%s_f32, %y_root) : f32[8]",
            "%y_center = Mul(%m_f32, %y_factor) : f32[8]",
            "%y_shift = Sub(%t_f32, %y_center) : f32[8]",
            "%y_factor_column = Reshape(%y_factor, %shape) : f32[8, 1, 1, 1]",
            "%h_last_f32 = Cast(%h_last) {to=1} : f32[8, 3, 3, 8]",
            "%h_last_scaled = Mul(%h_last_f32, %y_factor_column) : f32[8, 3, 3, 8]",
            "%b_f32 = Cast(%b) {to=1} : f32[8]",
            "%b_scaled = Mul(%b_f32, %y_factor) : f32[8]",
            "%b_shifted = Add(%b_scaled, %y_shift) : f32[8]",
            "%h_last_scaled_f16 = Cast(%h_last_scaled) {to=10} : f16[8, 3, 3, 8]",
            "%b_shifted_f16 = Cast(%b_shifted) {to=10} : f16[8]",
            f"%x_last = Transpose(%x) {{perm=[0, 2, 3, 1]}} : {turned}",
            f"%y_last = irpar.ConvChannelsLast(%x_last, %h_last_scaled_f16, %b_shifted_f16) {SAME}}} : {turned}",
            f"%y = Transpose(%y_last) {{perm=[0, 3, 1, 2]}} : {image}",
            takes=f"%x: {image}",
        ).replace(f"  {WEIGHT}\n", ""),
    )


def test_what_is_read_with_channels_first_is_turned_back_once(rewritten: Any) -> None:
    text = rewritten(
        "channels-last",
        graph(
            conv("%a"),
            f"%b = Relu(%a) : {IMAGE}",
            f"%c = Softmax(%b) {{axis=3}} : {IMAGE}",
            f"%d = Softmax(%b) {{axis=2}} : {IMAGE}",
            conv("%y", "%b"),
            gives="%c, %d, %y",
        ),
    )
    assert text.count("%b = Transpose(%b_last)") == 1
    assert text.count("Transpose(") == 4  # And the weight, what comes in, and what goes out.
    assert "Conv(%" not in text


@pytest.mark.parametrize("column", ["f32[8, 1, 1]", "f32[1, 8, 1, 1]"])
def test_numbers_of_features_that_are_added_are_a_bias(rewritten: Any, column: str) -> None:
    text = rewritten(
        "channels-last",
        graph(
            f'%b = constant : {column} data("w.bin", 0, 32)',
            conv("%a"),
            f"%c = Add(%b, %a) : {IMAGE}",
            f"%y = Add(%c, %x) : {IMAGE}",
        ),
    )
    assert "%b_row = Reshape(%b, %shape) : f32[8]" in text
    assert "irpar.ConvChannelsLast(%x_last, %w_last, %b_row, %x_last)" in text
    assert "Add(" not in text


GATES = [
    (("%s = Sigmoid(%a)", "%y = Mul(%a, %s)"), 'activation="Silu"'),
    (("%s = HardSigmoid(%a) {alpha=0.16666667, beta=0.5}", "%y = Mul(%s, %a)"), 'activation="HardSwish"'),
    (("%y = HardSwish(%a)",), 'activation="HardSwish"'),
    (("%y = Sigmoid(%a)",), 'activation="Sigmoid"'),
    (("%six = constant : f32[] 6.0", "%y = Clip(%a, _, %six)"), 'activation="Clip", max=6.0'),
    (("%y = HardSigmoid(%a)",), ""),
    (("%y = Elu(%a)",), ""),
    (("%y = Clip(%a, %low)",), ""),
]


@pytest.mark.parametrize(("lines", "activation"), GATES, ids=lambda given: str(given)[:24])
def test_activations(rewritten: Any, lines: tuple[str, ...], activation: str) -> None:
    typed = (line if "constant" in line else f"{line} : {IMAGE}" for line in lines)
    text = rewritten("channels-last", graph(conv("%a"), *typed, takes=f"%x: {IMAGE}, %low: f32[]"))
    (line,) = (line for line in text.splitlines() if "irpar.ConvChannelsLast" in line)
    assert (f"group=1, {activation}}}" if activation else "group=1}") in line


STAYS = [
    (conv("%y"), {"opset": 8}),
    (conv("%y", type_="f32[n, 8, 512, 512]"), {"takes": "%x: f32[n, 8, 512, 512]"}),
    ("%y = Conv(%x, %x) : f64[1, 1, 1, 1]", {"takes": "%x: f64[1, 1, 1, 1]"}),
    ("%y = Conv(%x, %k) {group=8} : f32[2, 8, 510, 510]", {"takes": f"%x: {IMAGE}, %k: f32[8, 1, 3, 3]"}),
    ("%y = Conv(%x, %k) : f32[2, 8, 512, 512]", {"takes": f"%x: {IMAGE}, %k: f32[8, 8, 1, 1]"}),
    (f"%y = MaxPool(%x) {{kernel_shape=[1, 1]}} : {IMAGE}", {}),
]


@pytest.mark.parametrize(("line", "given"), STAYS, ids=lambda given: str(given)[:24])
def test_what_stays_as_it_is(check_golden: Any, line: str, given: dict[str, Any]) -> None:
    """Sizes that nobody knows, and what would not save what its Transposes cost."""
    check_golden("channels-last", graph(line, **given), graph(line, **given))


def test_training_stays_as_it_is(check_golden: Any) -> None:
    text = graph(conv("%a"), f"%y = Neg(%a) {{| phase=backward}} : {IMAGE}")
    check_golden("channels-last", text, text)


def test_communication_is_a_border(rewritten: Any) -> None:
    text = rewritten(
        "channels-last",
        f"""
        mesh @m = ["tp"=2]
        graph local @g(%x: {IMAGE} of [2, 8, 512, 512]) -> (%y) opset 21 ranks [0, 1] {{
          {WEIGHT}
          {conv("%a")}
          %s = irpar.AllReduce(%a) {{axes=["tp"], reduce="sum", id=0}} : {IMAGE}
          {conv("%y", "%s")}
        }}
        """,
    )
    assert text.count("irpar.ConvChannelsLast") == 2
    assert "%a = Transpose(%a_last)" in text
    assert "irpar.AllReduce(%a)" in text
    assert "%s_last = Transpose(%s)" in text


def test_bodies_are_changed_by_themselves(rewritten: Any) -> None:
    text = rewritten(
        "channels-last",
        graph(
            "%t = Cast(%n) {to=9} : bool[]",
            f"%y = If(%t) {{then_branch=graph @t() -> (%p) {{\n    {conv('%p')}\n  }}, "
            f"else_branch=graph @e() -> (%q) {{\n    %q = Relu(%x) : {IMAGE}\n  }}}} : {IMAGE}",
            takes=f"%x: {IMAGE}, %n: i64[]",
        ),
    )
    assert "irpar.ConvChannelsLast" in text
    assert "%q = Relu(%x)" in text


def test_exports_that_turn_images_themselves_lose_their_transposes(rewritten: Any) -> None:
    """A normalisation of channels, as exporters write it: what turns the image around it computes nothing any more."""
    text = rewritten(
        "channels-last",
        graph(
            '%g = constant : f32[8] data("w.bin", 0, 32)',
            conv("%a"),
            f"%l = Transpose(%a) {{perm=[0, 2, 3, 1]}} : {TURNED}",
            f"%n = LayerNormalization(%l, %g) : {TURNED}",
            f"%f = Transpose(%n) {{perm=[0, 3, 1, 2]}} : {IMAGE}",
            conv("%y", "%f"),
        ),
    )
    assert text.count("Transpose(") == 3
    assert "%n = LayerNormalization(%a_last, %g)" in text
    assert "irpar.ConvChannelsLast(%n, %w_last)" in text


def test_images_are_turned_behind_elementwise_operators_rather_than_before_them(rewritten: Any) -> None:
    """Where it costs as much: what reads a view of a turned image reads elements that lie apart."""
    text = rewritten(
        "channels-last",
        graph(f"%a = Elu(%x) : {IMAGE}", conv("%b", "%a"), f"%c = Tanh(%b) : {IMAGE}", f"%y = Softmax(%c) : {IMAGE}"),
    )
    assert "%a = Elu(%x)" in text
    assert "%c_last = Tanh(%b_last)" in text


TURNED_NORMS = [
    ("%n = GroupNormalization(%a, %g, %h) {num_groups=4, epsilon=0.001}", "%n_last", "num_groups=4, epsilon=0.001"),
    ("%n = InstanceNormalization(%a, %g, %h)", "%n_last", "num_groups=8, epsilon=1e-05"),
]


@pytest.mark.parametrize(("line", "result", "attributes"), TURNED_NORMS, ids=lambda given: str(given)[:24])
def test_groups_of_channels_are_standardised_in_place(rewritten: Any, line: str, result: str, attributes: str) -> None:
    text = rewritten(
        "channels-last",
        graph(
            '%g = constant : f32[8] data("w.bin", 0, 32)',
            '%h = constant : f32[8] data("w.bin", 32, 32)',
            conv("%a"),
            f"{line} : {IMAGE}",
            f"%s = Sigmoid(%n) : {IMAGE}",
            f"%m = Mul(%n, %s) : {IMAGE}",
            conv("%y", "%m"),
        ),
    )
    assert f'irpar.GroupNormChannelsLast(%a_last, %g, %h) {{{attributes}, activation="Silu"}}' in text
    assert "Mul(" not in text


GROUPED = "f32[2, 4, 524288]"
APART = "f32[2, 4, 2, 512, 512]"


@pytest.mark.parametrize("grouped", [GROUPED, APART])
@pytest.mark.parametrize("is_apart", [False, True])
def test_groups_as_exporters_write_them(rewritten: Any, is_apart: bool, grouped: str) -> None:
    """Behind the normalisation channels are one dim again, or groups and their channels; before it places may be one."""
    image, column = (APART, "f32[4, 2, 1, 1]") if is_apart else (IMAGE, "f32[8, 1, 1]")
    joined = f"%t = Reshape(%m, %whole) : {IMAGE}" if is_apart else ""
    text = rewritten(
        "channels-last",
        graph(
            f'%g = constant : {column} data("w.bin", 0, 32)',
            f'%h = constant : {column} data("w.bin", 32, 32)',
            "%one = constant : f32[4] [1.0, 1.0, 1.0, 1.0]",
            "%zero = constant : f32[4] [0.0, 0.0, 0.0, 0.0]",
            f"%groups = constant : i64[{grouped.count(',') + 1}] {grouped[3:]}",
            "%whole = constant : i64[4] [2, 8, 512, 512]",
            "%apart = constant : i64[5] [2, 4, 2, 512, 512]",
            conv("%a"),
            f"%b = Reshape(%a, %groups) : {grouped}",
            f"%c = InstanceNormalization(%b, %one, %zero) : {grouped}",
            f"%d = Reshape(%c, {'%apart' if is_apart else '%whole'}) : {image}",
            f"%e = Mul(%d, %g) : {image}",
            f"%f = Add(%e, %h) : {image}",
            f"%m = Relu(%f) : {image}",
            joined,
            conv("%y", "%t" if is_apart else "%m"),
        ),
    )
    assert (
        'irpar.GroupNormChannelsLast(%a_last, %g_row, %h_row) {num_groups=4, epsilon=1e-05, activation="Relu"}' in text
    )
    assert text.count("Transpose(") == 3


SPREAD = "f32[2, 4, 1024, 1536]"


def test_windows_side_by_side_are_spread_by_a_product(rewritten: Any) -> None:
    text = rewritten(
        "channels-last",
        graph(
            '%v = constant : f32[8, 4, 2, 3] data("w.bin", 0, 768)',
            '%b = constant : f32[4] data("w.bin", 0, 16)',
            conv("%a"),
            f"%s = ConvTranspose(%a, %v, %b) {{strides=[2, 3]}} : {SPREAD}",
            "%y = MaxPool(%s) {kernel_shape=[2, 3], strides=[2, 3]} : f32[2, 4, 512, 512]",
        ),
    )
    assert "%s_last_columns = MatMul(%a_last, %v_last_columns) : f32[2, 512, 512, 24]" in text
    assert "perm=[0, 1, 3, 2, 4, 5]} : f32[2, 512, 2, 512, 3, 4]" in text
    assert "%s_last_shifted = Add(%s_last_woven, %b)" in text


@pytest.mark.parametrize(
    "attributes", ["", "strides=[1, 1]", "strides=[2, 3], pads=[1, 0, 0, 0]", "strides=[2, 3], output_padding=[1, 0]"]
)
def test_windows_over_each_other_stay(rewritten: Any, attributes: str) -> None:
    line = f"%y = ConvTranspose(%a, %v) {{{attributes}}} : f32[2, 4, n, m]"
    text = rewritten("channels-last", graph('%v = constant : f32[8, 4, 2, 3] data("w.bin", 0, 768)', conv("%a"), line))
    assert "ConvTranspose(" in text


def test_lines_are_turned_by_the_export_both_ways(rewritten: Any) -> None:
    """Of three dims the same order puts channels last, and back."""
    text = rewritten(
        "channels-last",
        graph(
            '%v = constant : f16[64, 64, 3] data("w.bin", 0, 24576)',
            "%l = Transpose(%x) {perm=[0, 2, 1]} : f16[2, 64, 65536]",
            "%a = Conv(%l, %v) {pads=[1, 1]} : f16[2, 64, 65536]",
            "%g = Gelu(%a) : f16[2, 64, 65536]",
            "%y = Transpose(%g) {perm=[0, 2, 1]} : f16[2, 65536, 64]",
            takes="%x: f16[2, 65536, 64]",
        ),
    )
    assert text.count("Transpose(") == 1
    assert "%y = Identity(%g_last)" in text


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_orders_of_dims(rank: int) -> None:
    dims = list(range(rank))
    assert [dims[place] for place in to_last(rank)] == list(last(dims))
    assert [to_last(rank)[place] for place in to_first(rank)] == dims
    assert [last(dims)[axis_last(axis, rank)] for axis in dims] == dims
    assert axis_last(-rank + 1, rank) == rank - 1
    assert lies_alike((2, 1, *range(2, rank)))
    assert lies_alike((2, 3, *(1 for _ in range(2, rank))))
    assert not lies_alike((2, 3, *range(2, rank)))
