"""How two processes prove to each other that they know a key, and neither sends it.

Each makes a number that was never used (a nonce) and shows HMAC-SHA256(key, its role, both numbers, what they speak
about). A proof that was overheard fits no other conversation, nor the other role.

The proofs say who is there when a conversation begins, and nothing of what follows: the stream after them is neither
encrypted nor authenticated, so that somebody on the way can read and change it.
"""

import hashlib
import hmac
import os

NONCE_BYTES = 16
PROOF_BYTES = 32


def nonce() -> bytes:
    """A number that was never used."""
    return os.urandom(NONCE_BYTES)


def key_of(*texts: str | bytes) -> bytes:
    """A key made of several texts, in this order."""
    made = hashlib.sha256()
    for text in texts:
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
        made.update(len(data).to_bytes(8, "little") + data)
    return made.digest()


def proof(key: bytes, role: str, nonces: bytes, about: bytes) -> bytes:
    """What only who knows the key can show.

    Args:
        key: that both know.
        role: of who shows it; that of the other side differs.
        nonces: of both, in one order.
        about: what it is good for.
    """
    return hmac.digest(key, role.encode() + b"\0" + nonces + about, hashlib.sha256)


def is_shown(expected: bytes, shown: bytes) -> bool:
    """Whether a proof is right; takes as long where it is not."""
    return hmac.compare_digest(expected, shown)
