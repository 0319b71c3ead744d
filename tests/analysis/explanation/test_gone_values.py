"""Chains of reasons where a value is gone and another stands for it."""

from irpar.analysis.explanation.gone_values import follow_instead
from irpar.ir import Decision, Module

BOTH = ("dp", "tp")


def logged(**decisions: list[Decision]) -> Module:
    module = Module({"": 21})
    module.decisions = decisions
    return module


def ends(module: Module, name: str, axis: str) -> str:
    return module.chain(name, axis)[-1][1].why


def test_what_follows_a_value_follows_the_one_that_stands_for_it() -> None:
    module = logged(x=[Decision("as u", "u", BOTH)], n=[Decision("as a", "a", BOTH)], a=[Decision("annotated")])
    follow_instead(module, {"u": "n"})
    assert [name for name, _ in module.chain("x", "tp")] == ["x", "n", "a"]


def test_in_a_circle_the_reason_of_the_value_that_is_gone_is_told() -> None:
    module = logged(x=[Decision("as u", "u", BOTH)], n=[Decision("as x", "x", BOTH)], u=[Decision("annotated u")])
    follow_instead(module, {"u": "n"})
    assert ends(module, "x", "dp") == ends(module, "n", "tp") == "annotated u"


def test_each_axis_has_its_reason() -> None:
    """u has one for dp and another for tp; n had one for both."""
    module = logged(
        x=[Decision("as u", "u", BOTH)],
        n=[Decision("as x", "x", BOTH)],
        u=[Decision("annotated u", None, ("dp",)), Decision("as a", "a", ("tp",))],
        a=[Decision("annotated a", None, ("tp",))],
    )
    follow_instead(module, {"u": "n"})
    assert ends(module, "x", "dp") == "annotated u"
    assert ends(module, "x", "tp") == "annotated a"


def test_a_circle_that_nothing_opens_ends() -> None:
    module = logged(x=[Decision("as u", "u")], n=[Decision("as x", "x")])
    follow_instead(module, {"u": "n"})
    assert [name for name, _ in module.chain("x")] == ["x", "n"]
