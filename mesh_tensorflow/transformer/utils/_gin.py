"""Reads gin files and parameters, and saves the operative configuration beside checkpoints."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.resources
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from typing import Optional, Union

import gin
import tensorflow.compat.v1 as tf

from mesh_tensorflow import estimator
from mesh_tensorflow.transformer.utils._data.text import temporary_name, write_text
from mesh_tensorflow.transformer.utils._flags import FLAGS

__all__ = ["OperativeConfigHook", "nearest_names_in_errors", "parse_gin_defaults_and_flags"]

_GIN_PACKAGE = "mesh_tensorflow.transformer.gin"
_DEFAULTS = "defaults.gin"
_CONFIG_NAME = "operative_config"
_MOST_NAMES = 3

_UNKNOWN_SELECTOR = re.compile(r"No configurable matching (?:reference )?'@?([^']*?)(?:\(\))?'")
_INCLUDE = re.compile(r"""\s*include\s+['"]([^'"]+)""")
_UNKNOWN_PARAMETER = re.compile(r"Configurable '([^']*)' doesn't have a parameter named '([^']*)'")


def _import_gin_tf() -> None:
    """Imports gin.tf, which registers TensorFlow's functions for gin files, such as @tf.nn.relu.

    gin.tf itself imports tf.estimator, which TensorFlow no longer has.
    """
    lacking = not hasattr(tf, "estimator")
    if lacking:
        estimator.install()
    try:
        importlib.import_module("gin.tf.external_configurables")
    finally:
        if lacking:
            estimator.uninstall()


_import_gin_tf()


def _registered() -> list[str]:
    # gin has no public way to list what is registered.
    return [name for name, _ in gin.config._REGISTRY.items()]


def _nearest(name: str, known: Iterable[str]) -> str:
    names = {k: k for k in known}
    # A file may use only the end of a name.
    names.update({k.rsplit(".", 1)[-1]: k for k in known})
    found = difflib.get_close_matches(name.rsplit(".", 1)[-1], names, _MOST_NAMES, 0.6)
    found += difflib.get_close_matches(name, names, _MOST_NAMES, 0.75)
    return ", ".join(dict.fromkeys(names[k] for k in found)) if found else ""


def _advice(message: str) -> str:
    """Returns a sentence with the nearest known names to one that gin does not know, or ""."""
    selector = _UNKNOWN_SELECTOR.search(message)
    if selector:
        near = _nearest(selector[1], _registered())
        return (f"The nearest names are {near}." if near else "No name is near it.") + (
            " A module that registers it may have to be imported, by --module_import or by an "
            "`import` in the gin file."
        )
    parameter = _UNKNOWN_PARAMETER.search(message)
    if parameter:
        function = gin.get_configurable(parameter[1])
        names = inspect.signature(function).parameters
        known = [name for name in names if name not in ("self", "args", "kwargs")]
        near = _nearest(parameter[2], known)
        return f"The nearest names are {near}." if near else f"It has {', '.join(known)}."
    return ""


@contextlib.contextmanager
def nearest_names_in_errors() -> Iterator[None]:
    """Adds the nearest known names to gin's errors about unknown names.

    Raises:
      ValueError: gin raised it.
    """
    try:
        yield
    except ValueError as error:
        message = str(error)
        advice = _advice(message)
        if not advice:
            raise
        raise ValueError(f"{message}\n{advice}") from error


def _line_not_in_utf8(files: Iterable[str], prefixes: Iterable[str]) -> str:
    """Returns an error message if a gin file, or one that it includes, is not valid UTF-8."""
    waiting, seen = list(files), set()
    while waiting:
        name = waiting.pop(0)
        paths = [os.path.join(prefix, name) for prefix in ("", *prefixes)]
        path = next((path for path in paths if os.path.isfile(path)), None)
        if path is None or path in seen:
            continue
        seen.add(path)
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    return (
                        f"line {number} of {path} is not in UTF-8 ({error.reason} at byte "
                        f"{error.start}: {line.strip()[:40]!r})"
                    )
                included = _INCLUDE.match(text)
                if included:
                    waiting.append(included[1])
    return ""


@contextlib.contextmanager
def _place_in_errors_of_encoding(prefixes: Iterable[str]) -> Iterator[None]:
    """Adds file and line to errors about gin files that are not valid UTF-8."""
    try:
        yield
    except UnicodeDecodeError as error:
        place = _line_not_in_utf8(FLAGS.gin_file, prefixes)
        raise ValueError(
            f"a gin file should be text in UTF-8: {place or error}. Save it as UTF-8, as by "
            "`iconv -f latin1 -t utf-8`"
        ) from error


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
    """
    directory = importlib.resources.files(_GIN_PACKAGE)
    prefixes = [*FLAGS.gin_location_prefix, str(directory)]
    for prefix in prefixes:
        gin.add_config_file_search_path(prefix)
    with nearest_names_in_errors(), _place_in_errors_of_encoding(prefixes):
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
