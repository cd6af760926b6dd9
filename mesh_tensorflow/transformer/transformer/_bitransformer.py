"""Models with an encoder and a decoder, distillation, and functions that build models for gin."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, layers
from mesh_tensorflow._core.errors import dims_text, slip, tensors_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer.transformer._call import (
    autoregressive_inputs,
    divided_loss,
    new_embedding,
    new_position_weights,
)
from mesh_tensorflow.transformer.transformer._context import EncoderOutputs, TransformerLayer
from mesh_tensorflow.transformer.transformer._decoding import Draft, draft_scope
from mesh_tensorflow.transformer.transformer._stack import LayerStack
from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer
from mesh_tensorflow.utils import steps_done

# -- the model


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@dataclasses.dataclass(eq=False, repr=False)
class Bitransformer:
    """A sequence-to-sequence model of an encoder and a decoder.

    Vaswani et al., "Attention is all you need" (2017).

    Attributes:
      encoder: a Unitransformer without an output vocabulary.
      decoder: an autoregressive Unitransformer, whose layers read the encoder's output.
      shared_embedding: whether both use the same embeddings of ids and of positions, which are in
        the variable scope `shared`; it is a ValueError if they cannot. Positional embeddings are
        shared only if both have the same maximum length.
    """

    encoder: Unitransformer
    decoder: Unitransformer
    shared_embedding: bool = True

    def __post_init__(self) -> None:
        sides = [[m.input_vocab_dim, m.model_dim] for m in (self.encoder, self.decoder)]
        if self.shared_embedding and sides[0] != sides[1]:
            raise ValueError(
                "Bitransformer: shared_embedding needs encoder and decoder of one d_model and "
                f"one input vocabulary, got {dims_text(sides[0])} and {dims_text(sides[1])}; "
                "change the sizes, or set shared_embedding=False"
            )

    @property
    def output_vocab_dim(self) -> Optional[mtf.Dimension]:
        """The output vocabulary of the decoder."""
        return self.decoder.output_vocab_dim

    @property
    def z_loss(self) -> float:
        """The coefficient of the decoder's z loss."""
        return self.decoder.z_loss

    def loss_denominator(self, targets: mtf.Tensor, num_microbatches: int) -> float:
        """Returns the denominator of the decoder's loss.

        Args:
          targets: a Tensor with dimensions [batch..., length].
          num_microbatches: an integer, the number of microbatches.
        """
        return self.decoder.loss_denominator(targets, num_microbatches)

    def _encoded_sequence_id(self, encoder_sequence_id: mtf.Tensor) -> mtf.Tensor:
        """Returns the sequence_id of the encoder's output; here that of its input."""
        return encoder_sequence_id

    def _shared_params(
        self, mesh: mtf.Mesh, variable_dtype: mtf.VariableDType
    ) -> Optional[dict[str, Any]]:
        """Returns the embeddings that encoder and decoder share, in the scope `shared`, or None."""
        if not self.shared_embedding:
            return None
        encoder, decoder = self.encoder, self.decoder
        params = {}
        with tf.variable_scope("shared"):
            params["embedding"] = new_embedding(encoder, mesh, variable_dtype)
            max_length_dim = encoder.max_length_dim
            sinusoids = [m.sinusoid_positional_embedding for m in (encoder, decoder)]
            if (
                max_length_dim is not None
                and max_length_dim == decoder.max_length_dim
                # One side with learned positions is enough: the other one does not use the
                # variable.
                and not all(sinusoids)
            ):
                params["positional_embedding"] = new_position_weights(encoder, mesh, variable_dtype)
        return params

    def _encode(
        self,
        inputs: mtf.Tensor,
        variable_dtype: mtf.VariableDType,
        sequence_id: mtf.Tensor,
        **options: Any,
    ) -> tuple[EncoderOutputs, Any]:
        """Calls the encoder; returns what the decoder reads, by its memory length, and the loss."""
        shared_params = self._shared_params(inputs.mesh, variable_dtype)
        # The encoder's stack appends to it; decoders with transparent attention mix what is in it.
        layer_outputs: list[mtf.Tensor] = []
        output, loss = self.encoder.call_simple(
            inputs,
            None,
            variable_dtype=variable_dtype,
            sequence_id=sequence_id,
            shared_params=shared_params,
            layer_outputs=layer_outputs,
            **options,
        )
        to_memory = layers.rename_length_to_memory_length
        encoded = EncoderOutputs(
            encoder_output=to_memory(output),
            encoder_sequence_id=to_memory(self._encoded_sequence_id(sequence_id)),
            encoder_inputs=to_memory(inputs),
            encoder_layer_outputs=layer_outputs,
            shared_params=shared_params,
        )
        return encoded, loss

    @leaves_no_node
    def call_simple(
        self,
        inputs: mtf.Tensor,
        targets: mtf.Tensor,
        compute_loss: bool,
        mode: str = "train",
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        decoder_sequence_id: Optional[mtf.Tensor] = None,
        decoder_subsequence_id: Optional[mtf.Tensor] = None,
        encoder_position: Optional[mtf.Tensor] = None,
        decoder_position: Optional[mtf.Tensor] = None,
        num_microbatches: int = 1,
    ) -> tuple[mtf.Tensor, Any]:
        """Returns the logits of all target positions, and the loss.

        The inputs of the decoder are the targets shifted by one position.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids, 0 at padding.
          targets: an integer Tensor with dimensions [batch..., length], ids, 0 at padding; the
            length may differ from that of the inputs.
          compute_loss: a bool, whether to compute the loss.
          mode: "train", "eval" or "infer"; see tf.estimator.ModeKeys.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoder_sequence_id: a Tensor of the shape of `inputs`, which numbers the examples
            packed into a row from 1, and is 0 at padding. If None, each row is one example, with
            padding where its ids are 0.
          decoder_sequence_id: a Tensor of the shape of `targets`, as `encoder_sequence_id`.
          decoder_subsequence_id: a Tensor of the shape of `targets`, for parts of examples.
          encoder_position: a Tensor of the shape of `inputs`, the positions within examples; 0,
            1, 2, ... if None.
          decoder_position: a Tensor of the shape of `targets`, as `encoder_position`.
          num_microbatches: an integer, the number of microbatches; this call is for one of them.

        Returns:
          (logits, loss). The logits are a Tensor with dimensions [batch..., length, vocab]; the
          loss is a scalar Tensor, or None if no loss is computed.
        """
        if encoder_sequence_id is None:
            # One example for each row: 1 at ids, 0 at padding.
            encoder_sequence_id = mtf.minimum(inputs, 1)
        if decoder_sequence_id is None:
            decoder_sequence_id = mtf.minimum(targets, 1)
        encoded, encoder_loss = self._encode(
            inputs,
            variable_dtype,
            encoder_sequence_id,
            compute_loss=compute_loss,
            mode=mode,
            position=encoder_position,
            num_microbatches=num_microbatches,
        )
        decoder_inputs = autoregressive_inputs(targets, sequence_id=decoder_sequence_id)
        logits, loss = self.decoder.call_simple(
            decoder_inputs,
            targets,
            compute_loss,
            mode=mode,
            variable_dtype=variable_dtype,
            sequence_id=decoder_sequence_id,
            subsequence_id=decoder_subsequence_id,
            position=decoder_position,
            num_microbatches=num_microbatches,
            **encoded.arguments(),
        )
        if compute_loss:
            # The encoder has no targets; its loss is that of layers, such as mixtures of experts.
            loss = loss + encoder_loss
        return logits, loss

    @leaves_no_node
    @gin.configurable(module="Bitransformer")
    def decode(
        self,
        inputs: mtf.Tensor,
        variable_dtype: mtf.VariableDType = mtf.VariableDType(tf.float32),
        beam_size: int = 1,
        alpha: float = 0.6,
        temperature: float = 0.0,
        sampling_keep_top_k: int = -1,
        decode_length_multiplier: float = 1.5,
        decode_length_constant: float = 10,
        max_decode_length: Optional[int] = None,
        draft_model: Optional[Bitransformer] = None,
        num_draft_ids: int = 4,
    ) -> mtf.Tensor:
        """Returns output sequences, by sampling or beam search.

        Args:
          inputs: an int32 Tensor with dimensions [batch..., length], ids, 0 at padding.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          beam_size: an int; 1 for sampling.
          alpha: a number, the length penalty of beam search: larger values prefer longer
            sequences.
          temperature: a number, for sampling: 0.0 takes the id with the largest logit, 1.0
            samples from the softmax. A beam search samples nothing: it must be 0.0.
          sampling_keep_top_k: an int, for sampling: the number of ids with the largest logits to
            sample from; -1 for all, which it must be for beam search.
          decode_length_multiplier: a number, for beam search: the maximum length is this times
            the length of the longest input, plus `decode_length_constant`.
          decode_length_constant: a number, for beam search.
          max_decode_length: an int, the size of the result's length; that of the inputs if None.
          draft_model: for sampling, a small Bitransformer of the same vocabulary that proposes
            ids; its variables are in the scope "draft". See
            `Unitransformer.sample_autoregressive`.
          num_draft_ids: an int, how many ids it proposes in a step.

        Returns:
          An int32 Tensor with dimensions [batch..., length].

        Raises:
          ValueError: `beam_size` is not positive, `inputs` is not such a Tensor, the draft does
            not fit, or a beam search is given arguments of sampling.
        """
        if beam_size < 1:
            raise ValueError(f"decode: beam_size must be 1, for sampling, or more, not {beam_size}")
        if beam_size > 1 and draft_model is not None:
            raise ValueError(
                f"decode: draft_model proposes ids for sampling, but beam_size is {beam_size}; set "
                "beam_size=1, or leave draft_model out"
            )
        if beam_size > 1 and (temperature != 0.0 or sampling_keep_top_k != -1):
            raise ValueError(
                f"decode: a beam search draws no ids, so temperature={temperature} and "
                f"sampling_keep_top_k={sampling_keep_top_k} have no meaning with beam_size="
                f"{beam_size}; set beam_size=1 to sample, or temperature=0.0 and "
                "sampling_keep_top_k=-1 for beams"
            )
        if not inputs.shape.dims or not inputs.dtype.is_integer:
            raise ValueError(
                "decode: inputs must be an integer Tensor with dimensions [batch..., length], not "
                f"{tensors_text([inputs])}"
            )
        *rows, length_dim = inputs.shape.dims
        if max_decode_length is None:
            decode_dim = length_dim
        else:
            decode_dim = mtf.Dimension("length", max_decode_length)
        # As in a call with one example in each row: 0 at padding, which the decoder must not see.
        reading: dict[str, Any] = {"compute_loss": False, "mode": "infer"}
        encoded, _ = self._encode(inputs, variable_dtype, mtf.minimum(inputs, 1), **reading)
        if beam_size == 1:
            draft = None
            if draft_model is not None:
                # Both models may have the same names, so the draft's variables need a scope around
                # them.
                with draft_scope():
                    read, _ = draft_model._encode(
                        inputs, variable_dtype, mtf.minimum(inputs, 1), **reading
                    )
                draft = Draft(draft_model.decoder, read, num_draft_ids)
            return self.decoder.sample_autoregressive(
                mtf.zeros(inputs.mesh, mtf.Shape([*rows, decode_dim]), tf.int32),
                temperature=temperature,
                variable_dtype=variable_dtype,
                # Zeros are no given ids: all rows begin at position 0, with states of zeros.
                has_partial_sequences=False,
                sampling_keep_top_k=sampling_keep_top_k,
                draft_model=draft,
                **encoded.arguments(),
            )
        # All rows are searched in one loop, whose number of steps is that of the longest one.
        lengths = mtf.reduce_sum(mtf.to_float(mtf.not_equal(inputs, 0)), reduced_dim=length_dim)
        longest = mtf.reduce_max(lengths, output_shape=[])
        decode_length = longest * float(decode_length_multiplier) + float(decode_length_constant)
        beams = mtf.Shape([*rows, mtf.Dimension("beam", beam_size), decode_dim])
        return self.decoder.beam_search(
            mtf.zeros(inputs.mesh, beams, tf.int32),
            mtf.to_int32(decode_length),
            variable_dtype=variable_dtype,
            alpha=alpha,
            **encoded.arguments(),
        )


# -- models of parts that gin configures; distillation


def _within(name: str) -> str:
    """Returns how names of variables in a scope within the current one begin."""
    # The programs of users may have opened a scope around the model.
    return f"{tf.get_variable_scope().name}/{name}/".lstrip("/")


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
@dataclasses.dataclass(eq=False, repr=False)
class StudentTeacher:
    """A student model that is trained on targets and on the probabilities of a fixed teacher.

    Hinton et al., "Distilling the knowledge in a neural network" (2015). The variables are in the
    scopes `student` and `teacher`.

    Attributes:
      student: a Unitransformer or a Bitransformer.
      teacher: another model, with the same output vocabulary.
      temperature: a number that the logits of both models are divided by.
      fraction_soft: a number between 0 and 1, the weight of the loss on the teacher's
        probabilities; the rest is the weight of the loss on the targets. If 0, the teacher is
        not called and has no variables.
      distill_start_step: the last step whose loss is on the targets only.
      teacher_checkpoint: the path of a checkpoint of the teacher alone, without the scope
        `teacher`.
      initialize_student_weights: whether the student is initialized from the teacher's
        checkpoint, too.
    """

    # Both must have an output vocabulary, and the student `decode` if it is called.
    student: Any
    teacher: Any
    temperature: Optional[float] = None
    fraction_soft: Optional[float] = None
    distill_start_step: int = 0
    teacher_checkpoint: Optional[str] = None
    initialize_student_weights: bool = False

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

        The teacher's variables become untrainable. The loss on its probabilities has the student's
        z loss in evaluation, too, as in the classic.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids.
          targets: an integer Tensor with dimensions [batch..., length].
          compute_loss: a bool; the teacher is called only if it is True, and `fraction_soft` is
            not 0.
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
        if self.fraction_soft == 0:
            # Nothing is learned from the teacher: it has no variables, in checkpoints neither.
            return student_logits, hard_loss
        temperature, fraction_soft = self._settings()
        with tf.variable_scope("teacher"):
            teacher_logits, _ = self.teacher.call_simple(inputs, targets, compute_loss, **kargs)
        graph = inputs.mesh.graph
        prefix = _within("teacher")
        # Only after the call, which makes the variables: optimizers are to leave them alone.
        graph.make_variables_untrainable(
            [v for v in graph.trainable_variables if v.name.startswith(prefix)]
        )
        soft_loss = self._soft_loss(
            student_logits / temperature, teacher_logits / temperature, targets
        )
        soft_loss = divided_loss(soft_loss, self.student, targets, num_microbatches)
        # A tf.Tensor: which step it is, is known only when the program runs.
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
        # -sum over v of softmax(teacher / T)[v] * log softmax(student / T)[v] (Hinton et al.).
        loss = layers.softmax_cross_entropy_with_logits(
            student_logits,
            mtf.stop_gradient(probabilities),
            vocab_dim,
            z_loss=self.student.z_loss,
        )
        # As in the hard loss: padding and given ids are not predicted.
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
        created, and before they are initialized, in the variable scope that the model was called
        in.

        Raises:
          ValueError: `teacher_checkpoint` is None, there are no variables, or one is not in the
            checkpoint.
        """
        if self.teacher_checkpoint is None:
            raise ValueError("StudentTeacher: initialize needs a teacher_checkpoint, got None")
        # Without a fraction of its loss, there is no teacher.
        sides = [] if self.fraction_soft == 0 else ["teacher"]
        if self.initialize_student_weights:
            sides.append("student")
        for side in sides:
            scope = _within(side)
            # The checkpoint is of the model by itself, so its names lack the scope.
            variables = {
                v.op.name[len(scope) :]: v
                for v in tf.global_variables()
                if v.op.name.startswith(scope)
            }
            if not variables:
                raise ValueError(
                    f"StudentTeacher: initialize finds no variables in the scope {scope!r}; call "
                    "it after call_simple, in the same variable scope"
                )
            checkpoint.init_from_checkpoint(self.teacher_checkpoint, variables)


# Gin files may name functions by this path, the public one, whichever file they are in.
_MODULE = "mesh_tensorflow.transformer.transformer"


def _layer_of(entry: object) -> tuple[Callable[..., TransformerLayer], Optional[str], dict]:
    """Returns (class, name, keyword arguments) for an entry of `layers`.

    Its parts are known by their types, since files of users have them in every order.
    """
    class_and_arguments: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    names = [p for p in class_and_arguments if isinstance(p, str)]
    kwargs = [p for p in class_and_arguments if isinstance(p, dict)]
    # None may stand for a name or for arguments that an entry leaves out.
    classes = [p for p in class_and_arguments if p is not None and not isinstance(p, (str, dict))]
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
    stack: list[TransformerLayer] = []
    for block in range(num_layers):
        for i, (cls, name, kwargs) in enumerate(entries):
            # One for each block: a layer holds its name, by which its variables are its own.
            layer = cls(**kwargs)
            # Scopes of blocks tell equal layers apart; without them, numbers must go on.
            number = i if block_scope else len(stack)
            name = name or f"layer_{number:03d}"
            layer.set_name(f"block_{block:03d}/{name}" if block_scope else name)
            stack.append(layer)
    return layer_stack_cls(stack)


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
    sides = {
        "encoder": (encoder_name, input_vocab_size, None),
        "decoder": (decoder_name, output_vocab_size, output_vocab_size),
    }
    models = []
    for scope, (name, inputs, outputs) in sides.items():
        with gin.config_scope(scope):
            model = Unitransformer(
                layer_stack=make_layer_stack(),
                input_vocab_size=inputs,
                output_vocab_size=outputs,
                autoregressive=scope == "decoder",
                name=name,
                layout=layout,
                mesh_shape=mesh_shape,
            )
        models.append(model)
    return bitransformer_cls(*models)


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
