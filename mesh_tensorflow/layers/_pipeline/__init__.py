"""Pipelines of stages, and their schedules."""
