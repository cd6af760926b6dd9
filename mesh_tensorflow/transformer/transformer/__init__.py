"""Models: stacks of layers with embeddings, for language and from one sequence to another."""

from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.transformer.transformer._bitransformer import (
    Bitransformer,
    StudentTeacher,
    make_bi_student_teacher,
    make_bitransformer,
    make_layer_stack,
)
from mesh_tensorflow.transformer.transformer._call import (
    UnscaledVocabEmbedding,
    VocabEmbedding,
    autoregressive_inputs,
    delimited_lm_inputs_mask,
    get_vocab_embedding_cls,
    reduce_ensemble_logits,
    reduce_ensemble_logits_mean_logit,
    reduce_ensemble_logits_mean_prob,
    reduce_ensemble_logits_select,
    shift_targets,
    sinusoid_positional_embedding_weights,
)
from mesh_tensorflow.transformer.transformer._context import Context, TransformerLayer
from mesh_tensorflow.transformer.transformer._pipelined import PipelinedLayerStack
from mesh_tensorflow.transformer.transformer._stack import (
    LayerStack,
    ReversibleLayerStack,
    sublayer_annealed_dropout,
    sublayer_call_layer,
    sublayer_clip_activation_gradient,
    sublayer_dropout,
    sublayer_legacy_dropout,
    sublayer_legacy_final_rms_norm,
    sublayer_legacy_rms_norm,
    sublayer_mask_padding,
    sublayer_residual,
    sublayer_rezero,
    sublayer_rms_norm,
    sublayer_rms_norm_subsampled,
    sublayer_scale_norm,
    sublayer_true_layer_norm,
)
from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer

__all__ = [
    "Bitransformer",
    "Context",
    "LayerStack",
    "PipelinedLayerStack",
    "ReversibleLayerStack",
    "StudentTeacher",
    "TransformerLayer",
    "Unitransformer",
    "UnscaledVocabEmbedding",
    "VocabEmbedding",
    "autoregressive_inputs",
    "delimited_lm_inputs_mask",
    "get_vocab_embedding_cls",
    "make_bi_student_teacher",
    "make_bitransformer",
    "make_layer_stack",
    "reduce_ensemble_logits",
    "reduce_ensemble_logits_mean_logit",
    "reduce_ensemble_logits_mean_prob",
    "reduce_ensemble_logits_select",
    "shift_targets",
    "sinusoid_positional_embedding_weights",
    "sublayer_annealed_dropout",
    "sublayer_call_layer",
    "sublayer_clip_activation_gradient",
    "sublayer_dropout",
    "sublayer_legacy_dropout",
    "sublayer_legacy_final_rms_norm",
    "sublayer_legacy_rms_norm",
    "sublayer_mask_padding",
    "sublayer_residual",
    "sublayer_rezero",
    "sublayer_rms_norm",
    "sublayer_rms_norm_subsampled",
    "sublayer_scale_norm",
    "sublayer_true_layer_norm",
]

replaceable(__name__)
