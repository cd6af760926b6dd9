"""Functions that build models from parts that gin configures; and distillation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, layers
from mesh_tensorflow._core.errors import slip
from mesh_tensorflow.transformer.transformer._call import divided_loss
from mesh_tensorflow.transformer.transformer._context import TransformerLayer
from mesh_tensorflow.transformer.transformer._models.bitransformer import Bitransformer
from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer
from mesh_tensorflow.transformer.transformer._stack import LayerStack
from mesh_tensorflow.utils import steps_done


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class StudentTeacher:
    """A student model that is trained on targets and on the probabilities of a fixed teacher.

    Hinton et al., "Distilling the knowledge in a neural network" (2015). The variables are in the
    scopes `student` and `teacher`.
    """

    def __init__(
        self,
        student: Union[Unitransformer, Bitransformer],
        teacher: Union[Unitransformer, Bitransformer],
        temperature: Optional[float] = None,
        fraction_soft: Optional[float] = None,
        distill_start_step: int = 0,
        teacher_checkpoint: Optional[str] = None,
        initialize_student_weights: bool = False,
    ) -> None:
        """Creates the pair.

        Args:
          student: a Unitransformer or a Bitransformer.
          teacher: another model, with the same output vocabulary.
          temperature: a number that the logits of both models are divided by.
          fraction_soft: a number between 0 and 1, the weight of the loss on the teacher's
            probabilities; the rest is the weight of the loss on the targets.
          distill_start_step: an integer, the last step whose loss is on the targets only.
          teacher_checkpoint: a string, the path of a checkpoint of the teacher alone, without
            the scope `teacher`.
          initialize_student_weights: whether the student is initialized from the teacher's
            checkpoint, too.
        """
        # Both must have an output vocabulary, and the student `decode` if it is called.
        self.student: Any = student
        self.teacher: Any = teacher
        self.temperature = temperature
        self.fraction_soft = fraction_soft
        self.distill_start_step = distill_start_step
        self.teacher_checkpoint = teacher_checkpoint
        self.initialize_student_weights = initialize_student_weights

    def call_simple(
        self,
        inputs: mtf.Tensor,
        targets: mtf.Tensor,
        compute_loss: bool,
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        num_microbatches: int = 1,
        **kargs: Any,
    ) -> Any:
        """Returns the student's logits and the loss.

        The teacher's variables become untrainable.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids.
          targets: an integer Tensor with dimensions [batch..., length].
          compute_loss: a bool; the teacher is called only if it is True.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          num_microbatches: an integer, the number of microbatches; this call is for one of them.
          **kargs: further arguments of the models' `call_simple`.

        Returns:
          (logits, loss): a Tensor with dimensions [batch..., length, vocab] and a scalar Tensor.
          The logits alone if no loss is computed.

        Raises:
          ValueError: `temperature` or `fraction_soft` is not set, or the vocabularies differ.
        """
        kargs = {"variable_dtype": variable_dtype, "num_microbatches": num_microbatches, **kargs}
        with tf.variable_scope("student"):
            student_logits, hard_loss = self.student.call_simple(
                inputs, targets, compute_loss, **kargs
            )
        if not compute_loss:
            return student_logits
        temperature, fraction_soft = self._settings()
        with tf.variable_scope("teacher"):
            teacher_logits, _ = self.teacher.call_simple(inputs, targets, compute_loss, **kargs)
        graph = inputs.mesh.graph
        # The programs of users may have opened a scope around the model.
        prefix = f"{tf.get_variable_scope().name}/teacher/".lstrip("/")
        graph.make_variables_untrainable(
            [v for v in graph.trainable_variables if v.name.startswith(prefix)]
        )
        soft_loss = self._soft_loss(
            student_logits / temperature, teacher_logits / temperature, targets
        )
        soft_loss = divided_loss(soft_loss, self.student, targets, num_microbatches)
        distills = tf.greater(steps_done(), self.distill_start_step)
        fraction = tf.cast(distills, tf.float32) * fraction_soft
        # The temperature divides the gradients of the soft loss by its square.
        soft_fraction = tf.cast(fraction * temperature**2, soft_loss.dtype)
        hard_fraction = tf.cast(1.0 - fraction, hard_loss.dtype)
        return student_logits, hard_loss * hard_fraction + soft_loss * soft_fraction

    def _settings(self) -> tuple[float, float]:
        """Returns (temperature, fraction_soft), and checks that the two models fit."""
        if self.temperature is None or self.fraction_soft is None:
            raise ValueError(
                "StudentTeacher: temperature and fraction_soft must be set, got temperature="
                f"{self.temperature}, fraction_soft={self.fraction_soft}; bind them with gin"
            )
        dims = [m.output_vocab_dim for m in (self.student, self.teacher)]
        if dims[0] != dims[1]:
            raise ValueError(
                "StudentTeacher: student and teacher must have one output vocabulary, got "
                f"{dims[0]} and {dims[1]}"
            )
        return self.temperature, self.fraction_soft

    def _soft_loss(
        self, student_logits: mtf.Tensor, teacher_logits: mtf.Tensor, targets: mtf.Tensor
    ) -> mtf.Tensor:
        """Returns the summed cross entropy of the student's and the teacher's probabilities."""
        vocab_dim = self.student.output_vocab_dim
        probabilities = mtf.softmax(teacher_logits, vocab_dim)
        loss = layers.softmax_cross_entropy_with_logits(
            student_logits,
            mtf.stop_gradient(probabilities),
            vocab_dim,
            z_loss=self.student.z_loss,
        )
        weights = mtf.cast(mtf.greater(targets, 0), loss.dtype)
        return mtf.reduce_sum(loss * weights)

    def decode(self, *args: Any, **kargs: Any) -> mtf.Tensor:
        """Returns the result of the student's `decode`.

        Args:
          *args: arguments of the student's `decode`.
          **kargs: keyword arguments of the student's `decode`.
        """
        with tf.variable_scope("student"):
            return self.student.decode(*args, **kargs)

    def initialize(self) -> None:
        """Sets the teacher's variables to be initialized from its checkpoint.

        With `initialize_student_weights`, the student's too. Call it after the variables are
        created, and before they are initialized.

        Raises:
          ValueError: `teacher_checkpoint` is None, or a variable is not in the checkpoint.
        """
        if self.teacher_checkpoint is None:
            raise ValueError("StudentTeacher: initialize needs a teacher_checkpoint, got None")
        scopes = ["teacher/", *(["student/"] if self.initialize_student_weights else [])]
        for scope in scopes:
            checkpoint.init_from_checkpoint(
                self.teacher_checkpoint,
                {
                    v.op.name[len(scope) :]: v
                    for v in tf.global_variables()
                    if v.op.name.startswith(scope)
                },
            )


_MODULE = "mesh_tensorflow.transformer.transformer"


def _layer_of(entry: object) -> tuple[Callable[..., TransformerLayer], Optional[str], dict]:
    """Returns (class, name, keyword arguments) for an entry of `layers`.

    Its parts are known by their types, since files of users have them in every order.
    """
    parts: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    names = [p for p in parts if isinstance(p, str)]
    kwargs = [p for p in parts if isinstance(p, dict)]
    classes = [p for p in parts if p is not None and not isinstance(p, (str, dict))]
    if not classes or not all(callable(c) for c in classes):
        raise ValueError(
            "make_layer_stack: an entry of layers must be a class of layers, or a list of it, a "
            f"name (a string) and keyword arguments (a dictionary), got {entry!r}"
        )
    for what, several in (("classes", classes), ("names", names)):
        if len(several) > 1:
            slip(
                f"make_layer_stack: the entry {entry!r} of layers has {len(several)} {what}, of "
                f"which only the last counts, {several[-1]!r}. Give each layer an entry of its own"
            )
    arguments = {name: value for given in kwargs for name, value in given.items()}
    return classes[-1], names[-1] if names else None, arguments


@gin.configurable(module=_MODULE)
def make_layer_stack(
    layers: Sequence[object] = gin.REQUIRED,
    layer_stack_cls: Callable[[list[TransformerLayer]], TransformerLayer] = LayerStack,
    num_layers: int = 6,
    block_scope: bool = True,
) -> TransformerLayer:
    """Returns a stack of blocks of layers.

    A layer is named `block_000/layer_000`, by the indices of the block and of the layer in it;
    without `block_scope` it is named `layer_000`, by its index among all layers. A name in
    `layers` replaces `layer_000`. Layers of the same name share their variables.

    Args:
      layers: a list with an entry for each layer of a block: a class, or a list or tuple of a
        class and, optionally, a name and a dictionary of keyword arguments, in any order.
      layer_stack_cls: a class, or a function that takes the list of layers.
      num_layers: an integer, the number of blocks.
      block_scope: whether the names of layers begin with the name of the block.

    Raises:
      ValueError: `layers` is not such a list.
    """
    if not isinstance(layers, (list, tuple)):
        raise ValueError(
            f"make_layer_stack: layers must be a list of classes of layers, got {layers!r}"
        )
    entries = [_layer_of(entry) for entry in layers]
    made: list[TransformerLayer] = []
    for block in range(num_layers):
        for i, (cls, name, kwargs) in enumerate(entries):
            layer = cls(**kwargs)
            number = i if block_scope else len(made)
            name = name or f"layer_{number:03d}"
            layer.set_name(f"block_{block:03d}/{name}" if block_scope else name)
            made.append(layer)
    return layer_stack_cls(made)


@gin.configurable(module=_MODULE)
def make_bitransformer(
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout: Optional[mtf.LayoutRules] = None,
    mesh_shape: Optional[mtf.Shape] = None,
    encoder_name: str = "encoder",
    decoder_name: str = "decoder",
    bitransformer_cls: Callable[[Unitransformer, Unitransformer], Bitransformer] = Bitransformer,
) -> Bitransformer:
    """Returns a Bitransformer; gin configures its parts in the scopes `encoder` and `decoder`.

    Args:
      input_vocab_size: an integer.
      output_vocab_size: an integer.
      layout: the LayoutRules that the model will be lowered with, for layers that ask.
      mesh_shape: the Shape of the mesh, for layers that ask.
      encoder_name: a string, the variable scope of the encoder.
      decoder_name: a string, the variable scope of the decoder.
      bitransformer_cls: a class, or a function that takes the encoder and the decoder.
    """
    with gin.config_scope("encoder"):
        encoder = Unitransformer(
            layer_stack=make_layer_stack(),
            input_vocab_size=input_vocab_size,
            output_vocab_size=None,
            autoregressive=False,
            name=encoder_name,
            layout=layout,
            mesh_shape=mesh_shape,
        )
    with gin.config_scope("decoder"):
        decoder = Unitransformer(
            layer_stack=make_layer_stack(),
            input_vocab_size=output_vocab_size,
            output_vocab_size=output_vocab_size,
            autoregressive=True,
            name=decoder_name,
            layout=layout,
            mesh_shape=mesh_shape,
        )
    return bitransformer_cls(encoder, decoder)


@gin.configurable(module=_MODULE)
def make_bi_student_teacher(
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout: Optional[mtf.LayoutRules] = None,
    mesh_shape: Optional[mtf.Shape] = None,
) -> StudentTeacher:
    """Returns a StudentTeacher of two Bitransformers.

    Gin configures them in the scopes `student` and `teacher`.

    Args:
      input_vocab_size: an integer.
      output_vocab_size: an integer.
      layout: the LayoutRules that the models will be lowered with, for layers that ask.
      mesh_shape: the Shape of the mesh, for layers that ask.
    """
    models = {}
    for scope in ("student", "teacher"):
        with gin.config_scope(scope):
            models[scope] = make_bitransformer(
                input_vocab_size=input_vocab_size,
                output_vocab_size=output_vocab_size,
                layout=layout,
                mesh_shape=mesh_shape,
            )
    return StudentTeacher(models["student"], models["teacher"])
