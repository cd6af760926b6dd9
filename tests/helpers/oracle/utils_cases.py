"""Calls of functions of transformer.utils that build no model, written once for both packages."""

import functools
import inspect
import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf

MESH, LAYOUT = "batch:4,model:2,outer:2", "batch:batch,heads:model,outer_batch:outer"
LENGTHS = {"inputs": 128, "targets": 64}
LINES = ["5 6 7", "8 9", "10 11 12 13 14 15 16 17 18 19"]
IDS = [[5, 6, 1, 7], [1, 2, 3, 4], [5, 6, 7, 8], [0, 5, 1, 0]]
STEPS = [0, 100, 200, 1000]


class Numbers:
    """Ids as decimal numbers."""

    vocab_size = 100

    def encode(self, s):
        return [int(i) for i in s.split()]

    def decode(self, ids):
        return " ".join(str(int(i)) for i in ids)

    def encode_tf(self, s):
        return tf.strings.to_number(tf.strings.split([s]).values, tf.int32)

    def decode_tf(self, ids):
        return tf.strings.reduce_join(tf.as_string(ids), separator=" ", axis=-1)


def _meshes(utils, mtf):
    calls = [
        ("v3-8", 1), ("v3-8", 4), ("v3-8", 8), ("4x4", 4), ("4x4", 4, 2), ("2x2x2", 2), ("v3-1", 1),
        ("8x8_twisted", 4, 2), ("8x8_untwisted", 1, 4), ("4x4", [["batch", None], ["model", [2, 2]]])]
    return [utils.tpu_mesh_shape(*call).to_string for call in calls]


def _batch_sizes(utils, mtf):
    mesh, layout = mtf.convert_to_shape(MESH), mtf.convert_to_layout_rules(LAYOUT)
    methods = [
        ("sequences_per_batch", 16), ("sequences_per_replica", 3), ("tokens_per_batch", 1024),
        ("tokens_per_replica", 256)]
    return [utils.compute_batch_size(LENGTHS, mesh, layout, m) for m in methods]


def _microbatches(utils, mtf):
    mesh, layout = mtf.convert_to_shape(MESH), mtf.convert_to_layout_rules(LAYOUT)
    none = mtf.convert_to_shape(""), mtf.convert_to_layout_rules("")
    found = []
    for size in (12, 20, 28, 32, 40, 48, 60):
        for tokens in (None, 64, 128, 256, 350, 512, 600, 4096):
            for where in ((mesh, layout), none):
                found.append(utils.serialize_num_microbatches(
                    mtf.Dimension("batch", size), LENGTHS, *where, tokens))
    return found


def _train_steps(utils, mtf):
    return [utils.auto_train_steps(32, LENGTHS), utils.auto_train_steps(7, LENGTHS, 1000)]


def _encoded(utils, mtf):
    found = {}
    for model_type in ("lm", "aligned", "bitransformer", "delimited_lm"):
        found[model_type] = [a.tolist() for a in (
            utils.encode_inputs(LINES, Numbers(), model_type, 4, 6),
            utils.encode_inputs(LINES[:2], Numbers(), model_type, 2, 6, 33),
            utils.encode_inputs(
                LINES[:2], Numbers(), model_type, 2, 6, unscored_prefix=["51 52 53", "11"]))]
    pairs = ["5 6 7", "8 9"], ["3", "4 5 6 7 8 9 10"]
    found["delimited"] = [a.tolist() for a in (
        utils.encode_delimited_lm(*pairs, Numbers(), 4, 8),
        utils.encode_delimited_lm(*pairs, Numbers(), 2, 6, include_final_eos=False),
        utils.encode_delimited_lm(*pairs, (Numbers(), Numbers()), 2, 8, eos_id=44))]
    return found


def _cleaned(utils, mtf):
    arguments = [{}, {"eos_id": 6, "pad_id": -1}, {"length_axis": 0}, {"pad_id": 9}]
    with tf.Graph().as_default(), tf.Session() as session:
        return [
            session.run(utils.clean_decodes(tf.constant(IDS), **kwargs)).tolist()
            for kwargs in arguments]


def _checkpoints(utils, mtf):
    with tempfile.TemporaryDirectory() as directory:
        for step in STEPS:
            for ending in (".index", ".data-00000-of-00001", ".meta"):
                with open(f"{directory}/model.ckpt-{step}{ending}", "w"):
                    pass
        with open(f"{directory}/checkpoint", "w") as f:
            f.write('model_checkpoint_path: "model.ckpt-1000"\n')
        calls = [
            (100,), (120,), (170,), (-1,), (5000,), ([100, 900],), ([900, 100, 110],), ("all",), (0,),
            ("all", 100), ([100, 200, 1000], 100), ([120, 100], 0, None, False),
            (None, 0, 1000)]
        found = []
        for step, *more in calls:
            paths = utils.get_checkpoint_iterator(step, directory, *more)
            found.append([os.path.relpath(p, directory) for p in paths])
        names = ["/a/model.ckpt-123", "model.ckpt-5.index", "/a/model.ckpt-12/x"]
        return found + [[utils.get_step_from_checkpoint_path(name) for name in names]]


def _files(utils, mtf):
    texts = [
        "a\n#b\n\n c \nlast", "a\nb\n", "a\nb\n\n", "a\n\n\nb\n\n\n\n", "a\n  #x\nb #\n \n", "\n\na",
        "a\r\nb\u00e9\u2028c\n", ""]
    found, read = [], utils.get_inputs_from_file
    if "keep_empty_lines" in inspect.signature(read).parameters:  # which the classic always does
        read = functools.partial(read, keep_empty_lines=True)
    with tempfile.TemporaryDirectory() as directory:
        path = os.path.join(directory, "f")
        for text in texts:
            with open(path, "wb") as f:
                f.write(text.encode())
            found += [read(path), read(path, True)]
        for lines in (["a", "b", 3], ["q"]):
            utils.write_lines_to_file(lines, path)
            with open(path) as f:
                found.append(f.read())
    return found


def _saved_scores(utils, mtf):
    example = {
        "inputs": np.array([5, 6, 1, 0]), "targets": np.array([7, 8, 1, 0]), "scores": -1.5}
    second = {
        "inputs": np.array([5, 0, 0, 0]), "targets": np.array([7, 0, 0, 0]), "scores": -22.34189}
    text = {**example, "inputs_pretokenized": "in t", "targets_pretokenized": "ta\nt"}
    targets = {"targets": np.array([7, -8, 1, 0]), "scores": -1.5}
    found = []
    for results in ([example, second], [text], [targets]):
        for keep in (True, False):
            with tempfile.TemporaryDirectory() as directory:
                returned = utils.save_scores(results, Numbers(), f"{directory}/s", keep)
                files = {}
                for name in sorted(os.listdir(directory)):
                    with open(os.path.join(directory, name)) as f:
                        files[name] = f.read()
                found.append([list(returned), files])
    added = utils._maybe_add_pretokenized_features([example, targets], (Numbers(), Numbers()))
    keep = "inputs_pretokenized", "targets_pretokenized", "targets_neg_pretokenized"
    return [*found, [{k: e[k] for k in keep if k in e} for e in added]]


def _metrics(utils, mtf):
    with tf.Graph().as_default(), tf.Session() as session:
        values = tf.placeholder(tf.float32, [3])
        metrics = [utils.metric_sum(values, name="s"), utils.metric_max(values)]
        session.run(tf.local_variables_initializer())
        for fed in ([1, 2, 5], [3, -2, 0]):
            session.run([m[1] for m in metrics], {values: fed})
        names = [v.op.name for v in tf.local_variables()]
        return [[float(x) for x in session.run([m[0] for m in metrics])], names]


PACKED = {
    "inputs": [[5, 6, 1, 7, 1, 9, 1, 0]], "inputs_segmentation": [[1, 1, 1, 2, 2, 3, 3, 0]],
    "inputs_position": [[0, 1, 2, 0, 1, 0, 1, 0]], "targets": [[8, 1, 9, 10, 1, 1]],
    "targets_segmentation": [[1, 1, 2, 2, 2, 3]], "targets_position": [[0, 1, 0, 1, 2, 0]],
}  # fmt: skip


def _text2self(utils, mtf):
    found = []
    pairs = [
        ([[5, 6, 1, 0], [7, 1, 0, 0]], [[8, 9, 1, 0], [1, 0, 0, 0]]),
        ([[5, 6, 1, 0], [7, 1, 0, 0]], [[8, 9, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]]),
        ([[5, 6, 7, 8]], [[8, 9, 1, 2]])]
    for example in [*({"inputs": a, "targets": b} for a, b in pairs), PACKED]:
        with tf.Graph().as_default(), tf.Session() as session:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            features = {
                name: mtf.import_tf_tensor(
                    mesh, tf.constant(x),
                    [mtf.Dimension("batch", len(x)), mtf.Dimension("length", len(x[0]))])
                for name, x in example.items()}
            y = utils._dynamic_text2self(features)
            impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
            lowering = mtf.Lowering(mesh.graph, {mesh: impl})
            found.append([
                [name, x.shape.to_string, session.run(lowering.export_to_tf_tensor(x)).tolist()]
                for name, x in sorted(y.items())])
    return found


def _layer_names(blocks, layers, names):
    return [
        f"block_{b:03d}/layer_{i:03d}/{names[(b * layers + i) % len(names)]}"
        for b in range(blocks) for i in range(layers)]


ENCODER, DECODER = ["SelfAttention/q", "Dense/wi"], ["SelfAttention/q", "EncDec/q", "Dense/wi"]


def _model(encoder, decoder):
    """Names of variables of stacks with (blocks, layers of a block)."""
    return [f"encoder/{n}" for n in _layer_names(*encoder, ENCODER)] + [
        f"decoder/{n}" for n in _layer_names(*decoder, DECODER)] + ["shared/embedding"]


def _mapped(utils, mtf):
    saved = _model((2, 2), (2, 3))
    cases = [
        (_model((2, 2), (2, 3)), None), (_model((1, 4), (1, 6)), None),
        (_model((1, 6), (1, 6)), ([4, 5], [])), (_model((1, 4), (1, 9)), ([], [6, 7, 8])),
        ([n.replace("block_000/", "") for n in _model((1, 4), (1, 6))], None)]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        with tf.Graph().as_default(), tf.Session() as session:
            for name in saved:
                tf.get_variable(name, [2])
            session.run(tf.global_variables_initializer())
            path = tf.train.Saver().save(session, f"{directory}/model.ckpt")
        for names, new in cases:
            with tf.Graph().as_default():
                for name in names:
                    tf.get_variable(name, [2])
                mapping = utils.flexible_ckpt_init_mapping(path, new)
                there = utils.flexible_ckpt_init_mapping(path, new, return_mapping_fn=False)
                found.append([mapping(n) if there(n) else None for n in names])
    return found


CASES = {
    "meshes": _meshes, "batch_sizes": _batch_sizes, "microbatches": _microbatches,
    "train_steps": _train_steps, "encoded": _encoded, "cleaned": _cleaned,
    "checkpoints": _checkpoints, "files": _files, "saved_scores": _saved_scores,
    "metrics": _metrics, "text2self": _text2self, "mapped": _mapped,
}  # fmt: skip
