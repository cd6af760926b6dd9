"""A checkpoint of the MNIST model with Adafactor slots, in both directions.

The classic's is written by make_fixtures.py to fixtures/classic.ckpt.*; test_oracle.py loads it
into this package.  For the other direction see check_ours_in_classic.py.  The model is narrow,
so that the file is small.
"""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle import oracle_runner
from helpers.paths import FIXTURES

PATH = str(FIXTURES / "classic.ckpt")
HIDDEN, FILTERS = 8, 4


class Model:
    """The model, its training step, and a saver, in the default tf graph."""

    def __init__(self, mesh_shape="", layout=""):
        p = oracle_runner.Case("checkpoint", mesh_shape, layout)
        images, labels = (
            p.input("images", "batch:4,rows:8,cols:8", "positive"),
            p.input("labels", "batch:4", 10),
        )
        batch, rows, cols, h, w, one = mtf.convert_to_shape(
            "batch:4,row_blocks:2,col_blocks:2,row_size:4,col_size:4,one_channel:1"
        ).dims
        x = mtf.reshape(images, [batch, rows, h, cols, w, one])
        x = mtf.transpose(x, [batch, rows, cols, h, w, one])
        with tf.variable_scope("mnist"):
            for i in range(2):
                x = mtf.relu(
                    mtf.layers.conv2d_with_blocks(
                        x,
                        mtf.Dimension(f"filters{i}", FILTERS),
                        (3, 3),
                        h_blocks_dim=rows,
                        w_blocks_dim=cols,
                        name=f"conv{i}",
                    )
                )
            x = mtf.reduce_mean(x, reduced_dim=x.shape.dims[-1])
            hidden, classes = mtf.Dimension("hidden", HIDDEN), mtf.Dimension("classes", 10)
            x = mtf.layers.dense(
                x, hidden, reduced_dims=x.shape.dims[-4:], activation=mtf.relu, name="hidden"
            )
            x = mtf.layers.layer_norm(x, hidden)
            logits = mtf.layers.dense(x, classes, reduced_dims=[hidden])
        loss = mtf.reduce_mean(
            mtf.layers.softmax_cross_entropy_with_logits(logits, labels, classes)
        )
        p.train(loss, lambda: mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=8, beta1=0.9))
        self.lowering = lowering = mtf.Lowering(p.graph, {p.mesh: p.impl()})
        self.logits, self.loss = (lowering.export_to_tf_tensor(t) for t in (logits, loss))
        updates = [lowering.lowered_operation(op) for op in p.update_ops]
        with tf.control_dependencies(updates):
            self.train = tf.assign_add(tf.train.get_global_step(), 1)
        self.to_slices = lowering.copy_masters_to_slices()
        self.to_masters = lowering.copy_slices_to_masters()
        self.saver = tf.train.Saver(tf.global_variables())
        self.fill = [
            tf.assign(
                v,
                tf.cast(
                    oracle_runner.array("positive", v.shape.as_list(), "fill", v.op.name) * 0.2,
                    v.dtype.base_dtype,
                ),
            )
            for v in tf.global_variables()
        ]

    def start(self, session):
        """Gives all variables seeded values, and copies them to the slices."""
        session.run(tf.global_variables_initializer())
        session.run(self.fill)
        session.run(self.to_slices)

    def load(self, session, path):
        self.saver.restore(session, path)
        session.run(self.to_slices)


def listing(path):
    """Returns [name, sizes, dtype] of what a checkpoint holds."""
    reader = tf.train.load_checkpoint(path)
    dtypes = reader.get_variable_to_dtype_map()
    return [
        [n, list(s), dtypes[n].name] for n, s in sorted(reader.get_variable_to_shape_map().items())
    ]


def save(path, mesh_shape="", layout=""):
    """Saves a checkpoint after three steps; returns the logits and loss of its values."""
    with tf.Graph().as_default(), tf.Session() as session:
        model = Model(mesh_shape, layout)
        model.start(session)
        for _ in range(3):
            session.run(model.train)
        session.run(model.to_masters)
        model.saver.save(session, path, write_meta_graph=False, write_state=False)
        return session.run([model.logits, model.loss])


def evaluate(path, mesh_shape="", layout=""):
    """Returns the logits and loss of a checkpoint."""
    with tf.Graph().as_default(), tf.Session() as session:
        model = Model(mesh_shape, layout)
        model.load(session, path)
        return session.run([model.logits, model.loss])


def record():
    logits, loss = save(PATH)
    np.savez(PATH + ".npz", logits=logits, loss=loss)
    print("checkpoint", len(listing(PATH)), "variables")
