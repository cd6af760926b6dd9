"""T5-small of this package, for t5_small.py."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import tensorflow.compat.v1 as tf
from t5_small import BATCH, BEAMS, LEARNING_RATE, SIZES, TARGETS, ids
from talking import serve

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

MESHES = {
    "one": ("", "", 1),
    "2x2": ("rows:2;cols:2", "batch:rows;vocab:cols;d_ff:cols;heads:cols", 4),
}
# Ends of names of systems: with bfloat16, and with processors of one memory merged.
BFLOAT16, MERGED = "_bf16", "_merged"


def side(kinds: str, **options: Any) -> Any:
    """The encoder or the decoder; `kinds` has a letter for each layer of a block."""
    heads = {"num_heads": SIZES["num_heads"], "key_value_size": SIZES["d_kv"]}
    layers = {
        "s": [
            transformer_layers.SelfAttention,
            {**heads, "relative_attention_type": "bias_shared"},
        ],
        "e": [transformer_layers.EncDecAttention, heads],
        "f": [transformer_layers.DenseReluDense, {"hidden_size": SIZES["d_ff"]}],
    }

    def stack(made: list) -> Any:
        return transformer.LayerStack(made, dropout_rate=0.0, norm_epsilon=1e-6)

    return transformer.Unitransformer(
        transformer.make_layer_stack([layers[k] for k in kinds], stack, SIZES["num_layers"]),
        d_model=SIZES["d_model"],
        input_vocab_size=SIZES["vocab_size"],
        max_length=512,
        positional_embedding=False,
        shared_embedding_and_softmax_weights=True,
        z_loss=0.0,
        **options,
    )


def model() -> Any:
    """T5-small."""
    return transformer.Bitransformer(
        side("sf", autoregressive=False, output_vocab_size=None, name="encoder"),
        side("sef", autoregressive=True, output_vocab_size=SIZES["vocab_size"], name="decoder"),
    )


def prepare(task: str, folder: str, mesh_name: str, threads: int) -> tuple[Callable[[], Any], dict]:
    """Returns what is timed, and the outcome that other systems must have too."""
    shape, rules, count = MESHES[mesh_name.removesuffix(BFLOAT16).removesuffix(MERGED)]
    merge = "memory" if MERGED in mesh_name else "device"
    precision = "mixed_bfloat16" if mesh_name.endswith(BFLOAT16) else "float32"
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    inputs, targets = (
        mtf.import_tf_tensor(
            mesh, tf.constant(x), mtf.Shape([mtf.Dimension("batch", BATCH), ("length", x.shape[1])])
        )
        for x in ids()
    )
    devices = [f"cpu:{i}" for i in range(count)]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, rules, devices, merge=merge)
    if task == "train":
        with mtf.precision(precision):
            loss = model().call_simple(inputs, targets, compute_loss=True)[1]
        weights = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.outputs[0] for v in weights])
        updates = mtf.optimize.SgdOptimizer(LEARNING_RATE).apply_grads(gradients, weights)
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetched = [lowering.export_to_tf_tensor(loss)]
        fetched.append(tf.group([lowering.lowered_operation(op) for op in updates]))
    else:
        with mtf.precision(precision):
            found = model().decode(
                inputs,
                decode_length_multiplier=0,
                decode_length_constant=TARGETS,
                max_decode_length=TARGETS,
                beam_size=BEAMS if task == "beam" else 1,
            )
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetched = [lowering.export_to_tf_tensor(found)]
    session = tf.Session(
        config=tf.ConfigProto(
            device_count={"CPU": count},
            # As mtf.session_config does, on a machine with so many cores.
            intra_op_parallelism_threads=1 if count >= threads and merge != "memory" else threads,
            inter_op_parallelism_threads=threads,
        )
    )
    session.run(tf.global_variables_initializer())
    with tempfile.TemporaryDirectory() as directory:
        # In a process of its own, whose memory is not that of what is measured.
        command = [sys.executable, "-m", "mesh_tensorflow.transformer.convert", "from-huggingface"]
        subprocess.run([*command, folder, directory], check=True, stdout=subprocess.DEVNULL)
        tf.train.Saver().restore(session, tf.train.latest_checkpoint(directory))
    session.run(lowering.copy_masters_to_slices())
    run = session.make_callable(fetched)
    outcome: Any
    if task == "train":
        outcome = [float(run()[0]) for _ in range(3)][-1]
    else:
        outcome = run()[0][:, :TARGETS].tolist()
    return run, {"outcome": outcome}


def work(task: str, folder: str, threads: int, mesh: str) -> None:
    """Serves."""
    tf.disable_v2_behavior()
    serve(lambda: prepare(task, folder, mesh, threads))
