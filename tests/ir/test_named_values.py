"""The index of a module's values by name: made once for many annotations, and again after any change of the graphs."""

from collections.abc import Callable

import pytest

from irpar.ir import Graph, Module, Node, Value, parse_module
from irpar.ir.annotate import NamedValues, named_values
from irpar.pass_manager import PassManager
from irpar.sharding import Mesh

TEXT = """
graph @g(%x: f32[8, 64], %p: bool[]) -> (%y, %i) opset 21 {
  %w = constant : f32[64, 64] data("w", 0, 16384) from "weight"
  %a = MatMul(%x, %w) : f32[8, 64]
  %y = Relu(%a) : f32[8, 64]
  %i = If(%p) {
    then_branch = graph @then() -> (%t) {
      %t = Relu(%a) : f32[8, 64]
    },
    else_branch = graph @else() -> (%e) {
      %f = Neg(%a) : f32[8, 64]
      %e = Relu(%f) : f32[8, 64]
    }
  } : f32[8, 64]
}
"""


@pytest.fixture
def module() -> Module:
    return parse_module(TEXT)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Module]:
    """The modules that an index was made of, one entry for each time."""
    modules: list[Module] = []
    plain = NamedValues.__init__

    def counted(self: NamedValues, module: Module) -> None:
        modules.append(module)
        plain(self, module)

    monkeypatch.setattr(NamedValues, "__init__", counted)
    return modules


def test_one_index_serves_all_annotations(module: Module, made: list[Module]) -> None:
    names = list(dict.fromkeys(name for name, _ in named_values(module) if name != "p"))
    for name in names:
        module.shard(name, [None, None])
    module.set_mesh(Mesh({"tp": 2}))
    assert len(module.annotated) == len(names) > 5
    assert len(made) == 1


def _value(module: Module, name: str) -> Value:
    return module.graph.value(name)


def _node(module: Module, name: str) -> Node:
    node = _value(module, name).node
    assert node is not None
    return node


def _set_source(module: Module) -> None:
    _value(module, "a").source = "weight"


def _rename(module: Module) -> None:
    _value(module, "f").rename("other")


def _add_node(module: Module) -> None:
    module.graph.insert_after(_node(module, "a"), Node("Neg", [_value(module, "a")]))


def _add_input(module: Module) -> None:
    module.graph.add_input("z")


def _add_result(module: Module) -> None:
    _node(module, "y").add_result(Value("mask"))


def _drop_constant(module: Module) -> None:
    weight = _value(module, "w")
    weight.replace_uses(_value(module, "x"))
    module.graph.remove_constant(weight)


def _erase(module: Module) -> None:
    _node(module, "f").replace([_value(module, "a")])


def _return_another(module: Module) -> None:
    _value(module, "y").replace_uses(_value(module, "a"))


def _return_under_another_name(module: Module) -> None:
    module.graph.output_names[0] = "result"


def _return_another_from_a_body(module: Module) -> None:
    _value(module, "t").replace_uses(_value(module, "a"))


def _take_another_body(module: Module) -> None:
    body = Graph("then", names=module.graph.names)
    body.set_outputs([_value(module, "x")], ["u"])
    _node(module, "i").set_attribute("then_branch", body)


def _take_another_graph(module: Module) -> None:
    module.graphs = [parse_module(TEXT.replace("%a", "%b")).graph]


CHANGES = [
    _set_source,
    _rename,
    _add_node,
    _add_input,
    _add_result,
    _drop_constant,
    _erase,
    _return_another,
    _return_under_another_name,
    _return_another_from_a_body,
    _take_another_body,
    _take_another_graph,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_the_index_is_as_one_made_after_a_change(module: Module, change: Callable[[Module], None]) -> None:
    before = module.named_values
    change(module)
    after = module.named_values
    assert after is not before
    assert _content(after) == _content(NamedValues(module)) != _content(before)
    assert module.named_values is after


def _content(index: NamedValues) -> list[tuple[str, list[int]]]:
    return sorted((name, [id(value) for value in values]) for name, values in index._values.items())


def test_passes_leave_no_index_that_holds_what_they_erased(module: Module) -> None:
    module.shard("x", [None, None])
    PassManager.parse("fold-constants,dce").run(module)
    assert module._named_values is None
