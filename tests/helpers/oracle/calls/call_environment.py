"""The names in which calls are written: modules, and small tensors made when a call needs them."""

import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
import mesh_tensorflow.auto_mtf
import mesh_tensorflow.beam_search
import mesh_tensorflow.optimize
import mesh_tensorflow.test_utils
import mesh_tensorflow.tpu_variables
import mesh_tensorflow.utils
from mesh_tensorflow import ops, placement_mesh_impl, simd_mesh_impl
from mesh_tensorflow.auto_mtf import (
    graph_interface,
    layout_optimizer,
    memory_estimator,
    scheduler,
    valid_layouts,
)
from mesh_tensorflow.bert import bert, optimization, tokenization
from mesh_tensorflow.transformer import (
    adaptive_softmax,
    attention,
    dataset,
    evolved_transformer,
    fixup_layers,
    funnel_transformer,
    heterogeneous_moe,
    learning_rate_schedules,
    memory_layers,
    moe,
    transformer,
    transformer_layers,
    universal_transformer,
    utils,
    vocab_embeddings,
    vocabulary,
)

STATIC = {
    "mtf": mtf,
    "tf": tf,
    "np": np,
    "os": os,
    "ops": ops,
    "S": mtf.Shape,
    "D": mtf.Dimension,
    "placement": placement_mesh_impl,
    "simd": simd_mesh_impl,
    "optimize": mtf.optimize,
    "layers": mtf.layers,
    "auto_mtf": mtf.auto_mtf,
    "graph_interface": graph_interface,
    "layout_optimizer": layout_optimizer,
    "memory_estimator": memory_estimator,
    "scheduler": scheduler,
    "valid_layouts": valid_layouts,
    "beam_search": mtf.beam_search,
    "test_utils": mtf.test_utils,
    "tpu_variables": mtf.tpu_variables,
    "mtf_utils": mtf.utils,
    "bert": bert,
    "optimization": optimization,
    "tokenization": tokenization,
    "adaptive_softmax": adaptive_softmax,
    "attention": attention,
    "dataset": dataset,
    "evolved_transformer": evolved_transformer,
    "fixup_layers": fixup_layers,
    "funnel_transformer": funnel_transformer,
    "heterogeneous_moe": heterogeneous_moe,
    "schedules": learning_rate_schedules,
    "memory_layers": memory_layers,
    "moe": moe,
    "transformer": transformer,
    "transformer_layers": transformer_layers,
    "universal_transformer": universal_transformer,
    "utils": utils,
    "vocab_embeddings": vocab_embeddings,
    "vocabulary": vocabulary,
}
for _dim in mtf.convert_to_shape(
    "a:2,b:3,c:4,rows:2,cols:2,batch:2,length:4,memory_length:4,d_model:4,vocab:6,heads:2,"
    "h:4,w_dim:4"
):
    STATIC[_dim.name] = _dim
STATIC["n_dim"] = mtf.Dimension("n", 2)
STATIC["vdtype"] = mtf.VariableDType(tf.float32, tf.float32, tf.float32)

LAZY = {}


def lazy(fn):
    """A name that is made when a call needs it; its parameters are other such names."""
    LAZY[fn.__name__] = fn
    return fn


def _input(mesh, dims, dtype="float32", scale=0.25, name=None):
    """Imports 0, 1, 2 ... around zero, times `scale`."""
    shape = mtf.Shape(dims)
    count = shape.size
    values = ((np.arange(count) * 7) % max(count, 1) - count // 2) * scale
    if dtype == "int32":
        values = np.arange(count) % 3
    values = values.reshape(shape.to_integer_list).astype("float32" if dtype == "bool" else dtype)
    if dtype == "bool":
        values = values > 0
    return mtf.import_tf_tensor(mesh, tf.constant(values), shape)


def _named(text):
    return mtf.convert_to_shape(text).dims


for _name, (_dims, _dtype) in {
    "x": ("a:2,b:3", "float32"),
    "y": ("b:3,c:4", "float32"),
    "s": ("", "float32"),
    "row": ("b:3", "float32"),
    "one_row": ("a:1,b:3", "float32"),
    "ints": ("a:2", "int32"),
    "bools": ("a:2,b:3", "bool"),
    "image": ("batch:1,h:4,w:4,in:2", "float32"),
    "volume": ("batch:1,d:4,h:4,w:4,in:1", "float32"),
    "sequence": ("batch:2,length:4,d_model:4", "float32"),
    "ids": ("batch:2,length:4", "int32"),
}.items():
    LAZY[_name] = lambda mesh, _dims=_dims, _dtype=_dtype: _input(mesh, _named(_dims), _dtype)


@lazy
def graph():
    return mtf.Graph()


@lazy
def mesh(graph):
    return mtf.Mesh(graph, "mesh")


@lazy
def half(x):
    return mtf.cast(x, tf.bfloat16)


def _variable(mesh, name):
    return mtf.get_variable(
        mesh, name, mtf.Shape(_named("a:2,b:3")), initializer=tf.constant_initializer(0.5)
    ).operation


@lazy
def v(mesh):
    return _variable(mesh, "v")


@lazy
def v2(mesh):
    return _variable(mesh, "v2")


@lazy
def w(v):
    return v.outputs[0]


@lazy
def impl():
    return placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])


@lazy
def impl4():
    """A mesh of four processors, of which each has its slices apart."""
    merge = {"merge": "none"} if hasattr(mtf, "VariableStore") else {}
    return placement_mesh_impl.PlacementMeshImpl(
        "rows:2,cols:2", "a:rows,c:cols", [""] * 4, **merge
    )


@lazy
def four(impl4):
    """Four slices on `impl4`."""
    return impl4.LaidOutTensor([tf.constant([[1.0 + n, 2.0], [3.0, 4.0 * n]]) for n in range(4)])


@lazy
def lowering(graph, mesh, x, impl):
    return mtf.Lowering(graph, {mesh: impl})


@lazy
def folder():
    """A folder of this call's own."""
    return tempfile.mkdtemp()


@lazy
def vocab_file(folder):
    path = os.path.join(folder, "vocab.txt")
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the qu ##ick fox ##es , un ##aff ##able".split()
    with open(path, "w") as f:
        f.write("\n".join(words) + "\n")
    return path


class Model:
    """What the layers of a transformer ask of their model."""

    model_dim = mtf.Dimension("d_model", 4)
    ensemble_dim = None
    layout = mtf.convert_to_layout_rules("")
    mesh_shape = mtf.Shape([])
    fully_autoregressive = True
    name = "model"
    z_loss = 0.0


@lazy
def context(mesh, sequence):
    batch, length = sequence.shape.dims[:2]
    return transformer.Context(
        model=Model(),
        mesh=mesh,
        batch_dims=[batch],
        length_dim=length,
        variable_dtype=STATIC["vdtype"],
        mode="eval",
        losses=[],
        position=mtf.mtf_range(mesh, length, tf.int32),
        position_is_default=True,
        inputs=None,
    )


class Words(vocabulary.Vocabulary):
    """A vocabulary of numbers: "3 4" is [3, 4]."""

    @property
    def vocab_size(self):
        return 20

    def encode(self, s):
        return [int(word) for word in s.split()]

    def decode(self, ids):
        return " ".join(str(int(n)) for n in ids)

    def encode_tf(self, s):
        return tf.strings.to_number(tf.strings.split([s]).values, tf.int32)

    def decode_tf(self, ids):
        return tf.strings.reduce_join(tf.strings.as_string(ids), separator=" ")


@lazy
def words():
    return Words()


@lazy
def texts(words):
    """A data set of two examples of ids."""

    def generate():
        yield {"inputs": [3, 4, 5], "targets": [6, 1]}
        yield {"inputs": [7], "targets": [8, 9, 1]}

    return tf.data.Dataset.from_generator(
        generate, {"inputs": tf.int64, "targets": tf.int64}, {"inputs": [None], "targets": [None]}
    )


class Environment(dict):
    """Names for one call; those of LAZY are made as they are looked up."""

    def __init__(self, **names):
        super().__init__(STATIC)
        self.update(names)

    def make(self, name):
        if name not in self and name in LAZY:
            fn = LAZY[name]
            code = fn.__code__
            needed = [n for n in code.co_varnames[: code.co_argcount] if not n.startswith("_")]
            self[name] = fn(*[self.make(n) for n in needed])
        return self.get(name)

    def prepare(self, code):
        """Makes all names that a piece of code mentions, in alphabetical order."""
        names = set(code.co_names)
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                names |= self.names(constant)
        for name in sorted(names):
            self.make(name)

    def names(self, code):
        found = set(code.co_names)
        for constant in code.co_consts:
            if hasattr(constant, "co_names"):
                found |= self.names(constant)
        return found
