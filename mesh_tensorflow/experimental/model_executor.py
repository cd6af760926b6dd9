r"""Trains and evaluates a U-Net in its own training loop, on a TPU, on CPUs or on GPUs.

python -m mesh_tensorflow.experimental.model_executor --train_file_pattern=... \
        --eval_file_pattern=... --checkpoint_dir=... --mesh_shape="rows:2,columns:2"
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, optimize
from mesh_tensorflow._core.layout import joined_names
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.devices import default_devices, devices_for
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.auto_mtf.measured import layout_on
from mesh_tensorflow.auto_mtf.profiles import Processors
from mesh_tensorflow.estimator.summaries import scalars
from mesh_tensorflow.experimental import unet
from mesh_tensorflow.experimental.input_reader import (
    PlacementMeshImplInputReader,
    SimdMeshImplInputReader,
)
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, auto_logical_to_physical_tpu, replicate
from mesh_tensorflow.train._model import Means

__all__ = ["FLAGS", "MeshContext", "main", "train_and_eval"]

_AUTO = "auto"

define(
    use_tpu=(
        True,
        "Whether all processors run one program: on a TPU, or else on CPUs or GPUs. "
        "Otherwise operations are placed on CPUs or GPUs one by one.",
    ),
    on_gcp=(False, "Whether --master is the name of a Cloud TPU."),
    master=("", "Address of the session's master."),
    checkpoint_dir=("", "Directory of checkpoints, from which training goes on."),
    pred_output_dir=("", "Directory of predictions; none are written without."),
    summary_dir=("", "Directory of summaries; --checkpoint_dir if it is empty."),
    write_summary=(True, "Whether to write summaries."),
    num_train_iterations_per_loop=(500, "Training steps between evaluations."),
    num_eval_iterations_per_loop=(2, "Batches of an evaluation."),
    num_training_loops=(1000, "How many times to train and evaluate."),
    save_checkpoints_steps=(500, "Steps between checkpoints; also before evaluations."),
    lr=(0.003, "Learning rate at the beginning, relative to the size of weights."),
    lr_drop_steps=(20000.0, "Steps between drops of the learning rate."),
    lr_drop_rate=(0.3, "What a drop multiplies the learning rate by."),
    mesh_shape=("rows:4, columns:4, cores:2", "Shape of the mesh."),
)


def _placed_on(count: int) -> list[str]:
    """Returns a device for each processor whose operations are placed one by one."""
    devices = default_devices()
    return (devices if len(devices) >= count else devices[:1] * count)[:count]


class MeshContext:
    """The processors and the mesh implementation of a mesh, in one session.

    Attributes:
      device_assignment: the tf DeviceAssignment of a TPU, or None.
      num_hosts: the number of hosts of the TPU; 1 without a TPU.
      num_cores: the number of processors of the mesh.
      num_cores_per_host: the mean number of processors of a host, rounded down.
      mesh_impl: the most recent mesh implementation, or None.
    """

    def __init__(
        self,
        sess: tf.Session,
        use_tpu: bool,
        mesh_shape: ShapeLike,
        layout_rules: Union[mtf.LayoutRules, str, Iterable[tuple[str, str]]],
    ):
        """Creates a MeshContext; initializes the TPU if the session has one.

        Args:
          sess: a tf.Session.
          use_tpu: whether all processors run one program, on a TPU or, without one, on CPUs or
            GPUs; otherwise operations are placed on CPUs or GPUs.
          mesh_shape: the mesh shape; a Shape, or what converts to one.
          layout_rules: the layout rules; LayoutRules, or what converts to them.
        """
        self._use_tpu = use_tpu
        self._shape = mtf.convert_to_shape(mesh_shape)
        self._rules = mtf.convert_to_layout_rules(layout_rules)
        self.mesh_impl: Optional[mtf.MeshImpl] = None
        self.device_assignment: Any = None
        self.num_hosts, self.num_cores = 1, self._shape.size
        if use_tpu and any(d.device_type == "TPU_SYSTEM" for d in sess.list_devices()):
            topology = sess.run(tf.tpu.initialize_system())
            self._topology = tf.tpu.experimental.Topology(serialized=topology)
            self.num_hosts = self._topology.num_tasks
            self.device_assignment = tf.tpu.experimental.DeviceAssignment.build(
                self._topology, num_replicas=self.num_cores
            )
        self.num_cores_per_host = self.num_cores // self.num_hosts

    def create_graph_mesh_and_mesh_impl(self) -> tuple[mtf.Graph, mtf.Mesh, Any]:
        """Returns a new (Graph, Mesh, MeshImpl).

        With `use_tpu` and no TPU, call it within the function that is passed to
        `mtf.simd_mesh_impl.replicate`.

        Raises:
          ValueError: it is called elsewhere.
        """
        graph = mtf.Graph()
        self.mesh_impl = self._make_impl()
        return graph, mtf.Mesh(graph, "my_mesh"), self.mesh_impl

    def _make_impl(self) -> Any:
        if not self._use_tpu:
            return PlacementMeshImpl(self._shape, self._rules, _placed_on(self.num_cores))
        assignment = self.device_assignment
        if assignment is None:
            return SimdMeshImpl(self._shape, self._rules)
        order = auto_logical_to_physical_tpu(
            self._shape.to_integer_list,
            list(self._topology.mesh_shape),
            device_assignment=assignment,
        )
        return SimdMeshImpl(
            self._shape, self._rules, device_assignment=assignment, logical_to_physical=order
        )


def _learning_rate(step: tf.Tensor) -> tf.Tensor:
    """Returns the learning rate at a step."""
    # lr * lr_drop_rate^floor(step / lr_drop_steps).
    return tf.train.exponential_decay(
        FLAGS.lr, step, FLAGS.lr_drop_steps, FLAGS.lr_drop_rate, staircase=True
    )


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
    names = mesh_shape.dimension_names
    return rules.of_pairs(
        (d, m) for d, m in rules.pairs if any(name in names for name in joined_names(m, names))
    )


class Model:
    """A U-Net that is trained or evaluated, in its own graph and session."""

    _lowering: Any = None
    _reader: Any = None

    def __init__(self, dataset_str: str, layout: Optional[str] = None):
        """Builds the U-Net, and starts reading inputs.

        Its graph has the seed of the default graph.

        Args:
          dataset_str: "train" or "eval".
          layout: the layout; None for that of the flags.
        """
        self._mode = dataset_str
        seed = tf.get_default_graph().seed
        # Programs of several processors can assign to resource variables only.
        with tf.Graph().as_default(), tf.variable_scope("", use_resource=True):
            tf.set_random_seed(seed)
            shape = mtf.convert_to_shape(FLAGS.mesh_shape)
            assert shape is not None
            self._session = _open_session(shape.size)
            rules = _layout(shape) if layout is None else layout
            self._context = MeshContext(self._session, FLAGS.use_tpu, shape, rules)
            with tf.device("/cpu:0"):
                self._step = tf.train.get_or_create_global_step()
                rate = _learning_rate(self._step)
            results = self._built(rate)
            # The learning rate of these results reads the step, so it is incremented after them.
            with tf.control_dependencies(tf.nest.flatten(results)):
                self._results = {
                    **results,
                    "step": tf.assign_add(self._step, int(self._is_training)),
                }
            self._to_slices = self._lowering.copy_masters_to_slices()
            self._to_masters = self._lowering.copy_slices_to_masters()
            self._saver = checkpoint.Saver(max_to_keep=3)
            self._session.run(tf.global_variables_initializer())
            # Slices are copies of the masters, which need their values first.
            self._session.run(self._to_slices)
            self._start_reading()

    @property
    def graph(self) -> mtf.Graph:
        """The program of a step."""
        return self._lowering.graph

    @property
    def _is_training(self) -> bool:
        return self._mode == "train"

    # -- the program

    def _built(self, rate: tf.Tensor) -> dict[str, Any]:
        """Returns the results of a step, by name."""
        if not FLAGS.use_tpu:
            built = self._context.create_graph_mesh_and_mesh_impl()
            self._make_reader(PlacementMeshImplInputReader, built)
            return self._reader.gpu_placement(lambda *slices: self._lowered(built, slices, rate))
        # A replicated program returns flat tensors, so their structure leaves it by this list.
        structure: list[Any] = []
        assignment = self._context.device_assignment

        def program(rate: tf.Tensor, *slices: tf.Tensor) -> list[tf.Tensor]:
            built = self._context.create_graph_mesh_and_mesh_impl()
            if assignment is None:
                self._make_reader(SimdMeshImplInputReader, built)
                slices = self._reader.infeed_queue.generate_dequeue_op()
            structure.append(self._lowered(built, [[x] for x in slices], rate))
            return tf.nest.flatten(structure[-1])

        count = self._context.num_cores
        if assignment is None:
            flat = replicate(program, [rate], devices=devices_for(count))
        else:
            # Outside of the program, as hosts enqueue what it dequeues; it makes a mesh of its own.
            built = self._context.create_graph_mesh_and_mesh_impl()
            self._make_reader(SimdMeshImplInputReader, built, external_worker=FLAGS.on_gcp)
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
        parts: tuple[mtf.Graph, mtf.Mesh, mtf.MeshImpl],
        **options: object,
    ) -> None:
        self._reader = kind(
            parts[-1],
            unet.get_dataset_creator(self._mode),
            unet.get_input_mtf_shapes(self._mode),
            is_eval_mode=not self._is_training,
            **options,
        )

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
        # All, as the moving averages of batch normalization are none of the optimizer's updates.
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
        # Steps have changed the slices alone, and the saver writes masters.
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
            # Checkpoints hold masters, and steps read slices.
            self._session.run(self._to_slices)
        return int(self._session.run(self._step))

    def close(self) -> None:
        """Closes the session."""
        self._session.close()


Scores = dict[str, float]


def _train(model: Model, step: int, stop: int, directory: str, progress: Progress) -> Scores:
    """Trains to a step; returns the mean scores over the steps."""
    means = Means()
    while step < stop:
        scores = model.run()["scores"]
        means.add({name: [value] for name, value in scores.items()}, 1)
        step += 1
        progress.update(loss=scores["loss"])
        # At the end as well, since the evaluation that follows reads the checkpoint.
        if step % FLAGS.save_checkpoints_steps == 0 or step == stop:
            model.save(directory)
    return means.result({})


def _evaluate(model: Model, directory: str) -> Scores:
    """Evaluates the latest checkpoint; returns mean scores, and Dice coefficients over all."""
    # The two models have a session each, so weights go from one to the other by files.
    model.restore(directory)
    means, processor = Means(), unet.PostProcessor()
    if FLAGS.pred_output_dir:
        tf.io.gfile.makedirs(FLAGS.pred_output_dir)
    for _ in range(FLAGS.num_eval_iterations_per_loop):
        results = model.run()
        means.add({name: [value] for name, value in results["scores"].items()}, 1)
        processor.record(
            [*results["record"], results["scores"]["loss"], results["step"]], FLAGS.pred_output_dir
        )
    return {**means.result({}), **processor.finish()}


def _write(writer: Optional[tf.summary.FileWriter], step: int, kind: str, scores: Scores) -> None:
    if writer is None:
        return
    values = scalars({f"{kind}/{name}": value for name, value in scores.items()})
    writer.add_summary(tf.Summary(value=values), step)
    writer.flush()


def _log(step: int, trained: Scores, evaluated: Scores) -> None:
    tf.logging.info("Step %d: training %s; evaluation %s", step, trained, evaluated)


def _chosen_layout() -> Optional[str]:
    """Returns the layout whose steps are the fastest if --layout is "auto", and None otherwise."""
    if FLAGS.layout != _AUTO:
        return None

    def machine_of() -> Processors:
        shape = mtf.convert_to_shape(FLAGS.mesh_shape)
        devices = devices_for(shape.size) if FLAGS.use_tpu else _placed_on(shape.size)
        return Processors(shape, devices, FLAGS.use_tpu)

    @contextlib.contextmanager
    def run(layout: str) -> Iterator[Callable[[], Any]]:
        with contextlib.closing(Model("train", layout)) as model:
            yield model.run

    def graph_of() -> mtf.Graph:
        with contextlib.closing(Model("train", "")) as model:
            return model.graph

    return layout_on("--layout=auto", machine_of, graph_of, run)


def _check_flags() -> None:
    """Checks the flags that loops count with.

    Raises:
      ValueError: a flag is not positive, or layouts are to be tried on a TPU of another process.
    """
    if FLAGS.layout == _AUTO and (FLAGS.on_gcp or FLAGS.master):
        raise ValueError(
            f"--layout=auto with --{'on_gcp' if FLAGS.on_gcp else 'master'}: layouts are tried on "
            "the devices of this process. Give a layout"
        )
    for flag in (
        "num_training_loops",
        "num_train_iterations_per_loop",
        "num_eval_iterations_per_loop",
        "save_checkpoints_steps",
    ):
        if getattr(FLAGS, flag) < 1:
            raise ValueError(f"--{flag}={getattr(FLAGS, flag)} must be 1 at least")


def train_and_eval(report: Callable[[int, Scores, Scores], Any] = _log) -> Scores:
    """Alternates between training and evaluation of a U-Net, as configured by flags.

    Evaluation restores the checkpoints of training from --checkpoint_dir, or from a temporary
    directory if the flag is empty. Training resumes from the latest checkpoint there. With
    --use_tpu, all processors of --mesh_shape run one program, on the TPU of the session or, without
    one, on logical CPUs or GPUs. Without --use_tpu, operations are placed on CPUs or GPUs. The
    optimizer is Adafactor; its learning rate, relative to the scale of each weight, is --lr,
    multiplied by --lr_drop_rate every --lr_drop_steps.

    Args:
      report: called after each evaluation with the step, the mean scores of training since the last
        evaluation, and the scores of the evaluation; logs them by default.

    Returns:
      The scores of the last evaluation by name; empty if training was complete already.

    Raises:
      ValueError: flags do not fit each other, or name no files.
    """
    _check_flags()
    scores: Scores = {}
    with contextlib.ExitStack() as stack:
        directory = FLAGS.checkpoint_dir or stack.enter_context(tempfile.TemporaryDirectory())
        folder = FLAGS.summary_dir or FLAGS.checkpoint_dir
        writer = None
        if FLAGS.write_summary and folder:
            # TensorFlow makes no FileWriter in eager code.
            with tf.Graph().as_default():
                writer = stack.enter_context(tf.summary.FileWriter(folder))
        layout = _chosen_layout()
        training = stack.enter_context(contextlib.closing(Model("train", layout)))
        evaluating = stack.enter_context(contextlib.closing(Model("eval", layout)))
        step = training.restore(directory)
        length = FLAGS.num_train_iterations_per_loop
        total = FLAGS.num_training_loops * length
        with Progress(total, "train", start=step, leave=step < total) as progress:
            while step < total:
                # The next multiple, so that a run that goes on evaluates at the same steps.
                stop = (step // length + 1) * length
                trained = _train(training, step, stop, directory, progress)
                step = stop
                scores = _evaluate(evaluating, directory)
                _write(writer, step, "train", trained)
                _write(writer, step, "eval", scores)
                report(step, trained, scores)
    return scores


def main(_: Sequence[str]) -> None:
    """Calls `train_and_eval`.

    Args:
      _: the remaining command-line arguments.
    """
    train_and_eval()


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.experimental.model_executor")
