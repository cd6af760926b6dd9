"""Transparent attention: encoder-decoder attention to learned mixes of the encoder's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer._residual_length import to_length
from mesh_tensorflow.transformer.transformer_layers._attention.enc_dec_attention import (
    EncDecAttention,
)

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["TransparentEncDecAttention"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class TransparentEncDecAttention(EncDecAttention):
    """Encoder-decoder attention to learned mixes of the encoder's layers, one per decoder module.

    Bapna et al., "Training deeper neural machine translation models with transparent attention"
    (2018). Encoder and decoder are grouped into modules of several layers; a mix is a weighted sum
    of the encoder's input and the outputs of its modules.
    """

    def __init__(
        self,
        layers_per_encoder_module: int = gin.REQUIRED,
        layers_per_decoder_module: int = gin.REQUIRED,
        encoder_num_modules: int = gin.REQUIRED,
        decoder_num_modules: int = gin.REQUIRED,
        dropout_rate: float = 0.0,
        **kwargs: Any,
    ) -> None:
        """Creates the layer.

        Args:
          layers_per_encoder_module: an integer.
          layers_per_decoder_module: an integer.
          encoder_num_modules: an integer.
          decoder_num_modules: an integer.
          dropout_rate: the dropout rate of the mixing weights and of the attention weights.
          **kwargs: further arguments of `EncDecAttention`.
        """
        super().__init__(dropout_rate=dropout_rate, **kwargs)
        self.layers_per_encoder_module = layers_per_encoder_module
        self.layers_per_decoder_module = layers_per_decoder_module
        self.encoder_num_modules = encoder_num_modules
        self.decoder_num_modules = decoder_num_modules

    def _get_memory_antecedent(self, context: Context) -> mtf.Tensor:
        # The first layer of this kind computes the mixes for all of them.
        if not hasattr(context, "decoder_layers_per_module"):
            context.decoder_layers_per_module = self._get_decoder_inputs(context)
        module = context.layer_index // self.layers_per_decoder_module
        if module >= self.decoder_num_modules:
            raise ValueError(
                f"TransparentEncDecAttention: layer {context.layer_index} of the decoder is in "
                f"module {module} of layers_per_decoder_module={self.layers_per_decoder_module}, "
                f"but decoder_num_modules={self.decoder_num_modules}"
            )
        return context.decoder_layers_per_module[module]

    def _get_decoder_inputs(self, context: Context) -> list[mtf.Tensor]:
        """Returns the mix for each decoder module."""
        outputs = self._module_outputs(context)
        stacked = mtf.stack(outputs, "encoder_module_outputs")
        encoder_dim = stacked.shape.dims[0]
        decoder_dim = mtf.Dimension("decoder_module_inputs", self.decoder_num_modules)
        weights = mtf.get_variable(
            context.mesh,
            "w",
            mtf.Shape([encoder_dim, decoder_dim]),
            initializer=tf.random_normal_initializer(stddev=encoder_dim.size**-0.5),
            dtype=context.variable_dtype,
        )
        rate = self.dropout_rate if context.train else 0.0
        weights = mtf.dropout(weights, context.train, keep_prob=1.0 - rate)
        weights = mtf.softmax(weights, encoder_dim)
        mixed = mtf.einsum(
            [weights, stacked], output_shape=mtf.Shape([decoder_dim, *outputs[0].shape])
        )
        return mtf.unstack(mixed, decoder_dim)

    def _module_outputs(self, context: Context) -> list[mtf.Tensor]:
        """Returns the encoder's input and the outputs of its modules."""
        found = context.encoder_layer_outputs or []
        needed = self.encoder_num_modules * self.layers_per_encoder_module + 1
        if len(found) != needed:
            raise ValueError(
                f"TransparentEncDecAttention: the encoder has {len(found)} layer outputs, its "
                f"input among them, not {needed} by encoder_num_modules="
                f"{self.encoder_num_modules} times layers_per_encoder_module="
                f"{self.layers_per_encoder_module} plus 1; set these to what the encoder is"
            )
        length_name = context.length_dim.name
        modules = [to_length(x, length_name) for x in found[:: self.layers_per_encoder_module]]
        return [
            layers.rename_length_to_memory_length(x, length_name)
            if length_name in x.shape.dimension_names
            else x
            for x in modules
        ]
