"""Fourier transforms along named dimensions, of which a layout may split any."""

from mesh_tensorflow.signal._transforms import (
    fft,
    fft3d,
    fftfreq,
    fftn,
    fftshift,
    ifft,
    ifft3d,
    ifftn,
    ifftshift,
    irfft,
    rfft,
    rfftfreq,
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
