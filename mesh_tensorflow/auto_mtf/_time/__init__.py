"""The time of a step under a layout, and the integer program for the fastest layout."""
