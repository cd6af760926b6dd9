"""What is given to TensorFlow's compiler: few operations that it is slow to translate."""

import re

import numpy as np
import pytest
import tensorflow as tf
from helpers.pjrt import DATA, LAYOUT, MESH, on_jax

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.gspmd import matrix_product

PRODUCTS = [
    "ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ac", "xab,xbc->xac", "xyab,xycb->xyac",
    "ab,bc->ca",  # transposed
    "axb,xbc->xac",  # the batch is not first
    "axb,bxc->cxa",
]  # fmt: skip
MERGED = [  # with what becomes one with a dimension before it
    ("abc,cx->abx", "b"),
    ("abc,dbc->da", "c"),
    ("abcd,xcb->adx", "cd"),  # in another order
    ("abxcd,xcbd->axb", "d"),
    ("abcd,bdx->acx", "cd"),
    ("ab,b->a", ""),  # and a vector, which is no matrix
    ("a,ab->b", ""),
    ("ab,ab->", "b"),
    ("xab,xb->xa", ""),
]
OTHERS = [
    "xab,yab->",  # x is summed over
    "ab,ab->ab",  # nothing is contracted
    "ab,cd->acbd",
    "a,bd->a",  # nothing in common
    "ab,bc,cd->ad",
]
SIZES = dict(zip("abcdxy", range(2, 8)))


def product_of(equation, split=""):
    """Returns what `matrix_product` makes of random operands, and NumPy's result."""
    rng = np.random.default_rng(0)
    *inputs, output = (
        mtf.Shape([mtf.Dimension(c, SIZES[c]) for c in text])
        for text in equation.replace("->", ",").split(",")
    )
    values = [rng.standard_normal(s.to_integer_list).astype("float32") for s in inputs]
    tensors = [tf.constant(v) for v in values]

    def merges(dims):
        return not any(d.name in split for d in dims[1:])

    found = matrix_product(inputs, output, tensors, merges)
    return found, np.einsum(equation, *values)


@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_of_matrices(equation):
    found, expected = product_of(equation, split="abcdxy")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("equation", "later"), MERGED)
def test_several_dimensions_are_merged_where_only_the_first_is_split(equation, later):
    found, expected = product_of(equation, split=set("abcdxy") - set(later))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for name in later:
        assert product_of(equation, split=name)[0] is None


@pytest.mark.parametrize("equation", OTHERS)
def test_other_products_are_left_to_einsum(equation):
    assert product_of(equation)[0] is None


def test_what_results_do_not_need_is_left_out():
    """A function of Python has no kernel in XLA, and side effects: it is not even translated."""

    @mtf.pjrt.function(mesh_shape=MESH, layout=LAYOUT)
    def double(x):
        tf.py_function(lambda: None, [], [])
        return x + x, x

    twice, once = double(DATA)
    np.testing.assert_array_equal(twice, 2 * DATA)
    np.testing.assert_array_equal(once, DATA)


def test_a_layer_is_one_product():
    text = on_jax(keep_prob=1.0).lower(DATA).stablehlo
    assert text.count("stablehlo.dot") == 5  # two layers and gradients, but not of the data


@pytest.mark.parametrize(
    "layout", ["batch:rows,length:cols", "length:rows,heads:cols", "d_kv:rows"]
)
def test_no_part_is_gathered_for_a_product(layout):
    """The partitioner gathers a split dimension that becomes one with a dimension before it."""
    shape = mtf.convert_to_shape("batch:4,length:8,d_model:6")
    batch, length, d_model = shape
    heads, d_kv = mtf.convert_to_shape("heads:2,d_kv:4")

    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout=layout)
    def step(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, x, shape)
        q = mtf.get_variable(mesh, "q", [d_model, heads, d_kv])
        o = mtf.get_variable(mesh, "o", [heads, d_kv, d_model])
        y = mtf.einsum([mtf.einsum([x, q], [batch, length, heads, d_kv]), o], shape)
        loss = mtf.reduce_sum(mtf.square(y))
        # Sums: a gradient that is returned would be gathered.
        of_weights = [mtf.reduce_sum(mtf.square(g)) for g in mtf.gradients([loss], [q, o])]
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(t) for t in [loss, *of_weights]]

    lowered = step.lower(np.ones(shape.to_integer_list, "float32"))
    assert {c.kind for c in lowered.collectives()} == {"all-reduce"}


@pytest.mark.parametrize("layout", ["batch:rows", "batch:rows,length:cols", "vocab:cols"])
def test_logits_and_rows_of_tables_stay_where_they_are(layout):
    """What is passed on are tables and sums of rows, no logits."""
    rows = mtf.convert_to_shape("batch:4,length:64")
    vocab, d_model = mtf.convert_to_shape("vocab:32,d_model:2")

    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout=layout)
    def step(ids):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        ids = mtf.import_tf_tensor(mesh, ids, rows)
        table = mtf.get_variable(mesh, "table", [vocab, d_model])
        x = mtf.gather(table, ids, vocab)
        logits = mtf.einsum([x, table], [*rows, vocab])
        loss = mtf.reduce_sum(mtf.layers.softmax_cross_entropy_with_logits(logits, ids, vocab))
        [gradient] = mtf.gradients([loss], [table])
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(t) for t in (loss, gradient)]

    lowered = step.lower(np.zeros(rows.to_integer_list, "int32"))
    found = lowered.collectives()
    # A processor has at least a quarter of the logits.
    assert found
    assert sum(c.bytes for c in found) < 4 * rows.size * vocab.size / 4, found


def test_what_is_not_split_is_computed_everywhere():
    """The partitioner would have each device compute a part, and gather it."""
    length, other, d_model = mtf.convert_to_shape("length:8,other:8,d_model:4").dims

    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout="length:rows")
    def step(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, x, mtf.Shape([length, d_model]))
        memory = mtf.rename_dimension(x, "length", "other")
        angles = mtf.cos(mtf.range(mesh, other, tf.float32)) * mtf.ones(mesh, [d_model])
        y = mtf.einsum([x, memory * angles], [length, other])
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return lowering.export_to_tf_tensor(mtf.reduce_sum(mtf.square(y)))

    gathers = [
        c for c in step.lower(np.ones([8, 4], "float32")).collectives() if "gather" in c.kind
    ]
    assert [(c.mesh_dims, c.count, c.bytes) for c in gathers] == [(("rows",), 1, 8 * 4 * 4)]


def test_masks_are_no_constants():
    """TensorFlow would write a mask into the program as often as it is read."""

    @mtf.pjrt.function(mesh_shape="all:1", layout="")
    def causal(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        row, column = mtf.convert_to_shape("row:32,column:32").dims
        hidden = mtf.less(mtf.range(mesh, row, tf.int32), mtf.range(mesh, column, tf.int32))
        y = mtf.import_tf_tensor(mesh, x, mtf.Shape([row, column]))
        y = mtf.where(hidden, mtf.zeros_like(y), y)
        return mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()}).export_to_tf_tensor(y)

    x = np.ones([32, 32], "float32")
    np.testing.assert_array_equal(causal(x), np.tril(x))
    assert "32x32xi1>" in causal.lower(x).stablehlo
    assert not re.search(r"stablehlo.constant.*32x32x", causal.lower(x).stablehlo)
