"""Errors found when programs are lowered, and in meshes and layouts; gradients that are None."""

import re

import pytest
import tensorflow.compat.v1 as tf
from helpers.world import A, B, C, Plain, World

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

V, T = ValueError, TypeError

# -- what is found when a program is lowered

LOWER = {
    "not_divisible": (
        lambda w: w.tensor([("a", 10)]),
        "x:4",
        "a:x",
        r"not divisible.*a=10 of Shape\[a=10\] .*x=4.*multiple of 4 \(for instance 8 or 12\)"
        r".*divides 10 \(1, 2, 5, 10\).*drop the layout rule a:x",
    ),
    "two_dims_on_one_axis": (
        lambda w: w.x * 2,
        "x:2",
        "a:x,b:x",
        r"Two Tensor Dimensions may not map to the same Mesh Dimension: a=8, b=16"
        r".*x=2.*mtf.rename_dimension",
    ),
    "one_dim_on_two_axes": (
        lambda w: w.x * 2,
        "x:2,y:2",
        "a:x,a:y",
        r"a=8 maps to multiple mesh dimensions x=2, y=2.*; a:x\+y splits it over all of them",
    ),
    "results_of_a_function": (
        lambda w: mtf.slicewise(
            lambda t: [t, t], [w.x], [w.x.shape, w.x.shape], [tf.float32, tf.int32]
        ),
        "x:2",
        "",
        r"slicewise: for its outputs slicewise:0 Shape\[a=8, b=16\] float32; slicewise:1 "
        r"Shape\[a=8, b=16\] int32 the function must return a tuple of 2 tf.Tensors, and it "
        r"returned list",
    ),
    "result_of_an_elementwise_function": (
        lambda w: mtf.cwise(lambda t: (t, None), [w.x], name="mine"),
        "x:2",
        "",
        r"mine: for its output mine:0 Shape\[a=8, b=16\] float32 the function must return a "
        r"tf.Tensor, and it returned \(\w*Tensor, NoneType\)",
    ),
}


@pytest.mark.parametrize("name", LOWER)
def test_lowering(name, tf_graph):
    call, mesh, layout, text = LOWER[name]
    world = Plain()
    if "x" in call.__code__.co_names:
        world.x = world.tensor([A, B])
    call(world)
    before = list(world.graph.operations)
    impl = PlacementMeshImpl(mesh, layout, [""] * mtf.convert_to_shape(mesh).size)
    with pytest.raises(ValueError) as caught:
        mtf.Lowering(world.graph, {world.mesh: impl})
    assert re.search(text, str(caught.value), re.S), str(caught.value)
    assert "while lowering" in str(caught.value)
    assert world.graph.operations == before


@pytest.mark.parametrize(
    "layout, text", [("b:x", "b=3 .* cannot be split over"), ("a:x,b:x", "may not map to the same")]
)
def test_variables_that_a_layout_does_not_fit(layout, text, tf_graph):
    """Where each processor has slices of its own, variables are looked at before they are lowered."""
    world = Plain()
    for name in ("first", "second"):
        mtf.get_variable(world.mesh, name, "a:8,b:3")

    def lowered(layout):
        impl = PlacementMeshImpl("x:2", layout, ["", ""], merge="none")
        mtf.Lowering(world.graph, {world.mesh: impl})

    with pytest.raises(ValueError, match=text) as caught:
        lowered(layout)
    assert re.search(r"while lowering Variable\(.*first.*made here:", str(caught.value), re.S)
    lowered("a:x")  # the graph is as it was
    assert [v.name for v in world.graph.all_variables] == ["stacked/first"]


def test_lowering_without_a_mesh_implementation(tf_graph):
    world = World()
    impl = PlacementMeshImpl("x:1", "", [""])
    with pytest.raises(ValueError, match=r"for mesh 'other'.*PlacementMeshImpl"):
        mtf.Lowering(world.graph, {world.mesh: impl}, autostack=False)


def _lowered(world):
    world.y = mtf.import_tf_tensor(world.mesh, tf.ones([8]), [A])
    return mtf.Lowering(world.graph, {world.mesh: PlacementMeshImpl("x:2", "a:x", [""] * 2)})


def test_export_of_a_tensor_made_after_lowering(tf_graph):
    world = Plain()
    lowering = _lowered(world)
    late = mtf.reduce_sum(world.y * 2)
    first = lowering.export_to_tf_tensor(late)
    nodes = len(tf_graph.get_operations())
    again = lowering.export_to_tf_tensor(late)
    assert len(tf_graph.get_operations()) - nodes < 3  # it is lowered once
    with tf.Session() as session:
        assert session.run([first, again]) == [16.0, 16.0]


def test_what_cannot_be_lowered_after_a_lowering(tf_graph):
    world = Plain()
    lowering = _lowered(world)
    before = dict(lowering.tensors)
    v = mtf.get_variable(world.mesh, "v", [A])
    inner = []
    mtf.while_loop(lambda t: mtf.less(mtf.reduce_sum(t), 1), lambda t: inner.append(t) or t, [v])
    other = mtf.Mesh(mtf.Graph(), "other")
    lowering._pairs[other] = lowering._pair(world.mesh)
    for late in (v * world.y, inner[0], mtf.zeros(other, [A])):
        with pytest.raises(ValueError, match=r"is not in this Lowering: .*Make the Lowering last"):
            lowering.export_to_tf_tensor(late)
    assert lowering.tensors == before


def test_gradient_of_a_loop_made_after_a_lowering(tf_graph):
    world = Plain()

    def tripled(x):
        zero = mtf.constant(world.mesh, 0, dtype=tf.int32)
        return mtf.while_loop(
            lambda i, x: mtf.less(i, 3), lambda i, x: [i + 1, x * 3], [zero, x], back_prop=True
        )[1]

    x = mtf.import_tf_tensor(world.mesh, tf.ones([8]), [A])
    early = tripled(x)
    lowering = mtf.Lowering(world.graph, {world.mesh: PlacementMeshImpl("x:2", "a:x", [""] * 2)})
    [of_early] = mtf.gradients([early], [x])
    with pytest.raises(ValueError, match=r"is not in this Lowering.*the gradient of a loop"):
        lowering.export_to_tf_tensor(of_early)
    [of_late] = mtf.gradients([tripled(x)], [x])
    with tf.Session() as session:
        assert session.run(lowering.export_to_tf_tensor(of_late)).tolist() == [27.0] * 8


def test_lowered_operation_of_what_is_none_or_late(tf_graph):
    world = Plain()
    lowering = _lowered(world)
    for wrong in (None, [world.y.operation], world.y):
        with pytest.raises(WrongTypeError, match=r"lowered_operation: .*not an Operation"):
            lowering.lowered_operation(wrong)
    assert isinstance(lowering.lowered_operation((world.y * 2).operation), tf.Operation)
    v = mtf.get_variable(world.mesh, "v", [A])
    with pytest.raises(ValueError, match=r"is not in this Lowering: .*Make the Lowering last"):
        lowering.lowered_operation((v * world.y).operation)


def test_lowered_operation_of_a_replaced_assignment(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    v = mtf.get_variable(mesh, "v", [A])
    old = mtf.assign(v, v * 2)
    graph.combine_assignments([old])
    lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
    with pytest.raises(ValueError, match="combine_assignments are replaced"):
        lowering.lowered_operation(old)


def test_a_name_that_tensorflow_has(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tf.Variable(1.0, name="v")
    with pytest.raises(ValueError, match=r"'v' became 'v_1'.*Use another name"):
        mtf.get_variable(mesh, "v", [A])
    assert graph.all_variables == [] and graph.operations == []
    assert graph.unique_name("v", mark_as_used=False) == "v"


# -- meshes and layouts


def _replicated(devices, local=None):
    with tf.Graph().as_default():
        return mtf.simd_mesh_impl.replicate(lambda: tf.zeros([]), devices=devices, local=local)


def _lowered_with(impls):
    with tf.Graph().as_default():
        world = Plain()
        return mtf.Lowering(world.graph, impls(world.mesh))


TWO = ["/cpu:0", "/cpu:1"]


MESHES = {
    "devices": (
        lambda: PlacementMeshImpl("x:2,y:4", "", [""] * 6),
        V,
        r"x=2, y=4 needs 8 devices, but there are 6.*shapes that fit 6: .*x:2,y:3",
    ),
    "devices_set": (
        lambda: PlacementMeshImpl("x:2", "", {"", "cpu:0"}),
        T,
        r"a list of device strings, not set: pass list\(devices\)",
    ),
    "devices_string": (lambda: PlacementMeshImpl("x:2", "", "cpu"), T, "not str"),
    "strict": (
        lambda: PlacementMeshImpl("x:2", "a:x,b:z", ["", ""], strict_layout=True),
        V,
        r"unknown mesh dimension 'z' in LayoutRules{a:x, b:z}: the mesh has x=2",
    ),
    "allreduce": (
        lambda: PlacementMeshImpl("x:1", "", [""], allreduce="fast"),
        V,
        r"PlacementMeshImpl: allreduce='fast' is none of 'ring', 'collective', 'auto'",
    ),
    "merge": (
        lambda: PlacementMeshImpl("x:1", "", [""], merge="host"),
        V,
        r"PlacementMeshImpl: merge='host' is none of 'device', 'memory', 'none'",
    ),
    "mesh_string": (
        lambda: PlacementMeshImpl("x=2", "", []),
        V,
        r"malformed shape 'x=2': 'x=2' is not a pair",
    ),
    "mesh_size": (
        lambda: PlacementMeshImpl("x:two", "", []),
        V,
        r"the size 'two' of 'x' is not a whole",
    ),
    "mesh_colons": (
        lambda: PlacementMeshImpl("x:2:3", "", []),
        V,
        r"'x:2:3' is not a pair left:right",
    ),
    "mesh_negative": (
        lambda: PlacementMeshImpl("x:-2", "", []),
        V,
        "dimension 'x' cannot have the size -2",
    ),
    "mesh_empty": (
        lambda: PlacementMeshImpl("x:2,y:0", "", []),
        V,
        r"a mesh with y=0 has no processors: Shape\[x=2, y=0\]",
    ),
    "device_malformed": (
        lambda: PlacementMeshImpl("x:2", "", ["cpu:0", "cpu:one"]),
        V,
        "'cpu:one' is no device. Devices are strings such as \"cpu:0\"",
    ),
    "device_of_replicate": (lambda: _replicated(["cpu:0", "third"]), V, "'third' is no device"),
    "device_number": (lambda: PlacementMeshImpl("x:2", "", [0, 1]), V, "0 is no device"),
    "no_devices_of_replicate": (lambda: _replicated([]), V, "replicate: devices is empty"),
    "local_none": (
        lambda: _replicated(TWO, []),
        V,
        r"local must have numbers from 0 to 1, .*/cpu:0, /cpu:1.* It is \[\]; None means all",
    ),
    "local_too_large": (lambda: _replicated(TWO, [2]), V, r"from 0 to 1, .*It is \[2\]"),
    "local_negative": (lambda: _replicated(TWO, [-1]), V, r"from 0 to 1, .*It is \[-1\]"),
    "local_twice": (lambda: _replicated(TWO, [0, 0]), V, r"each at most once.*It is \[0, 0\]"),
    "mesh_none": (
        lambda: PlacementMeshImpl(None, "", []),
        T,
        r'None is no mesh shape: write it as "rows:2,cols:2"',
    ),
    "mesh_int": (lambda: PlacementMeshImpl(2, "", []), T, r"2 \(int\) is no shape"),
    "mesh_dict": (lambda: PlacementMeshImpl({"x": 2}, "", []), T, r"\(dict\) is no shape"),
    "mesh_fraction": (
        lambda: PlacementMeshImpl("x:1.5", "", []),
        V,
        r"the size '1.5' is not a whole number",
    ),
    "layout_none": (
        lambda: PlacementMeshImpl("x:1", None, []),
        T,
        r"None \(NoneType\) is no layout",
    ),
    "layout_int": (lambda: PlacementMeshImpl("x:1", 3, []), T, r"3 \(int\) is no layout"),
    "layout_dict": (lambda: PlacementMeshImpl("x:1", {"a": "x"}, []), T, r"\(dict\) is no layout"),
    "layout_single": (lambda: PlacementMeshImpl("x:1", ["a"], []), V, r"'a' .*is no pair of names"),
    "lowering_none": (
        lambda: _lowered_with(lambda m: None),
        T,
        r"mesh_to_impl must be a dictionary.*not None",
    ),
    "lowering_value_none": (
        lambda: _lowered_with(lambda m: {m: None}),
        T,
        r"must be a dictionary from mtf.Mesh to a MeshImpl",
    ),
    "lowering_layout": (lambda: _lowered_with(lambda m: {m: "x:1"}), T, r"not 'x:1'"),
    "layout_string": (lambda: PlacementMeshImpl("x:1", "a:", []), V, r"malformed layout 'a:'"),
    "layout_space": (lambda: PlacementMeshImpl("x:1", "a : x", []), V, "no space around it"),
    "size_per_split": (
        lambda: mtf.tensor_dim_to_size_per_split("a:x", "x:3", A),
        V,
        r"a=8 cannot be cut into 3 equal parts .*multiple of 3",
    ),
    "dimension": (lambda: mtf.convert_to_dimension("a"), V, r"'a' to Dimension: .*\(str, int\)"),
    "combined": (lambda: mtf.combined_dimension([]), V, "without a name"),
    "transposed": (lambda: mtf.transpose_list_of_lists([]), V, "empty"),
    "parallel_tuple": (lambda: mtf.parallel(("", ""), lambda: 0), V, "must be a list, not tuple"),
    "parallel_length": (
        lambda: mtf.parallel(["", ""], lambda x: x, [1]),
        V,
        r"each of 2 devices, got 1",
    ),
    "reduction": (
        lambda: mtf.reduction_fn("MEAN"),
        V,
        r"reduction_fn_string='MEAN' is none of 'SUM', 'MAX', 'MIN'",
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes_and_layouts(name):
    call, kind, text = MESHES[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(text, str(caught.value), re.S), str(caught.value)


# -- no gradient is None, not an error

NO_GRADIENT = {
    "sign": lambda w: mtf.sign(w.x),
    "stop_gradient": lambda w: mtf.stop_gradient(w.x),
    "comparison": lambda w: mtf.to_float(mtf.less(w.x, 0.5)),
    "indices": lambda w: mtf.to_float(mtf.argmax(w.x, A)),
    "cast_to_int_and_back": lambda w: mtf.to_float(mtf.to_int32(w.x)),
    "unrelated": lambda w: w.y * 2,
    "tf_function": lambda w: mtf.binary_op_with_broadcasting(tf.atan2, w.x, w.x),
    "one_hot": lambda w: mtf.one_hot(mtf.argmax(w.x, A), C),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient_is_none(name, tf_graph):
    world = World()
    assert mtf.gradients([NO_GRADIENT[name](world)], [world.x]) == [None]


def test_gradient_of_a_gradient_of_a_loop(tf_graph):
    world = World()
    [y] = mtf.while_loop(lambda x: mtf.less(mtf.reduce_sum(x), 9.0), lambda x: [x * x], [world.x])
    [dx] = mtf.gradients([y], [world.x])
    with pytest.raises(NotImplementedError, match="has no gradient itself; unroll the loop"):
        mtf.gradients([dx], [world.x])


def test_gradient_of_random_loops_in_loops(tf_graph):
    def counted(body, x):
        zero = mtf.constant(x.mesh, 0, dtype=tf.int32)
        return mtf.while_loop(
            lambda i, _: mtf.less(i, 2), lambda i, y: [i + 1, body(y)], [zero, x]
        )[1]

    world = World()
    y = counted(lambda y: counted(lambda z: mtf.dropout(z, rate=0.5), y), world.x)
    with pytest.raises(NotImplementedError, match="no gradient of a loop in a loop"):
        mtf.gradients([y], [world.x])
