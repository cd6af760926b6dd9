"""Fourier transforms along named dimensions, of which a layout may split any."""

from mesh_tensorflow.signal._frequencies import fftfreq, fftshift, ifftshift, rfftfreq
from mesh_tensorflow.signal._transforms import (
    fft,
    fft3d,
    fftn,
    ifft,
    ifft3d,
    ifftn,
    irfft,
    rfft,
)

__all__ = [
    "fft",
    "fft3d",
    "fftfreq",
    "fftn",
    "fftshift",
    "ifft",
    "ifft3d",
    "ifftn",
    "ifftshift",
    "irfft",
    "rfft",
    "rfftfreq",
]
