"""Trains and uses a model by the classes of the package t5, with data of the package seqio."""

import os
import tempfile
import unittest

import gin
import numpy as np
import seqio
import tensorflow.compat.v1 as tf
from t5.models import mtf_model

import mesh_tensorflow as mtf

VOCABULARY = seqio.ByteVocabulary()
GIN = [os.path.join(os.path.dirname(mtf.__file__), "transformer", "gin")]
GIN += [os.path.join(os.path.dirname(mtf_model.__file__), "gin")]
SMALL = ["d_model=32", "d_ff=64", "d_kv=8", "num_heads=4", "num_layers=2", "dropout_rate=0.0"]
LENGTHS = {"inputs": 16, "targets": 12}


def examples(split, shuffle_files=False, seed=None):
    """Returns texts, and the same backwards."""
    rng = np.random.RandomState(len(split))
    texts = ["".join(rng.choice(list("abcdef"), size=rng.randint(3, 9))) for _ in range(64)]
    reverse = [text[::-1] for text in texts]
    return tf.data.Dataset.from_tensor_slices({"inputs": texts, "targets": reverse})


feature = seqio.Feature(VOCABULARY, add_eos=True)
seqio.TaskRegistry.add(
    "reverse",
    seqio.FunctionDataSource(examples, splits=["train", "validation"]),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={"inputs": feature, "targets": feature},
    metric_fns=[],
)


class T5ModelTest(unittest.TestCase):
    """The methods of MtfModel, in the order in which its users call them."""

    @classmethod
    def setUpClass(cls):
        tf.disable_v2_behavior()
        for path in GIN:
            gin.add_config_file_search_path(path)
        gin.parse_config_files_and_bindings(["defaults.gin", "models/bi_v1.gin"], SMALL)
        cls.directory = tempfile.mkdtemp()
        cls.model("").train("reverse", 6)

    @classmethod
    def model(cls, mesh_shape, directory=None):
        size = mtf.convert_to_shape(mesh_shape).size
        return mtf_model.MtfModel(
            model_dir=directory or cls.directory,
            tpu=None,
            batch_size=8,
            sequence_length=LENGTHS,
            mesh_shape=mesh_shape,
            mesh_devices=["cpu:0"] * size if mesh_shape else None,
            learning_rate_schedule=0.01,
            save_checkpoints_steps=3,
            iterations_per_loop=3,
            extra_gin_bindings=[],
        )

    def predicted(self, mesh_shape, beam_size):
        with tempfile.TemporaryDirectory() as folder:
            given, out = os.path.join(folder, "in"), os.path.join(folder, "out")
            with open(given, "w") as file:
                file.write("abc\nfedc\naabbcc\n")
            self.model(mesh_shape).predict(
                given, out, beam_size=beam_size, temperature=0.0, vocabulary=VOCABULARY
            )
            with open(out + "-6") as file:
                return file.read().splitlines()

    def test_train_in_another_layout(self):
        """A checkpoint of one processor is continued on four."""
        self.model("model:2,batch:2").train("reverse", 9)
        self.assertTrue(os.path.exists(os.path.join(self.directory, "model.ckpt-9.index")))

    def test_predict(self):
        for beam_size in (1, 3):
            texts = self.predicted("", beam_size)
            self.assertEqual(len(texts), 3)
            self.assertEqual(self.predicted("model:2,batch:2", beam_size), texts)

    def test_score(self):
        scores = [
            self.model(mesh_shape).score(
                inputs=["abc", "fedc"], targets=["cba", "cdef"], vocabulary=VOCABULARY
            )
            for mesh_shape in ("", "model:2,batch:2")
        ]
        self.assertEqual(scores[0][1], ["cba", "cdef"])
        self.assertLess(max(scores[0][0]), 0.0)
        np.testing.assert_allclose(scores[1][0], scores[0][0], rtol=1e-4)

    def test_export(self):
        with tempfile.TemporaryDirectory() as folder:
            path = self.model("").export(folder, temperature=0.0, vocabulary=VOCABULARY)
            self.assertTrue(tf.saved_model.contains_saved_model(os.fsdecode(path)))

    def test_finetune(self):
        with tempfile.TemporaryDirectory() as folder:
            step = int(tf.train.latest_checkpoint(self.directory).rpartition("-")[2])
            self.model("", folder).finetune("reverse", 2, pretrained_model_dir=self.directory)
            self.assertIn(f"model.ckpt-{step + 2}.index", os.listdir(folder))
