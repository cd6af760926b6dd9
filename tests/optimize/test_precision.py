"""Mixed precision: dtypes of variables, activations and losses, and what is computed in float32."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import simd_mesh_impl
from mesh_tensorflow.testing import harness
from mesh_tensorflow.transformer import transformer, transformer_layers

CPUS = [f"/cpu:{i}" for i in range(4)]
BATCH, LENGTH, MODEL = mtf.convert_to_shape("batch:4,length:6,model:8").dims
VOCAB, HEADS, KV = mtf.convert_to_shape("vocab:12,heads:2,kv:4").dims
IDS = np.random.RandomState(0).randint(1, 12, [4, 6])


class Model:
    """A layer of attention between embeddings and logits; a step of AdamW."""

    def __init__(self):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        ids = mtf.import_tf_tensor(self.mesh, tf.constant(IDS, tf.int32), [BATCH, LENGTH])
        x = mtf.layers.embedding(ids, VOCAB, MODEL, mtf.VariableDType())
        memory = mtf.Dimension("memory_length", 6)
        mask = mtf.layers.attention_mask_autoregressive(mtf.range(self.mesh, LENGTH, tf.int32))
        y = mtf.layers.multihead_attention(
            mtf.layers.layer_norm(x, MODEL), None, mask, KV, HEADS, is_training=True
        )
        assert memory.size == LENGTH.size
        self.hidden = x + y
        bias = mtf.get_variable(self.mesh, "scale", [MODEL], initializer=tf.ones_initializer())
        logits = mtf.layers.dense(self.hidden * bias, [VOCAB], reduced_dims=[MODEL], name="logits")
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, ids, VOCAB)
        self.loss = mtf.reduce_mean(losses)
        variables = self.graph.trainable_variables
        grads = mtf.gradients([self.loss], [v.value for v in variables])
        grads, _ = mtf.optimize.clip_by_global_norm(grads, 1.0)
        self.updates = mtf.optimize.AdamWOptimizer(0.01).apply_grads(grads, variables)


def losses(setting, simd=False):
    """Returns the losses of some steps, and the model."""
    made = []
    with tf.Graph().as_default(), harness.session() as session:
        tf.set_random_seed(1)
        before = None

        def program():
            with mtf.precision(setting):
                made.append(Model())
            args = ("rows:2,cols:2", "batch:rows,heads:cols,vocab:cols")
            if simd:
                impl = simd_mesh_impl.SimdMeshImpl(*args)
            else:
                impl = mtf.placement_mesh_impl.PlacementMeshImpl(*args, [""] * 4)
            lowering = mtf.Lowering(made[0].graph, {made[0].mesh: impl})
            made.append(None if simd else lowering.copy_masters_to_slices())
            loss = lowering.export_to_tf_tensor(made[0].loss)
            with tf.control_dependencies([loss]):
                train = [lowering.lowered_operation(op) for op in made[0].updates]
            return [loss, tf.group(train)]

        step = simd_mesh_impl.replicate(program, devices=CPUS) if simd else program()
        session.run(tf.global_variables_initializer())
        before = made[1]
        if before is not None:
            session.run(before)
        return [session.run(step)[0] for _ in range(5)], made[0]


@pytest.mark.slow
def test_training():
    """Nearly the losses of float32, and the same in SIMD programs; dtypes as documented."""
    exact, plain = losses("float32")
    mixed, model = losses("mixed_bfloat16")
    in_simd, _ = losses("mixed_bfloat16", simd=True)
    assert exact[-1] < exact[0] - 0.1
    np.testing.assert_allclose(mixed, exact, rtol=0.02)
    np.testing.assert_allclose(in_simd, mixed, rtol=0.01)
    assert model.hidden.dtype == tf.bfloat16 and model.loss.dtype == tf.float32
    names = [v.name for v in plain.graph.all_variables]
    assert [v.name for v in model.graph.all_variables] == names
    for v in model.graph.all_variables:
        assert (v.master_dtype, v.slice_dtype) == (tf.float32, tf.float32)
        assert v.activation_dtype == (tf.bfloat16 if v.trainable else tf.float32), v.name


def test_updates_within_a_precision(tf_graph):
    """Learning rates and slots are float32 wherever apply_grads is called."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with mtf.precision("mixed_bfloat16"):
        w = mtf.get_variable(mesh, "w", [MODEL], initializer=tf.ones_initializer())
        grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
        optimizer = mtf.optimize.AdamWOptimizer(tf.constant(0.1), weight_decay_rate=0.0)
        updates = optimizer.apply_grads(grads, mesh.graph.trainable_variables)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    step = [lowering.lowered_operation(update) for update in updates]
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(step)
        session.run(lowering.copy_slices_to_masters())
        [value] = session.run(mesh.graph.name_to_variable["w"].get_master().read_value()[None])
    np.testing.assert_allclose(value, 0.9, rtol=1e-5)


def test_what_is_imported_and_asked_for(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")

    def imported(dtype):
        return mtf.import_tf_tensor(mesh, tf.zeros([4], dtype), [BATCH]).dtype

    def made(name, **kwargs):
        dtype = mtf.get_variable(mesh, name, [BATCH], **kwargs).operation.dtype
        return tuple(d.name for d in vars(dtype).values())

    with mtf.precision(mtf.Precision("bfloat16", slice_dtype="bfloat16")):
        assert [imported(d) for d in (tf.float32, tf.int32, tf.float64)] == [
            tf.bfloat16,
            tf.int32,
            tf.float64,
        ]
        wide = mtf.zeros(mesh, [BATCH], tf.float32)
        array = np.ones(4, np.float32)
        beside = [1.0 - wide, mtf.maximum(wide, 1.0), wide * array, array - wide]
        constant = mtf.constant(mesh, array, [BATCH], tf.float32)
        assert [y.dtype for y in [*beside, constant]] == [tf.float32] * 5
        assert made("a") == ("float32", "bfloat16", "bfloat16")
        assert made("b", trainable=False) == ("float32",) * 3
        assert made("c", dtype=tf.float64) == ("float64",) * 3
        asked = mtf.VariableDType(tf.bfloat16, tf.float32, tf.float32)
        assert made("d", dtype=asked) == ("bfloat16", "float32", "float32")
        x = mtf.zeros(mesh, [BATCH, MODEL])
        mtf.layers.dense(x, [VOCAB], reduced_dims=[MODEL], name="e", use_bias=False)
        [kernel] = [v for v in mesh.graph.all_variables if v.name == "e/kernel"]
        assert kernel.activation_dtype == tf.float32  # as the layer's input
        with mtf.precision("float32"):
            assert made("f") == ("float32",) * 3 and imported(tf.float32) == tf.float32
    assert made("g") == ("float32",) * 3 and imported(tf.float32) == tf.float32


def test_computed_in_float32():
    """Softmax, norms and losses of bfloat16 are those of float32, rounded once."""
    rows = np.random.RandomState(0).randn(4, 8).astype(np.float32) * 3
    narrow = tf.cast(rows, tf.bfloat16)

    def build(mesh, x):
        ids = mtf.import_tf_tensor(mesh, tf.constant([1, 2, 3, 4]), [BATCH])
        normal, _ = mtf.layers.batch_norm(x, True, 0.9, name="batch")
        loss = mtf.layers.softmax_cross_entropy_with_logits
        return [
            mtf.softmax(x, MODEL),
            mtf.log_softmax(x, MODEL),
            mtf.reduce_logsumexp(x, MODEL, extra_logit=mtf.constant(mesh, 1.0, dtype=x.dtype)),
            mtf.layers.layer_norm(x, MODEL),
            normal,
            loss(x, ids, MODEL),
            loss(x, ids, MODEL, z_loss=0.1),
            mtf.layers.sigmoid_cross_entropy_with_logits(x, x),
        ]

    def run(dtype, setting):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with mtf.precision(setting):
            x = mtf.import_tf_tensor(mesh, tf.cast(narrow, dtype), [BATCH, MODEL])
            ys = build(mesh, x)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "model:x", [""] * 2)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return [lowering.export_to_tf_tensor(y) for y in ys]

    exact, mixed = run(tf.float32, "float32"), run(tf.bfloat16, "mixed_bfloat16")
    assert [y.dtype.name for y in mixed] == ["bfloat16"] * 5 + ["float32"] * 3
    for one, other in zip(exact[:4] + exact[5:], mixed[:4] + mixed[5:]):
        rounded = tf.cast(one, other.dtype)
        np.testing.assert_allclose(
            tf.cast(other, tf.float32), tf.cast(rounded, tf.float32), rtol=0.01, atol=1e-6
        )


ERRORS = {
    "name": (
        lambda: mtf.precision("half").__enter__(),
        "'half' is neither an mtf.Precision nor one",
    ),
    "float16": (
        lambda: mtf.precision("mixed_float16").__enter__(),
        "float16 would need a scale of the loss, which is not offered; bfloat16 has the range of",
    ),
    "dtype": (
        lambda: mtf.Precision(tf.float16),
        "activation_dtype must be 'float32' or 'bfloat16', not tf.float16. float16 would need",
    ),
    "slices": (
        lambda: mtf.Precision(slice_dtype="int8"),
        "Precision: slice_dtype must be 'float32' or 'bfloat16', not 'int8'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        call()


def test_transformers(tf_graph):
    """Their activations and losses, too, without a word about dtypes."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    sublayers = transformer.sublayer_rms_norm
    with mtf.precision("mixed_bfloat16"):
        stack = transformer.LayerStack(
            [transformer_layers.SelfAttention(num_heads=2, key_value_size=4)],
            sublayers_initial=[sublayers],
            sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
            sublayers_final=[sublayers],
        )
        model = transformer.Unitransformer(
            stack, 8, input_vocab_size=12, output_vocab_size=12, autoregressive=True, max_length=6
        )
        ids = mtf.import_tf_tensor(mesh, tf.constant(IDS, tf.int32), [BATCH, LENGTH])
        logits, loss = model.call_simple(
            ids, ids, compute_loss=True, mode="train", variable_dtype=mtf.VariableDType()
        )
    assert (logits.dtype, loss.dtype) == (tf.bfloat16, tf.float32)
    for v in mesh.graph.trainable_variables:
        assert (v.slice_dtype, v.activation_dtype) == (tf.float32, tf.bfloat16)
    grads = mtf.gradients([loss], [v.value for v in mesh.graph.trainable_variables])
    assert all(g is not None for g in grads)


OPTIMIZERS = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.05),
    "sgd with momentum": lambda: mtf.optimize.SgdOptimizer(0.05, momentum=0.9, nesterov=True),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.05),
    "adamw": lambda: mtf.optimize.AdamWOptimizer(mtf.schedules.constant(0.05)),
    "lion": lambda: mtf.optimize.LionOptimizer(0.05),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.05),
    "keras": lambda: mtf.optimize.from_keras(tf.keras.optimizers.RMSprop(0.05, momentum=0.5)),
}


@pytest.mark.parametrize(
    "name", [n if n == "momentum" else pytest.param(n, marks=pytest.mark.slow) for n in OPTIMIZERS]
)
def test_gradients_in_float32_of_values_in_bfloat16(name):
    """Those of microbatches are float32: the updates are those of gradients in bfloat16."""

    def trained(number, wide=False):
        store = mtf.VariableStore()
        for _ in range(3):
            with store.scope(), mtf.precision("mixed_bfloat16"):
                mesh = mtf.Mesh(mtf.Graph(), "mesh")

                def loss_fn(x):
                    y = mtf.layers.dense(x, [HEADS], [MODEL], name="y", use_bias=False)
                    return mtf.reduce_mean(mtf.square(mtf.to_float(y) - 1.0))

                data = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
                x = mtf.import_tf_tensor(mesh, data, [BATCH, MODEL])
                fill = tf.constant_initializer(0.5)
                mtf.get_variable(mesh, "y/kernel", [MODEL, HEADS], initializer=fill)
                found = mtf.optimize.accumulate_gradients(loss_fn, x, BATCH, number)
                grads = [g if wide else mtf.to_bfloat16(g) for g in found.grads]
                OPTIMIZERS[name]().apply_grads(grads, found.variables)
                impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", [""] * 2)
                mtf.Lowering(mesh.graph, {mesh: impl})
        return store.value("y/kernel").numpy()

    narrow = trained(1)
    assert np.abs(narrow - 0.5).max() > 1e-3
    for number in (1, 2):
        np.testing.assert_allclose(trained(number, wide=True), narrow, atol=4e-3)
