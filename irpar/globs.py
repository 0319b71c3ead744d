"""Names and globs."""

import fnmatch
import re
from collections.abc import Collection


def matching_names(pattern: str, known: Collection[str]) -> list[str]:
    """The name that the pattern is; where there is none, those that it matches as a glob, in their order."""
    if pattern in known or not re.search(r"[*?\[]", pattern):
        return [pattern] if pattern in known else []
    matches = re.compile(fnmatch.translate(pattern)).match
    return [name for name in known if matches(name)]
