"""Distillation: a model that is trained on the probabilities of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import checkpoint, layers
from mesh_tensorflow.transformer.transformer._loss import divided_loss
from mesh_tensorflow.utils import steps_done

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.bitransformer import Bitransformer
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["StudentTeacher"]


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
