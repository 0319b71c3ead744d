"""A table of what computes which version of which operator, filled as it is asked: a family, a file each, at a time."""

from collections.abc import Mapping
from importlib import import_module
from typing import Generic, Protocol, TypeVar


class Versioned(Protocol):
    """What computes an operator from a version of its operator set on."""

    @property
    def domain(self) -> str:
        """The operator's domain, `""` for ONNX's own."""

    @property
    def op_type(self) -> str:
        """The operator's name."""

    @property
    def since(self) -> int:
        """The first version."""


Entry = TypeVar("Entry", bound=Versioned)

Operators = Mapping[tuple[str, str], tuple[str, int]]
"""(domain, operator) to its family, and to the first version that there is something of."""


def operators_of(families: Mapping[str, str]) -> Operators:
    """Operators by what is said of families: words `domain::operator:version`, without domain for ONNX's own."""
    found = {}
    for family, text in families.items():
        for word in text.split():
            name, _, since = word.rpartition(":")
            domain, _, op_type = name.rpartition("::")
            found[domain, op_type] = family, int(since)
    return found


class Table(Generic[Entry]):
    """Entries by operator, those of one in order of their first versions.

    Args:
        package: where the families are.
        operators: which of them has which.

    Attributes:
        entries: those of the families that are loaded, and what others have entered.
    """

    def __init__(self, package: str, operators: Operators) -> None:
        self._package = package
        self._operators = operators
        self._loaded: set[str] = set()
        self.entries: dict[tuple[str, str], list[Entry]] = {}

    def enter(self, entry: Entry, module: str) -> None:
        """Add an entry that a module has.

        Raises:
            ValueError: there is one of that version.
        """
        key = (entry.domain, entry.op_type)
        if not module.startswith(f"{self._package}."):
            self._load(*key)  # So that two for one version are reported here.
        versions = self.entries.setdefault(key, [])
        if any(other.since == entry.since for other in versions):
            raise ValueError(f"two kernels for {entry.op_type} since version {entry.since}")
        versions.append(entry)
        versions.sort(key=lambda other: other.since)

    def has(self, domain: str, op_type: str, version: int) -> bool:
        """True where `find` finds an entry; loads none."""
        key = ("" if domain == "ai.onnx" else domain, op_type)
        if key in self._operators and self._operators[key][1] <= version:
            return True
        return any(entry.since <= version for entry in self.entries.get(key, ()))

    def find(self, domain: str, op_type: str, version: int) -> Entry | None:
        """The entry with the greatest first version that is not above `version`, or None."""
        key = ("" if domain == "ai.onnx" else domain, op_type)
        self._load(*key)
        # There are few versions, and analyses ask of every node.
        for entry in reversed(self.entries.get(key, ())):
            if entry.since <= version:
                return entry
        return None

    def all(self) -> list[tuple[str, str]]:
        """All (domain, operator) pairs that have an entry, sorted; loads every family."""
        for operator in self._operators:
            self._load(*operator)
        return sorted(self.entries)

    def _load(self, domain: str, op_type: str) -> None:
        """Load the family that has an operator, if one has."""
        family, _ = self._operators.get((domain, op_type), ("", 0))
        if family and family not in self._loaded:
            import_module(f"{self._package}.{family}")
            self._loaded.add(family)
