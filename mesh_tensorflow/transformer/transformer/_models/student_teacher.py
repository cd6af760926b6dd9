"""Distillation: a model that learns from the probabilities of another."""

from __future__ import annotations

from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, layers
from mesh_tensorflow.utils import steps_done

__all__ = ["StudentTeacher"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
class StudentTeacher:
    """A student that learns from targets and from a teacher, which does not learn.

    Hinton et al., "Distilling the knowledge in a neural network" (2015). Variables are in the
    scopes `student` and `teacher`.
    """

    def __init__(
        self,
        student: Any,
        teacher: Any,
        temperature: Optional[float] = None,
        fraction_soft: Optional[float] = None,
        distill_start_step: int = 0,
        teacher_checkpoint: Optional[str] = None,
        initialize_student_weights: bool = False,
    ) -> None:
        """Creates the pair.

        Args:
          student: a Unitransformer or a Bitransformer.
          teacher: another, of the same output vocabulary.
          temperature: a number that the logits of both are divided by.
          fraction_soft: how much of the loss is that for the teacher's probabilities, between
            0 and 1; the rest is that for the targets.
          distill_start_step: an integer, the last step on which only targets count.
          teacher_checkpoint: a string, the path of a checkpoint of the teacher alone, without
            the scope `teacher`.
          initialize_student_weights: whether the student begins with the teacher's weights.
        """
        self.student = student
        self.teacher = teacher
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

        The teacher's variables are taken off the list of trainable ones.

        Args:
          inputs: an integer Tensor with dimensions [batch..., length], ids.
          targets: an integer Tensor with dimensions [batch..., length].
          compute_loss: a bool; the teacher is called only if it is true.
          variable_dtype: a VariableDType.
          num_microbatches: into how many parts the batch is cut, of which this is one.
          **kargs: further arguments of the models' `call_simple`.

        Returns:
          (a Tensor with dimensions [batch..., length, vocab], a scalar Tensor); the first alone
          if no loss is computed.

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
        prefix = f"{tf.get_variable_scope().name}/teacher/".lstrip("/")
        graph.make_variables_untrainable(
            [v for v in graph.trainable_variables if v.name.startswith(prefix)]
        )
        soft_loss = self._soft_loss(
            student_logits / temperature, teacher_logits / temperature, targets
        )
        soft_loss /= self.student.loss_denominator(targets, num_microbatches)
        distills = tf.greater(steps_done(), self.distill_start_step)
        fraction = tf.cast(distills, tf.float32) * fraction_soft
        # Gradients of probabilities at a temperature are smaller by its square.
        soft_fraction = tf.cast(fraction * temperature**2, soft_loss.dtype)
        hard_fraction = tf.cast(1.0 - fraction, hard_loss.dtype)
        return student_logits, hard_loss * hard_fraction + soft_loss * soft_fraction

    def _settings(self) -> tuple[float, float]:
        """Returns temperature and fraction_soft, once the pair is known to be complete."""
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
        """Returns the sum of the cross entropies of the teacher's and student's probabilities."""
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
          *args: its arguments.
          **kargs: its keyword arguments.
        """
        with tf.variable_scope("student"):
            return self.student.decode(*args, **kargs)

    def initialize(self) -> None:
        """Has the teacher's variables begin with the values in its checkpoint.

        To be called when the variables have been made, and before they are initialized. The
        student's too if it was made so.

        Raises:
          ValueError: there is no `teacher_checkpoint`, or it lacks a variable.
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
