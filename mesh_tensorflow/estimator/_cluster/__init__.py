"""Runs of several processes."""
