"""Fourier transforms, windows and filter banks."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .operands import dtype_of, narrow, normalize_axis, to_int, widen
from .registry import Array, ArrayModule, HostArray, kernel, register
from .temporaries import arrays_like


def _as_complex(xp: ArrayModule, x: Array) -> Array:
    """A complex array from one whose last dim holds the real part, or real and imaginary parts."""
    wide = widen(x)
    if x.shape[-1] == 2:
        return wide[..., 0] + 1j * wide[..., 1]
    if x.shape[-1] != 1:
        raise ValueError(f"the last dim must hold 1 or 2 parts of a number, not {x.shape[-1]}")
    return wide[..., 0]


def _as_parts(xp: ArrayModule, x: Array, dtype: Any) -> Array:
    return narrow(xp.stack([x.real, x.imag], axis=-1), dtype)


def _dft(xp: ArrayModule, x: Array, length: Array | None, axis: int, inverse: int, onesided: int) -> Array:
    axis = normalize_axis(axis, x.ndim)
    if axis == x.ndim - 1:
        raise ValueError("the axis cannot be the last dim, which holds the parts of numbers")
    signal, n = _as_complex(xp, x), None if length is None else to_int(length)
    if onesided and inverse:
        full = n if n is not None else 2 * (x.shape[axis] - 1)
        return narrow(xp.fft.irfft(signal, n=full, axis=axis)[..., None], x.dtype)
    transform = xp.fft.ifft if inverse else xp.fft.rfft if onesided else xp.fft.fft
    return _as_parts(xp, transform(signal, n=n, axis=axis), x.dtype)


@kernel("DFT", since=17, temporaries=arrays_like(8.5, 0))
def dft_by_attribute(
    xp: ArrayModule, x: Array, length: HostArray | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Array:
    """Discrete Fourier transform along an axis given as an attribute (before version 20)."""
    return _dft(xp, x, length, axis, inverse, onesided)


@kernel("DFT", since=20, temporaries=arrays_like(8.5, 0))
def dft(
    xp: ArrayModule,
    x: Array,
    length: HostArray | None = None,
    axis: HostArray | None = None,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Array:
    """Discrete Fourier transform along an axis, the last but one by default."""
    return _dft(xp, x, length, -2 if axis is None else to_int(axis), inverse, onesided)


@kernel("STFT", since=17, temporaries=arrays_like(1, 0, results=5))
def stft(
    xp: ArrayModule,
    signal: Array,
    frame_step: HostArray,
    window: Array | None = None,
    frame_length: HostArray | None = None,
    *,
    onesided: int = 1,
) -> Array:
    """Fourier transforms of frames (batch, frames, frequencies, 2) cut out of a signal."""
    if frame_length is not None:
        size = to_int(frame_length)
    elif window is not None:
        size = window.shape[0]
    else:
        raise ValueError("a window or a frame length must be given")
    step = to_int(frame_step)
    values = _as_complex(xp, signal)
    starts = xp.arange((values.shape[1] - size) // step + 1) * step
    frames = values[:, starts[:, None] + xp.arange(size)]
    if window is not None:
        frames = frames * widen(window)
    transform = xp.fft.rfft if onesided and signal.shape[-1] == 1 else xp.fft.fft
    return _as_parts(xp, transform(frames, axis=-1), signal.dtype)


# name -> coefficients of cos(2 pi k n / N), k = 0, 1, ...
_WINDOWS = {
    "HannWindow": (0.5, -0.5),
    "HammingWindow": (25 / 46, -21 / 46),
    "BlackmanWindow": (0.42, -0.5, 0.08),
}


def _window(coefficients: tuple[float, ...]) -> Callable[..., Array]:
    def window(xp: ArrayModule, size: HostArray, *, output_datatype: int = 1, periodic: int = 1) -> Array:
        n = to_int(size)
        period = n if periodic else n - 1
        # Of a single element that is not periodic the operator's definition makes 0 / 0.
        angle = xp.arange(n).astype(np.float64) * (2 * math.pi / period if period else math.nan)
        values = sum(c * xp.cos(k * angle) for k, c in enumerate(coefficients))
        return values.astype(dtype_of(output_datatype))

    return window


for _op_type, _coefficients in _WINDOWS.items():
    register(_op_type, 17, _window(_coefficients))


def _mel(hertz: float) -> float:
    return 2595 * math.log10(1 + hertz / 700)


@kernel("MelWeightMatrix", since=17)
def mel_weight_matrix(
    xp: ArrayModule,
    num_mel_bins: HostArray,
    dft_length: HostArray,
    sample_rate: HostArray,
    lower_edge_hertz: HostArray,
    upper_edge_hertz: HostArray,
    *,
    output_datatype: int = 1,
) -> Array:
    """Triangular filters (frequencies, mel bins), evenly spaced on the mel scale."""
    bins, length, rate = to_int(num_mel_bins), to_int(dft_length), to_int(sample_rate)
    low, high = (_mel(float(edge.reshape(()).item())) for edge in (lower_edge_hertz, upper_edge_hertz))
    mel = np.arange(bins + 2) * ((high - low) / (bins + 2)) + low
    edges = ((length + 1) * (700 * (10 ** (mel / 2595) - 1)) // rate).astype(np.int64)
    frequency = np.arange(length // 2 + 1)[:, None]
    left, centre, right = edges[:-2], edges[1:-1], edges[2:]
    rising = (frequency - left) / np.maximum(centre - left, 1)
    falling = (right - frequency) / np.maximum(right - centre, 1)
    weights = np.where((left <= frequency) & (frequency < centre), rising, 0)
    weights = np.where((centre <= frequency) & (frequency < right), falling, weights)
    weights = np.where(frequency == centre, 1, weights)
    return xp.asarray(weights).astype(dtype_of(output_datatype))
