"""Sources in CUDA C++, and what is defined for one use of them."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A source with its definitions; equal programs are compiled once for a device.

    Functions of it that are launched are `extern "C"`.

    Attributes:
        source: CUDA C++.
        defines: names and what stands for them.
        features: `"a"` for a program that needs what one architecture alone has (`sm_90a`).
    """

    source: str
    defines: tuple[tuple[str, str], ...] = ()
    features: str = ""

    @classmethod
    def file(cls, name: str, features: str = "", **defines: object) -> "Program":
        """The program of a file of this folder, what it includes of this folder written out."""
        return cls(_source(name), tuple((key, str(value)) for key, value in defines.items()), features)

    def options(self, arch: int) -> tuple[str, ...]:
        """What the compiler is told, for an architecture such as 90."""
        special = (f"-arch=sm_{arch}{self.features}",) if self.features else ()
        return ("-std=c++17", *special, *(f"-D{name}={value}" for name, value in self.defines))


@cache
def _source(name: str) -> str:
    """A file, with what it includes in place of the first line that includes it: a cache of sources sees all of it."""
    included: set[str] = set()

    def read(part: str) -> str:
        return _INCLUDE.sub(once, (FOLDER / part).read_text(encoding="utf-8"))

    def once(line: re.Match[str]) -> str:
        if line[1] in included:
            return ""
        included.add(line[1])
        return read(line[1])

    return read(name)
