"""The former name of `irpar.annotations`: `from irpar.spellings import gspmd` goes on working."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if not name.startswith("_"):
        try:
            return import_module(f"irpar.annotations.{name}")
        except ModuleNotFoundError:
            pass
    raise AttributeError(f"module 'irpar.spellings' has no attribute {name!r}")
