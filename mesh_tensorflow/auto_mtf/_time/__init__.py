"""The time of a step under a layout, and the integer program of the fastest layout."""
