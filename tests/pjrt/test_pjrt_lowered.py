"""Lowered: texts, communication, memory and cost of a program, before it runs."""

import pytest

pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")

import jax
import numpy as np
import tensorflow.compat.v1 as tf
from helpers.pjrt import DATA, MESH, on_jax

import mesh_tensorflow as mtf
from mesh_tensorflow.pjrt import Collectives
from mesh_tensorflow.pjrt._function import collectives_of


def test_what_is_known_of_a_program():
    step = on_jax(keep_prob=1.0)
    lowered = step.lower(DATA)
    assert not step.store.names  # nothing has been computed
    assert "stablehlo.dot" in lowered.stablehlo and "@Sharding" in lowered.stablehlo
    assert "num_partitions=4" in lowered.compiled_text
    memory = lowered.memory()
    # A quarter of what is split over both, a half of the weights over cols, and the bias of d.
    arguments = DATA.nbytes // 2 + 2 * 4 * (64 + 16 + 64) // 2 + 2 * 4 * 4
    assert memory.argument_size_in_bytes == arguments
    assert lowered.cost()["flops"] > 0


def test_shapes_are_enough():
    """A program is compiled ahead of time, without data and without variables."""
    step = on_jax("rows:2,cols:4", keep_prob=1.0)
    ahead = step.lower(jax.ShapeDtypeStruct(DATA.shape, DATA.dtype))
    assert "num_partitions=8" in ahead.compiled_text and not step.store.names
    assert ahead.collectives() == step.lower(DATA).collectives()
    fewer = on_jax(keep_prob=1.0).lower(DATA).memory().argument_size_in_bytes
    assert ahead.memory().argument_size_in_bytes < fewer


def test_communication():
    """The sum over hidden of a product, and those over the batch of gradients and of the loss."""
    found = on_jax(keep_prob=1.0).lower(DATA).collectives()
    sums = {c.mesh_dims: c.bytes for c in found if c.kind == "all-reduce"}
    assert sums == {("cols",): 4 * 4 * 4, ("rows",): 4 * (32 + 8 + 32 + 4 + 1)}
    assert {c.kind for c in found} == {"all-reduce"}


GROUPS = {
    "replica_groups={{0,1},{2,3}}": ("cols",),
    "replica_groups={{0,1,2,3}}": ("rows", "cols"),
    "replica_groups={}": ("rows", "cols"),
    "replica_groups=[2,2]<=[4]": ("cols",),
    "replica_groups=[2,2]<=[2,2]T(1,0)": ("rows",),
    "replica_groups=mesh['a'=2,'b'=1,'c'=2] {'a'}": ("rows",),
    "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}": ("cols",),
    "replica_groups=mesh['a'=2,'b'=2] {'b','a'}": ("rows", "cols"),
    "replica_groups=mesh['a'=4] {'a':(2)2}": ("cols",),
    "replica_groups=mesh['a'=4] {'a':(1)2}": ("rows",),
}


@pytest.mark.parametrize("groups", GROUPS)
def test_groups(groups):
    line = f"  %x.1 = f32[4,6]{{1,0}} all-reduce(%y), channel_id=1, {groups}, to_apply=%add"
    [found] = collectives_of(line, mtf.convert_to_shape(MESH))
    assert found == Collectives("all-reduce", GROUPS[groups], 1, 96)


LINES = """
  %a = (bf16[8]{0}, pred[3]{0}) all-gather(%x, %y), replica_groups={{0,2},{1,3}}, dimensions={0}
  %b = f32[2]{0} reduce-scatter(%z), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  ROOT %c = s8[5]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0},{2,2}}
  %d = (f32[4]{0}, f32[8]{0}) all-gather-start(%x), replica_groups={{0,1},{2,3}}
  %e = f32[8]{0} all-gather-done(%d)
  %f = f32[2]{0} reduce-scatter(%z), replica_groups={{0,2},{1,3}}, dimensions={0}
  %g = f32[2]{0} add(%all-reduce.1, %b)
"""


def test_bytes():
    assert collectives_of(LINES, mtf.convert_to_shape(MESH)) == [
        Collectives("all-gather", ("cols",), 1, 32),
        Collectives("all-gather", ("rows",), 1, 19),
        Collectives("collective-permute", ("cols",), 1, 5),
        Collectives("reduce-scatter", ("rows",), 2, 32),
    ]


STARTS = {
    "(f32[4]{0}, f32[8]{0:T(256)}) all-gather-start(%x)": ("all-gather", 32),
    "((f32[4,2]{1,0}, bf16[3]{0}), (f32[8,2]{1,0}, bf16[6]{0})) all-gather-start(%x, %y)": ("all-gather", 76),
    "f32[4]{0} all-reduce-start(%x)": ("all-reduce", 16),
    "(f32[4]{0}, f32[8]{0}) all-reduce-start(%x, %y)": ("all-reduce", 48),
    "((f32[8]{0}), f32[4]{0}, u32[]) reduce-scatter-start(%x)": ("reduce-scatter", 32),
    "((f32[2,4]{1,0}), f32[4,2]{1,0}, u32[]) all-to-all-start(%x)": ("all-to-all", 32),
    "(f32[5]{0}, f32[5]{0}, u32[], u32[]) collective-permute-start(%x)": ("collective-permute", 20),
    "((f32[5]{0}, s8[3]{0}), (f32[5]{0}, s8[3]{0}), u32[], u32[]) collective-permute-start(%x, %y)":
        ("collective-permute", 23),
}  # fmt: skip


@pytest.mark.parametrize("line", STARTS)
def test_bytes_of_asynchronous_collectives(line):
    """Several arrays in one, and the operands that stand before them."""
    text = f"  %x.1 = {line}, channel_id=1, replica_groups={{{{0,1}},{{2,3}}}}\n"
    kind, size = STARTS[line]
    if kind == "collective-permute":
        text = text.replace("replica_groups", "source_target_pairs")
    assert collectives_of(text, mtf.convert_to_shape(MESH)) == [
        Collectives(kind, ("cols",), 1, size)
    ]


def test_programs_do_not_grow_with_the_mesh():
    """The text of 512 devices is as long as that of four, apart from numbers."""
    texts = []
    for mesh_shape in ["rows:2,cols:2", "rows:8,cols:64"]:
        step = on_jax(mesh_shape, "batch:rows", devices="abstract", keep_prob=1.0)
        texts.append(step.lower(DATA).stablehlo)
    few, many = texts
    assert len(few.splitlines()) == len(many.splitlines()) and abs(len(many) - len(few)) < 200
    assert "num_partitions = 512" in many
    with pytest.raises(ValueError, match=r"has no devices: .* Make it without, to call it"):
        step(DATA)
    with pytest.raises(ValueError, match=r"devices='cpu': pass a list of jax\.devices\(\)"):
        on_jax(devices="cpu")


def test_readers_do_not_decide_how_a_transform_lies_in_memory():
    """XLA's transforms of CPUs refuse what is not in row-major order, which a product asked for."""

    def shells():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.random_uniform(mesh, "x:16,y:16,z:16")
        modes = mtf.convert_to_shape("kx:16,ky:16,kz:16,shell:4")
        y = mtf.signal.fft3d(mtf.cast(x, tf.complex64), x.shape.dims, modes.dims[:3])
        total = mtf.einsum([mtf.square(mtf.abs(y)), mtf.ones(mesh, modes)], modes.dims[3:])
        power = mtf.reduce_sum(mtf.square(x)) * 16.0**3
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(t) for t in (total, power)]

    step = mtf.pjrt.function(shells, mesh_shape=MESH, layout="ky:rows,z:rows")
    total, power = step()
    # Parseval's theorem: all modes together have the power of all points.
    np.testing.assert_allclose(total, np.full(4, power), rtol=1e-4)


@pytest.mark.parametrize("layout", ["x:rows", "y:rows", "z:cols", "y:rows,z:cols", "s:rows,y:cols"])
def test_a_sum_by_weights_is_of_parts(layout):
    """Parts stay where they are, and sums of them are added, whichever dimension is split."""
    shape, box, shells = map(mtf.convert_to_shape, ("x:16,y:16,z:16,s:8", "x:16,y:16,z:16", "s:8"))

    @mtf.pjrt.function(mesh_shape=MESH, layout=layout)
    def sums(weights, values):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, weights, box)
        y = mtf.einsum([mtf.import_tf_tensor(mesh, values, shape), x], shells)
        return mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()}).export_to_tf_tensor(y)

    random = np.random.RandomState(1)
    weights, values = (random.normal(size=s.to_integer_list).astype("f") for s in (box, shape))
    # At most the sums are gathered, and no part of an operand.
    sent = sums.lower(weights, values).collectives()
    assert sum(one.bytes for one in sent) < weights.nbytes / 4
    expected = np.einsum("xyz,xyzs->s", weights, values)
    np.testing.assert_allclose(sums(weights, values), expected, rtol=1e-3)
