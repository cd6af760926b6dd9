"""Attention over whole sequences, neighborhoods and compressed memories, and masks."""
