"""A Llama that gin files describe is that of config.json: the same variables, the same logits."""

import pathlib

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils

GIN = pathlib.Path(mtf.__file__).parent / "transformer" / "gin"
SIZES = {"num_layers": 2, "d_model": 24, "d_ff": 40, "num_heads": 4, "d_kv": 6}
CONFIG = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 6, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.mark.parametrize("groups, tied", [(2, True), (1, False)])
def test_logits(groups, tied, tmp_path):
    config = {**CONFIG, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    model = mtf.models.from_config(config)
    draw = np.random.default_rng(1)
    sizes = model._form.sizes
    values = {
        weight.ours: draw.normal(0, 0.3, [sizes[d] for d in weight.dims.split()]).astype("float32")
        for weight in model._form.weights
    }
    model.assign(values)
    ids = draw.integers(0, 96, [2, 12])
    bindings = [f"{name} = {value}" for name, value in {**SIZES, "num_kv_heads": groups}.items()]
    bindings += [
        f"Unitransformer.shared_embedding_and_softmax_weights = {tied}",
        "Unitransformer.vocab_divisor = 1",
    ]
    files = [str(GIN / "defaults.gin"), str(GIN / "models" / "lm_llama.gin")]
    try:
        gin.parse_config_files_and_bindings(files, bindings, finalize_config=False)
        made = utils.build_model("lm", input_vocab_size=96, output_vocab_size=96)
        store = mtf.VariableStore()
        store.begin_with(values)
        with store.scope():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            x = mtf.import_tf_tensor(mesh, ids.astype(np.int32), "batch:2,length:12")
            logits, _ = made.call_simple(
                x, None, compute_loss=False, mode="infer",
                variable_dtype=mtf.VariableDType(tf.float32),
            )  # fmt: skip
            found = logits.numpy()
    finally:
        gin.clear_config()
    assert {v.name for v in mesh.graph.trainable_variables} == {*values}
    np.testing.assert_allclose(found, model.logits(ids), atol=1e-4)
