"""The program of a model function: its model, settings, layout, and place on a mesh."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_choice, dims_text
from mesh_tensorflow._lowering.lowering import rules_that_apply
from mesh_tensorflow._mesh.devices import check_devices_exist, devices_for
from mesh_tensorflow._mesh.mesh_impl import MESH_IMPLS
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.estimator.processes import devices_of, in_cluster, shards_of_process
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import (
    HierarchicalTiling,
    SimdMeshImpl,
    auto_logical_to_physical_tpu,
    physical_shape_3d_from_topology_proto_4d,
    replicate,
)
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.utils._settings import MODULE, Filter, Settings
from mesh_tensorflow.utils import summaries_so_far, taken_summaries

# By model type: how to build the model from (input_vocab_size, output_vocab_size, layout,
# mesh_shape).
_LANGUAGE_MODELS = {"lm": True, "delimited_lm": True, "aligned": False}
_MODELS = {
    "bitransformer": transformer.make_bitransformer,
    "bi_student_teacher": transformer.make_bi_student_teacher,
}
_SMALLEST_VOCABULARY = 3  # padding, EOS and one token


# -- the model, and a call of it


def build_model(
    model_type: str = "bitransformer",
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout_rules: Union[mtf.LayoutRules, str, None] = None,
    mesh_shape: Union[mtf.Shape, str, None] = None,
) -> Any:
    """Builds a model, whose layers gin configures.

    Args:
      model_type: "bitransformer", "bi_student_teacher" (a bitransformer that learns from another),
        "lm" (one stack, each position attends to those before it), "delimited_lm" (the same for
        pairs of inputs and targets) or "aligned" (one stack, all positions attend to each other).
      input_vocab_size: the number of ids of inputs.
      output_vocab_size: the number of ids of targets.
      layout_rules: the layout that the model will be lowered with.
      mesh_shape: the mesh.

    Returns:
      A Unitransformer, Bitransformer or StudentTeacher.

    Raises:
      ValueError: the type is unknown, or a vocabulary is too small.
    """
    for name, size in (("input", input_vocab_size), ("output", output_vocab_size)):
        if size is not gin.REQUIRED and size < _SMALLEST_VOCABULARY:
            raise ValueError(
                f"build_model: the {name} vocabulary is too small, with vocab_size {size}: id 0 is "
                "padding and id 1 the end of a sequence, and there should be others"
            )
    sizes: dict[str, Any] = {
        "input_vocab_size": input_vocab_size,
        "output_vocab_size": output_vocab_size,
    }
    where: dict[str, Any] = {
        "layout": None if layout_rules is None else mtf.convert_to_layout_rules(layout_rules),
        "mesh_shape": None if mesh_shape is None else mtf.convert_to_shape(mesh_shape),
    }
    check_choice("build_model", "model_type", model_type, [*_MODELS, *_LANGUAGE_MODELS])
    if model_type in _MODELS:
        return _MODELS[model_type](**sizes, **where)
    autoregressive = _LANGUAGE_MODELS[model_type]
    return transformer.Unitransformer(
        transformer.make_layer_stack(), autoregressive=autoregressive, **sizes, **where
    )


def is_unitransformer(model: Any) -> bool:
    """Returns whether a model, or its student, is a single stack.

    Args:
      model: a model.

    Returns:
      A bool.
    """
    return isinstance(getattr(model, "student", model), transformer.Unitransformer)


def check_length(model: Any, length: int) -> None:
    """Checks that sequences do not exceed a model's number of positions.

    Args:
      model: a model.
      length: the length of the longest sequences.

    Raises:
      ValueError: they do.
    """
    model = getattr(model, "student", model)
    names = ("positional_embedding", "sinusoid_positional_embedding")
    # A single stack has positions itself; other models have an encoder and a decoder with them.
    stacks: list[Any] = [model, getattr(model, "encoder", None), getattr(model, "decoder", None)]
    for stack in stacks:
        dim = getattr(stack, "max_length_dim", None)
        positions = None if dim is None else dim.size - getattr(stack, "position_offset", 0)
        # A model with relative positions alone reads sequences of any length.
        embedded = any(getattr(stack, name, False) for name in names)
        if positions is not None and embedded and length > positions:
            raise ValueError(
                f"a sequence of length {length} (utils.run.sequence_length) is longer than the "
                f"{positions} positions of {stack.name!r}; bind Unitransformer.max_length to "
                "a larger number, or make sequences shorter"
            )


def call_model(
    model: Any,
    features: Mapping[str, mtf.Tensor],
    mode: str,
    variable_dtype: mtf.VariableDType,
    compute_loss: bool,
    num_microbatches: int = 1,
) -> tuple[mtf.Tensor, Optional[mtf.Tensor]]:
    """Calls a model on all positions of a batch at once.

    Args:
      model: a model.
      features: Tensors by name; without targets, inputs are read and nothing is predicted.
      mode: a mode of the model, such as "train" or "score".
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      compute_loss: whether to compute the loss.
      num_microbatches: the number of microbatches that the batch is divided into.

    Returns:
      (logits [batch..., length, vocab], loss), where the loss is None without `compute_loss`.
    """
    inputs, targets = features.get("inputs"), features.get("targets")
    segments, subsegments, positions = (
        features.get(f"targets_{name}") for name in ("segmentation", "subsegmentation", "position")
    )
    packing: dict[str, Optional[mtf.Tensor]]
    if is_unitransformer(model):
        if inputs is None:
            assert targets is not None  # see `check_features`
            # Each target is predicted from those before it, so inputs are targets, shifted by one.
            inputs = transformer.autoregressive_inputs(targets, sequence_id=segments)
        packing = {"sequence_id": segments, "subsequence_id": subsegments, "position": positions}
    else:
        packing = {
            "encoder_sequence_id": features.get("inputs_segmentation"),
            "encoder_position": features.get("inputs_position"),
            "decoder_sequence_id": segments,
            "decoder_subsequence_id": subsegments,
            "decoder_position": positions,
        }
    returned = model.call_simple(
        inputs=inputs,
        targets=targets,
        **packing,
        compute_loss=compute_loss,
        mode=mode,
        variable_dtype=variable_dtype,
        num_microbatches=num_microbatches,
    )
    # A StudentTeacher returns logits alone where there is no loss.
    return returned if isinstance(returned, tuple) else (returned, None)


# -- its variables


@gin.configurable(module=MODULE)
def get_variable_dtype(
    master_dtype: Union[tf.DType, str] = tf.bfloat16,
    slice_dtype: Union[tf.DType, str] = tf.float32,
    activation_dtype: Union[tf.DType, str] = tf.float32,
) -> mtf.VariableDType:
    """Returns the dtypes of a model's variables and activations.

    Args:
      master_dtype: the dtype of masters and checkpoints; a tf.DType or its name.
      slice_dtype: the dtype of slices, in which variables are updated.
      activation_dtype: the dtype of activations.

    Returns:
      A VariableDType.
    """
    return mtf.VariableDType(
        tf.as_dtype(master_dtype), tf.as_dtype(slice_dtype), tf.as_dtype(activation_dtype)
    )


@gin.configurable(module=MODULE)
def variable_filter_max_size(v: mtf.Variable, max_size: float = 1e7) -> bool:
    """Returns whether a variable is small enough to be trained, as a `variable_filter`.

    Args:
      v: a Variable.
      max_size: the largest number of elements.

    Returns:
      A bool.
    """
    return v.size <= max_size


def trained_variables(graph: mtf.Graph, variable_filter: Filter) -> list[mtf.Variable]:
    """Returns the variables to train.

    Args:
      graph: a Graph.
      variable_filter: None for all that are trainable, a regular expression that is searched for
        in their names, or a function of a Variable.

    Returns:
      A list of Variables.

    Raises:
      ValueError: the filter leaves none.
    """
    if variable_filter is None:
        return list(graph.trainable_variables)
    if isinstance(variable_filter, str):
        variables = [v for v in graph.trainable_variables if re.search(variable_filter, v.name)]
    else:
        variables = [v for v in graph.trainable_variables if variable_filter(v)]
    if not variables:
        names = ", ".join(v.name for v in graph.trainable_variables[:10])
        raise ValueError(
            f"variable_filter={variable_filter!r} leaves no variable to train; the model has "
            f"{len(graph.trainable_variables)}: {names}, ..."
        )
    tf.logging.info(
        "Training %d of %d variables: %s",
        len(variables),
        len(graph.trainable_variables),
        ", ".join(v.name for v in variables),
    )
    return variables


# -- its layout


# Dimensions that only some models have, or only training or decoding.
_OF_MODELS = frozenset(
    "batch outer_batch ensemble length memory_length d_model d_ff d_kv heads memory_heads vocab "
    "experts expert_hidden beam buckets max_length inner_vocab frequent_vocab n_keys "
    "residual_length attention_heads stages".split()
)
# `tpu_mesh_shape` omits these if their size is 1.
_OF_MESHES = frozenset(["ensemble", "batch", "model"])


def layout_of_program(
    layout_rules: mtf.LayoutRules, graph: mtf.Graph, mesh_shape: mtf.Shape
) -> mtf.LayoutRules:
    """Removes layout rules for dimensions that only other models or meshes have.

    A remaining rule that splits nothing is a slip of its Lowering; so is one that splits attention
    alone, unless other models have its dimension.

    Args:
      layout_rules: LayoutRules.
      graph: the program.
      mesh_shape: a Shape.
    """
    graph.names_lent -= _OF_MODELS
    return rules_that_apply(layout_rules, graph.operations, mesh_shape, _OF_MODELS, _OF_MESHES)


# -- its outputs, and its devices


_DIMENSIONS_OF_TOPOLOGY = 4


class Outputs(NamedTuple):
    """The outputs of a program: Tensors by name, and operations that update variables.

    A program with updates is a step of training, which carries out all of its assignments.
    """

    tensors: Mapping[str, mtf.Tensor]
    updates: Sequence[mtf.Operation] = ()


class Results(NamedTuple):
    """The lowered outputs, in the tf graph."""

    tensors: dict[str, tf.Tensor]
    update: Optional[tf.Operation]
    lowering: mtf.Lowering
    summaries: dict[str, tf.Tensor]


def processor_devices(
    mesh_impl: str,
    mesh_shape: mtf.Shape,
    mesh_devices: Optional[Sequence[str]] = None,
    config: Any = None,
) -> list[str]:
    """Returns a device for each processor of a mesh.

    Args:
      mesh_impl: one of MESH_IMPLS.
      mesh_shape: the mesh.
      mesh_devices: the devices named by the user, or None.
      config: the estimator's RunConfig; required with several processes.

    Returns:
      The devices named by the user; or equally many from each process of a cluster; or GPUs if
      there are enough; or else logical CPUs on a SIMD mesh, and TensorFlow's choice elsewhere.

    Raises:
      ImportError: `mesh_impl` is "pjrt", and JAX is not installed.
      ValueError: `mesh_impl` is unknown, devices are named for devices of JAX, or the processors
        are not divisible by the processes.
    """
    check_choice("tpu_estimator_model_fn", "mesh_impl", mesh_impl, MESH_IMPLS)
    if mesh_impl == "pjrt":
        pjrt()  # for its error without JAX
        if mesh_devices is not None:
            raise ValueError(
                f"mesh_devices={list(mesh_devices)} names devices of TensorFlow, but mesh_impl "
                "'pjrt' uses those of JAX, the first of jax.devices(). Leave mesh_devices out"
            )
    if mesh_devices is not None:
        # The estimator's session has soft placement, but on a SIMD mesh.
        soft = True if mesh_impl == "placement" else None
        check_devices_exist(mesh_devices, soft, in_session=True, who="mesh_devices")
        return list(mesh_devices)
    # Only the configuration of a TPUEstimator has this.
    if in_cluster() and hasattr(config, "tpu_config") and shards_of_process(config):
        return devices_of(config)
    size = mesh_shape.size
    # TensorFlow chooses a GPU by itself where it may, which is not in a SIMD session.
    chooses = size == 1 and mesh_impl != "simd"
    return [""] if chooses else devices_for(size, None if mesh_impl == "simd" else "")


def check_tiling(spec: Optional[Sequence[Any]], mesh_shape: mtf.Shape) -> None:
    """Checks that a mesh matches a HierarchicalTiling.

    Args:
      spec: the specification of a HierarchicalTiling, or None.
      mesh_shape: the mesh.

    Raises:
      ValueError: it does not.
    """
    if spec is None:
        return
    tiled = HierarchicalTiling.spec_to_mesh_shape(spec, mesh_shape.size)
    # A dimension of size 1 splits nothing, and `tpu_mesh_shape` leaves it out.
    if [d for d in tiled if d.size > 1] != [d for d in mesh_shape if d.size > 1]:
        raise ValueError(
            f"tpu_estimator_model_fn: hierarchical_tiling_spec={spec} makes the mesh "
            f"{dims_text(tiled)}, but mesh_shape is {dims_text(mesh_shape)}: bind "
            "utils.run.mesh_shape to what utils.tpu_mesh_shape makes of the same list"
        )


# -- its place in TensorFlow's graph, or in the program of a processor


def outside_program(settings: Settings) -> contextlib.AbstractContextManager:
    """Context in which operations are created on the host, outside the TPUEstimator's program.

    Args:
      settings: the settings, which tell whether there is such a program.

    Returns:
      A context manager.
    """
    if settings.context is None:
        return contextlib.nullcontext()
    return mtf.utils.outside_all_rewrites()


def _mesh_in_program(settings: Settings, layout_rules: mtf.LayoutRules) -> SimdMeshImpl:
    """Returns a mesh of the processors that run the TPUEstimator's program."""
    assignment = settings.context.device_assignment
    physical, spec = list(assignment.topology.mesh_shape), settings.hierarchical_tiling_spec
    if spec is None:
        order = auto_logical_to_physical_tpu(
            settings.mesh_shape.to_integer_list, physical, device_assignment=assignment
        )
    else:
        if len(physical) == _DIMENSIONS_OF_TOPOLOGY:
            physical = physical_shape_3d_from_topology_proto_4d(physical)
        order = HierarchicalTiling(spec, physical).logical_to_physical
    return SimdMeshImpl(
        settings.mesh_shape, layout_rules, device_assignment=assignment, logical_to_physical=order
    )


def run_on_mesh(
    settings: Settings,
    build: Callable[[mtf.Mesh], Outputs],
    log_file: Optional[str] = None,
    summaries: bool = False,
) -> Results:
    """Builds a program for a mesh and lowers it.

    Inside the program of a TPUEstimator, the results are part of that program.

    Args:
      settings: the settings, with mesh, layout and mesh implementation.
      build: a function of a Mesh that builds the program.
      log_file: a path, to which variable sizes and counters are written.
      summaries: whether the results include the scalars of mtf.scalar_summary.

    Returns:
      Results.
    """
    devices = processor_devices(
        settings.mesh_impl, settings.mesh_shape, settings.mesh_devices, settings.config
    )
    # What runs a program on a mesh passes tensors on only, so the Lowering leaves it by this list.
    lowerings: list[mtf.Lowering] = []

    def program() -> tuple[dict[str, tf.Tensor], list[tf.Operation], dict[str, tf.Tensor]]:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "my_mesh")
        # What the collection has by now are scalars of another program in this tf graph.
        start = summaries_so_far()
        outputs = build(mesh)
        # Only once the model is built is it known which dimensions it has.
        rules = layout_of_program(settings.layout_rules, graph, settings.mesh_shape)
        impl: Any
        if settings.context is not None:
            impl = _mesh_in_program(settings, rules)
        elif settings.mesh_impl == "placement":
            impl = PlacementMeshImpl(settings.mesh_shape, rules, devices)
        elif settings.mesh_impl == "simd":
            impl = SimdMeshImpl(settings.mesh_shape, rules)
        else:
            impl = mtf.GspmdMeshImpl(settings.mesh_shape, rules)
        # What layers assign is part of a step of training, besides what the optimizer does.
        graph.assigns = "all" if outputs.updates else "none"
        lowering = mtf.Lowering(
            graph, {mesh: impl}, autostack=settings.autostack, log_file=log_file
        )
        lowerings.append(lowering)
        tensors = {name: lowering.export_to_tf_tensor(x) for name, x in outputs.tensors.items()}
        updates = lowering.effects if outputs.updates else []
        return (
            tensors,
            [tf.group(updates)] if updates else [],
            taken_summaries(start) if summaries else {},
        )

    if settings.context is not None or settings.mesh_impl == "placement":
        tensors, updates, scalars = program()
    elif settings.mesh_impl == "simd":
        tensors, updates, scalars = replicate(program, devices=devices)
    else:
        tensors, updates, scalars = pjrt().in_session(program)
    return Results(tensors, updates[0] if updates else None, lowerings[-1], scalars)
