"""Reads gin files and parameters, and saves the operative configuration beside checkpoints."""

from __future__ import annotations

import importlib
import importlib.resources
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Optional, Union

import gin
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator
from mesh_tensorflow._programs.gin_errors import explained_errors
from mesh_tensorflow.transformer.utils._data.text import temporary_name, write_text
from mesh_tensorflow.transformer.utils._flags import FLAGS

__all__ = ["OperativeConfigHook", "parse_gin_defaults_and_flags"]

_GIN_PACKAGE = "mesh_tensorflow.transformer.gin"
_DEFAULTS = "defaults.gin"
_CONFIG_NAME = "operative_config"


class _LaterKeras(SimpleNamespace):
    """Functions that call those of a part of tf.keras, which is imported when one is called."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Returns the function that stands for an optimizer or a schedule."""
        # Python asks for such names to learn what an object can do: having all would be wrong.
        if name.startswith("__"):
            raise AttributeError(name)

        def make(*args: Any, **kwargs: Any) -> Any:
            part: Any = tf2.keras
            for key in self.path:
                part = getattr(part, key)
            return getattr(part, name)(*args, **kwargs)

        make.__name__ = make.__qualname__ = name
        return make


def _import_gin_tf() -> None:
    """Imports gin.tf, which registers TensorFlow's functions for gin files, such as @tf.nn.relu.

    gin.tf itself imports tf.estimator, which TensorFlow no longer has, and Keras, which takes a
    second and 200 MB. Where Keras is not imported yet, it is when a file first uses it.
    """
    lacking = not hasattr(tf, "estimator")
    if lacking:
        estimator.install()
    keras = vars(tf2).get("keras")
    if "keras" not in sys.modules and "tf_keras" not in sys.modules:
        schedules = _LaterKeras(path=("optimizers", "schedules"))
        optimizers = _LaterKeras(path=("optimizers",), schedules=schedules)
        tf2.keras = SimpleNamespace(optimizers=optimizers)
    try:
        importlib.import_module("gin.tf.external_configurables")
    finally:
        # Gin keeps the functions that stand for Keras; all others get Keras itself again.
        tf2.keras = keras
        if lacking:
            estimator.uninstall()


_import_gin_tf()


def parse_gin_defaults_and_flags(
    skip_unknown: Union[bool, list[str], tuple[str, ...]] = False, finalize_config: bool = True
) -> None:
    """Reads `defaults.gin` of this package, then the files and parameters of the command line.

    The flags --gin_file and --gin_param may be repeated. Files are also searched for under
    --gin_location_prefix, and in this package.

    Args:
      skip_unknown: whether to ignore names that are not registered; or the names to ignore.
      finalize_config: whether to lock the configuration.

    Raises:
      ValueError: a name is unknown; the message has the nearest known ones. Or a file is not valid
        UTF-8; the message has the line.
      SyntaxError: a file or a parameter is no gin; the message has the line.
    """
    directory = importlib.resources.files(_GIN_PACKAGE)
    prefixes = [*FLAGS.gin_location_prefix, str(directory)]
    for prefix in prefixes:
        gin.add_config_file_search_path(prefix)
    with explained_errors(FLAGS.gin_file or (), prefixes):
        with gin.unlock_config():
            gin.parse_config((directory / _DEFAULTS).read_text(), skip_unknown=skip_unknown)
            gin.parse_config_files_and_bindings(
                FLAGS.gin_file, FLAGS.gin_param, skip_unknown=skip_unknown, finalize_config=False
            )
        if finalize_config:
            gin.finalize()


class OperativeConfigHook(tf.train.SessionRunHook):
    """Writes the operative gin configuration to operative_config.gin, and as a summary."""

    def __init__(self, directory: Optional[str]) -> None:
        """Creates an OperativeConfigHook.

        Args:
          directory: the directory to write to; nothing is written if None.
        """
        self._directory = directory

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Writes.

        Args:
          session: the new session.
          coord: unused.
        """
        if self._directory is None:
            return
        text = gin.operative_config_str()
        tf.io.gfile.makedirs(self._directory)
        path = os.path.join(self._directory, f"{_CONFIG_NAME}.gin")
        # A unique name, since another process may write here too.
        write_text(text, path, temporary_name(path))
        plugin = tf.SummaryMetadata.PluginData(plugin_name="text")
        summary = tf.Summary(
            value=[
                tf.Summary.Value(
                    tag=f"gin/{_CONFIG_NAME}",
                    tensor=tf.make_tensor_proto(gin.markdown(text)),
                    metadata=tf.SummaryMetadata(plugin_data=plugin),
                )
            ]
        )
        step = session.run(tf.train.get_global_step(session.graph))
        writer = tf.summary.FileWriterCache.get(self._directory)
        writer.add_summary(summary, step)
        writer.flush()
