"""Legal layouts of a program, its memory, and the integer program of the least memory."""
