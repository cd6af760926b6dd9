"""Trains the linear model in one of several processes, until it is ended."""

import sys

from helpers.train import linear

__all__ = ["main"]


def main(directory, mesh_impl):
    """Trains for very many steps; the chief notes them."""
    linear.train_and_note(
        f"{directory}/model",
        f"{directory}/steps",
        None,
        mesh_shape="rows:2",
        layout="batch:rows",
        mesh_impl=mesh_impl,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
