import pytest

from irpar.onnx_io.scopes import scope_of


@pytest.mark.parametrize(
    ("name", "metadata", "scope"),
    [
        ("/h.0/attn/MatMul", None, "h.0/attn"),
        ("h.0/attn/MatMul", None, "h.0/attn"),
        ("/MatMul", None, None),
        ("MatMul_3", None, None),
        ("", None, None),
        ("n", {"pkg.torch.onnx.name_scopes": "['', 'h.0', 'h.0.attn', 'linear']"}, "h.0/attn"),
        ("n", {"pkg.torch.onnx.name_scopes": "['', 'linear']"}, None),
        ("n", {"pkg.torch.onnx.name_scopes": "['']"}, None),
        ("n", {"pkg.torch.onnx.name_scopes": "nonsense"}, None),
        ("n", {"pkg.torch.onnx.name_scopes": "['', \"it's\", \"it's.fc\", 'linear']"}, "it's/fc"),
        ("n", {"namespace": ": Gpt/h.0: Block/h.0.attn: Attention/linear: aten.linear.default"}, "h.0/attn"),
        ("n", {"namespace": "linear: aten.linear"}, None),
        ("/a/b", {"other": "1"}, "a"),
    ],
)
def test_scope_of(name: str, metadata: dict[str, str] | None, scope: str | None) -> None:
    assert scope_of(name, metadata) == scope
