"""The secret of a run: whoever knows it is one of its ranks.

`irpar launch` makes one for each run and gives it to the ranks it starts. Under other launchers `IRPAR_TOKEN` has it,
or a file that nobody else can read, which `IRPAR_TOKEN_FILE` names. The ranks prove to each other that they know it,
and never send it (see `groups.proof`).
"""

import os
import secrets
import stat
from collections.abc import Mapping

from irpar.sharding import IrparError

TOKEN = "IRPAR_TOKEN"
TOKEN_FILE = "IRPAR_TOKEN_FILE"
_LEAST = 16
"""Characters: who hears a proof could try all shorter ones."""
_MOST_BYTES = 4096
"""Of a file with a secret: a longer one is something else."""
_DO = (
    f"give all ranks one {TOKEN}=$(openssl rand -hex 32); or write such a text to a file of mode 0600, and its path to "
    f"{TOKEN_FILE}"
)


class TokenError(IrparError):
    """There is no secret where one is needed, or it is none."""


def made_token() -> str:
    """A new secret."""
    return secrets.token_hex(32)


def token_of_environment(environ: Mapping[str, str] | None = None) -> str:
    """The secret that the ranks of this run share; empty where there is none.

    Args:
        environ: None: that of the process.

    Raises:
        TokenError: it is too short, or others can read its file.
    """
    variables = os.environ if environ is None else environ
    token, where = variables.get(TOKEN, "").strip(), TOKEN
    if not token and (path := variables.get(TOKEN_FILE, "").strip()):
        token, where = _read(path), path
    elif not token:
        return ""
    if len(token) < _LEAST:
        raise TokenError(f"the secret of the run has {len(token)} characters, and needs {_LEAST}", where=where, do=_DO)
    return token


def no_token(place: str) -> TokenError:
    """The error of ranks that would meet where other hosts reach them, and share no secret.

    Args:
        place: where they meet.
    """
    return TokenError(
        f"the ranks meet at {place}, which other hosts reach, and share no secret",
        notes=("without one, whoever reaches that address could join the run",),
        do=_DO,
    )


def _read(path: str) -> str:
    """The text of a file that this user alone, and root, can read and write."""
    try:
        # Not to wait where it is a pipe.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            _check(status, path)
            told = b""
            while len(told) <= _MOST_BYTES and (part := os.read(handle, _MOST_BYTES + 1 - len(told))):
                told += part
        finally:
            os.close(handle)
    except OSError as error:
        raise TokenError(
            f"the secret of the run cannot be read: {error.strerror}", where=f"{path}, as {TOKEN_FILE} says", do=_DO
        ) from error
    if len(told) > _MOST_BYTES:
        raise TokenError(
            f"what holds the secret of the run has more than {_MOST_BYTES} bytes",
            where=f"{path}, as {TOKEN_FILE} says",
            do=_DO,
        )
    return told.decode("utf-8", "surrogateescape").strip()


def _check(status: os.stat_result, path: str) -> None:
    """Whether it can hold a secret."""
    problem, do = "", _DO
    if not stat.S_ISREG(status.st_mode):
        problem = "is no file"
    elif status.st_uid not in (os.geteuid(), 0):
        problem = "belongs to another user"
    elif status.st_mode & 0o077:
        problem = f"can be read or written by others (mode {stat.S_IMODE(status.st_mode):04o})"
        do = f"chmod 600 {path}; and make a new secret, if others may have read this one"
    if problem:
        raise TokenError(f"what holds the secret of the run {problem}", where=f"{path}, as {TOKEN_FILE} says", do=do)
