"""Processes that run one program together: which there are, and who is lost."""
