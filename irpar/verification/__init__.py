"""Comparing a partition with the model that it was made of."""

from .comparison import Difference
from .original import Original, VerificationError, check_fits
from .verify import Bisection, Verification, bisect, describe, verify

__all__ = [
    "Bisection",
    "Difference",
    "Original",
    "Verification",
    "VerificationError",
    "bisect",
    "check_fits",
    "describe",
    "verify",
]
