"""Tokens of the text form, names and strings as it writes them, and errors that show the place."""

import re
from typing import NoReturn

from irpar.sharding import IrparError

# Colons, slashes and dashes belong to a name only where nothing else can be meant: `%x:0` and `%onnx::Add_1` are
# names, `%x: f32[2]` is a name and a type, `//` starts a comment, `->` is an arrow.
_VALUE = r"(?:[A-Za-z0-9_.$]++|/(?!/)|-(?=[A-Za-z0-9_$])|::(?=[A-Za-z0-9_])|:(?=[0-9]))++"
_NAME = r"[A-Za-z_][A-Za-z0-9_.]*+"
_STRING = r'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+"'
_SKIP = r"(?:[ \t\r\n]++|//[^\n]*+)*+"

_TOKEN = re.compile(
    rf"{_SKIP}(?:"
    rf"(?P<value>%(?:{_VALUE}|{_STRING}))"
    rf"|(?P<bytes>b{_STRING})"
    rf"|(?P<name>{_NAME})"
    r"|(?P<punctuation>->|[(){}\[\]<>,=:|?.*-])"
    rf"|(?P<string>{_STRING})"
    r"|(?P<number>0x[0-9a-fA-F]++|[0-9]++(?:\.[0-9]*+)?(?:[eE][+-]?[0-9]++)?)"
    rf"|(?P<symbol>@(?:{_NAME}|{_STRING}))"
    r"|(?P<end>\Z))"
)
_SKIPPED = re.compile(_SKIP)
_PLAIN_VALUE = re.compile(_VALUE)
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN_DOMAIN = re.compile(_NAME)
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_SHORT_ESCAPES = {'"': '"', "\\": "\\", "n": "\n", "t": "\t", "r": "\r"}
_ESCAPED = {character: f"\\{letter}" for letter, character in _SHORT_ESCAPES.items()}
_WINDOW = 100
"""Characters of a source line that a message shows."""

RESERVED = frozenset(
    (
        "_",
        "call",
        "constant",
        "whole",
        "data",
        "slice",
        "tensor",
        "graph",
        "from",
        "for",
        "as",
        "scope",
        "name",
        "doc",
        "meta",
        "in",
        "on",
        "of",
        "replicated",
        "partial",
        "sharded",
    )
)
"""Words that cannot stand for an operator unless quoted."""


MOST_VERSION = 2**31 - 1
"""Of operators, or of the IR: what ONNX's schemas can tell apart."""


class TextError(IrparError):
    """The text form cannot be read; says where, and what was expected."""


def text_error(text: str, filename: str, position: int, what: str, do: str = "") -> TextError:
    """An error at a position of a text: file, line, column, the line itself and a caret."""
    position = min(position, len(text))
    start = text.rfind("\n", 0, position) + 1
    end = text.find("\n", position)
    column = position - start
    line = text[start : end if end >= 0 else len(text)].rstrip("\r")
    first = max(0, column - _WINDOW // 2) if len(line) > _WINDOW else 0
    shown = "".join(c if c.isprintable() else " " for c in line[first : first + _WINDOW])
    number = text.count("\n", 0, position) + 1
    caret = " " * (column - first) + "^"
    do = do or "mend the text there; docs/text.md says how each line is written"
    return TextError(what, where=f"{filename}:{number}:{column + 1}", notes=(f"  {shown}", f"  {caret}"), do=do)


class Lexer:
    """One token of lookahead over a text.

    Attributes:
        kind: "value", "name", "string", "bytes", "number", "symbol", "punctuation" or "end".
        token: the token in hand, as written.
        start: where it starts.
        position: where it ends.
        last: where the token before it ended.
    """

    __slots__ = ("filename", "kind", "last", "position", "start", "text", "token")

    def __init__(self, text: str, filename: str) -> None:
        self.text = text
        self.filename = filename
        self.position = 0
        self.last = 0
        self.advance()

    def advance(self) -> None:
        """Take the next token in hand."""
        match = _TOKEN.match(self.text, self.position)
        if match is None:
            self._refuse()
        kind = match.lastgroup
        assert kind is not None
        self.kind = kind
        self.token = match[kind]
        self.last = self.position
        self.position = match.end()
        self.start = self.position - len(self.token)

    def seek(self, position: int) -> None:
        """Take the first token at or after `position` in hand."""
        self.position = position
        self.advance()

    def skip(self, position: int) -> int:
        """The first place at or after `position` that is neither space nor comment."""
        match = _SKIPPED.match(self.text, position)
        return match.end() if match else position

    def _refuse(self) -> NoReturn:
        position = self.skip(self.position)
        character = self.text[position]
        if character == '"' or self.text[position : position + 2] in ('%"', '@"', 'b"'):
            raise self.error("this string does not end on its line", position)
        raise self.error(f"unexpected character {character!r}", position)

    def error(self, what: str, position: int | None = None, do: str = "") -> TextError:
        """An error at a position, by default at the token in hand."""
        return text_error(self.text, self.filename, self.start if position is None else position, what, do)

    def expected(self, what: str) -> TextError:
        """An error that says what should stand here."""
        found = "the end of the text" if self.kind == "end" else f"`{self.token[:40]}`"
        return self.error(f"expected {what}, found {found}")

    def accept(self, token: str) -> bool:
        """Step over a token if it is in hand."""
        if self.token == token and self.kind != "end":
            self.advance()
            return True
        return False

    def expect(self, token: str) -> None:
        """Step over a token that must be in hand."""
        if self.token != token:
            raise self.expected(f"`{token}`")
        self.advance()

    def take(self, kind: str, what: str) -> str:
        """Step over a token of a kind; `what` is what a message calls it."""
        if self.kind != kind:
            raise self.expected(what)
        token = self.token
        self.advance()
        return token

    def string(self, what: str = "a string") -> str:
        """Step over a string and return what it says."""
        if self.kind != "string":
            raise self.expected(what)
        return self._decoded(self.token[1:-1])

    def bytes_(self) -> bytes:
        """Step over `b"..."` and return the bytes."""
        text = self._decoded(self.token[2:-1])
        try:
            return text.encode("latin-1")
        except UnicodeEncodeError:
            raise self.error("bytes hold characters above \\xff", self.last, do="write them as \\x..") from None

    def integer(self, what: str = "an integer", least: int = -(2**63), most: int = 2**64 - 1) -> int:
        """Step over an integer, with or without a minus, that lies within bounds."""
        negative = self.accept("-")
        start = self.start
        token = self.take("number", what)
        if not token.isdigit() or len(token) > 1000:
            raise self.error(f"expected {what}, found `{token[:40]}`", start)
        number = -int(token) if negative else int(token)
        if not least <= number <= most:
            raise self.error(
                f"expected {what}, found {str(number)[:40]}, which is too {'large' if number > 0 else 'small'}", start
            )
        return number

    def value_name(self, what: str = "a value such as %x") -> str:
        """Step over a value and return its name."""
        if self.kind != "value":
            raise self.expected(what)
        token = self.token
        if token[1] != '"':
            self.advance()
            return token[1:]
        if token == '%""':
            raise self.error("a value needs a name")
        return self._decoded(token[2:-1])

    def symbol(self, what: str) -> str:
        """Step over `@name` or `@"name"` and return the name."""
        if self.kind != "symbol":
            raise self.expected(what)
        token = self.token
        if token[1] == '"':
            return self._decoded(token[2:-1])
        self.advance()
        return token[1:]

    def word(self, what: str) -> str:
        """Step over a name without dots, or a string."""
        if self.kind == "name" and "." not in self.token:
            return self.take("name", what)
        return self.string(what)

    def _decoded(self, body: str) -> str:
        """Step over the string in hand, whose text between the quotes is `body`."""
        if "\\" in body:
            body = _ESCAPE.sub(self._unescaped, body)
        self.advance()
        return body

    def _unescaped(self, match: re.Match[str]) -> str:
        code = match[1]
        if len(code) > 1 and (number := int(code[1:], 16)) < 0x110000:
            if 0xD800 <= number < 0xE000:
                raise self.error(
                    f"\\{code} is half a surrogate pair, which no text has",
                    do=r"write the character itself, or \UHHHHHHHH",
                )
            return chr(number)
        if code not in _SHORT_ESCAPES:
            known = r"\" \\ \n \t \r \xHH \uHHHH \UHHHHHHHH"
            raise self.error(f"unknown escape \\{code} in a string", do=f"use one of {known}")
        return _SHORT_ESCAPES[code]


def quote(text: str) -> str:
    """A string in quotes, on one line, all that does not print escaped."""
    if text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPED:
        return _ESCAPED[character]
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def quote_bytes(data: bytes) -> str:
    """Bytes in quotes: printable ASCII as it is, the rest as `\\xHH`."""
    inner = "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in data)
    return f'b"{inner}"'


def value_reference(name: str) -> str:
    """`%name`, quoted where needed."""
    return f"%{name}" if _PLAIN_VALUE.fullmatch(name) else f"%{quote(name)}"


def symbol_reference(name: str) -> str:
    """`@name`, quoted where needed."""
    return f"@{name}" if _PLAIN_DOMAIN.fullmatch(name) else f"@{quote(name)}"


def word(name: str) -> str:
    """A name as it is where it is an identifier, else quoted."""
    return name if _PLAIN_NAME.fullmatch(name) else quote(name)


def qualified(domain: str, name: str) -> str:
    """`domain.name`, or `name` in the default domain, quoted where needed."""
    if not domain:
        return name if _PLAIN_NAME.fullmatch(name) and name not in RESERVED else quote(name)
    if _PLAIN_DOMAIN.fullmatch(domain) and _PLAIN_NAME.fullmatch(name):
        return f"{domain}.{name}"
    return f"{quote(domain)}.{quote(name)}"
