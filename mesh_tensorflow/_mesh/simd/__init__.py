"""One program that all processors run, on CPUs and GPUs."""
