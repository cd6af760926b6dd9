"""Calls of public names, and what comes out of them."""
