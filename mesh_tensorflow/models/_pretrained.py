"""What models of all families have: weights by the names of variables, read and written back."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import first_names
from mesh_tensorflow._huggingface import write_folder
from mesh_tensorflow._mesh.variables.checkpoint_files import check_writable
from mesh_tensorflow.models._family import Form
from mesh_tensorflow.models._place import Place
from mesh_tensorflow.models._tokenizer import Tokenizer
from mesh_tensorflow.models._weights import Weights, tensors_of


class Pretrained:
    """A model of a family, whose weights are in parts on a mesh.

    Attributes:
      config: the contents of config.json.
      tokenizer: the Tokenizer of the folder; None if it has none, or the package tokenizers is not
        installed.
      weights: the weights by the names of variables, as `init_checkpoint` of `mtf.train.fit` and
        `directory` of `mtf.train.predict` take them. Those of a folder are read when they are asked
        for. Empty if there are none yet: then variables begin with their initializers.
      store: the VariableStore that calls keep weights in.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        form: Form,
        weights: Mapping[str, np.ndarray],
        place: Place,
        dtype: str,
        tokenizer: Optional[Tokenizer] = None,
    ) -> None:
        """Creates it; `from_pretrained` and `from_config` do so for users."""
        self.config = dict(config)
        self.tokenizer = tokenizer
        self.weights = weights
        self.store = place.new_store()
        self.store.begin_with(weights)
        # By the names of the whole model, which PEFT has also where a folder has shorter ones.
        self._form_of_family = form
        self._form = form = weights.form if isinstance(weights, Weights) else form
        self._names = [weight.ours for weight in form.weights]
        self._dtypes = {
            # Trainings have masters in float32, also of a model that computes in bfloat16.
            name: weights.dtype(name) if isinstance(weights, Weights) else np.dtype("float32")
            for name in self._names
        }
        self._place, self._mesh_impl = place, place.mesh_impl
        self._dtype = dtype

    def _function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function compiled, whose first call reads weights and shows how far it is."""
        compiled = self._place.function(fn, self.store)

        @functools.wraps(compiled)
        def call(*args: Any) -> Any:
            weights = self.weights
            shown: contextlib.AbstractContextManager = contextlib.nullcontext()
            # What `assign` was given is in memory: there is nothing to read.
            if self._place.shows and isinstance(weights, Weights):
                shown = weights.progress_shown()
            with shown:
                return compiled(*args)

        return call

    def _tokenizer_for(self, what: str, texts: str) -> Tokenizer:
        """Returns the tokenizer, without which what `texts` names are lists of ids."""
        if self.tokenizer is None:
            raise ValueError(
                f"{what}: the model has no tokenizer, so {texts} are lists of ids. It reads "
                "tokenizer.json of the folder where the package tokenizers is installed: "
                "pip install tokenizers"
            )
        return self.tokenizer

    def __repr__(self) -> str:
        """Says its family, its size, and how it is split."""
        weights = sum(
            math.prod(self._form.sizes[d] for d in w.dims.split()) for w in self._form.weights
        )
        family = self.config.get("model_type")
        return f"<{type(self).__name__} {family}: {weights:,} weights on {self._place!r}>"

    def assign(self, variables: Mapping[str, Any]) -> None:
        """Sets the weights, such as to those of a training.

        Args:
          variables: arrays by the names of variables, such as `Result.variables` of
            `mtf.train.fit`. Other names are ignored.

        Raises:
          ValueError: variables are missing, or have other shapes.
        """
        if not isinstance(variables, Mapping):
            raise ValueError(
                f"assign: variables are arrays by name, such as Result.variables, not {variables!r}"
            )
        missing = [name for name in self._names if name not in variables]
        if missing:
            raise ValueError(
                f"assign: the variables lack {first_names(missing)}; give all of the model's"
            )
        # All of them are looked at before any is set, so that an error leaves the model as it was.
        values = {name: np.asarray(variables[name]) for name in self._names}
        for weight in self._form.weights:
            sizes = [self._form.sizes[d] for d in weight.dims.split()]
            shape = list(values[weight.ours].shape)
            if shape != sizes:
                raise ValueError(f"assign: {weight.ours} has shape {shape} instead of {sizes}")
        self.weights = values
        # The store has those variables alone that a call has made so far.
        self.store.begin_with(values)
        for name in values.keys() & self.store.names:
            self.store.assign(name, values[name])

    def check_weights(self, what: str) -> None:
        """Checks that there are weights.

        Args:
          what: the method that is to have them, for the error.

        Raises:
          ValueError: the model is a new one, with which nothing has been done.
        """
        if not self.weights:
            raise ValueError(
                f"{what}: the model has no weights yet; train it, and give them to `assign`"
            )

    def save_pretrained(self, path: Union[str, os.PathLike[str]]) -> None:
        """Writes the model, its weights in the dtypes that they were read in, and its tokenizer.

        The files are `config.json` and `model.safetensors`; of a tokenizer `tokenizer.json`,
        `chat_template.jinja` and, for the tokens that the template names, `tokenizer_config.json`;
        of a LanguageModel `generation_config.json` as it was read;
        of a TextEncoder also those that say how it pools. All of them are written before any is put
        into the directory, the weights last. Of several processes one calls it; each has them all.

        Args:
          path: a directory, which has no model yet; created if it does not exist.

        Raises:
          ImportError: safetensors is not installed.
          ValueError: there are no weights yet, the directory already holds a model, or it cannot be
            written.
        """
        check_path("save_pretrained", path, "folder, which has no model yet")
        self.check_weights("save_pretrained")
        check_writable(os.fspath(path), "save_pretrained: path")
        values = {name: self.weights[name].astype(self._dtypes[name]) for name in self._names}
        tensors = tensors_of(self._form.weights, values, self._form.sizes)
        write_folder(tensors, self.config, os.fspath(path), self._write_more)

    def _write_more(self, folder: str) -> None:
        """Writes the files of a folder that have neither weights nor config.json."""
        if self.tokenizer is not None:
            self.tokenizer.save(folder)


def check_path(what: str, path: object, of: str) -> None:
    """Checks an argument that is a path.

    Args:
      what: the name of the method, for the error.
      path: the argument.
      of: what it is the path of, for the error.

    Raises:
      ValueError: it is no path.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(f"{what}: path is that of a {of}, not {path!r}")


def array_of(what: str, rows: Any) -> np.ndarray:
    """Returns rows of numbers as an array.

    Args:
      what: what is given them, for the error.
      rows: an array, or lists of the same length.

    Raises:
      ValueError: their lengths differ.
    """
    try:
        return np.asarray(rows)
    except ValueError as error:
        lengths = [len(row) if hasattr(row, "__len__") else row for row in rows]
        raise ValueError(
            f"{what}: rows are of one length, but have {first_names(list(map(str, lengths)))}; "
            "generate, log_probs and embed take rows of several lengths"
        ) from error


def rows_of_ids(what: str, ids: Any) -> np.ndarray:
    """Returns rows of ids as an array, in code that returns values.

    Args:
      what: the name of the method that is given them, for errors.
      ids: an array, or lists of the same length.

    Raises:
      ValueError: they are not ints, [batch, length]; or there are no values here.
    """
    if not tf.executing_eagerly():
        raise ValueError(
            f"{what} returns values, so it needs eager code: call it outside of tf.function, "
            "of sessions and of tf.disable_v2_behavior. There, the attribute `model` is what "
            "programs are built of"
        )
    rows = array_of(what, ids)
    if rows.ndim != 2 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
        raise ValueError(
            f"{what}: ids must be ints, [batch, length], and at least one, but have the shape "
            f"{list(rows.shape)} and dtype {rows.dtype}"
        )
    return rows


def imported(mesh: mtf.Mesh, x: tf.Tensor, *names: str) -> mtf.Tensor:
    """Returns a tf.Tensor as a Tensor with dimensions of some names.

    Args:
      mesh: a Mesh.
      x: a tf.Tensor of a known shape.
      *names: a name for each dimension.
    """
    dims = [mtf.Dimension(name, size) for name, size in zip(names, x.shape.as_list())]
    return mtf.import_tf_tensor(mesh, x, mtf.Shape(dims))
