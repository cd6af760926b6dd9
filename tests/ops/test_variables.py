"""Variables: dtypes, names, reading, assigning, order, stacking."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 16)
PLACINGS = [
    Placing("x:1", ""),
    Placing("x:4", "a:x"),
    Placing("x:2,y:2", "a:x,b:y"),
    Placing("x:2,y:2", "b:y", apart=True),
    Placing("x:2", "", apart=True),
]


class Program:
    """A graph on one mesh, lowered in a placing, in a session with its variables set."""

    def __init__(self, placing=PLACINGS[0], **lowering_kwargs):
        self.placing = placing
        self.kwargs = lowering_kwargs
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")

    def variable(self, name, value, **kwargs):
        initializer = tf.constant_initializer(np.asarray(value))
        shape = mtf.Shape([A, B][: np.ndim(value)])
        return mtf.get_variable(self.mesh, name, shape, initializer=initializer, **kwargs)

    def start(self):
        with harness.separate_memories() if self.placing.apart else tf.name_scope(""):
            impl = self.placing.impl()
            self.lowering = mtf.Lowering(self.graph, {self.mesh: impl}, **self.kwargs)
            to_slices = self.lowering.copy_masters_to_slices()
            self.to_masters = self.lowering.copy_slices_to_masters()
        self.session = harness.session()
        self.session.run(tf.global_variables_initializer())
        self.session.run(to_slices)

    def value(self, x):
        return self.session.run(self.lowering.export_to_tf_tensor(x))

    def do(self, op):
        self.session.run(self.lowering.lowered_operation(op))

    def masters(self):
        """Returns the masters by name, brought up to date."""
        self.session.run(self.to_masters)
        return dict(
            zip([v.op.name for v in tf.global_variables()], self.session.run(tf.global_variables()))
        )


# -- dtypes and names

DTYPES = [
    (tf.float32, {}, (tf.float32, tf.float32, tf.float32)),
    (tf.bfloat16, {}, (tf.bfloat16, tf.bfloat16, tf.bfloat16)),
    (tf.float32, {"activation_dtype": tf.bfloat16}, (tf.float32, tf.float32, tf.bfloat16)),
    (tf.float32, {"master_dtype": tf.bfloat16}, (tf.bfloat16, tf.float32, tf.float32)),
    (tf.bfloat16, {"slice_dtype": tf.float32}, (tf.bfloat16, tf.float32, tf.bfloat16)),
    (mtf.VariableDType(tf.bfloat16, tf.float32), {}, (tf.bfloat16, tf.float32, tf.bfloat16)),
    (
        mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16),
        {},
        (tf.float32, tf.float32, tf.bfloat16),
    ),
    (mtf.VariableDType(), {}, (tf.float32,) * 3),
    (tf.int32, {}, (tf.int32,) * 3),
]


@pytest.mark.parametrize("dtype, kwargs, expected", DTYPES)
def test_dtypes(dtype, kwargs, expected, tf_graph):
    program = Program(PLACINGS[1])
    values = np.arange(8)
    x = program.variable("v", values, dtype=dtype, **kwargs)
    v = x.operation
    assert (v.master_dtype, v.slice_dtype, v.activation_dtype) == expected
    assert (v.dtype.master_dtype, v.dtype.slice_dtype, v.dtype.activation_dtype) == expected
    assert x.dtype == expected[2]
    add = mtf.assign_add(x, mtf.cast(mtf.ones(program.mesh, [A]), x.dtype))
    program.start()
    assert program.lowering.variables[v].slice_variables[0].dtype.base_dtype == expected[1]
    value = program.value(x)
    assert value.dtype == expected[2].as_numpy_dtype
    np.testing.assert_array_equal(value.astype(np.float32), values)
    program.do(add)
    master = program.masters()["v"]
    assert master.dtype == expected[0].as_numpy_dtype
    np.testing.assert_array_equal(master.astype(np.float32), values + 1)


def test_slices_keep_their_precision_when_activations_do_not(tf_graph):
    program = Program(PLACINGS[1])
    x = program.variable("v", np.full(8, 256.0), activation_dtype=tf.bfloat16)
    step = mtf.assign_sub(x, mtf.cast(mtf.ones(program.mesh, [A]), tf.bfloat16) * 0.25)
    program.start()
    for _ in range(3):
        program.do(step)
    np.testing.assert_array_equal(program.masters()["v"], np.full(8, 255.25))


@pytest.mark.slips
def test_names_and_scopes(tf_graph):
    program = Program()
    with tf.variable_scope("outer"):
        x = program.variable("v", np.ones(8))
        with pytest.warns(mtf.MeshTensorFlowWarning, match=r"outer/v.*bfloat16"):
            again = mtf.get_variable(program.mesh, "v", [A], dtype=tf.bfloat16, trainable=False)
        with pytest.raises(
            ValueError, match=r"'outer/v' is Shape\[a=8\], and is asked for as .*b=16"
        ):
            mtf.get_variable(program.mesh, "v", [B])
    assert again is x and x.operation.name == "outer/v" and x.name == "outer/v:0"
    assert program.graph.name_to_variable == {"outer/v": x.operation}
    assert [v.op.name for v in tf.trainable_variables()] == ["outer/v"]
    other = mtf.get_variable(program.mesh, "v", [A], trainable=False, collections=["mine"])
    assert other.operation.name == "v" and program.graph.trainable_variables == [x.operation]
    assert [v.op.name for v in tf.get_collection("mine")] == ["v"]
    assert [v.op.name for v in tf.global_variables()] == ["outer/v"]


def test_default_initializer_is_glorot(tf_graph):
    program = Program()
    mtf.get_variable(program.mesh, "v", [("a", 300), ("b", 100)])
    program.start()
    value = program.masters()["v"]
    limit = np.sqrt(6 / 400)
    assert np.abs(value).max() <= limit and np.abs(value).max() > 0.99 * limit


# -- masters and slices


@pytest.mark.parametrize("placing", PLACINGS)
def test_copies_between_masters_and_slices(placing, tf_graph):
    program = Program(placing)
    values = np.arange(128.0).reshape(8, 16)
    x = program.variable("v", values)
    program.start()
    np.testing.assert_array_equal(program.value(x), values)
    master = x.operation.get_master()
    program.session.run(master.assign(values * 2))
    program.session.run(program.lowering.copy_masters_to_slices())
    np.testing.assert_array_equal(program.value(x), values * 2)
    laid_out = program.lowering.variables[x.operation]
    for v in laid_out.slice_variables:
        program.session.run(v.assign_add(tf.ones_like(v)))
    np.testing.assert_array_equal(program.masters()["v"], values * 2 + 1)


@pytest.mark.parametrize("sequence", ["", "1"])
def test_copies_in_sequence(sequence, monkeypatch, tf_graph):
    monkeypatch.setenv("MTF_SEQUENCE_MODE", sequence)
    program = Program(PLACINGS[1], autostack=False)
    xs = [program.variable(f"v{i}", np.full(8, float(i))) for i in range(3)]
    program.start()
    for i, x in enumerate(xs):
        np.testing.assert_array_equal(program.value(x), np.full(8, i))
    masters = program.masters()
    for i in range(3):
        np.testing.assert_array_equal(masters[f"v{i}"], np.full(8, i))


# -- assignments


@pytest.mark.parametrize("placing", PLACINGS)
def test_assignments(placing, tf_graph):
    program = Program(placing)
    values = np.arange(128.0).reshape(8, 16)
    xs = [program.variable(n, values) for n in ("set", "add", "sub", "own", "far")]
    two = mtf.constant(program.mesh, 2.0, [A, B])
    ops = [
        mtf.assign(xs[0], xs[0] * two),
        mtf.assign_add(xs[1], two),
        mtf.assign_sub(xs[2], two),
        mtf.assign(
            xs[3],
            two,
            assign_fn=lambda v, s, val: s.assign(tf.cast(val, s.dtype) * 10, read_value=False),
        ),
        mtf.assign(mtf.identity(mtf.cast(xs[4], tf.float32)), two),  # reached by one-input ops
    ]
    program.start()
    program.session.run([program.lowering.lowered_operation(op) for op in ops])
    masters = program.masters()
    expected = {
        "set": values * 2,
        "add": values + 2,
        "sub": values - 2,
        "own": np.full([8, 16], 20.0),
        "far": np.full([8, 16], 2.0),
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(masters[name], value, err_msg=name)


def test_assignments_happen_only_when_run(tf_graph):
    program = Program(PLACINGS[1])
    x = program.variable("v", np.zeros(8))
    mtf.assign_add(x, mtf.ones(program.mesh, [A]))
    y = x + 1.0
    program.start()
    np.testing.assert_array_equal(program.value(y), np.ones(8))
    np.testing.assert_array_equal(program.masters()["v"], np.zeros(8))


@pytest.mark.slips  # a layout for dimensions that it lacks
def test_combine_assignments(tf_graph):
    program = Program(PLACINGS[2])
    u, v, w = (program.variable(n, np.ones(8)) for n in "uvw")
    ops = [mtf.assign_sub(u, u * 0.5), mtf.assign_sub(v, u), mtf.assign(w, u + v)]
    before = len(program.graph.operations)
    combined = program.graph.combine_assignments(ops)
    assert [len(op.variables) for op in combined] == [2, 1]
    assert len(program.graph.operations) == before - 1
    assert not set(ops) & set(program.graph.operations)
    program.start()
    program.session.run([program.lowering.lowered_operation(op) for op in combined])
    masters = program.masters()
    for name, value in [("u", 0.5), ("v", 0.0), ("w", 2.0)]:
        np.testing.assert_array_equal(masters[name], np.full(8, value))


@pytest.mark.slips  # a layout for dimensions that it lacks
@pytest.mark.parametrize("placing", PLACINGS)
def test_order_by_depend(placing, tf_graph):
    """A variable that is read again after an assignment has the new value."""
    program = Program(placing)
    x = program.variable("v", np.zeros(8))
    program.variable("like_it", np.zeros(8))
    bump = mtf.assign_add(x, mtf.ones(program.mesh, [A]))
    direct = mtf.depend(x, [bump]) * 1.0
    read = mtf.depend(mtf.read_variable(x), [bump]) * 1.0
    old = x * 1.0
    ordinary = mtf.depend(x * 1.0, [bump])
    program.start()
    values = program.session.run(
        [program.lowering.export_to_tf_tensor(t) for t in (direct, read, old, ordinary)]
    )
    for value, expected in zip(values, [1.0, 1.0, 0.0, 0.0]):
        np.testing.assert_array_equal(value, np.full(8, expected))
    np.testing.assert_array_equal(program.masters()["v"], np.ones(8))


def test_what_waits_for_no_assignment_is_not_read_again():
    """A variable that waits for another value has that from before the assignments of the step."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x, y = (mtf.get_variable(mesh, n, [A], initializer=tf.zeros_initializer()) for n in "xy")
    mtf.assign_add(x, mtf.ones_like(x))
    other = mtf.assign_add(y, mtf.ones_like(y))
    after = mtf.depend(mtf.depend(y, [other]) + x, [y])
    waiting = [mtf.depend(x, [y]), mtf.depend(x, [after]), mtf.depend(x, [other])]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "a:x", ["", ""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    found = [lowering.export_to_tf_tensor(t).numpy()[0] for t in (after, *waiting)]
    assert found == [1.0, 0.0, 0.0, 1.0]  # the last one names an Operation


def _before_and_after_a_loop(w, add, loop):
    """A loop reads what was assigned before it, and nothing that is assigned after it."""
    add()
    y = loop(lambda y: y + mtf.read_variable(w), mtf.zeros_like(w))
    add()
    return [y, mtf.read_variable(w)], lambda step: [3.0 * (2 * step + 2), 2 * step + 3]


def _in_a_loop(w, add, loop):
    """An iteration reads what it has assigned, and the gradient takes what it read."""
    x = mtf.ones_like(w)

    def body(y):
        update = add()
        return mtf.depend(y, [update]) * (mtf.read_variable(w) + mtf.depend(w, [update]))

    y = loop(body, x)
    return [
        y,
        *mtf.gradients([y], [x]),
    ], lambda n: [8.0 * (3 * n + 2) * (3 * n + 3) * (3 * n + 4)] * 2


@pytest.mark.slips  # a layout for dimensions that it lacks
@pytest.mark.parametrize("build", [_before_and_after_a_loop, _in_a_loop])
@pytest.mark.parametrize("placing", [PLACINGS[0], PLACINGS[3]])
def test_loops_read_and_assign_in_the_order_of_the_program(build, placing, tf_graph):
    program = Program(placing)
    program.graph.assigns = "all"
    w = program.variable("w", np.ones(8), trainable=False)

    def loop(body, x):
        zero = mtf.constant(program.mesh, 0, dtype=tf.int32)
        return mtf.while_loop(
            lambda i, _: mtf.less(i, 3), lambda i, y: [i + 1, body(y)], [zero, x]
        )[1]

    fetched, expected = build(w, lambda: mtf.assign_add(w, mtf.ones_like(w)), loop)
    program.start()
    step = [program.lowering.export_to_tf_tensor(x) for x in fetched], program.lowering.effects
    for n in range(6):
        values = program.session.run(step)[0]
        np.testing.assert_array_equal([v[0] for v in values], expected(n))


@pytest.fixture(params=["functions", "contexts"])
def control_flow(request):
    """TensorFlow's two forms of loops in graphs; programs choose by tf.disable_v2_behavior()."""
    if request.param == "contexts":
        tf.disable_control_flow_v2()
    yield
    tf.enable_control_flow_v2()


@pytest.mark.parametrize("placing", [PLACINGS[1], PLACINGS[3]])
def test_a_loop_assigns_after_the_reads_of_the_step(placing, control_flow, tf_graph):
    """TensorFlow lets each input enter a loop by itself: a read might come late otherwise."""
    program = Program(placing)
    program.graph.assigns = "all"
    w = program.variable("w", np.zeros((8, 16)), trainable=False)

    def body(i, y):
        after = mtf.depend(w, [mtf.assign_add(w, mtf.ones_like(w))])
        return [i + 1, y + after * 0.0 + w]

    zero = mtf.constant(program.mesh, 0, dtype=tf.int32)
    _, y = mtf.while_loop(lambda i, _: mtf.less(i, 2), body, [zero, mtf.zeros_like(w)])
    program.start()
    step = program.lowering.export_to_tf_tensor(y), program.lowering.effects
    for n in range(40):
        np.testing.assert_array_equal(program.session.run(step)[0], np.full((8, 16), 4.0 * n))


def _twice(body, x):
    """Returns what a loop of two iterations makes of a Tensor."""
    zero = mtf.constant(x.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(lambda i, _: mtf.less(i, 2), lambda i, y: [i + 1, body(y)], [zero, x])[1]


COMPUTED_AGAIN = {
    "of a loop in a loop": (lambda fn, x: _twice(lambda y: _twice(fn, y), x), 4),
    "of a recomputed loop": (lambda fn, x: mtf.recompute_grad(lambda y: _twice(fn, y), [x]), 2),
    "of a loop in a recomputed one": (
        lambda fn, x: mtf.recompute_grad(lambda y: _twice(lambda z: _twice(fn, z), y), [x]),
        4,
    ),
}


@pytest.mark.parametrize("name", COMPUTED_AGAIN)
def test_a_gradient_assigns_nothing_again(name, tf_graph):
    """Nor do loops that are computed a second time for it."""
    make, times = COMPUTED_AGAIN[name]
    program = Program(PLACINGS[1])
    program.graph.assigns = "all"
    n = program.variable("n", np.zeros(8), trainable=False)

    def counted(y):
        mtf.assign_add(n, mtf.ones_like(n))
        return mtf.sin(y)

    x = mtf.import_tf_tensor(program.mesh, np.linspace(0, 1, 8, dtype=np.float32), [A])
    y = make(counted, x)
    [dx] = mtf.gradients([mtf.reduce_sum(y)], [x])
    program.start()
    step = program.lowering.export_to_tf_tensor(dx), program.lowering.effects
    for done in range(1, 4):
        program.session.run(step)
        assert program.masters()["n"].tolist() == [done * times] * 8


def test_a_recomputed_loop_reads_what_it_read():
    """Values of a variable that changes are those of the first time, not read again."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [A], initializer=tf.ones_initializer())

    def body(y):
        mtf.assign_add(w, mtf.ones_like(w))
        return y * mtf.read_variable(w)

    x = mtf.ones(mesh, [A])
    y = mtf.recompute_grad(lambda y: _twice(body, y), [x])
    [dx] = mtf.gradients([y], [x])
    lowering = mtf.Lowering(mesh.graph, {mesh: PLACINGS[1].impl()})
    for value in (y, dx):
        assert lowering.export_to_tf_tensor(value).numpy().tolist() == [6.0] * 8
    assert w.operation.get_master().numpy().tolist() == [3.0] * 8


@pytest.mark.parametrize("placing", [PLACINGS[1], PLACINGS[1]._replace(simd=True)])
def test_variables_that_a_condition_makes(placing, tf_graph):
    """They are read at the beginning, as those of a body are, and known outside of the loop."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")

    def variable(name, value):
        return mtf.get_variable(mesh, name, [A], initializer=tf.constant_initializer(value))

    [y] = mtf.while_loop(
        lambda y: mtf.less(mtf.reduce_sum(y), mtf.reduce_sum(variable("limit", 5.0))),
        lambda y: [y * variable("factor", 2.0) + 0.0 * variable("limit", 5.0)],
        [mtf.ones(mesh, [A])],
        maximum_iterations=9,
    )
    more = mtf.assign_add(variable("limit", 5.0), variable("limit", 5.0))

    def lowered():
        lowering = mtf.Lowering(graph, {mesh: placing.impl()})
        return lowering.export_to_tf_tensor(y), lowering.lowered_operation(more)

    step = placing.run(lowered)
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        found = [session.run(step)[0][0] for _ in range(3)]
    assert found == [8.0, 16.0, 32.0]


def test_no_gradient_of_reads_in_inner_loops():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    w = mtf.get_variable(mesh, "w", [A], initializer=tf.ones_initializer())
    i, x = mtf.constant(mesh, 0, dtype=tf.int32), mtf.ones_like(w)

    def inner(i, y):
        return [i + 1, y * mtf.read_variable(w)]

    def outer(i, y):
        mtf.assign_add(w, y)
        return [i + 1, mtf.while_loop(lambda i, _: mtf.less(i, 2), inner, [i, y])[1]]

    y = mtf.while_loop(lambda i, _: mtf.less(i, 2), outer, [i, x])[1]
    with pytest.raises(
        NotImplementedError, match=r"reads the variable w, .* read it outside of wh"
    ):
        mtf.gradients([y], [x])


def test_read_variable_has_a_gradient(tf_graph):
    program = Program(PLACINGS[1])
    x = program.variable("v", np.full(8, 3.0))
    y = mtf.square(mtf.read_variable(x))
    [dx] = mtf.gradients([y], [x])
    program.start()
    np.testing.assert_array_equal(program.value(dx), np.full(8, 6.0))


# -- stacking


def _three(program, **kwargs):
    return [program.variable(f"v{i}", np.arange(8.0) + i, **kwargs) for i in range(3)]


def test_rewrite_stack_variables(tf_graph):
    program = Program(PLACINGS[1], autostack=False)
    xs = _three(program)
    y = mtf.add_n([x * float(i + 1) for i, x in enumerate(xs)])
    program.graph.rewrite_stack_variables()
    [stacked] = program.graph.all_variables
    assert stacked.name == "stacked/v0" and stacked.original_names == ["v0", "v1", "v2"]
    assert stacked.shape == mtf.Shape([("stacked", 3), A]) and stacked.is_stacked
    assert program.graph.trainable_variables == [stacked]
    assert set(program.graph.name_to_variable.values()) == {stacked}
    with pytest.raises(ValueError, match="was called before"):
        program.graph.rewrite_stack_variables()
    program.start()
    arrays = [np.arange(8.0) + i for i in range(3)]
    np.testing.assert_array_equal(program.value(y), sum((i + 1) * a for i, a in enumerate(arrays)))
    for x, array in zip(xs, arrays):
        np.testing.assert_array_equal(program.value(x), array)
        np.testing.assert_array_equal(program.masters()[x.operation.name], array)


def test_assignments_to_stacked_variables(tf_graph):
    program = Program(PLACINGS[1])
    xs = _three(program)
    combined = program.graph.combine_assignments(
        [mtf.assign_sub(x, x * float(i)) for i, x in enumerate(xs)]
    )
    program.start()
    assert [v.name for v in program.graph.all_variables] == ["stacked/v0"]
    program.session.run([program.lowering.lowered_operation(op) for op in combined])
    masters = program.masters()
    for i in range(3):
        np.testing.assert_array_equal(masters[f"v{i}"], (np.arange(8.0) + i) * (1 - i))


def _names(program, **kwargs):
    program.graph.rewrite_stack_variables(**kwargs)
    return [v.name for v in program.graph.all_variables]


def test_what_is_stacked(tf_graph):
    """Of one shape, dtype, trainable flag, and set of assignments."""
    program = Program()
    _three(program)
    program.variable("other", np.zeros(8), trainable=False)
    program.variable("bfloat16", np.zeros(8), activation_dtype=tf.bfloat16)
    program.variable("matrix", np.zeros([8, 16]))
    single = program.variable("assigned", np.zeros(8))
    mtf.assign(single, single * 2)
    again = program.variable("read_again", np.zeros(8))
    mtf.read_variable(again)
    assert _names(program) == [
        "stacked/v0",
        "other",
        "bfloat16",
        "matrix",
        "assigned",
        "read_again",
    ]


@pytest.mark.parametrize(
    "kwargs, expected",
    [
        ({}, ["stacked/v0"]),
        ({"max_combined_variable_size": 16}, ["stacked/v0", "v2"]),
        ({"max_combined_variable_size": 8}, ["v0", "v1", "v2"]),
        ({"max_combined_slice_size": 16}, ["stacked/v0", "v2"]),
    ],
)
def test_limits_of_stacking(kwargs, expected, tf_graph):
    program = Program()
    _three(program)
    assert _names(program, **kwargs) == expected


def test_slices_limit_stacking_by_their_own_size(tf_graph):
    program = Program()
    _three(program)
    impl = PLACINGS[1].impl()
    names = _names(program, mesh_to_impl={program.mesh: impl}, max_combined_slice_size=4)
    assert names == ["stacked/v0", "v2"]


@pytest.mark.parametrize("placing, stacks", [(PLACINGS[0], False), (PLACINGS[1], True)])
def test_autostack(placing, stacks, tf_graph):
    program = Program(placing)
    _three(program)
    program.start()
    assert len(program.graph.all_variables) == (1 if stacks else 3)
    with pytest.raises(KeyError, match=r"no variable 'v_0' in the graph.*v0"):
        program.graph.name_to_variable["v_0"]
    off = Program(placing, autostack=False)
    with tf.variable_scope("off"):
        _three(off)
        off.start()
    assert len(off.graph.all_variables) == 3


def test_stacked_variables_in_loops_and_recomputed_functions(tf_graph):
    program = Program(PLACINGS[1])
    xs = _three(program)
    zero = mtf.constant(program.mesh, 0, dtype=tf.int32)
    _, looped = mtf.while_loop(
        lambda i, _: mtf.less(i, 3), lambda i, y: [i + 1, y * xs[1] + xs[2]], [zero, xs[0] * 1.0]
    )
    recomputed = mtf.recompute_grad(lambda y: mtf.sin(y * xs[1]), [xs[2] * 1.0])
    grads = mtf.gradients([looped + recomputed], xs)
    program.start()
    a, b, c = (np.arange(8.0) + i for i in range(3))
    assert len(program.graph.all_variables) == 1
    y = ((a * b + c) * b + c) * b + c
    np.testing.assert_allclose(program.value(looped), y, rtol=1e-6)
    np.testing.assert_allclose(program.value(recomputed), np.sin(b * c), rtol=1e-4, atol=1e-5)
    expected = [
        b**3,
        3 * a * b**2 + c * (2 * b + 1) + c * np.cos(b * c),
        b**2 + b + 1 + b * np.cos(b * c),
    ]
    for g, e in zip(grads, expected):
        np.testing.assert_allclose(program.value(g), e, rtol=1e-4, atol=1e-3)
