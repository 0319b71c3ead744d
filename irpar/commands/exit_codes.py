"""Exit codes of commands that are no error."""

DIFFERS = 1
"""Exit code where the partition differs from the original."""
