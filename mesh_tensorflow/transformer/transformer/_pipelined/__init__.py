"""Stacks whose layers are stages of a pipeline."""
