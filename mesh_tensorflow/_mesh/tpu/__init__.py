"""One program that all processors run, on a TPU."""
