"""What is legal and hardly meant: it warns once, at the user's line; strict programs refuse it."""

import re
import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.world import A, B, C, World

import mesh_tensorflow as mtf
from mesh_tensorflow._core import errors
from mesh_tensorflow._lowering.lowering import rules_that_apply

STRICT = r"\n  \(an error by mtf.strict\(\) or MTF_STRICT; a warning otherwise\)"
OTHER_A = mtf.Dimension("a", 4)


def _lowered(layout, mesh_shape="rows:2,cols:2"):
    def lower(_):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.zeros(mesh, [A, B])
        mtf.while_loop(
            lambda i: mtf.less(i, 2),
            lambda i: i + mtf.cast(mtf.reduce_sum(mtf.zeros(mesh, [("inside", 4)])), tf.int32),
            [mtf.constant(mesh, 0, dtype=tf.int32)],
        )
        size = mtf.convert_to_shape(mesh_shape).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * size)
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(x)

    return lower


SLIPS = {
    "einsum_sizes": (
        lambda w: mtf.einsum([w.x, w.other_a], output_shape=[B]),
        r"einsum: the name 'a' has two sizes in one operation, 8 and 4: Shape\[a=8, b=16\], "
        r"Shape\[a=4\]\. .* mtf.rename_dimension",
    ),
    "add_sizes": (lambda w: w.x + w.other_a, "add: the name 'a' has two sizes"),
    "compare_sizes": (lambda w: mtf.less(w.x, w.other_a), "'a' has two sizes"),
    "einsum_broadcast": (
        lambda w: mtf.einsum([w.x], output_shape=[A, ("bb", 16)]),
        r"einsum: the output has bb=16, which none of the inputs Shape\[a=8, b=16\] has; did you "
        r"mean b=16\? .* mtf.broadcast",
    ),
    "stack_name": (
        lambda w: mtf.stack([w.x, w.x], "a"),
        r"stack: the result Shape\[a=2, a=8, b=16\] has two dimensions called 'a', of sizes 2 and 8",
    ),
    "top_k_name": (
        lambda w: mtf.top_k(w.x, B, OTHER_A),
        r"top_k: the result Shape\[a=8, a=4\] has two dimensions called 'a'",
    ),
    "rename_name": (
        lambda w: mtf.rename_dimension(w.x, "a", "b"),
        r"the result Shape\[b=8, b=16\] has two dimensions called 'b'",
    ),
    "reshape_order": (
        lambda w: mtf.reshape(w.x, [B, ("one", 1), A]),
        r"becomes Shape\[b=16, one=1, a=8\], which has a=8, b=16 in another order.*mtf.transpose",
    ),
    "rule_twice": (
        lambda w: mtf.convert_to_layout_rules("a:rows, b:cols, a:rows"),
        "layout rule a:rows is given more than once in a:rows,b:cols,a:rows",
    ),
    "rule_of_mesh": (
        _lowered("a:row"),
        "layout rule a:row splits nothing: 'row' is not there. The mesh has rows, cols; did you "
        "mean rows",
    ),
    "rule_of_program": (
        _lowered("a:rows,insider:cols"),
        "layout rule insider:cols splits nothing: 'insider' is not there. The program has a, b, "
        "inside; did you mean inside",
    ),
    "rule_of_neither": (_lowered("qq:rows"), "The program has a, b, inside. Correct the rule"),
    "rule_reversed": (_lowered("rows:a"), "A rule names the program's first; did you mean a:rows"),
    "adafactor": (
        lambda w: mtf.optimize.AdafactorOptimizer(0.02),
        "multiply_by_parameter_scale is true or false, but was given 0.02.*; write "
        r"AdafactorOptimizer\(learning_rate=0.02\)",
    ),
    "adam": (
        lambda w: mtf.optimize.AdamWeightDecayOptimizer(1e-3, 0.9, 0.999),
        r"write AdamWeightDecayOptimizer\(learning_rate, beta_1=0.9, beta_2=0.999\)",
    ),
    "batch_norm": (
        lambda w: mtf.layers.batch_norm(w.x, 0.9, 1e-6),
        r"is_training is true or false, but was given 0.9.*batch_norm\(x, is_training, momentum=0.9",
    ),
    "dense": (
        lambda w: mtf.layers.dense(w.x, C, [B], None, mtf.relu),
        r"use_bias is true or false.*activation=",
    ),
}


@pytest.mark.slips
@pytest.mark.parametrize("name", SLIPS)
def test_slip(name, tf_graph):
    call, text = SLIPS[name]
    world = World()
    world.other_a = world.tensor([OTHER_A])
    before = world.state()
    with mtf.strict(), pytest.raises(ValueError) as refused:
        call(world)
    assert re.search(text, str(refused.value), re.S), str(refused.value)
    assert re.search(STRICT, str(refused.value))
    assert world.state() == before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with tf.variable_scope("", reuse=tf.AUTO_REUSE):
            call(world)
            call(world)
    told = [w for w in caught if w.category is mtf.MeshTensorFlowWarning]
    assert len(told) == 1, [str(w.message) for w in told]
    assert re.search(text, str(told[0].message), re.S)
    assert told[0].filename == __file__


def _trained(kernel):
    """Updates a variable: arithmetic of tensors that all have one name in two sizes."""
    optimizer = mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=2)
    graph = kernel.graph
    grads = mtf.gradients([mtf.reduce_sum(mtf.square(kernel))], [kernel])
    return optimizer.apply_grads(grads, [graph.name_to_variable["k"]])


RIGHT = {
    "einsum_of_one_position": lambda w: mtf.einsum([w.x], output_shape=[A, ("position", 1), B]),
    "kernel_of_one_name": lambda w: _trained(mtf.get_variable(w.mesh, "k", [A, OTHER_A, B])),
    "sizes_of_shapes": lambda w: mtf.Shape([A, OTHER_A]),
    "broadcast": lambda w: mtf.broadcast(mtf.einsum([w.x], output_shape=[A]), [A, ("n", 2)]),
    "concat": lambda w: mtf.concat([w.x, mtf.zeros(w.mesh, [OTHER_A, B])], "a"),
    "reshape": lambda w: mtf.reshape(w.x, [("a1", 2), ("a2", 4), B]),
    "reshape_of_one": lambda w: mtf.reshape(mtf.zeros(w.mesh, [A, ("one", 1)]), [("one", 1), A]),
    "top_k": lambda w: mtf.gradients([mtf.top_k(w.x, A, OTHER_A)[0]], [w.x]),
    "gather": lambda w: mtf.gather(w.x, mtf.mtf_range(w.mesh, OTHER_A, tf.int32), A),
    "rules": _lowered("a:rows,inside:cols,b:cols"),
    "no_rules": _lowered(""),
    "one_processor": _lowered("a:row,q:cols", ""),
    "flags": lambda w: [mtf.optimize.AdafactorOptimizer(flag) for flag in (True, 1, 0, None)],
    "adam": lambda w: mtf.optimize.AdamWeightDecayOptimizer(1e-3, 0.1, 0.9, 0.999),
    "axis_from_the_end": lambda w: [
        mtf.stack([w.x, w.x], "new", axis=axis).shape.dimension_names.index("new") == 3 + axis
        or pytest.fail(f"axis {axis}")
        for axis in (-1, -2, -3)
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_meant_is_no_slip(name, tf_graph):
    with mtf.strict():
        RIGHT[name](World())


@pytest.mark.slips
@pytest.mark.parametrize("rows", [2, 2**14])
def test_a_gather_without_its_dimension_gives_all(rows, tf_graph):
    """Of tables of any size, at indices in range."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    table = mtf.ones(mesh, [("rows", rows)])
    with pytest.warns(mtf.MeshTensorFlowWarning, match="nothing is picked"):
        y = mtf.gather(table, mtf.constant(mesh, [1, 9], [("batch", 2)], tf.int32), C)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    with tf.Session() as session:
        found = session.run(lowering.export_to_tf_tensor(y))
    np.testing.assert_array_equal(found, np.ones([2, rows], "float32"))


def test_a_rule_needs_to_fit_one_of_the_meshes(tf_graph):
    graph = mtf.Graph()
    meshes = [mtf.Mesh(graph, "one"), mtf.Mesh(graph, "two")]
    mtf.zeros(meshes[0], [A]), mtf.zeros(meshes[1], [B])
    impls = [
        mtf.placement_mesh_impl.PlacementMeshImpl(f"{name}:2", "a:rows,b:cols", ["cpu:0"] * 2)
        for name in ("rows", "cols")
    ]
    with mtf.strict():
        mtf.Lowering(graph, dict(zip(meshes, impls)))


@pytest.mark.slips
def test_both_sides_of_a_rule_are_told(tf_graph):
    """Also where long names begin alike."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _lowered("a_name_of_no_dimension:a_name_of_no_axis")(None)
    told = [str(w.message) for w in caught if w.category is mtf.MeshTensorFlowWarning]
    assert len(told) == 2 and "The program has" in told[0] and "The mesh has" in told[1], told


def test_rules_of_other_programs_are_left_out(tf_graph):
    world = World()
    rules = mtf.convert_to_layout_rules("a:rows,experts:rows,ensemble:ensemble,axx:rows,b:colls")
    left = rules_that_apply(
        rules,
        world.graph.operations,
        mtf.convert_to_shape("rows:2"),
        {"a", "experts", "ensemble"},
        {"ensemble"},
    )
    assert left.pairs == [("a", "rows"), ("axx", "rows"), ("b", "colls")]


def test_where_it_is_strict(monkeypatch):
    monkeypatch.delenv("MTF_STRICT", raising=False)
    found = []

    @mtf.strict()
    def decorated():
        return errors.is_strict()

    with mtf.strict():
        found.append(errors.is_strict())
        with mtf.strict(False):
            found.append(errors.is_strict())
        thread = threading.Thread(target=lambda: found.append(errors.is_strict()))
        thread.start()
        thread.join()
    found += [decorated(), errors.is_strict()]
    assert found == [True, False, False, True, False]
    for value, expected in {"1": True, "yes": True, "0": False, "off": False, "": False}.items():
        monkeypatch.setenv("MTF_STRICT", value)
        assert errors.is_strict() is expected, value
        with mtf.strict(False):
            assert not errors.is_strict()


def test_filters_and_threads():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", mtf.MeshTensorFlowWarning)
        errors.slip("silenced")
    assert not caught
    with warnings.catch_warnings():
        warnings.simplefilter("error", mtf.MeshTensorFlowWarning)
        for _ in range(2):  # what raises is not told once and for all
            with pytest.raises(mtf.MeshTensorFlowWarning, match="raised"):
                errors.slip("raised")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [
            threading.Thread(target=errors.slip, args=(f"from {i}", "one key")) for i in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1
    assert issubclass(mtf.MeshTensorFlowWarning, UserWarning)


@pytest.mark.slow
@pytest.mark.slips
def test_devices_that_are_not_there():
    """In eager code TensorFlow places operations elsewhere, without a word; a session raises."""

    def lower(device):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.zeros(mesh, [A])
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "a:all", [device])
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(x)

    text = r"this process has no device 'gpu:7'; .* It has CPU:0.*set_logical_device_configuration"
    with mtf.strict():
        with pytest.raises(ValueError, match=text):
            lower("gpu:7")
        for device in ("cpu:0", "", "/cpu", "/job:localhost/device:CPU:0"):
            assert lower(device).shape == [8]
        with tf.Graph().as_default():  # which devices there are is known to its session only
            lower("gpu:7")
    with pytest.warns(mtf.MeshTensorFlowWarning, match=text):
        tf.function(lambda: lower("gpu:7"))()
    tf2.config.set_soft_device_placement(False)
    try:
        with pytest.raises(ValueError, match=r"has no device 'gpu:7'\. It has CPU:0"):
            lower("gpu:7")
    finally:
        tf2.config.set_soft_device_placement(True)


class OfAUser(mtf.Operation):
    """The sum of a Tensor, which needs a slice for each processor."""

    slices = 0

    def __init__(self, x):
        super().__init__([x], name="of_a_user")
        self._outputs = [mtf.Tensor(self, mtf.Shape([]), x.dtype)]

    def lower(self, lowering):
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        OfAUser.slices = len(x.all_slices)
        total = tf.reduce_sum(lowering.mesh_impl(self).export_to_tf_tensor(self.inputs[0], x))
        y = lowering.mesh_impl(self).import_tf_tensor(self.outputs[0], total)
        lowering.set_tensor_lowering(self.outputs[0], y)


def test_what_is_in_the_condition_of_a_loop_counts(tf_graph):
    """Its dimensions, which a rule may split; and its operations, before processors are merged."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")

    def smaller(i):
        wide = mtf.broadcast(mtf.to_float(i), mtf.Shape([mtf.Dimension("within", 2)]))
        return mtf.less(OfAUser(wide).outputs[0], 6.0)

    start = mtf.import_tf_tensor(mesh, tf.constant(0), mtf.Shape([]))
    [end] = mtf.while_loop(smaller, lambda i: [i + 1], [start])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "within:x", ["", ""])
    with mtf.strict():
        lowering = mtf.Lowering(graph, {mesh: impl})
    with tf.Session() as session:
        assert session.run(lowering.export_to_tf_tensor(end)) == 3
    assert OfAUser.slices == 2
