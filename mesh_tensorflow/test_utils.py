"""Utilities for tests of programs on one processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._lowering.lowering import Lowering
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

__all__ = ["NumpyConverter"]


class NumpyConverter:
    """Converts NumPy arrays to Tensors of its own graph, and back.

    Attributes:
      graph: the Graph.
      mesh: its Mesh.
    """

    def __init__(self) -> None:
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "my_mesh")
        self._session: Optional[tf.Session] = None

    @property
    def session(self) -> tf.Session:
        """The session that runs converted tensors, except in eager code."""
        if self._session is None:
            self._session = tf.Session()
        return self._session

    def convert_np_array_to_mtf_tensor(
        self,
        x: npt.ArrayLike,
        dim_names: Optional[Sequence[str]] = None,
        dtype: tf.DType = tf.int32,
    ) -> mtf.Tensor:
        """Returns a Tensor with the values of an array.

        Args:
          x: an array.
          dim_names: names of its dimensions; dim0, dim1, ... if None.
          dtype: a dtype.
        """
        x = np.asarray(x)
        names = [f"dim{i}" for i in range(x.ndim)] if dim_names is None else dim_names
        shape = mtf.Shape([mtf.Dimension(n, s) for n, s in zip(names, x.shape, strict=True)])
        return mtf.import_tf_tensor(self.mesh, tf.constant(x, dtype=dtype), shape)

    def convert_mtf_tensor_to_np_array(self, x_mtf: mtf.Tensor) -> np.ndarray:
        """Returns the value of a Tensor, after initializing all variables."""
        lowering, x_tf = self.convert_mtf_tensor_to_tf_tensor(x_mtf)
        if tf.executing_eagerly():
            return x_tf.numpy()
        self.session.run(tf.global_variables_initializer())
        self.session.run(lowering.copy_masters_to_slices())
        return self.session.run(x_tf)

    def convert_mtf_tensor_to_tf_tensor(self, mtf_tensor: mtf.Tensor) -> tuple[Lowering, tf.Tensor]:
        """Returns (a Lowering of the graph, the Tensor's value as a tf.Tensor)."""
        mesh_impl = PlacementMeshImpl(shape=[], layout={}, devices=[""])
        lowering = Lowering(self.graph, {self.mesh: mesh_impl})
        return lowering, lowering.export_to_tf_tensor(mtf_tensor)
