"""For tools that call setup.py; what the package is stands in pyproject.toml."""

from setuptools import setup

setup()
