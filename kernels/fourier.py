"""com.microsoft's Fourier transforms, over the last dims; a complex number is a last dim of two."""

from .registry import Array, ArrayModule, kernel
from .temporaries import arrays_like

DOMAIN = "com.microsoft"


def _refuse(signal_ndim: int, normalized: int, onesided: int) -> None:
    if signal_ndim not in (1, 2, 3) or normalized or not onesided:
        raise ValueError("only one-sided transforms of one to three dims that are not normalized are supported")


@kernel("Rfft", since=1, domain=DOMAIN, temporaries=arrays_like(5))
def rfft(xp: ArrayModule, x: Array, *, signal_ndim: int = 1, normalized: int = 0, onesided: int = 1) -> Array:
    """The spectrum of real signals: half of it says all."""
    _refuse(signal_ndim, normalized, onesided)
    found = xp.fft.rfftn(x, axes=tuple(range(-signal_ndim, 0)))
    return xp.stack([found.real, found.imag], axis=-1).astype(x.dtype)


@kernel("Irfft", since=1, domain=DOMAIN, temporaries=arrays_like(2))
def irfft(xp: ArrayModule, x: Array, *, signal_ndim: int = 1, normalized: int = 0, onesided: int = 1) -> Array:
    """Real signals, of an even number of elements, from half of their spectrum."""
    _refuse(signal_ndim, normalized, onesided)
    return xp.fft.irfftn(x[..., 0] + 1j * x[..., 1], axes=tuple(range(-signal_ndim, 0))).astype(x.dtype)
