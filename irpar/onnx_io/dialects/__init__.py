"""Parts whose collectives are operators of another runtime, and parts that give any tool the types of irpar's own."""

from .reading import own
from .stubs import add_stubs
from .writing import DialectError, say_in

__all__ = ["DialectError", "add_stubs", "own", "say_in"]
