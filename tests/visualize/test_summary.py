"""Tables of variables and of communication against real variables and the Lowering's counters."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import _units as units
from mesh_tensorflow.auto_mtf import models
from mesh_tensorflow.visualize import _step

TINY = {
    "batch": 8, "length": 8, "vocab": 16, "d_model": 16, "layers": 2, "heads": 4, "d_kv": 4,
    "d_ff": 32,
}  # fmt: skip
LAYOUT = "batch:rows,d_ff:cols,heads:cols,vocab:cols"


def placed(layout=LAYOUT, devices=("cpu:0",) * 4, **kwargs):
    return mtf.placement_mesh_impl.PlacementMeshImpl(
        "rows:2,cols:2", layout, list(devices), **kwargs
    )


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (2**20 - 1, "1 MiB"), (5e6, "4.77 MiB"),
     (-5000, "-4.88 KiB"), (1.5 * 2**40, "1.5 TiB"), (2**71, "2,048 EiB")],
)  # fmt: skip
def test_bytes_in_words(count, text):
    assert units.bytes_text(count) == text


def test_counts_and_names_in_words():
    assert [units.count_text(n) for n in (999, 999_600, 11e9)] == ["999", "1M", "11B"]
    assert units.shortened("short", 5) == "short"
    long = units.shortened("decoder/block_000/layer_001/wi/kernel", 20)
    assert len(long) == 20 and long.startswith("decode…") and long.endswith("wi/kernel")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["placement", "simd"])
def test_bytes_are_those_of_real_slices(tf_graph, kind):
    """On a mesh that stores every slice, the sum over processors is what the variables take."""
    found = []

    def program():
        made = models.language_model(**TINY)
        impl = (
            placed(devices=[f"cpu:{i}" for i in range(4)], merge="none")
            if kind == "placement"
            else mtf.simd_mesh_impl.SimdMeshImpl("rows:2,cols:2", LAYOUT)
        )
        before = mtf.summary(made.graph, impl)
        lowering = mtf.Lowering(made.graph, {made.mesh: impl})
        found.append((before, mtf.summary(lowering), lowering))
        return [lowering.lowered_operation(op) for op in made.updates]

    if kind == "simd":
        mtf.simd_mesh_impl.replicate(program, devices=[f"cpu:{i}" for i in range(4)])
    else:
        program()
    before, summary, lowering = found[0]
    assert before.rows == summary.rows  # stacked variables count as what they consist of
    names = {name for v in lowering.graph.all_variables for name in [p.name for p in v.parts]}
    assert {row.name for row in summary.rows} == names
    real = 0
    for variable, laid_out in lowering.variables.items():
        stored = {v.name: v for v in laid_out.slice_variables}.values()
        sizes = {tuple(v.shape.as_list()) for v in stored}
        assert sizes == {tuple(lowering.mesh_impl(variable).slice_shape(variable.shape))}
        size = int(np.prod(next(iter(sizes)))) * variable.slice_dtype.size
        real += size
    assert summary.bytes_per_processor() == real
    assert summary.parameters() == sum(v.size for v in lowering.graph.trainable_variables)
    assert len(summary.of_kind("slots")) == len(summary.of_kind("weights"))


def test_table_of_variables(tf_graph):
    made = models.language_model(**TINY)
    summary = mtf.summary(made.graph, placed())
    text = str(summary)
    assert text.startswith("mesh    rows=2, cols=2: 4 processors\nlayout  batch:rows, d_ff:cols,")
    row = next(r for r in summary.rows if r.name == "layer_1/feed_forward/wi/kernel")
    assert row.split_text == "d_ff:cols" and row.slice_shape == (16, 16) and row.copies == 2
    assert row.bytes_per_processor == 16 * 16 * 4 and row.bytes == 16 * 32 * 4
    line = next(li for li in text.splitlines() if li.startswith(row.name))
    assert line.split() == (
        "layer_1/feed_forward/wi/kernel [d_model=16, d_ff=32] [16, 16] d_ff:cols 512 1 KiB".split()
    )
    assert "slot_v" not in text and "optimizer slots         25       4,896" in text
    assert "slot_v" in str(mtf.summary(made.graph, placed(), slots=True))
    narrow = str(mtf.summary(made.graph, placed(), width=40)).splitlines()
    assert any("…" in line for line in narrow) and len(max(narrow, key=len)) < len(line) + 10


def test_one_processor_and_no_variables():
    assert "no variables" in str(mtf.summary(mtf.Graph()))
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.get_variable(mesh, "mean", mtf.Shape([("d", 8)]), tf.bfloat16, trainable=False)
    summary = mtf.summary(mesh.graph)
    assert [row.kind for row in summary.rows] == ["others"] and summary.bytes_per_processor() == 16
    assert "1 processor\n" in str(summary) and "other variables" in str(summary)


def test_meshes_with_layouts_of_their_own(tmp_path):
    graph, place = mtf.Graph(), mtf.placement_mesh_impl.PlacementMeshImpl
    one, two = (mtf.Mesh(graph, name) for name in ("one", "two"))
    for mesh in (one, two):
        mtf.get_variable(mesh, f"w_{mesh.name}", "a:8,b:4")
    impls = {one: place("x:2", "a:x", [""] * 2), two: place("y:4", "b:y", [""] * 4)}
    summary = mtf.summary(graph, impls)
    assert summary.mesh == "one x=2: 2 processors; two y=4: 4 processors"
    assert summary.layout == "one a:x; two b:y"
    assert summary.bytes_per_processor() == 4 * (16 + 8)
    text = mtf.visualize.training_report(graph, impls)
    assert f"mesh            {summary.mesh}\nlayout          {summary.layout}\n" in text
    with pytest.raises(ValueError, match=r"for one layout, but .* one a:x; two b:y"):
        mtf.visualize.memory(graph, impls)
    path = tmp_path / "report.html"
    mtf.visualize.report(graph, str(path), impls)
    assert "one a:x; two b:y" in path.read_text() and "estimated for one layout" in path.read_text()


def test_meshes_of_one_name():
    graph, place = mtf.Graph(), mtf.placement_mesh_impl.PlacementMeshImpl
    impls = {mtf.Mesh(graph, "mesh"): place(f"x:{n}", "a:x", [""] * n) for n in (2, 4)}
    for mesh, impl in impls.items():
        mtf.get_variable(mesh, f"w_{impl.size}", "a:8,b:4")
    assert mtf.summary(graph, impls).mesh == "mesh x=2: 2 processors; mesh x=4: 4 processors"


def program_of(layout, shape="rows:2,cols:2"):
    made = models.language_model(**TINY)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(shape, layout, ["cpu:0"] * 4)
    return made, impl


@pytest.mark.slow("batch:rows", "d_model*")
@pytest.mark.parametrize("layout", [LAYOUT, "batch:rows", "d_model:cols"])
def test_communication_is_what_the_lowering_counts(tf_graph, layout):
    made, impl = program_of(layout)
    predicted = mtf.visualize.communication(made.graph, impl, made.outputs)
    lowering = mtf.Lowering(made.graph, {made.mesh: impl}, autostack=False)
    for x in made.outputs:
        lowering.export_to_tf_tensor(x)
    counted = mtf.visualize.communication(lowering)
    assert collections.Counter(predicted.items) == collections.Counter(counted.items)
    assert counted.bytes == sum(c.bytes for _, _, c in lowering.collectives) > 0
    by_layer = counted.by_layer()
    assert sum(i.bytes for items in by_layer.values() for i in items) == counted.bytes
    assert {"layer_0", "layer_1"} <= {name.split("/")[0] for name in by_layer}
    sums = {(i.collective, i.mesh_axes): i.bytes for i in counted.by_collective()}
    text = lowering.communication_table()
    assert f"{counted.bytes:,}" in text.splitlines()[-1]
    assert all(f"{kind}" in text and axes in text for kind, axes in sums)
    assert str(counted).splitlines()[0].split() == (
        "layer collective mesh axes count per processor all processors".split()
    )


def test_communication_of_loops_and_of_nothing(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    d = mtf.Dimension("d", 4)
    x = mtf.ones(mesh, mtf.Shape([d]))

    def body(i, total):
        return i + 1, total + mtf.reduce_sum(x)

    start = [mtf.constant(mesh, 0, dtype=tf.int32), mtf.constant(mesh, 0.0)]
    mtf.while_loop(lambda i, _: mtf.less(i, 3), body, start)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "d:all", ["cpu:0"] * 2)
    found = mtf.visualize.communication(mesh.graph, impl)
    assert found.has_loops and found.bytes == 8
    assert "The bodies of loops are counted once." in str(found)
    assert str(mtf.visualize.communication(mesh.graph)) == "no communication"


@pytest.mark.slow
def test_training_report(tf_graph, capsys):
    made, impl = program_of(LAYOUT)
    lowering = mtf.Lowering(made.graph, {made.mesh: impl})
    summary, found = mtf.summary(lowering), mtf.visualize.communication(lowering)
    mtf.visualize.print_training_report(lowering, places={"logs": "/tmp/somewhere"})
    text = capsys.readouterr().err
    for line in [
        "mesh            rows=2, cols=2: 4 processors on CPU:0",
        "layout          batch:rows, d_ff:cols, heads:cols, vocab:cols",
        f"parameters      {summary.parameters():,} (4.9K) in 25 variables",
        f"per processor   weights {units.bytes_text(summary.bytes_per_processor('weights'))}, "
        f"optimizer slots {units.bytes_text(summary.bytes_per_processor('slots'))}",
        "logs            /tmp/somewhere",
    ]:
        assert line in text.splitlines()
    for item in found.by_collective():
        assert f"{item.collective} over {item.mesh_axes}: {item.times} time" in text
    mtf.visualize.print_training_report(lowering, places={"logs": "/tmp/somewhere"})
    assert not capsys.readouterr().err  # once, though the program may be built again
    mtf.visualize.print_training_report(lowering, places={"logs": "/tmp/elsewhere"})
    assert "/tmp/elsewhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda graph, impl: mtf.summary("model"),
         r"mtf.summary describes a mtf.Graph or a mtf.Lowering, not str: give it mesh.graph"),
        (lambda graph, impl: mtf.summary(graph, "rows:2"),
         r"mtf.summary: mesh_impl is a mesh implementation such as .* not 'rows:2'"),
        (lambda graph, impl: mtf.summary(graph, {}),
         r"mtf.summary: no mesh implementation for mesh mesh"),
        (lambda graph, impl: mtf.summary(mtf.Lowering(graph, impl), impl),
         r"mtf.summary: a Lowering has its own mesh implementation; leave out mesh_impl"),
    ],
)  # fmt: skip
def test_mistakes(tf_graph, call, message):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.ones(mesh, mtf.Shape([("d", 4)]))
    impl = {mesh: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])}
    with pytest.raises(ValueError, match=message):
        call(mesh.graph, impl)


def test_layers_are_as_fine_as_rows_allow():
    names = [f"model/block_{i}/layer_{j}/wi/einsum" for i in range(30) for j in range(2)]
    items = [_step.Item(name, "allreduce", "x=2", 1, 8, 32, 2) for name in names]
    items += [_step.Item(f"tiny_{i}/sum", "shift", "x=2", 1, 1, 1, 2) for i in range(9)]
    found = mtf.visualize.Communication(items)
    assert {"model/block_*/layer_*/wi", "tiny_*"} == set(found.by_layer())
    assert len(found.by_layer(depth=2)) == 30 + 9
    assert list(found.by_layer(most_layers=32))[-1] == "8 others"
    assert sum(i.bytes for sums in found.by_layer(most_layers=32).values() for i in sums) == (
        found.bytes
    )
    assert _step.layer_of("a/b/einsum/gradients/einsum_1") == "a/b"
    assert _step.layer_of("einsum_4/gradients/add") == "(no scope)"
