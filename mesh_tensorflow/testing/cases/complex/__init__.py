"""Cases of complex numbers and of Fourier transforms."""
