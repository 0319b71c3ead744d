"""State of a program: what it may be, in text and back."""

import textwrap

import numpy as np
import pytest

import irpar
from irpar.arguments import ArgumentError
from irpar.errors import IrparError
from irpar.inputs.fixed import fix_inputs
from irpar.ir import (
    ArrayTensor,
    Module,
    State,
    StateError,
    VerifyError,
    clone_module,
    parse_module,
    same_module,
    verify,
)
from irpar.ir.state_rules import add_states
from irpar.ir.text.lexer import TextError
from irpar.sharding import Sharding

STEP = textwrap.dedent(
    """\
    mesh @m = ["dp"=2]
    graph @step(%x: f32[8@dp, 4], state statistic %mean: f32[4] = [1.0, 2.0, 3.0, 4.0], state moment of "w" %m: f32[4], state counter %n: i64[]) -> (%y, %mean_1 as "next" replaces %mean, %n_1 replaces %n) opset 21 {
      %axes = constant : i64[1] [0]
      %one = constant : i64[] 1
      %s = ReduceMean(%x, %axes) {keepdims=0} : f32[4]
      %mean_1 = Add(%mean, %s) : f32[4]
      %a = Add(%mean_1, %m) : f32[4]
      %y = Sub(%x, %a) : f32[8, 4]
      %n_1 = Add(%n, %one) : i64[]
    }
    """
)


def test_it_reads_back() -> None:
    module = parse_module(STEP)
    verify(module)
    assert str(module) == STEP
    assert same_module(module, parse_module(str(module))) is None
    copy = clone_module(module)
    assert same_module(module, copy) is None
    kinds = {value.name: (state.kind, state.output, state.parameter) for value, state in copy.graph.states.items()}
    assert kinds == {"mean": ("statistic", 1, None), "m": ("moment", None, "w"), "n": ("counter", 2, None)}


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("state counter", "state clock", "no such kind of state"),
        ("replaces %mean,", "replaces %x,", "%x is no state of this graph"),
        ("%n_1 replaces %n", "%n_1 replaces %mean", "%mean is replaced already"),
        ("= [1.0, 2.0, 3.0, 4.0]", "= [1.0]", "1 elements for f32"),
    ],
)
def test_a_text_that_cannot_be(before: str, after: str, said: str) -> None:
    assert before in STEP
    with pytest.raises(TextError, match=said):
        parse_module(STEP.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("%n_1 replaces %n", "%y replaces %n", "has the type i64\\[\\], and %y, which replaces it, f32\\[8, 4\\]"),
        ("%m: f32[4]", "%m: seq<f32[4]>", "only a tensor can be state"),
        ("%m: f32[4]", "%m: str[4]", "holds texts, and only numbers can be state"),
    ],
)
def test_the_verifier_refuses(before: str, after: str, said: str) -> None:
    assert before in STEP
    text = STEP.replace(before, after)
    text = text.replace("%y, %mean_1", "%n_1, %mean_1") if "%y replaces" in text else text
    with pytest.raises(VerifyError, match=said):
        verify(parse_module(text))


def plain() -> Module:
    return parse_module(
        """
        graph @g(%x: f32[2], %past: f32[2]) -> (%y as "out", %z as "present") opset 21 {
          %w = constant : f32[2] [1.0, 2.0] from "weight"
          %y = Mul(%x, %w) : f32[2]
          %z = Add(%past, %y) : f32[2]
        }
        """
    )


def test_an_input_and_a_weight_become_state() -> None:
    module = plain()
    module.add_state("past", "present")
    module.add_state("weight", kind="parameter")
    verify(module)
    past, weight = module.graph.states.items()
    assert past[1] == State("cache", 1)
    assert weight[1].output is None
    assert weight[1].data is not None
    np.testing.assert_array_equal(weight[1].data.numpy(), [1, 2])
    assert [value.name for value in module.graph.inputs] == ["x", "past", "w"]
    assert not module.graph.constants
    assert '-> (%y as "out", %z as "present" replaces %past)' in str(module)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"name": "pst", "output": "present"}, 'no input and no constant is called "pst"'),
        ({"name": "past", "output": "presnt"}, 'no result is called "presnt"'),
        ({"name": "past", "kind": "memory"}, 'there is no kind of state "memory"'),
        ({"name": "past", "data": ArrayTensor(np.zeros(3, np.float32))}, "is f32\\[2\\], and begins as f32\\[3\\]"),
        ({"name": "past", "data": np.zeros(2, np.int32)}, "is f32\\[2\\], and begins as i32\\[2\\]"),
        ({"name": "past", "data": object()}, '"past" cannot begin as an object'),
        (
            {"name": "past", "parameter": "wight"},
            '"past" cannot belong to "wight": no input and no weight is called so',
        ),
    ],
)
def test_what_cannot_be_state(words: dict[str, object], said: str) -> None:
    module = plain()
    before = str(module)
    with pytest.raises(StateError, match=said):
        module.add_state(**words)  # type: ignore[arg-type]
    assert str(module) == before


@pytest.mark.parametrize("words", [{"name": 3}, {"name": "past", "output": 5}, {"name": "past", "parameter": 5}])
def test_arguments_of_other_types(words: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="is the number"):
        plain().add_state(**words)  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [np.float32([1, 2]), [1, 2]])
def test_what_state_begins_with_may_be_an_array_or_a_list(data: object) -> None:
    module = plain()
    module.add_state("past", "present", data=data, parameter="weight")  # type: ignore[arg-type]
    (state,) = module.graph.states.values()
    assert state.data is not None
    np.testing.assert_array_equal(state.data.numpy(), np.float32([1, 2]))


def test_two_states_that_one_result_would_replace() -> None:
    module = plain()
    module.add_state("past", "present")
    with pytest.raises(StateError, match='the result "present" replaces the state "past" already'):
        module.add_state("x", "present")


def test_twice() -> None:
    module = plain()
    module.add_state("past", "present")
    with pytest.raises(StateError, match="is state already: cache"):
        module.add_state("past")


def test_a_weight_that_cannot_be_state_stays_where_it_was() -> None:
    module = parse_module(
        """
        graph @g(%x: f32[2]) -> (%y) opset 21 {
          %w = constant : f32[2] [1.0, 2.0]
          %v = constant : f32[2] [3.0, 4.0]
          %a = Add(%x, %w) : f32[2]
          %y = Add(%a, %v) : f32[2]
        }
        """
    )
    before = str(module)
    with pytest.raises(StateError, match="begins as"):
        module.add_state("w", data=ArrayTensor(np.zeros(3, np.float32)))
    assert str(module) == before


def test_what_is_fixed_is_no_state_and_the_other_way_round() -> None:
    module = plain()
    fix_inputs(module, {"past": np.zeros(2, np.float32)})
    with pytest.raises(StateError, match='"past" is an input that is fixed'):
        module.add_state("past", "present")
    module = plain()
    module.add_state("past", "present")
    with pytest.raises(IrparError, match="input past is state"):
        fix_inputs(module, {"past": np.zeros(2, np.float32)})


def test_many_states_are_named_at_once() -> None:
    text = """
        graph @g(%x: f32[2], %y: f32[2]) -> (%z) opset 21 {
          %w = constant : f32[2] [1.0, 2.0] from "fc.weight"
          %a = Add(%x, %w) : f32[2]
          %z = Add(%a, %y) : f32[2]
        }
    """
    one, many = (parse_module(textwrap.dedent(text)) for _ in range(2))
    one.add_state("y", kind="cache")
    one.add_state("fc.weight", kind="parameter")
    made = add_states(many, {"y": "cache", "fc.weight": "parameter"})
    assert [value.source_name for value in made] == ["y", "fc.weight"]
    assert str(many) == str(one)
    with pytest.raises(StateError, match='no input and no constant is called "v"'):
        add_states(many, {"v": "cache"})


def test_what_replaces_a_state_has_its_blocks_however_they_are_spelled() -> None:
    module = parse_module(STEP.replace('"dp"=2', '"dp"=2, "one"=1'))
    work = irpar.partition(module).module
    assert work is not None
    graph, mesh = work.graphs[0], work.mesh
    result = graph.output(1)
    result.sharding = Sharding.of_spec(mesh, [["one"]])
    verify(work)
    result.sharding = Sharding.of_spec(mesh, [["dp"]])
    with pytest.raises(VerifyError, match=r"is sharded .*, and %mean_1, which replaces it, "):
        verify(work)
