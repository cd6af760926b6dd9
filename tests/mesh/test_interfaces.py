"""The abstract bases of what mesh implementations consist of, and classes without them."""

import itertools
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.paths import EXAMPLES

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.mesh_impl import Reducer
from mesh_tensorflow._mesh.program import Program, TfCollectives
from mesh_tensorflow._mesh.replicate import SimdProgram
from mesh_tensorflow._mesh.tpu_program import TpuCollectives, TpuProgram
from mesh_tensorflow.placement_mesh_impl import PlacedReducer, PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

sys.path.append(str(EXAMPLES))

import mesh_impl_of_your_own as example

IMPLEMENTATIONS = [
    (mtf.LaidOutTensor, PlacementMeshImpl.LaidOutTensor),
    (mtf.LaidOutTensor, SimdMeshImpl.LaidOutTensor),
    (mtf.LaidOutVariable, PlacementMeshImpl.LaidOutVariable),
    (mtf.LaidOutVariable, SimdMeshImpl.LaidOutVariable),
    (Reducer, PlacedReducer),
    (Reducer, TfCollectives),
    (Reducer, TpuCollectives),
    (Program, SimdProgram),
    (Program, TpuProgram),
]


@pytest.mark.parametrize("base, implementation", IMPLEMENTATIONS)
def test_implementations_are_whole(base, implementation):
    assert issubclass(implementation, base)
    assert not getattr(implementation, "__abstractmethods__", None)


@pytest.mark.parametrize("base", [mtf.LaidOutVariable, Reducer, Program])
def test_bases_are_abstract(base):
    with pytest.raises(TypeError, match="abstract"):
        base()


def test_programs_say_how_inputs_come():
    assert TpuProgram.has_infeed and not SimdProgram.has_infeed
    with pytest.raises(NotImplementedError, match="TpuProgram has no own_tensor"):
        TpuProgram.own_tensor(object.__new__(TpuProgram), [])


class DuckVariable:
    """Has what a Lowering calls, and no base of this package."""

    def __init__(self, variable, mesh_impl):
        self._whole = mesh_impl.WholeVariable(variable, mesh_impl)
        self.asked_for = []

    def __getattr__(self, name):
        self.asked_for.append(name)
        return getattr(self._whole, name)


class DuckMeshImpl(example.OneDeviceMeshImpl):
    WholeVariable = example.OneDeviceMeshImpl.LaidOutVariable
    LaidOutVariable = DuckVariable


class BareVariable(mtf.LaidOutVariable):
    """Has no copies, and does not say so."""

    def __init__(self, variable, mesh_impl):
        self._whole = example.OneDeviceMeshImpl.LaidOutVariable(variable, mesh_impl)

    @property
    def laid_out_tensor(self):
        return self._whole.laid_out_tensor

    def read(self):
        return self._whole.read()

    def assign_to_slices(self, assign_fn, values):
        return self._whole.assign_to_slices(assign_fn, values)


class BareMeshImpl(example.OneDeviceMeshImpl):
    LaidOutVariable = BareVariable


def lowered(impl_class):
    """Returns a Lowering of `v += 1; v`, and (the assignment, the value)."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    v = mtf.get_variable(mesh, "v", "a:4,b:6", initializer=tf.ones_initializer())
    assignment = mtf.assign_add(v, v * 2)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl_class("rows:2", "a:rows")})
    return lowering, lowering.lowered_operation(assignment), lowering.export_to_tf_tensor(v)


def test_variables_without_the_base(tf_graph):
    assert not issubclass(DuckVariable, mtf.LaidOutVariable)
    lowering, assigned, value = lowered(DuckMeshImpl)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(assigned)
        assert (session.run(value) == 3).all()
    [laid_out] = lowering.variables.values()
    assert set(laid_out.asked_for) == {"laid_out_tensor", "assign_to_slices", "needs_copies"}


class ListedVariable:
    """Has tf variables as slices, assignments to them and copies, and nothing that reads them."""

    def __init__(self, variable, mesh_impl):
        self.variable, self.mesh_impl = variable, mesh_impl
        sizes = mesh_impl.slice_shape(variable.shape)
        # Of one processor, the variable itself, which needs no copies.
        self.slices = [variable.get_master()]
        if mesh_impl.size > 1:
            self.slices = [
                tf.Variable(
                    tf.zeros(sizes, variable.slice_dtype),
                    trainable=False,
                    collections=[],
                    use_resource=mesh_impl.use_resource,
                )
                for _ in range(mesh_impl.size)
            ]
        self.laid_out_tensor = mesh_impl.LaidOutTensor(self.slices)

    def assign_to_slices(self, assign_fn, values):
        return tf.group([assign_fn(self.variable, *of_one) for of_one in zip(self.slices, values)])

    @property
    def needs_copies(self):
        return len(self.slices) > 1

    @property
    def copy_master_to_slices(self):
        master = self.variable.get_master()
        values = self.mesh_impl.make_slices(master, self.variable.shape)
        return self.assign_to_slices(mtf.assign_slice, values)

    @property
    def copy_slices_to_master(self):
        value = self.mesh_impl.combine_slices(self.slices, self.variable.shape)
        return self.variable.assign_to_master(value)


class ListedMeshImpl(PlacementMeshImpl):
    LaidOutVariable = ListedVariable
    use_resource = True


class ListedMeshImplOfReferences(ListedMeshImpl):
    use_resource = False


@pytest.mark.parametrize("mesh_shape, layout", [("p:1", ""), ("rows:2,cols:2", "a:rows,b:cols")])
def test_variables_that_have_no_read(tf_graph, mesh_shape, layout):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mesh.graph.assigns = "all"
    v = mtf.get_variable(mesh, "v", "a:4,b:6", initializer=tf.ones_initializer())
    after = mtf.depend(v, [mtf.assign_add(v, v * 2)])
    last = mtf.assign_add(v, mtf.ones_like(v))
    average = mtf.optimize.ExponentialMovingAverage(0.5)
    updates = average.apply([v.operation], after=[last])
    read = mtf.read_variable(v)
    impl = ListedMeshImpl(mesh_shape, layout, ["cpu:0"] * mtf.convert_to_shape(mesh_shape).size)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    values = [lowering.export_to_tf_tensor(x) for x in (after, read)]
    done = [lowering.lowered_operation(op) for op in updates]
    saved = lowering.copy_slices_to_masters()
    average_master = average.average(v.operation).operation.get_master()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        got, _ = session.run([values, done])
        session.run(saved)
        assert [np.unique(x) for x in [*got, session.run(average_master)]] == [3, 4, 2.5]


def losses_of_steps(impl):
    """Returns the losses of a training whose products need a weight after its gradient is known."""
    with tf.Graph().as_default(), tf.Session() as session:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        rng = np.random.RandomState(0)
        dims = [mtf.Dimension(f"d{i}", 64) for i in range(5)]
        x = h = mtf.import_tf_tensor(
            mesh, tf.constant(rng.normal(size=[8, 64]), "float32"), "b:8,d0:64"
        )
        for i, (a, b) in enumerate(itertools.pairwise(dims)):
            start = tf.constant_initializer(rng.normal(size=[64, 64], scale=0.1))
            h = mtf.tanh(
                mtf.einsum(
                    [h, mtf.get_variable(mesh, f"w{i}", [a, b], initializer=start)], [x.shape[0], b]
                )
            )
        loss = mtf.reduce_mean(mtf.square(h - mtf.rename_dimension(x, "d0", "d4")))
        weights = [v.value for v in mesh.graph.trainable_variables]
        updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(
            mtf.gradients([loss], weights), mesh.graph.trainable_variables
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        value = lowering.export_to_tf_tensor(loss)
        step = tf.group([lowering.lowered_operation(op) for op in updates])
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return [session.run([value, step])[0] for _ in range(6)]


@pytest.mark.parametrize("kind", [ListedMeshImpl, ListedMeshImplOfReferences])
@pytest.mark.parametrize(
    "mesh_shape, layout", [("p:1", ""), ("p:2", ""), ("rows:2,cols:2", "b:rows,d1:cols,d3:cols")]
)
def test_variables_that_are_their_own_values(kind, mesh_shape, layout):
    """All of a step reads what they were at its beginning."""
    made = mesh_shape, layout, ["cpu:0"] * mtf.convert_to_shape(mesh_shape).size
    np.testing.assert_allclose(
        losses_of_steps(kind(*made)), losses_of_steps(PlacementMeshImpl(*made)), rtol=1e-5
    )


def test_variables_that_are_their_own_values_in_eager_code():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.get_variable(mesh, "v", "a:4")
    with pytest.raises(
        ValueError, match=r"LaidOutVariable keeps variables .* run it in a tf\.Session"
    ):
        mtf.Lowering(mesh.graph, {mesh: ListedMeshImpl("x:2", "a:x", ["cpu:0"] * 2)})


def test_copies_that_are_needed_and_lacking(tf_graph):
    lowering, *_ = lowered(BareMeshImpl)
    with pytest.raises(NotImplementedError, match="BareVariable has no copy_master_to_slices"):
        lowering.copy_masters_to_slices()
    with pytest.raises(NotImplementedError, match="BareVariable has no copy_slices_to_master"):
        lowering.copy_slices_to_masters()


class OwnRandom(PlacementMeshImpl):
    """Gives the function its arguments, with a seed, and remembers their names."""

    def random(self, shape, tf_fn, kwargs):
        self.given = sorted(kwargs)
        if "seed" in kwargs:
            kwargs["seed"] += 1  # the dictionary is its own
        return self.LaidOutTensor([tf_fn(self.slice_shape(shape), **kwargs)] * self.size)


@pytest.mark.parametrize("seed, given", [(None, []), (3, ["seed"])])
@pytest.mark.parametrize("in_loop", [False, True])
def test_random_values_of_an_implementation_without_keys(tf_graph, in_loop, seed, given):
    """Programs that have one were written before there were keys, and pass on what they get."""
    if seed is not None:
        tf.set_random_seed(seed)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")

    def draw(total):
        return total + mtf.random_uniform(mesh, "d:4", minval=1.0, maxval=2.0)

    x = mtf.zeros(mesh, "d:4")
    if in_loop:
        count = mtf.constant(mesh, 0, dtype=tf.int32)
        _, y = mtf.while_loop(
            lambda i, _: mtf.less(i, 3), lambda i, t: [i + 1, draw(t)], [count, x]
        )
    else:
        y = draw(draw(draw(x)))
    impl = OwnRandom("p:2", "", ["cpu:0"] * 2)
    assert PlacementMeshImpl.takes_random_keys and not impl.takes_random_keys
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    value = lowering.export_to_tf_tensor(y)
    assert [name for name in impl.given if name in ("key", "seed")] == given
    with tf.Session() as session:
        total = session.run(value)
    assert ((3 < total) & (total < 6)).all() and len(set(total)) == 4
