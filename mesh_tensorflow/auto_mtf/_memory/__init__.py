"""The legal layouts and the memory of a program, and the integer program for least memory."""
