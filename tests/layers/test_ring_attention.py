"""Ring attention: layouts that split the length of queries and of the memory alike."""

import collections
import functools
import re
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.layers import _ring_attention as ring_attention

BATCH, HEADS, LENGTH, CHANNELS = 2, 2, 32, 4
LAYOUTS = [
    ("x:2", "length:x,memory:x"),
    ("x:4", "length:x,memory:x"),
    ("x:2,y:2", "length:x,memory:x,heads:y"),
    ("x:2,y:4", "length:y,memory:y,batch:x"),
]


KINDS = ["zigzag", "contiguous"]
OPERATIONS = ["blocked_attention", "blocked_attention_grad"]


def arrays():
    """Queries, keys, values, the gradient of the result, and ids of segments."""
    rng = np.random.default_rng(0)
    made = [rng.normal(size=[BATCH, LENGTH, HEADS, CHANNELS]).astype("f") for _ in range(4)]
    return [*made, np.sort(rng.integers(0, 3, [BATCH, LENGTH])).astype("i")]


def build(mesh, dropout, ring, blind=False, segments=True, size=LENGTH, order="greater_equal"):
    """Returns the result of causal attention within segments, and its gradients.

    Args:
      mesh: a Mesh.
      dropout: a rate.
      ring: how parts are passed around.
      blind: whether one query sees nothing.
      segments: whether there are segments.
      size: the length.
      order: how positions compare where a query sees the memory.
    """
    q, k, v, dy, ids = (x[:, :size] for x in arrays())
    seeing = np.where(np.arange(size) == 9, 7, ids).astype("i") if blind else ids

    def given(x, names):
        dims = [mtf.Dimension(name, n) for name, n in zip(names.split(), x.shape, strict=True)]
        return mtf.import_tf_tensor(mesh, tf.constant(x), dims)

    rows, columns = "batch length heads d_kv", "batch memory heads d_kv"
    xs = [given(q, rows), given(k, columns), given(v, columns)]
    length, memory = (mtf.Dimension(name, size) for name in ("length", "memory"))
    visible = [(order, *(mtf.range(mesh, d, tf.int32) for d in (length, memory)))]
    if segments:
        visible.append(("equal", given(seeing, "batch length"), given(ids, "batch memory")))
    channels = xs[0].shape.dims[-1]
    y = mtf.layers.blocked_attention(
        *xs, memory, channels, channels, visible=visible, dropout_rate=dropout,
        block_sizes=(4, 4), ring=ring,
    )  # fmt: skip
    return [y, *mtf.gradients([y], xs, [given(dy, rows)])]


def run(mesh_shape, layout, kind="placement", dropout=0.0, ring=True, metadata=None, **options):
    """Returns the values of `build`, the Lowering, and the tf.Graph."""
    with tf.Graph().as_default() as tf_graph:
        tf.set_random_seed(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        found = build(mesh, dropout, ring, **options)
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

            values = mtf.simd_mesh_impl.replicate(program, devices=devices)
        else:
            values, lowering = lowered(mtf.placement_mesh_impl.PlacementMeshImpl, devices)
            lowerings.append(lowering)
        config = tf.ConfigProto(device_count={"CPU": len(devices)})
        config.graph_options.rewrite_options.disable_meta_optimizer = True  # saves a third
        with tf.Session(config=config) as session:
            traced = metadata and tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
            found = session.run(values, options=traced, run_metadata=metadata)
            return found, lowerings[0], tf_graph


@functools.cache
def expected(dropout=0.0, **options):
    """Returns the values of one processor, from one block that is all logits at once."""
    return run("x:1", "", dropout=dropout, **options)[0]


def assert_same(found, wanted, text=""):
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place, kind, ring",
    [
        *(pytest.param(place, "placement", "zigzag", id=place[0]) for place in LAYOUTS[:3]),
        pytest.param(LAYOUTS[3], "placement", "zigzag", id="2x4", marks=pytest.mark.slow),
        pytest.param(LAYOUTS[1], "placement", "contiguous", id="contiguous"),
        pytest.param(LAYOUTS[1], "placement", False, id="gathered"),
        pytest.param(("x:4", "length:x"), "placement", False, id="queries"),
        pytest.param(("x:4", "memory:x"), "placement", False, id="memory"),
        pytest.param(LAYOUTS[0], "simd", "zigzag", id="simd 2"),
        pytest.param(LAYOUTS[3], "simd", "zigzag", id="simd 2x4", marks=pytest.mark.slow),
        pytest.param(("x:4", "length:x,memory:x"), "simd", "contiguous", id="simd contiguous"),
    ],
)
def test_equal_to_one_processor(place, kind, ring):
    assert_same(run(*place, kind=kind, ring=ring)[0], expected())


def test_equal_to_all_logits():
    """Which attention of one processor without blocks has."""
    q, k, v, _, ids = arrays()
    logits = np.einsum("blhd,bmhd->bhlm", q, k)
    seen = (ids[:, :, None] == ids[:, None]) & np.tri(LENGTH, dtype=bool)
    weights = np.exp(np.where(seen[:, None], logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    assert_same(expected()[:1], [np.einsum("bhlm,bmhd->blhd", weights, v)])


@pytest.mark.slow
@pytest.mark.parametrize("ring", KINDS)
def test_dropout(ring):
    assert_same(run(*LAYOUTS[1], dropout=0.3, ring=ring)[0], expected(0.3))


@pytest.mark.slow
def test_a_query_that_sees_nothing():
    """Has the mean of everything, of which no block may be left out."""
    wanted = run("x:1", "", blind=True)[0]
    np.testing.assert_allclose(wanted[0][:, 9], arrays()[2].mean(1), rtol=1e-4, atol=1e-4)
    assert_same(run(*LAYOUTS[1], blind=True)[0], wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape, size", [("x:2", 6), ("x:3", 9)])
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_parts_without_whole_halves_stay(kind, mesh_shape, size):
    """With `ring=True`; what is sent says that nothing is exchanged."""
    wanted = run("x:1", "", size=size)[0]
    layout = "length:x,memory:x"
    found, lowering, _ = run(mesh_shape, layout, kind=kind, size=size)
    assert_same(found, wanted)
    stay = run(mesh_shape, layout, ring="contiguous", size=size)[1]
    assert collections.Counter(lowering.counters) == collections.Counter(stay.counters)
    message = (
        f"length={size} is not divisible by {2 * int(mesh_shape[-1])}: parts are left as they are, "
        f"as by ring='contiguous'. Pad it to {size // 3 * 4}"
    )
    with pytest.warns(mtf.MeshTensorFlowWarning, match=re.escape(message)):
        zigzag = run(mesh_shape, layout, ring="zigzag", size=size)
    assert_same(zigzag[0], wanted)
    assert collections.Counter(zigzag[1].counters) == collections.Counter(stay.counters)


def products(metadata):
    """Returns how many matrix products each device has computed."""
    found = collections.Counter()
    for device in metadata.step_stats.dev_stats:
        number = int(device.device.rpartition(":")[2])
        found[number] += sum(
            re.search("= (_Mkl)?BatchMatMul", n.timeline_label) is not None
            for n in device.node_stats
        )
    return [found[i] for i in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("ring, blocks", [("zigzag", [9] * 4), ("contiguous", [3, 7, 11, 15])])
def test_blocks_that_are_computed(ring, blocks):
    """Two products of each in the value, and five in gradients; of 16 that a processor has."""
    metadata = tf.RunMetadata()
    run(*LAYOUTS[1], ring=ring, metadata=metadata, segments=False)
    assert products(metadata) == [7 * n for n in blocks]


def test_blocks_that_one_processor_computes():
    metadata = tf.RunMetadata()
    run("x:1", "", metadata=metadata, segments=False)
    n = LENGTH // 4
    assert products(metadata) == [7 * n * (n + 1) // 2]


@pytest.mark.parametrize("place, ring, blocks", [
    (("x:1", ""), True, 36 / 64),
    (("x:2", "heads:x"), False, 36 / 64),
    (LAYOUTS[1], "zigzag", 9 / 16),
    (LAYOUTS[1], True, 9 / 16),
    (LAYOUTS[1], "contiguous", 15 / 16),
    (LAYOUTS[1], False, 15 / 16),
    (("x:4", "length:x"), False, 15 / 16),
    (("x:4", "memory:x"), False, 1),
    (("x:2,y:2", "length:x,memory:y"), False, 1),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("comparison", ["greater_equal", "less_equal"])
def test_blocks_that_are_counted(place, ring, blocks, comparison):
    """Those of the busiest processor, as `test_blocks_that_are_computed` finds; the others wait."""
    shape, layout = place
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        shape, layout, [""] * mtf.convert_to_shape(shape).size
    )

    def flops(order):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with tf.Graph().as_default():
            build(mesh, 0.0, ring, order=order)
        attention = [op for op in mesh.graph.operations if op.name.split("/")[-1] in OPERATIONS]
        assert len(attention) == 2
        return [op.cost(impl).flops for op in attention]

    for found, every in zip(flops(comparison), flops("equal")):
        assert found == every * blocks


def test_costs_of_a_ring_are_its_own():
    """Operations of the same shapes share what they cost only if they compute the same."""
    keys = set()
    orders = ["greater_equal", "less_equal", "equal"]
    cases = [*((True, order) for order in orders), (False, "equal"), ("contiguous", "equal")]
    for ring, order in cases:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        with tf.Graph().as_default():
            build(mesh, 0.0, ring, order=order)
        keys.update(op.cost_key() for op in mesh.graph.operations if op.name == "blocked_attention")
    assert len(keys) == len(cases)


@pytest.mark.slow
@pytest.mark.parametrize("ring, others", [("zigzag", 1), ("contiguous", 0)])
def test_parts_are_passed_around_instead_of_gathered(ring, others):
    passing, gathering = (collections.Counter(), collections.Counter())
    for counted, kind in ((passing, ring), (gathering, False)):
        for name, elements in run(*LAYOUTS[1], ring=kind)[1].counters:
            counted[name] += elements
    assert gathering["allconcat/0/blocked_attention_op"]
    moved = {name.partition("/")[0] for name in passing if name.endswith("blocked_attention_op")}
    assert moved == {"shift"}
    part = BATCH * LENGTH * HEADS * CHANNELS
    # Keys and values go three steps in each direction of differentiation, their gradients four;
    # and the positions and segments of the memory with them.
    ids = LENGTH + BATCH * LENGTH
    steps = (2 * 3 + 2 * 3 + 2 * 4) * part + 2 * 3 * ids
    # Halves of queries, keys, values and the result, and with these of gradients; of ids of both;
    # and of three numbers of each row twice.
    halves = (4 + 8) * part + 2 * 2 * ids + (3 + 3) * BATCH * LENGTH * HEADS
    assert passing["shift/0/blocked_attention_op"] == steps + others * halves // 2


@pytest.mark.slow
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


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place, ring, message", [
    (("x:4", "length:x"), True, "blocked_attention: ring=True passes parts of memory=32 around the "
     "processors that have parts of length=32, and nothing is passed where not one mesh dimension "
     "splits both; the layout splits length over x=4 and memory over no mesh dimension. Use the rules length:x;memory:x, or"
     " leave ring out"),
    (("x:4", "memory:x"), True, "the layout splits length over no mesh dimension and memory over "
     "x=4. Use the rules length:x;memory:x"),
    (("x:2,y:2", "length:x,memory:y"), True, "splits length over x=2 and memory over y=2"),
])  # fmt: skip
def test_layouts_that_make_no_ring(place, ring, message):
    """They compute the same, and say so."""
    with pytest.warns(mtf.MeshTensorFlowWarning, match=re.escape(message)):
        found, lowering, _ = run(*place, ring=ring)
    assert_same(found, expected())
    without = run(*place, ring=False)[1]
    assert collections.Counter(lowering.counters) == collections.Counter(without.counters)


def test_a_ring_of_another_kind():
    message = "ring='round' is none of False, True, 'contiguous', 'zigzag'; True is"
    with pytest.raises(ValueError, match=re.escape(message)):
        run("x:1", "", ring="round")


@pytest.mark.parametrize("mesh_shape, layout, sizes, mend", [
    ("x:4", "length:x", (8, 10), "length:x;memory:x, and pad memory=10 to 12, or leave ring out"),
    ("x:4,y:2", "length:x,memory:y", (8, 10), "Use the rules length:y;memory:y, or leave ring out"),
])  # fmt: skip
def test_mends_fit_sizes(mesh_shape, layout, sizes, mend):
    devices = [""] * mtf.convert_to_shape(mesh_shape).size
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, devices)
    length, memory = (mtf.Dimension(*d) for d in zip(("length", "memory"), sizes))
    dims = types.SimpleNamespace(length=length, memory=memory)
    with pytest.warns(mtf.MeshTensorFlowWarning, match=re.escape(mend)):
        ring_attention.tell("attention", True, impl, dims)
