"""Small programs of real operations, for the tests of estimated times."""

import hypothesis.strategies as st
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

SIZES = {"a": 4, "b": 8, "c": 12, "d": 16}
MESHES = ["m:2", "m:4,n:2", "m:2,n:2", "m:2,n:2,o:2"]


def dims(names):
    return [mtf.Dimension(n, SIZES[n]) for n in names]


def variable(mesh, names):
    return mtf.get_variable(
        mesh,
        f"v{len(mesh.graph.all_variables)}",
        mtf.Shape(dims(names)),
        initializer=tf.zeros_initializer(),
    )


def _einsum(draw, mesh, xs):
    x = draw(st.sampled_from(xs))
    w = variable(
        mesh, draw(st.lists(st.sampled_from(sorted(SIZES)), min_size=1, max_size=3, unique=True))
    )
    known = list(dict.fromkeys(x.shape.dims + w.shape.dims))
    kept = draw(st.lists(st.sampled_from(known), unique=True, max_size=3))
    return mtf.einsum([x, w], output_shape=mtf.Shape(kept))


def _add(draw, mesh, xs):
    x = draw(st.sampled_from(xs))
    alike = [y for y in xs if y.shape == x.shape]
    return x + draw(st.sampled_from(alike))


def _reduce(draw, mesh, xs):
    x = draw(st.sampled_from(xs))
    kept = [d for d in x.shape if draw(st.booleans())]
    return mtf.reduce_sum(x, output_shape=mtf.Shape(kept))


def _rename(draw, mesh, xs):
    x = draw(st.sampled_from(xs))
    if not x.shape.dims:
        return mtf.relu(x)
    d = draw(st.sampled_from(x.shape.dims))
    return mtf.relu(mtf.rename_dimension(x, d.name, f"{d.name}2"[:2]))


KINDS = [
    _einsum,
    _einsum,
    _add,
    _add,
    _reduce,
    lambda draw, mesh, xs: mtf.relu(draw(st.sampled_from(xs))),
    _rename,
]


@st.composite
def real_programs(draw):
    """Draws (graph, outputs) of up to eight operations, with gradients or without."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        xs = [variable(mesh, draw(st.permutations(sorted(SIZES)))[:2]) for _ in range(2)]
        for _ in range(draw(st.integers(1, 8))):
            xs.append(draw(st.sampled_from(KINDS))(draw, mesh, xs))
        loss = mtf.reduce_sum(xs[-1], output_shape=mtf.Shape([]))
        outputs = [loss]
        if draw(st.booleans()):
            grads = mtf.gradients([loss], [v.value for v in graph.trainable_variables])
            pairs = [(v, g) for v, g in zip(graph.trainable_variables, grads) if g is not None]
            mtf.optimize.SgdOptimizer(0.1).apply_grads([g for _, g in pairs], [v for v, _ in pairs])
    return graph, outputs


def loop_program(iterations=5, gradients=False):
    """Returns (graph, outputs) of a loop with a product and a sum over iterations."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d, h = (mtf.Dimension(n, s) for n, s in [("batch", 8), ("d", 16), ("h", 32)])
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), [batch, d])
    w = mtf.get_variable(mesh, "w", mtf.Shape([d, h]), initializer=tf.zeros_initializer())

    def body(i, y):
        hidden = mtf.relu(mtf.einsum([y, w], reduced_dims=[d]))
        back = mtf.einsum([hidden, w], reduced_dims=[h])
        return [i + 1, back, mtf.reduce_sum(back, reduced_dim=batch)]

    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    _, y, total = mtf.while_loop(
        lambda i, y: mtf.less(i, iterations),
        body,
        [zero, x],
        has_accumulators=True,
        maximum_iterations=iterations,
    )
    loss = mtf.reduce_sum(mtf.square(y)) + mtf.reduce_sum(mtf.square(total))
    if gradients:
        mtf.gradients([loss], [w])
    return graph, [loss]
