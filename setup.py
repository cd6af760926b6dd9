"""Packaging of mesh-tensorflow."""

import os
import re

from setuptools import find_packages, setup

HERE = os.path.dirname(os.path.abspath(__file__))


def read(*path):
    """Returns the text of a file of this checkout."""
    with open(os.path.join(HERE, *path), encoding="utf-8") as f:
        return f.read()


VERSION = re.search(r'^__version__ = "([^"]+)"', read("mesh_tensorflow", "__init__.py"), re.M)

TRANSFORMER = ["safetensors>=0.5", "sentencepiece", "tensorflow-datasets"]
TESTS = [
    "hypothesis",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "scikit-learn",
    "matplotlib",
    "safetensors>=0.5",
    "sentencepiece",
]
TESTS_TPU = ["jax"]  # runs TPU programs on XLA's CPU replicas
PJRT = ["jax>=0.8"]
TESTS_T5 = ["torch", "transformers"]  # with which converted models are compared; large
EXAMPLES = ["scikit-learn", "matplotlib", "tensorboard"]

setup(
    name="mesh-tensorflow",
    version=VERSION.group(1),
    description="Mesh TensorFlow: distributed deep learning by named dimensions and layout rules",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["mesh_tensorflow", "mesh_tensorflow.*"]),
    package_data={"mesh_tensorflow": ["py.typed", "transformer/gin/**/*.gin", "bert/config/*"]},
    python_requires=">=3.10",
    install_requires=[
        "absl-py",
        "gin-config",
        "numpy",
        "pulp>=2.7,<4",
        "six",
        "tensorflow>=2.16",
    ],
    extras_require={
        "examples": EXAMPLES,
        "highs": ["highspy"],
        "transformer": TRANSFORMER,
        "pjrt": PJRT,
        "test": [*TESTS, *TESTS_TPU],
        "test-t5": TESTS_T5,
        "test-tpu": TESTS_TPU,
        "dev": [*TESTS, *TESTS_TPU, "codespell", "mypy", "ruff"],
        "docs": ["mkdocs", "mkdocs-material", "mkdocstrings[python]", "ruff"],
    },
    classifiers=[
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
