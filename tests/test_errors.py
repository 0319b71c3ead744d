"""Errors: what, where, notes and what to do; the names that a mistyped one resembles."""

import pickle

from irpar.sharding import IrparError, ShardingError, nearest_names


def test_an_error_says_what_where_and_what_to_do() -> None:
    error = ShardingError("no axis mp", where="shardings.yaml, line 7", notes=("it matches 12 tensors",), do="write tp")
    assert str(error) == "no axis mp\n  shardings.yaml, line 7\n  it matches 12 tensors\n  do: write tp"
    assert str(IrparError("no axis mp")) == "no axis mp"


def test_errors_pass_between_processes() -> None:
    error = pickle.loads(pickle.dumps(ShardingError("what", where="where", notes=("a", "b"), do="do")))
    assert type(error) is ShardingError
    assert (error.what, error.where, error.notes, error.do) == ("what", "where", ("a", "b"), "do")


def test_nearest_names() -> None:
    known = ["h.0.attn.weight", "h.1.attn.weight", "", "x"]
    assert nearest_names("h.0.atn.weight", known) == ("nearest names: h.0.attn.weight, h.1.attn.weight",)
    assert nearest_names("labels", known) == ()
