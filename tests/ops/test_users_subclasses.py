"""Operations of a user's own that derive from classes of the package, as published programs have.

They set and read fields by the names that the classic gives them, and move values between meshes.
"""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

X = np.arange(1.0, 9.0, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def mesh(tf_graph):
    return mtf.Mesh(mtf.Graph(), "mesh")


def placed(layout="", shape="p:2"):
    return PlacementMeshImpl(shape, layout, ["cpu:0"] * 2)


def imported(mesh, value=X, shape="b:2,d:4"):
    return mtf.import_tf_tensor(mesh, tf.constant(value), shape)


def values(graph, mesh_to_impl, *targets):
    lowering = mtf.Lowering(graph, mesh_to_impl)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        return session.run([lowering.export_to_tf_tensor(t) for t in targets])


# -- gradients


def slices_of(lowering, x):
    return lowering.tensors[x].to_laid_out_tensor().tensor_list


class SliceBySlice(mtf.GenericGradOperation):
    """Differentiates each slice; reads the operation and the gradients of its outputs."""

    def lower(self, lowering):
        impl = lowering.mesh_impl(self)
        xs, [y], [dy] = self._forward_op.inputs, self._forward_op.outputs, self._grad_ys
        found = [
            tf.gradients(b, a, grad_ys=g)
            for *a, b, g in zip(*(slices_of(lowering, t) for t in (*xs, y, dy)))
        ]
        for out, slices in zip(self.outputs, mtf.transpose_list_of_lists(found)):
            lowering.set_tensor_lowering(out, impl.LaidOutTensor.from_tensor_list(slices))


@pytest.mark.parametrize("layout", ["", "b:p", "d:p"])
def test_a_gradient_of_slicewise(mesh, layout):
    x = imported(mesh)
    y = mtf.slicewise(
        lambda s, t: s * s * t,
        [x, imported(mesh, X + 1)],
        splittable_dims=x.shape.dims,
        grad_function=lambda op, dy: SliceBySlice(op, [dy]).outputs,
    )
    [dx] = mtf.gradients([mtf.reduce_sum(y)], [x])
    [found] = values(mesh.graph, {mesh: placed(layout)}, dx)
    np.testing.assert_allclose(found, 2 * X * (X + 1), rtol=1e-6)


class Cube(mtf.Operation):
    """An operation whose gradient is TensorFlow's of what it lowers to."""

    def __init__(self, x):
        super().__init__([x], name="cube")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        return mtf.GenericGradOperation(self, grad_ys).outputs

    def lower(self, lowering):
        cubes = [s * s * s for s in slices_of(lowering, self.inputs[0])]
        made = lowering.mesh_impl(self).LaidOutTensor.from_tensor_list(cubes)
        lowering.set_tensor_lowering(self.outputs[0], made)


@pytest.mark.parametrize("layout", ["", "b:p", "d:p"])
def test_a_gradient_of_another_operation(mesh, layout):
    x = imported(mesh)
    [dx] = mtf.gradients([Cube(x).outputs[0]], [x])
    [found] = values(mesh.graph, {mesh: placed(layout)}, dx)
    np.testing.assert_allclose(found, 3 * X**2, rtol=1e-6)


class Scaled(mtf.Operation):
    """A product, with a further input that only orders it, or gradients of more than its inputs."""

    def __init__(self, x, w, *others, given):
        super().__init__([x, w, *others], name="scaled")
        self._given = given
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        x, w, *_ = self.inputs
        yield from [grad_ys[0] * w, mtf.reduce_sum(grad_ys[0] * x, output_shape=w.shape), None][
            : self._given
        ]

    def lower(self, lowering):
        x, w, *_ = [lowering.tensors[t] for t in self.inputs]
        lowering.set_tensor_lowering(
            self.outputs[0], lowering.mesh_impl(self).slicewise(tf.multiply, x, w)
        )


@pytest.mark.parametrize("given, others", [(1, 0), (2, 0), (2, 2), (3, 0)])
def test_gradients_of_the_first_inputs(mesh, given, others):
    """As many as there are: what a user's operation leaves out is none."""
    x, w = imported(mesh), imported(mesh, X[0], "d:4")
    y = Scaled(x, w, *[mtf.exp(x)] * others, given=given).outputs[0]
    dx, dw = mtf.gradients([y], [x, w])
    found = values(mesh.graph, {mesh: placed()}, *([dx] if given == 1 else [dx, dw]))
    np.testing.assert_allclose(found[0], np.broadcast_to(X[0], X.shape), rtol=1e-6)
    if given == 1:
        assert dw is None
    else:
        np.testing.assert_allclose(found[1], X.sum(0), rtol=1e-6)


def test_a_gradient_of_another_operation_in_eager_code():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf2.constant(X), "b:2,d:4")
    [dx] = mtf.gradients([Cube(x).outputs[0]], [x])
    with pytest.raises(NotImplementedError, match=r"(?s)that cube became.*@mtf.function.*Cube"):
        mtf.Lowering(mesh.graph, {mesh: placed()})
    with pytest.raises(NotImplementedError, match=r"@mtf\.function"):
        dx.numpy()


class SummedSliceBySlice(SliceBySlice):
    """Sums gradients over the processors itself, in place of leaving them to be summed."""

    def lower(self, lowering):
        super().lower(lowering)
        impl = lowering.mesh_impl(self)
        split = set(impl.splitting_axes(self._forward_op.outputs[0].shape))
        for y in self.outputs:
            axes = sorted(split - set(impl.splitting_axes(y.shape)))
            lowering.set_tensor_lowering(y, impl.allreduce(lowering.tensors[y], axes, "SUM"))


@pytest.mark.parametrize("layout", ["", "b:p"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_that_is_summed_already(mesh, microbatches, layout):
    """Loops keep sums over processors pending, but not those that a user's operation has made."""
    rows = np.concatenate([X, X + 1])
    x = imported(mesh, rows, "b:4,d:4")
    batch, d = x.shape.dims

    def loss(features):
        w = mtf.get_variable(mesh, "w", [d], initializer=tf.constant_initializer(2.0))
        y = mtf.slicewise(
            lambda s, t: s * t * t,
            [features["x"], w],
            output_shape=[*features["x"].shape.dims],
            splittable_dims=[batch, d],
            grad_function=lambda op, dy: SummedSliceBySlice(op, [dy]).outputs,
        )
        return {"loss": mtf.reduce_sum(y)}

    [dw], out = mtf.serialize_training_step({"x": x}, loss, batch, microbatches)
    found, total = values(mesh.graph, {mesh: placed(layout)}, dw, out["loss"])
    np.testing.assert_allclose(found, 4 * rows.sum(0), rtol=1e-6)
    np.testing.assert_allclose(total, 4 * rows.sum(), rtol=1e-6)


# -- contractions


class Activated(mtf.Operation):
    """A matrix product that applies a function to a factor, with the package's contraction."""

    def __init__(self, x, w, shape):
        super().__init__([x, w], name="activated")
        self._outputs = [mtf.Tensor(self, mtf.Shape(shape), x.dtype)]

    def lower(self, lowering):
        impl, [y] = lowering.mesh_impl(self), self.outputs
        multiply, axes = mtf.ops._einsum_helper([x.shape for x in self.inputs], y.shape, impl)
        product = impl.slicewise(
            lambda x, w: multiply(tf.square(x), w), *[lowering.tensors[x] for x in self.inputs]
        )
        if axes:
            product = mtf.LazyAllreduceSum(impl, product, axes, add_counter_fn=lambda: None)
        lowering.set_tensor_lowering(y, product)


@pytest.mark.parametrize("layout", ["", "b:p", "d:p", "o:p"])
def test_a_contraction(mesh, layout):
    w = imported(mesh, X.T, "d:4,o:2")
    b, o = mtf.convert_to_shape("b:2,o:2")
    y = Activated(imported(mesh), w, [b, o]).outputs[0]
    [found] = values(mesh.graph, {mesh: placed(layout)}, y)
    np.testing.assert_allclose(found, X**2 @ X.T, rtol=1e-6)


def test_a_contraction_of_two_dimensions_on_one_axis(mesh):
    w = imported(mesh, X.T, "d:4,o:2")
    Activated(imported(mesh), w, mtf.convert_to_shape("b:2,o:2"))
    with pytest.raises(ValueError, match=r"(?s)'?b'?.*'?o'?.*p"):
        mtf.Lowering(mesh.graph, {mesh: placed("b:p,o:p")})


# -- convolutions

IMAGES = {2: "b:1,h:5,w:5,i:2", 3: "b:1,t:5,h:5,w:5,i:2"}
WINDOWS = {2: "fh:3,fw:3,i:2,o:4", 3: "ft:3,fh:3,fw:3,i:2,o:4"}
CLASSES = {
    (2, False): mtf.Conv2dOperation,
    (3, False): mtf.Conv3dOperation,
    (2, True): mtf.Conv2dTransposeOperation,
    (3, True): mtf.Conv3dTransposeOperation,
}


@pytest.mark.slow_but(13)
@pytest.mark.parametrize("layout", ["", "o:p", "i:p"])
@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("rank, transposed", CLASSES)
def test_a_convolution_that_sets_the_fields(mesh, rank, transposed, strides, layout):
    """The classic's constructor is not called: the output's shape is said by the subclass."""
    base = CLASSES[rank, transposed]

    class Mine(base):
        def __init__(self, x, w, strides, padding):
            mtf.Operation.__init__(self, [x, w], name="my_conv")
            self._strides, self._padding = strides, padding
            shape = base(x, w, strides, padding).outputs[0].shape
            self._outputs = [mtf.Tensor(self, shape, x.dtype)]

    window = WINDOWS[rank]
    if transposed:
        window = window.replace("i:2,o:4", "o:4,i:2")
    x = mtf.random_uniform(mesh, IMAGES[rank], seed=1)
    w = mtf.random_uniform(mesh, window, seed=2)
    steps = (1, *[strides] * rank, 1)
    results = []
    for cls in (Mine, base):
        y = cls(x, w, steps, "VALID").outputs[0]
        results += [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, w])]
    found = values(mesh.graph, {mesh: placed(layout)}, *results)
    for mine, expected in zip(found[:3], found[3:]):
        np.testing.assert_allclose(mine, expected, rtol=1e-5)


def test_fields_of_a_convolution(mesh):
    x, w = mtf.zeros(mesh, IMAGES[3]), mtf.zeros(mesh, WINDOWS[3])
    op = mtf.Conv3dOperation(x, w, [1, 2, 2, 2, 1], "VALID")
    sizes = {name: d.size for name, d in vars(op).items() if name.endswith("_dim")}
    assert sizes == {
        "_in_d_dim": 5, "_in_h_dim": 5, "_in_w_dim": 5, "_in_dim": 2,
        "_fd_dim": 3, "_fh_dim": 3, "_fw_dim": 3, "_out_dim": 4,
        "_out_d_dim": 2, "_out_h_dim": 2, "_out_w_dim": 2,
    }  # fmt: skip
    assert (op._strides, op._padding) == ([1, 2, 2, 2, 1], "VALID")
    assert op._batch_dims == [mtf.Dimension("b", 1)]


# -- what a subclass lowers otherwise


class SplitParts(mtf.SplitOperation):
    """Cuts each slice, so that each part has something of every processor's slice."""

    def lower(self, lowering):
        impl = lowering.mesh_impl(self)
        axis = impl.tensor_dimension_to_mesh_axis(self._split_dim)
        parts = 1 if axis is None else impl.shape[axis].size
        sizes = [size // parts for size in self._output_sizes]
        made = impl.slicewise(
            lambda t: tuple(tf.split(t, sizes, axis=self._axis)), lowering.tensors[self.inputs[0]]
        )
        for y, value in zip(self.outputs, made):
            lowering.set_tensor_lowering(y, value)


class Undeclared(mtf.SplitOperation):
    """Lowers as its base does."""


class Declared(SplitParts):
    """Says which dimension may not be split."""

    def _unsplittable(self):
        return ["d"]


def test_what_a_base_declares_is_not_said_of_another_lowering(mesh):
    x = imported(mesh)
    parts = SplitParts(x, x.shape.dims[1], 2).outputs
    assert parts[0].operation.unsplittable_dims == {"d"}  # auto_mtf does not choose it
    a, b = values(mesh.graph, {mesh: placed("d:p")}, *parts)
    np.testing.assert_array_equal(a, X[:, [0, 2]])
    np.testing.assert_array_equal(b, X[:, [1, 3]])


def test_what_a_subclass_inherits(mesh):
    """It lowers as its base does, and is given whole tensors as that is."""
    x = imported(mesh)
    parts = Undeclared(x, x.shape.dims[1], 2).outputs
    for part, columns in zip(
        values(mesh.graph, {mesh: placed("d:p")}, *parts), (X[:, :2], X[:, 2:])
    ):
        np.testing.assert_array_equal(part, columns)


def test_what_a_subclass_declares(mesh):
    """It takes every other column of what it is given, which is whole."""
    x = imported(mesh)
    parts = Declared(x, x.shape.dims[1], 2).outputs
    impl = placed("d:p")
    found = values(mesh.graph, {mesh: impl}, *parts)
    assert mesh.graph.operations[-1].needs_whole(impl) == {"d"}
    for part, whole in zip(found, values(mesh.graph, {mesh: placed("")}, *parts)):
        np.testing.assert_array_equal(part, whole)


def test_sizes_that_concatenations_have(mesh):
    x = imported(mesh)
    assert mtf.concat([x, x], "d").operation._input_sizes == [4, 4]
    assert mtf.split(x, x.shape.dims[1], [1, 3])[0].operation._output_sizes == [1, 3]


class PaddedWith(mtf.PadOperation):
    """Pads with another number; reads the sizes, the axis and the dimensions."""

    def __init__(self, x, paddings, dim_name, value):
        super().__init__(x, paddings, dim_name)
        self._value = value

    def gradient(self, grad_ys):
        [x] = self.inputs
        begin, size = self._paddings[0], x.shape.dims[self._axis].size
        return [mtf.slice(grad_ys[0], begin, size, self._output_dim.name)]

    def lower(self, lowering):
        impl, [x] = lowering.mesh_impl(self), self.inputs
        assert impl.tensor_dimension_to_mesh_axis(self._output_dim) is None
        paddings = [[0, 0]] * x.shape.ndims
        paddings[self._axis] = self._paddings
        made = impl.slicewise(
            lambda t, p: tf.pad(t, p, constant_values=self._value), lowering.tensors[x], paddings
        )
        lowering.set_tensor_lowering(self.outputs[0], made)


@pytest.mark.parametrize("layout", ["", "b:p"])
def test_padding_with_another_number(mesh, layout):
    x = imported(mesh)
    y = PaddedWith(x, [1, 2], "d", -3.0).outputs[0]
    [dx] = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])
    found, gradient = values(mesh.graph, {mesh: placed(layout)}, y, dx)
    np.testing.assert_array_equal(found, np.pad(X, [[0, 0], [1, 2]], constant_values=-3.0))
    np.testing.assert_array_equal(gradient, 2 * X)


def test_fields_of_ranges_and_windows(mesh):
    x = imported(mesh)
    part = mtf.slice(x, 1, 2, "d").operation
    assert (part._begin, part._axis, part._slice_dim) == (1, 1, mtf.Dimension("d", 2))
    images = mtf.zeros(mesh, "b:1,h:4,w:6,c:2")
    pooled = mtf.PoolOperation(images, [2, 3], [2, 3], "MAX_2D")
    assert list(pooled._ksize) == list(pooled._strides) == [2, 3]


# -- several meshes


class ToMesh(mtf.Operation):
    """Moves a value to a mesh with as many processors; its gradient moves back."""

    def __init__(self, x, *others, mesh):
        super().__init__([x, *others], mesh=mesh, name="to_mesh")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        rest = [None] * (len(self.inputs) - 1)
        return [ToMesh(grad_ys[0], mesh=self.inputs[0].mesh).outputs[0], *rest]

    def lower(self, lowering):
        made = lowering.mesh_impl(self).LaidOutTensor(slices_of(lowering, self.inputs[0]))
        lowering.set_tensor_lowering(self.outputs[0], made)


def test_inputs_on_several_meshes(tf_graph):
    graph = mtf.Graph()
    first, second = mtf.Mesh(graph, "first"), mtf.Mesh(graph, "second")
    x, y = imported(first), imported(second, 10 * X)
    op = ToMesh(x, y, mesh=second)
    assert (op.mesh, op.outputs[0].mesh) == (second, second)
    z = op.outputs[0] * y
    [dx] = mtf.gradients([z], [x])
    assert dx.mesh is first
    impls = {first: placed("b:p"), second: placed("b:q", "q:2")}
    found = values(graph, impls, z, dx)
    np.testing.assert_allclose(found, [10 * X**2, 10 * X], rtol=1e-6)
    with pytest.raises(ValueError, match=r"on one mesh: .*super\(\).__init__\(inputs, mesh=mesh\)"):
        mtf.add(x, y)


def test_gradients_are_on_the_meshes_of_what_they_are_of(tf_graph):
    graph = mtf.Graph()
    first, second = mtf.Mesh(graph, "first"), mtf.Mesh(graph, "second")
    x, y = imported(first), imported(second)
    op = ToMesh(x, y, mesh=second)
    grad = mtf.GenericGradOperation(op, [mtf.ones_like(op.outputs[0])])
    assert [t.mesh for t in grad.outputs] == [first, second]
    grad.outputs[1]._mesh = first
    assert grad.outputs[1].mesh is first


class Resplit(ToMesh):
    """Moves a value to a mesh that splits another dimension, slice by slice."""

    def gradient(self, grad_ys):
        return [Resplit(grad_ys[0], mesh=self.inputs[0].mesh).outputs[0]]

    def lower(self, lowering):
        [x], new = self.inputs, lowering.mesh_impl(self)
        old = lowering.mesh_impl(x.mesh)
        slices = slices_of(lowering, x)
        # The Shape of the whole says how slices are laid out, also where they are of parts.
        part = mtf.Shape([d._replace(size=n) for d, n in zip(x.shape, old.slice_shape(x.shape))])
        cut = [new.make_slices(s, part) for s in slices]
        made = [
            old.combine_slices(pieces, x.shape, device=device)
            for device, pieces in zip(new.devices, zip(*cut))
        ]
        lowering.set_tensor_lowering(self.outputs[0], new.LaidOutTensor(made))


@pytest.mark.parametrize("old, new", [("b:p", "d:p"), ("d:p", "b:p"), ("", "b:p")])
def test_slices_of_slices_are_joined(tf_graph, old, new):
    graph = mtf.Graph()
    first, second = mtf.Mesh(graph, "first"), mtf.Mesh(graph, "second")
    x = imported(first)
    y = Resplit(x, mesh=second).outputs[0]
    [dx] = mtf.gradients([mtf.reduce_sum(y * imported(second, X**2))], [x])
    impls = {first: placed(old), second: placed(new)}
    found, gradient = values(graph, impls, y, dx)
    np.testing.assert_array_equal(found, X)
    np.testing.assert_array_equal(gradient, X**2)


@pytest.mark.parametrize("layouts", [("b:p", ""), ("", "b:q"), ("b:p", "b:q")])
def test_what_is_whole_on_either_mesh(tf_graph, layouts):
    class Whole(ToMesh):
        def _unsplittable(self):
            return ["b"]

    graph = mtf.Graph()
    first, second = mtf.Mesh(graph, "first"), mtf.Mesh(graph, "second")
    y = Whole(imported(first), mesh=second).outputs[0]
    impls = {first: placed(layouts[0]), second: placed(layouts[1], "q:2")}
    np.testing.assert_array_equal(values(graph, impls, y)[0], X)


# -- meshes


class Counting(PlacementMeshImpl):
    """Adds and joins slices in its own way, on the devices of each group."""

    def __init__(self, *args):
        super().__init__(*args)
        self.groups = []

    def _on(self, devices, slices, fn):
        self.groups.append([d.device_index for d in devices])
        return mtf.parallel(devices, lambda: fn(slices))

    def allreduce(self, x, mesh_axes, reduction_fn_string):
        return self._collective_with_groups(
            x, mesh_axes, lambda slices, devices: self._on(devices, slices, tf.add_n)
        )

    def allconcat(self, x, mesh_axis, concat_axis):
        def joined(slices, devices):
            return self._on(devices, slices, lambda s: tf.concat(s, concat_axis))

        return self._collective_with_groups(x, [mesh_axis], joined)


def test_collectives_of_ones_own(mesh):
    """On devices that are given as DeviceSpecs, as they are given back."""
    devices = [tf.DeviceSpec(device_type="CPU", device_index=i) for i in range(4)]
    impl = Counting("rows:2,cols:2", "b:rows,d:cols", devices)
    x = imported(mesh)
    total = mtf.reduce_sum(x, reduced_dim=x.shape.dims[1])
    whole = mtf.rename_dimension(x, "d", "e")
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    targets = [lowering.export_to_tf_tensor(t) for t in (total, whole)]
    assert impl.devices == devices
    assert impl.groups == [[0, 1], [2, 3]] * 2
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        for found, right in zip(session.run(targets), (X.sum(1), X)):
            np.testing.assert_allclose(found, right, rtol=1e-6)
    over_all = impl._collective_with_groups(
        lowering.tensors[x], [0, 1], lambda slices, _: [tf.add_n(slices)] * 4
    )
    assert len(over_all.tensor_list) == 4
    assert impl._collective_with_groups(lowering.tensors[x], [], None) is lowering.tensors[x]
    with pytest.raises(ValueError, match="shorter"):
        impl._collective_with_groups(lowering.tensors[x], [0], lambda slices, _: slices[:1])


def test_a_mesh_of_device_specs(mesh):
    devices = [tf2.DeviceSpec.from_string("/device:CPU:0")] * 2
    impl = PlacementMeshImpl("p:2", "b:p", devices)
    assert impl.domains == placed().domains
    assert "on /device:CPU:0" in repr(impl)
    [found] = values(mesh.graph, {mesh: impl}, mtf.square(imported(mesh)))
    np.testing.assert_array_equal(found, X**2)


# -- names of early releases


@pytest.mark.parametrize("layout", ["", "b:p", "d:p"])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("slice_dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("in_use", [False, True])
def test_slices_have_initializers(mesh, in_use, slice_dtype, stacked, layout):
    """Programs initialize them, and not the masters."""
    dtype = mtf.VariableDType(tf.float32, slice_dtype, tf.float32)
    initial = {"v": 2.0, "w": 3.0}
    for name, value in initial.items():
        v = mtf.get_variable(
            mesh, name, "b:2,d:4", dtype, initializer=tf.constant_initializer(value)
        )
        if in_use:
            tf.identity(v.operation.get_master().read_value())
    tensors = [v.value for v in mesh.graph.all_variables]
    lowering = mtf.Lowering(mesh.graph, {mesh: placed(layout)}, autostack=stacked)
    exported = [lowering.export_to_tf_tensor(t) for t in tensors]
    begin = []
    for v in mesh.graph.all_variables:
        value = lowering.variables[v].laid_out_tensor
        assert len(value.all_slices) == len(value.tensor_list)
        for s, t in zip(value.all_slices, value.tensor_list):
            assert s.shape == t.shape
            with tf.device(s.device):
                begin.append(s.initializer)
        # What an operation computes with are tensors.
        assert not any(isinstance(s, tf.Variable) for s in lowering.tensors[v.value].all_slices)
    with tf.Session() as session:
        session.run(begin)
        for found, value in zip(session.run(exported), initial.values()):
            np.testing.assert_array_equal(found, np.full([2, 4], value))


def test_variables_by_early_names(mesh):
    v = mtf.get_variable(mesh, "v", "b:2,d:4", initializer=tf.zeros_initializer()).operation
    assert mesh.graph._name_to_variable == {"v": v} and v.master is v.get_master()
    with pytest.raises(ValueError, match=r"variable 'v' has no slices: make a Lowering"):
        v.assign_to_slices(mtf.assign_slice, [])
    mine = tf.get_variable("mine", initializer=X)
    with pytest.raises(ValueError, match=r"'v' Shape\[b=2, d=4\] must be .*\[2, 4\] and float32"):
        v.set_master(tf.get_variable("other", initializer=X[:1]))
    v.set_master(mine)
    lowering = mtf.Lowering(mesh.graph, {mesh: placed("b:p")})
    whole = lowering.export_to_tf_tensor(v.value)
    slices = lowering.variables[v].laid_out_tensor.all_slices
    doubled = v.assign_to_slices(mtf.assign_slice, [2 * s for s in slices])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        np.testing.assert_array_equal(session.run(whole), X)
        session.run(doubled)
        session.run(lowering.copy_slices_to_masters())
        np.testing.assert_array_equal(session.run(mine), 2 * X)
        assert not any(g.name == "v:0" for g in tf.global_variables())


def test_a_variable_of_a_store_has_no_other_master():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    v = mtf.get_variable(mesh, "v", "d:4").operation
    with pytest.raises(ValueError, match=r"store.assign\('v', value\)"):
        v.set_master(tf2.Variable(X[0]))
