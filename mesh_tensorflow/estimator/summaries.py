"""What TensorBoard shows: numbers, texts and histograms, in event files that are read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow.compat.v1 as tf

__all__ = ["histograms", "scalars", "scalars_of_steps", "text", "write"]

_BUCKETS = 30  # of a histogram, as TensorBoard draws them


def scalars(values: Mapping[str, float]) -> list[tf.Summary.Value]:
    """Returns the values of a tf.Summary.

    Args:
      values: numbers by tag.
    """
    return [tf.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]


def text(tag: str, content: str) -> tf.Summary.Value:
    """Returns a value of a tf.Summary that is shown as text.

    Args:
      tag: its tag.
      content: the text, which may be in Markdown.
    """
    plugin = tf.SummaryMetadata.PluginData(plugin_name="text")
    return tf.Summary.Value(
        tag=tag,
        tensor=tf.make_tensor_proto(content, dtype=tf.string),
        metadata=tf.SummaryMetadata(plugin_data=plugin),
    )


def histograms(variables: Mapping[str, np.ndarray]) -> list[tf.Summary.Value]:
    """Returns a value for each variable that has a distribution: real numbers, all finite.

    Args:
      variables: arrays by tag.
    """
    values = []
    for name, value in variables.items():
        if value.size < 2 or np.iscomplexobj(value):
            continue
        # In float64: a sum of squares of float16 would soon be infinite.
        flat = value.astype(np.float64).ravel()
        flat = flat[np.isfinite(flat)]  # NaNs belong to no bucket
        if not flat.size:
            continue
        counts, edges = np.histogram(flat, _BUCKETS)
        values.append(
            tf.Summary.Value(
                tag=name,
                histo=tf.HistogramProto(
                    min=flat.min(),
                    max=flat.max(),
                    num=flat.size,
                    sum=flat.sum(),
                    sum_squares=np.square(flat).sum(),
                    # A HistogramProto has the upper end of each bucket alone.
                    bucket_limit=edges[1:],
                    bucket=counts,
                ),
            )
        )
    return values


def write(directory: str, step: int, values: Iterable[tf.Summary.Value]) -> None:
    """Writes values of a step at once, by the writer that hooks of this process share.

    Args:
      directory: the directory of the event file.
      step: the number of the step.
      values: values of a tf.Summary.
    """
    with tf.Graph().as_default():  # eager code has no such writer
        writer = tf.summary.FileWriterCache.get(directory)
    writer.add_summary(tf.Summary(value=values), step)
    writer.flush()


def scalars_of_steps(pattern: str) -> dict[int, dict[str, float]]:
    """Returns the numbers of event files by step, in order, and by tag.

    Args:
      pattern: a pattern of the files.
    """
    by_step: dict[int, dict[str, float]] = {}
    for path in sorted(tf.io.gfile.glob(pattern)):
        for event in tf.train.summary_iterator(path):
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    # Files are in the order of their times, so a later evaluation of a step
                    # replaces an earlier one.
                    by_step.setdefault(event.step, {})[value.tag] = value.simple_value
    return dict(sorted(by_step.items()))
