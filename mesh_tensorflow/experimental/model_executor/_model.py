"""A U-Net in a session: its steps, variables and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, optimize
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow.experimental import unet
from mesh_tensorflow.experimental.input_reader import (
    PlacementMeshImplInputReader,
    SimdMeshImplInputReader,
)
from mesh_tensorflow.experimental.model_executor._context import MeshContext, processors
from mesh_tensorflow.experimental.model_executor._flags import FLAGS
from mesh_tensorflow.simd_mesh_impl import replicate

__all__ = ["Model"]


def _learning_rate(step: tf.Tensor) -> tf.Tensor:
    """Returns the learning rate at a step."""
    drops = tf.floor(tf.cast(step, tf.float32) / FLAGS.lr_drop_steps)
    return FLAGS.lr * tf.pow(tf.constant(FLAGS.lr_drop_rate), drops)


def _open_session(num_cores: int) -> tf.Session:
    """Returns a session of the default graph, with a logical CPU for each processor."""
    config = tf.ConfigProto(allow_soft_placement=True, device_count={"CPU": num_cores})
    target = FLAGS.master
    if FLAGS.on_gcp:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(FLAGS.master or None)
        target = resolver.get_master()
        config.cluster_def.CopyFrom(resolver.cluster_spec().as_cluster_def())
    return tf.Session(target, config=config)


def _layout(mesh_shape: mtf.Shape) -> mtf.LayoutRules:
    """Returns the rules of --layout; of its default value, those for dimensions of the mesh."""
    rules = unet.get_layout()
    if not FLAGS["layout"].using_default_value:
        return rules
    return mtf.LayoutRules((d, m) for d, m in rules.pairs if m in mesh_shape.dimension_names)


class Model:
    """A U-Net that is trained or evaluated, in its own graph and session."""

    _lowering: Any = None
    _reader: Any = None

    def __init__(self, dataset_str: str):
        """Builds the U-Net, and starts reading inputs.

        Its graph has the seed of the default graph.

        Args:
          dataset_str: "train" or "eval".
        """
        self._mode = dataset_str
        seed = tf.get_default_graph().seed
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            tf.set_random_seed(seed)
            shape = mtf.convert_to_shape(FLAGS.mesh_shape)
            assert shape is not None
            self._session = _open_session(shape.size)
            self._context = MeshContext(self._session, FLAGS.use_tpu, shape, _layout(shape))
            with tf.device("/cpu:0"):
                self._step = tf.train.get_or_create_global_step()
                rate = _learning_rate(self._step)
            results = self._built(rate)
            with tf.control_dependencies(tf.nest.flatten(results)):
                self._results = {
                    **results,
                    "step": tf.assign_add(self._step, int(self._is_training)),
                }
            self._to_slices = self._lowering.copy_masters_to_slices()
            self._to_masters = self._lowering.copy_slices_to_masters()
            self._saver = checkpoint.Saver(max_to_keep=3)
            self._session.run(tf.global_variables_initializer())
            self._session.run(self._to_slices)
            self._start_reading()

    @property
    def _is_training(self) -> bool:
        return self._mode == "train"

    # -- the program

    def _built(self, rate: tf.Tensor) -> dict[str, Any]:
        """Returns the results of a step, by name."""
        if not FLAGS.use_tpu:
            return self._placed(rate)
        structure: list[Any] = []

        def program(rate: tf.Tensor, *slices: tf.Tensor) -> list[tf.Tensor]:
            results = self._simd(rate, [[x] for x in slices])
            structure.append(results)
            return tf.nest.flatten(results)

        assignment = self._context.device_assignment
        count = self._context.num_cores
        if assignment is None:
            flat = replicate(program, [rate], devices=processors(count))
        else:
            parts = self._context.create_graph_mesh_and_mesh_impl()
            self._make_reader(SimdMeshImplInputReader, parts[-1], external_worker=FLAGS.on_gcp)
            flat = tf.tpu.replicate(
                program,
                [[rate]] * count,
                infeed_queue=self._reader.infeed_queue,
                device_assignment=assignment,
            )[0]
        return tf.nest.pack_sequence_as(structure[-1], flat)

    def _make_reader(
        self,
        kind: Callable[..., Union[PlacementMeshImplInputReader, SimdMeshImplInputReader]],
        mesh_impl: mtf.MeshImpl,
        **options: object,
    ) -> None:
        self._reader = kind(
            mesh_impl,
            unet.get_dataset_creator(self._mode),
            unet.get_input_mtf_shapes(self._mode),
            is_eval_mode=not self._is_training,
            **options,
        )

    def _placed(self, rate: tf.Tensor) -> dict[str, Any]:
        """Builds the model on a PlacementMeshImpl."""
        parts = self._context.create_graph_mesh_and_mesh_impl()
        self._make_reader(PlacementMeshImplInputReader, parts[-1])
        return self._reader.gpu_placement(lambda *slices: self._lowered(parts, slices, rate))

    def _simd(self, rate: tf.Tensor, slices: Sequence[Any]) -> dict[str, Any]:
        """Builds the model within the program that all processors run."""
        parts = self._context.create_graph_mesh_and_mesh_impl()
        if not slices:
            self._make_reader(SimdMeshImplInputReader, parts[-1])
            slices = [[x] for x in self._reader.infeed_queue.generate_dequeue_op()]
        return self._lowered(parts, slices, rate)

    def _lowered(
        self,
        parts: tuple[mtf.Graph, mtf.Mesh, mtf.MeshImpl],
        slices: Sequence[Any],
        rate: tf.Tensor,
    ) -> dict[str, Any]:
        """Builds the U-Net and lowers it; returns its results as tf.Tensors."""
        graph, mesh, mesh_impl = parts
        record, loss, scores, _ = unet.unet_with_spatial_partition(
            mesh, mesh_impl, self._mode, *slices
        )
        if self._is_training:
            variables = graph.trainable_variables
            grads = mtf.gradients([loss], [v.value for v in variables])
            optimize.AdafactorOptimizer(learning_rate=rate).apply_grads(grads, variables)
        outputs: dict[str, Any] = {"scores": {"loss": loss, **scores}}
        if not self._is_training:
            outputs["record"] = record
        outputs = tf.nest.map_structure(lambda x: mtf.cast(x, tf.float32), outputs)
        graph.assigns = "all" if self._is_training else "none"
        self._lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        done = self._lowering.effects
        exported = tf.nest.map_structure(self._lowering.export_to_tf_tensor, outputs)
        with tf.control_dependencies(done):  # the results of a program are tensors
            return tf.nest.map_structure(tf.identity, exported)

    # -- steps

    def _start_reading(self) -> None:
        if isinstance(self._reader, SimdMeshImplInputReader):
            self._reader.start_infeed_thread(self._session)
        else:
            self._reader.initialize(self._session)

    def run(self) -> dict[str, Any]:
        """Runs a step; returns "scores" by name, "step" and, in evaluation, "record"."""
        return self._session.run(self._results)

    def save(self, directory: str) -> None:
        """Writes a checkpoint.

        Args:
          directory: the directory of checkpoints.
        """
        self._session.run(self._to_masters)
        step = int(self._session.run(self._step))
        path = os.path.join(directory, "model.ckpt")
        with self._session.graph.as_default():  # needed if the caller is eager
            self._saver.save(self._session, path, global_step=step)

    def restore(self, directory: str) -> int:
        """Reads the latest checkpoint, if there is one; returns the step.

        Args:
          directory: the directory of checkpoints.
        """
        path = checkpoint_files.latest(directory)
        if path:
            with self._session.graph.as_default():
                self._saver.restore(self._session, path)
            self._session.run(self._to_slices)
        return int(self._session.run(self._step))

    def close(self) -> None:
        """Closes the session."""
        self._session.close()
