"""Ring attention: layouts that split the length of queries and of the memory alike."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

BATCH, HEADS, LENGTH, CHANNELS = 2, 2, 32, 4
SIZES = {"batch": BATCH, "length": LENGTH, "memory": LENGTH, "heads": HEADS, "d_kv": CHANNELS}
LAYOUTS = [
    ("x:2", "length:x,memory:x"),
    ("x:4", "length:x,memory:x"),
    ("x:2,y:2", "length:x,memory:x,heads:y"),
    ("x:2,y:4", "length:y,memory:y,batch:x"),
]


def arrays():
    """Queries, keys, values, the gradient of the result, and ids of segments."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=[BATCH, LENGTH, HEADS, CHANNELS]).astype("f") for _ in range(4)]
    return [*made, np.sort(rng.integers(0, 3, [BATCH, LENGTH])).astype("i")]


def build(mesh, dropout, ring):
    """Returns the result of causal attention within segments, and its gradients."""
    q, k, v, dy, ids = arrays()

    def given(x, names):
        dims = [mtf.Dimension(name, SIZES[name]) for name in names.split()]
        return mtf.import_tf_tensor(mesh, tf.constant(x), dims)

    rows, columns = "batch length heads d_kv", "batch memory heads d_kv"
    xs = [given(q, rows), given(k, columns), given(v, columns)]
    length, memory = (mtf.Dimension(name, LENGTH) for name in ("length", "memory"))
    visible = [
        ("greater_equal", *(mtf.range(mesh, d, tf.int32) for d in (length, memory))),
        ("equal", given(ids, "batch length"), given(ids, "batch memory")),
    ]
    channels = xs[0].shape.dims[-1]
    y = mtf.layers.blocked_attention(
        *xs, memory, channels, channels, visible=visible, dropout_rate=dropout,
        block_sizes=(4, 4), ring=ring,
    )  # fmt: skip
    return [y, *mtf.gradients([y], xs, [given(dy, rows)])]


def run(mesh_shape, layout, kind="placement", dropout=0.0, ring=True):
    """Returns the values of `build`, the Lowering, and the tf.Graph."""
    with tf.Graph().as_default() as tf_graph:
        tf.set_random_seed(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        found = build(mesh, dropout, ring)
        devices = [f"cpu:{i}" for i in range(mtf.convert_to_shape(mesh_shape).size)]

        def lowered(make, *arguments):
            lowering = mtf.Lowering(graph, {mesh: make(mesh_shape, layout, *arguments)})
            return [lowering.export_to_tf_tensor(x) for x in found], lowering

        lowerings = []
        if kind == "simd":

            def program():
                values, lowering = lowered(mtf.simd_mesh_impl.SimdMeshImpl)
                lowerings.append(lowering)
                return values

            values = mtf.simd_mesh_impl.replicate(program, devices=devices, share_memory=False)
        else:
            values, lowering = lowered(mtf.placement_mesh_impl.PlacementMeshImpl, devices)
            lowerings.append(lowering)
        config = tf.ConfigProto(device_count={"CPU": len(devices)})
        with tf.Session(config=config) as session:
            return session.run(values), lowerings[0], tf_graph


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_equal_to_one_processor(dropout):
    expected = run("x:1", "", dropout=dropout)[0]
    for mesh_shape, layout in LAYOUTS if not dropout else LAYOUTS[1:2]:
        found = run(mesh_shape, layout, dropout=dropout)[0]
        for x, y in zip(found, expected):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=layout)


def test_simd():
    expected = run("x:1", "")[0]
    for x, y in zip(run(*LAYOUTS[1], kind="simd")[0], expected):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_parts_are_passed_around_instead_of_gathered():
    passing, gathering = (collections.Counter(), collections.Counter())
    for counted, ring in ((passing, True), (gathering, False)):
        for name, elements in run(*LAYOUTS[1], ring=ring)[1].counters:
            counted[name] += elements
    assert gathering["allconcat/0/blocked_attention_op"]
    moved = {name.partition("/")[0] for name in passing if name.endswith("blocked_attention_op")}
    assert moved == {"shift"}
    part = BATCH * LENGTH * HEADS * CHANNELS
    # Keys and values go three steps in each direction of differentiation, their gradients four;
    # and the positions and segments of the memory with them.
    ids = LENGTH + BATCH * LENGTH
    expected = (2 * 3 + 2 * 3 + 2 * 4) * part + 2 * 3 * ids
    assert passing["shift/0/blocked_attention_op"] == expected


def test_no_tensor_has_all_logits():
    _, _, graph = run(*LAYOUTS[1])
    sizes = [
        x.shape.num_elements() or 0
        for op in graph.get_operations()
        for x in op.outputs
        if x.shape.ndims is not None
    ]
    # The largest are whole queries, keys and values.
    assert max(sizes) == BATCH * LENGTH * HEADS * CHANNELS < HEADS * LENGTH * LENGTH
