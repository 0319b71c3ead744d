"""YAML and JSON files as trees of nodes that know their lines."""

import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, ReusedAnchorWarning, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from irpar.sharding import IrparError

from .regular_file import read_text

_MOST_DEPTH = 100
_BRACKETS = re.compile(r"""[\[\]{}]|"(?:[^"\\]|\\.)*"|'[^']*'""", re.DOTALL)
"""Brackets, and texts in quotes."""
TAG = "tag:yaml.org,2002:"
_TAGS = {
    MappingNode: {f"{TAG}map"},
    SequenceNode: {f"{TAG}seq"},
    ScalarNode: {f"{TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")},
}
"""What plain tables, lists and single values have as their tag."""


@dataclass(frozen=True)
class Words:
    """How messages speak of a file.

    Attributes:
        error: what is raised.
        what: the file, such as "the shardings".
        verb: "is" or "are".
        form: what to do where it has another form.
    """

    error: type[IrparError]
    what: str
    verb: str
    form: str

    @property
    def has(self) -> str:
        """ "has" or "have"."""
        return "has" if self.verb == "is" else "have"


def compose(path: Path, words: Words) -> Any:
    """The tree of nodes of a file; None where it is empty.

    Raises:
        IrparError: of the type of `words`: it cannot be read, or is neither YAML nor JSON; names the line.
    """
    try:
        text = read_text(path, "utf-8-sig")
    except OSError as error:
        raise words.error(
            f"cannot read {words.what}: {error.strerror}", where=str(path), do="give a YAML or JSON file"
        ) from None
    except UnicodeDecodeError as error:
        raise words.error(
            f"{words.what} {words.verb} not UTF-8 text: byte {error.start}",
            where=str(path),
            do="give a YAML or JSON file",
        ) from None
    if path.suffix == ".json":
        _check_json(text, path, words)
        # JSON may be indented with tabs, YAML may not; inside its strings JSON has none.
        text = text.replace("\t", " ")
    try:
        if _depth(text) > _MOST_DEPTH:
            raise RecursionError
        with warnings.catch_warnings():
            # An anchor may be given again (YAML 1.2.2, section 3.2.2.2); ruamel warns of it.
            warnings.simplefilter("ignore", ReusedAnchorWarning)
            root = YAML(typ="safe", pure=True).compose(text)
        _refuse_tags(root, path, words)
        return root
    except MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        problem = " ".join(part for part in (error.context, error.problem) if part)
        alias = "alias" in problem
        raise words.error(
            f"not YAML: {problem}",
            where=f"{path}{line}",
            do='put names that begin with "*" or "&" in quotes' if alias else "mend the file at that place",
        ) from None
    except YAMLError as error:
        problem = str(error).splitlines()[0]
        raise words.error(f"not YAML: {problem}", where=str(path), do="give a YAML or JSON file") from None
    except RecursionError:
        raise words.error(f"{words.what} {words.verb} nested too deep", where=str(path), do=words.form) from None


def _depth(text: str) -> int:
    """How deep brackets nest outside of quotes; YAML's reader takes time by its square."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        mark = match[0]
        depth += (mark in "[{") - (mark in "]}")
        deepest = max(deepest, depth)
    return deepest


def _refuse_tags(root: Any, path: Path, words: Words) -> None:
    """Refuse what is not plain data: `!foo`, `!!set`, `!!python/object`."""
    waiting, met = [root] if root is not None else [], set()
    while waiting:
        node = waiting.pop()
        if id(node) in met:
            continue
        met.add(id(node))
        if str(node.tag) not in _TAGS[type(node)]:
            raise words.error(
                f"{words.what} {words.has} the tag {str(node.tag).replace(TAG, '!!')}, which means nothing here",
                where=f"{path}, line {node.start_mark.line + 1}",
                do="write plain tables, lists, texts and numbers",
            )
        if isinstance(node, MappingNode):
            waiting.extend(child for entry in reversed(node.value) for child in reversed(entry))
        elif isinstance(node, SequenceNode):
            waiting.extend(reversed(node.value))


def _check_json(text: str, path: Path, words: Words) -> None:
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}"
        raise words.error(f"not JSON: {error.msg}", where=where, do="mend the file at that place") from None
    except RecursionError:
        raise words.error(f"{words.what} {words.verb} nested too deep", where=str(path), do=words.form) from None


class Tables:
    """Reads tables of one file; every message names the line.

    Args:
        path: the file.
        words: how messages speak of it.
    """

    def __init__(self, path: Path, words: Words) -> None:
        self.path = path
        self.words = words

    def where(self, node: Any) -> str:
        """File and line of a node."""
        return f"{self.path.name}, line {node.start_mark.line + 1}"

    def error(self, what: str, node: Any, do: str, text: str = "", notes: tuple[str, ...] = ()) -> IrparError:
        """An error at a node; `text` is what is written there."""
        where = f"{text}      {self.where(node)}" if text else self.where(node)
        return self.words.error(what, where=where, notes=notes, do=do)

    def table(self, node: Any, what: str, do: str) -> Iterator[tuple[str, Any, Any]]:
        """The entries of a table as (key, node of the key, node of the value).

        Raises:
            IrparError: it is no table, or a key comes twice.
        """
        if not isinstance(node, MappingNode):
            raise self.error(f"{what} must be a table, not {text_of(node)}", node, do)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise self.error(f"{text_of(key)} is no name", key, do)
            # Exporters call values 17 or null too: whatever is written is the name.
            name = _characters(str(key.value))
            if name in lines:
                raise self.error(f'"{name}" comes twice, first in line {lines[name]}', key, "keep one of the two")
            lines[name] = key.start_mark.line + 1
            yield name, key, value


def _characters(text: str) -> str:
    """JSON escapes characters beyond the first plane as two halves; put them together."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_null(node: Any) -> bool:
    """Whether a node is a null."""
    return isinstance(node, ScalarNode) and node.tag == TAG + "null"


def text_of(node: Any, depth: int = 4) -> str:
    """A node in one line, as JSON; short."""
    if isinstance(node, ScalarNode):
        return json.dumps(node.value, ensure_ascii=False) if node.tag == TAG + "str" else str(node.value or "null")
    if depth == 0:
        return "..."
    if isinstance(node, SequenceNode):
        text = f"[{', '.join(text_of(item, depth - 1) for item in node.value[:12])}]"
    else:
        entries = (f"{text_of(key, depth - 1)}: {text_of(value, depth - 1)}" for key, value in node.value[:12])
        text = f"{{{', '.join(entries)}}}"
    return text if len(text) <= 100 else text[:97] + "..."
