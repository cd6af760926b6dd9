"""Graphs with one layer."""
