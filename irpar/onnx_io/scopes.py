"""Where a node stood in the source program: `h.0/attn` from what exporters leave in metadata or in node names."""

import re
from collections.abc import Callable, Mapping

_ENTRY = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")

_known: dict[str, str] = {}
"""Scope of each list of modules met so far: the nodes of one module share it."""


def scope_of(name: str, metadata: Mapping[str, str] | None) -> str | None:
    """The scope of a node, modules from the outside in, joined by "/"; None where nothing tells.

    PyTorch's newer exporter writes `pkg.torch.onnx.name_scopes` ("['', 'h.0', 'h.0.attn', 'linear']") and `namespace`
    (": Gpt/h.0: Block/h.0.attn: Attention/linear: aten.linear"); its older one names nodes "/h.0/attn/MatMul".
    """
    if metadata:
        scopes = metadata.get("pkg.torch.onnx.name_scopes")
        if scopes is not None:
            # The last entry is the operation itself.
            return _join(scopes[: scopes.rfind(",")], _listed)
        namespace = metadata.get("namespace")
        if namespace is not None:
            return _join(namespace[: namespace.rfind("/")] if "/" in namespace else "", _namespaced)
    if "/" in name:
        return name[: name.rfind("/")].strip("/") or None
    return None


def _join(text: str, split: Callable[[str], list[str]]) -> str | None:
    scope = _known.get(text)
    if scope is None:
        if len(_known) > 100_000:
            _known.clear()
        scope = _known[text] = "/".join(_relative(split(text)))
    return scope or None


def _listed(text: str) -> list[str]:
    return [single or double for single, double in _ENTRY.findall(text)]


def _namespaced(text: str) -> list[str]:
    return [part.split(": ", 1)[0] for part in text.split("/")]


def _relative(modules: list[str]) -> list[str]:
    """Full module paths (`h.0`, `h.0.attn`) as steps (`h.0`, `attn`)."""
    steps = []
    outer = ""
    for module in modules:
        if module and module != outer:
            steps.append(module.removeprefix(outer + ".") if outer else module)
            outer = module
    return steps
