"""Decoding: sampling and beam search, one position at a time."""
