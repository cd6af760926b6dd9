"""The Universal Transformer: one stack of layers, applied recurrently."""

from mesh_tensorflow.transformer.universal_transformer._stack import UTLayerStack

__all__ = ["UTLayerStack"]
