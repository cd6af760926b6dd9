"""Estimated times: by hand, against walks over whole programs, and against brute force."""

import random

import hypothesis
import hypothesis.strategies as st
import pytest
import tensorflow.compat.v1 as tf
from helpers.auto_mtf.real_programs import MESHES, loop_program, real_programs

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import given_stored_layout
from mesh_tensorflow._core.operation import Collective, Cost, needed_operations
from mesh_tensorflow._core.placement import walk
from mesh_tensorflow.auto_mtf import _units, hardware, models
from mesh_tensorflow.auto_mtf.hardware import CostModel, Hardware, Link
from mesh_tensorflow.auto_mtf.step_time import MemoryLimitError, StepEstimator

SLOW = Hardware("slow", {"float32": 1e9}, 1e8, 1e9, Link(1e7, 1e-6), operation_seconds=1e-6)
RING = SLOW.replace(link=Link(1e7, 1e-6, "ring"))
SHARED = SLOW.replace(one_memory=True)
TINY = {
    "batch": 8,
    "length": 8,
    "vocab": 16,
    "d_model": 16,
    "layers": 2,
    "heads": 4,
    "d_kv": 4,
    "d_ff": 32,
}
PAPER = {
    "batch": 256,
    "length": 256,
    "vocab": 32000,
    "d_model": 1024,
    "layers": 6,
    "heads": 256,
    "d_kv": 256,
    "d_ff": 262144,
}


def all_layouts(estimator):
    layouts = [{}]
    for d in estimator.space.dims:
        layouts += [
            {**rules, n: m}
            for rules in layouts
            for n, m in estimator.space.pairs
            if n == d and estimator.space.is_legal({**rules, n: m})
        ]
    return layouts


def directly(graph, outputs, estimator, layout):
    """Returns the seconds of a program without loops, by one walk over it."""
    model = CostModel(estimator.mesh_shape, estimator.hardware)
    impl = model.impl(layout)
    compute = communication = 0.0
    operations = needed_operations(graph.operations, outputs)
    for op in operations:
        if isinstance(op, mtf.Assign):
            for x in op.inputs:
                moved = 2 * impl.laid_out_size(x.shape) * 4
                compute += moved / impl.size / estimator.hardware.memory_bandwidth
                compute += estimator.hardware.operation_seconds
        else:
            own = model.operation(op, impl)
            compute += own.compute
            communication += own.communication
    asked = walk(operations, impl, outputs).costs
    own = sum(len(op.cost(impl).collectives) for op in operations)
    total = sum(model.collective(c) for _, cost in asked for c in cost.collectives)
    assert own <= sum(len(cost.collectives) for _, cost in asked)
    return compute, total


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer, recompute", [(None, False), ("sgd", False), ("adafactor", True)]
)
def test_units_add_up_to_the_program(tf_graph, optimizer, recompute):
    """Sums that are delayed, shared and asked for are those of a walk over all operations."""
    program = models.language_model(**TINY, optimizer=optimizer, recompute=recompute)
    for hw in [SLOW, RING]:
        estimator = StepEstimator(program.graph, "m:4,n:2", program.outputs, hw)
        assert estimator.times.is_exact
        layouts = all_layouts(estimator)
        for layout in random.Random(1).sample(layouts, 12):
            found = estimator.estimate(layout).seconds
            expected = directly(program.graph, program.outputs, estimator, layout)
            assert found == pytest.approx(expected, rel=1e-9), layout


def test_sums_of_too_many_assignments_are_taken_apart(tf_graph, monkeypatch):
    """Each is then computed where it begins, and an explanation says so."""
    program = models.language_model(**TINY, optimizer="sgd")
    where = program.graph, "m:4,n:2", program.outputs
    whole = StepEstimator(*where, SLOW)
    monkeypatch.setattr(_units, "_MOST_ASSIGNMENTS", 10)
    apart = StepEstimator(*where, SLOW)
    assert whole.times.is_exact and not apart.times.is_exact
    assert apart.estimate("").seconds == pytest.approx(whole.estimate("").seconds)
    layout = "batch:m;d_ff:n"
    at_once, delayed = (e.estimate(layout).seconds for e in (apart, whole))
    assert at_once.compute == pytest.approx(delayed.compute)
    assert at_once.communication >= delayed.communication > 0
    explained = mtf.auto_mtf.explain(*where, layout, hardware=SLOW, alternatives=0)
    assert "sums over several processors may be counted more than once" in str(explained)


@pytest.mark.slow
@hypothesis.settings(max_examples=15)
@hypothesis.given(
    real_programs(), st.sampled_from(MESHES), st.sampled_from([SLOW, RING]), st.booleans()
)
def test_brute_force(program, mesh_shape, hw, joint):
    """The layout of least time is that, without a limit and with one; units add up."""
    graph, outputs = program
    estimator = StepEstimator(graph, mesh_shape, outputs, hw, joint=joint)
    every = [estimator.estimate(layout) for layout in all_layouts(estimator)]
    for e in every[:: max(1, len(every) // 5)]:
        assert e.seconds == pytest.approx(directly(graph, outputs, estimator, e.layout), rel=1e-9)
    best = estimator.solve()
    least = min(e.seconds.total for e in every)
    assert best.seconds.total <= least * (1 + 2e-6)
    equal = [e.peak_bytes for e in every if e.seconds.total <= best.seconds.total]
    assert best.peak_bytes <= min(equal)
    peaks = sorted(e.peak_bytes for e in every)
    for limit in {peaks[len(peaks) // 4], peaks[0]}:
        found = estimator.solve(limit)
        assert found.peak_bytes <= limit
        fits = min(e.seconds.total for e in every if e.peak_bytes <= limit)
        assert found.seconds.total <= fits * (1 + 2e-6)
    if peaks[0] > 1:
        with pytest.raises(MemoryLimitError, match="which needs the least, takes") as error:
            estimator.solve(peaks[0] - 1)
        assert error.value.missing_bytes == 1


@pytest.mark.slow
def test_joined_mesh_dimensions(tf_graph):
    """They split as one mesh dimension does that has the processors of both."""
    program = models.language_model(**TINY, optimizer="adam")
    both = StepEstimator(program.graph, "m:2,n:2", program.outputs, SLOW, joint=True)
    one = StepEstimator(program.graph, "m:4", program.outputs, SLOW)
    for dim in ("batch", "d_ff", "vocab"):
        joined, single = both.estimate(f"{dim}:m+n"), one.estimate(f"{dim}:m")
        assert joined.peak_bytes == single.peak_bytes
        assert joined.seconds.compute == pytest.approx(single.seconds.compute)
        assert both.estimate(f"{dim}:q+n+m").peak_bytes == single.peak_bytes
    assert both.estimate("batch:q+n").text == "batch:n"
    assert {e.text for e in both.best(40)} >= {"batch:m+n"}
    with pytest.raises(ValueError, match=r"m\+n=4 does not divide all sizes of dimension 'odd'"):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        mtf.zeros(mesh, "odd:6")
        StepEstimator(mesh.graph, "m:2,n:2").estimate("odd:m+n")
    with pytest.raises(ValueError, match="may not map to the same Mesh Dimension"):
        both.estimate("batch:m+n,d_ff:n")


def test_layouts_in_order(tf_graph):
    program = models.language_model(**TINY, optimizer=None)
    estimator = StepEstimator(program.graph, "m:2,n:2", program.outputs, SLOW)
    every = sorted(estimator.estimate(x).seconds.total for x in all_layouts(estimator))
    best = [e.seconds.total for e in estimator.best(8)]
    assert best == sorted(best)
    distinct = sorted({float(f"{t:.6g}") for t in every})
    assert {float(f"{t:.6g}") for t in best} == set(
        distinct[: len({float(f"{t:.6g}") for t in best})]
    )


def test_collectives_by_hand():
    shape = mtf.Shape([("m", 4), ("n", 2)])

    def seconds(hw, kind, axes, count=8000):  # so many bytes on each of the eight processors
        return CostModel(shape, hw).collective(Collective(kind, axes, 2 * count, 8 * count))

    fast = SLOW.replace(link=Link(1e7, 0.0))
    assert seconds(fast, "allreduce", (0,)) == pytest.approx(2 * 3 / 4 * 8000 / 1e7)
    assert seconds(fast, "allreduce", (1,)) == pytest.approx(2 * 1 / 2 * 8000 / 1e7)
    both = 2 * (3 / 4 * 8000 + 1 / 2 * 2000) / 1e7
    assert seconds(fast, "allreduce", (0, 1)) == pytest.approx(both)
    assert seconds(fast, "allconcat", (0,)) == pytest.approx(3 / 4 * 8000 / 1e7)
    assert seconds(fast, "alltoall", (0,)) == pytest.approx(3 / 4 * 8000 / 1e7)
    assert seconds(fast, "shift", (0,)) == pytest.approx(8000 / 1e7)
    ring = fast.replace(link=Link(1e7, 0.0, "ring"))
    assert seconds(ring, "allreduce", (0,)) == seconds(fast, "allreduce", (0,))
    assert seconds(ring, "alltoall", (0,)) == pytest.approx(8000 / 1e7)  # 4 / 4 steps of all
    assert seconds(ring, "shift", (0,)) == pytest.approx(2 * 8000 / 1e7)
    # Short sums go by a tree: twice log2(4) steps, in place of 2 * 3.
    slow = SLOW.replace(link=Link(1e7, 1.0))
    assert seconds(slow, "allreduce", (0,), 8) == pytest.approx(4, rel=1e-5)
    assert seconds(slow, "allconcat", (0,), 8) == pytest.approx(3, rel=1e-5)


def test_links_within_and_between_nodes():
    inner, outer = Link(1e9, 0.0), Link(1e8, 0.0)
    hw = SLOW.replace(link=outer, node_link=inner, node_size=8)
    shape = mtf.Shape([("m", 4), ("n", 4)])
    assert hw.links(shape, 1) == [(4, inner)]
    assert hw.links(shape, 0) == [(2, inner), (2, outer)]
    assert hw.links(mtf.Shape([("m", 4), ("n", 8)]), 0) == [(4, outer)]
    special = Link(5e8, 0.0)
    assert hw.replace(axis_links={"m": special}).links(shape, 0) == [(4, special)]
    total = CostModel(shape, hw).collective(Collective("allreduce", (0,), 0, 16 * 1000))
    assert total == pytest.approx(2 * (1 / 2 * 1000 / 1e9 + 1 / 2 * 500 / 1e8))


def test_one_memory(tf_graph):
    """What is not split is computed once, and a sum reads all parts."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a, b, c = (mtf.Dimension(n, 8) for n in "abc")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 8]), [a, b])
    w = mtf.import_tf_tensor(mesh, tf.zeros([8, 8]), [b, c])
    y = mtf.einsum([x, w], output_shape=[a, c])
    free = SHARED.replace(operation_seconds=0.0, link=Link(1e7, 0.0), memory_bandwidth=1e30)
    model = CostModel(mtf.Shape([("m", 4)]), free)
    for layout in [{}, {"a": "m"}, {"b": "m"}]:
        assert model.operation(y.operation, model.impl(layout)).compute == pytest.approx(
            2 * 8**3 / 1e9
        )
    calls = CostModel(
        mtf.Shape([("m", 4)]), SHARED.replace(flops={"float32": 1e30}, memory_bandwidth=1e30)
    )
    times = [calls.operation(y.operation, calls.impl(x)).compute for x in ({}, {"a": "m"})]
    assert times == pytest.approx([1e-6, 4e-6])
    total = StepEstimator(graph, "m:4", [y], free).estimate("b:m").seconds.communication
    assert total == pytest.approx(5 * 256 / 1e7)


def test_loops(tf_graph):
    with tf.Graph().as_default():
        once = StepEstimator(*prepend(loop_program(1), "m:2,n:2"), SLOW)
    often = StepEstimator(*prepend(loop_program(11), "m:2,n:2"), SLOW)
    layouts = all_layouts(once)
    assert {"h", "batch", "d"} <= set(once.space.dims)
    for layout in layouts[:: max(1, len(layouts) // 12)]:
        one, eleven = once.estimate(layout), often.estimate(layout)
        assert one.seconds.compute < eleven.seconds.compute <= 11 * one.seconds.compute
        assert eleven.seconds.communication <= 11 * one.seconds.communication
    # The sum over iterations is made once, after the loop.
    batch = [e.estimate("batch:m").seconds.communication for e in (once, often)]
    assert batch[0] == batch[1] > 0
    hidden = [e.estimate("h:m").seconds.communication for e in (once, often)]
    assert hidden[1] == pytest.approx(11 * hidden[0])


def prepend(program, mesh_shape):
    graph, outputs = program
    return graph, mesh_shape, outputs


def test_loops_take_memory(tf_graph):
    with tf.Graph().as_default():
        plain = StepEstimator(*prepend(loop_program(6), "m:2"), SLOW)
    trained = StepEstimator(*prepend(loop_program(6, gradients=True), "m:2"), SLOW)
    contents = plain.peak_contents("")
    assert any("relu" in held.name for held in contents)  # inside of an iteration
    kinds = trained.peak_by_kind("")
    assert kinds["loop tape"] == 6 * (8 * 16 * 4 + 4)
    assert trained.peak_by_kind("batch:m")["loop tape"] == 6 * (4 * 16 * 4 + 4)
    assert trained.estimate("").peak_bytes == sum(h.bytes for h in trained.peak_contents(""))


def test_memory_by_hand(tf_graph):
    """Variables stay, slots too; activations until their gradient."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    b, d, h = (mtf.Dimension(n, s) for n, s in [("b", 8), ("d", 16), ("h", 64)])
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), [b, d])
    w = mtf.get_variable(mesh, "w", mtf.Shape([d, h]))
    y = mtf.relu(mtf.einsum([x, w], output_shape=[b, h]))
    loss = mtf.reduce_sum(y)
    grads = mtf.gradients([loss], [w])
    tf.train.get_or_create_global_step()
    mtf.optimize.MomentumOptimizer(0.1, 0.9).apply_grads(grads, graph.trainable_variables)
    estimator = StepEstimator(graph, "m:2", [loss], SLOW)
    kinds = estimator.peak_by_kind("")
    assert kinds["weights"] == kinds["slots"] == 4 * 16 * 64
    halved = estimator.peak_by_kind("h:m")
    assert halved["weights"] == halved["slots"] == 2 * 16 * 64
    assert estimator.estimate("").peak_bytes == sum(kinds.values())
    forward = sum(h.bytes for h in estimator.memory.contents(0, {}))
    assert forward >= 2 * 4 * 16 * 64  # before anything runs


@pytest.mark.slow
def test_recompute_takes_less_memory_and_more_time(tf_graph):
    sizes = {**TINY, "layers": 6, "length": 32}
    with tf.Graph().as_default():
        plain = models.language_model(**sizes)
    again = models.language_model(**sizes, recompute=True)
    estimates = [
        StepEstimator(p.graph, "m:2", p.outputs, SLOW).estimate("batch:m") for p in (plain, again)
    ]
    assert estimates[1].peak_bytes < 0.6 * estimates[0].peak_bytes
    assert estimates[1].seconds.compute > 1.1 * estimates[0].seconds.compute


@pytest.mark.slow
@pytest.mark.parametrize("training", [False, True])
def test_language_model_of_the_paper(tf_graph, training):
    """That of 4.9 billion parameters, Shazeer et al., 2018."""
    program = models.language_model(**PAPER, optimizer="adafactor" if training else None)
    mesh_shape = "rows:16,cols:32"
    small = mtf.auto_mtf.layout(program.graph, mesh_shape, program.outputs)
    theirs = {("batch", "rows"), ("d_ff", "cols"), ("heads", "cols"), ("vocab", "cols")}
    assert theirs <= small._pairs
    assert sum(v.size for v in program.graph.trainable_variables) == pytest.approx(4.9e9, rel=0.01)
    estimator = StepEstimator(program.graph, mesh_shape, program.outputs, "tpu_v2")
    fast, paper = estimator.solve(), estimator.estimate(mtf.LayoutRules(theirs))
    if training:
        assert theirs <= set(fast.layout.items())
    else:  # without gradients of weights to sum, it pays to split the batch more
        assert {("batch", "cols"), ("d_ff", "rows"), ("heads", "rows")} <= set(fast.layout.items())
        assert fast.seconds.total < paper.seconds.total
    assert fast.peak_bytes < estimator.hardware.memory_bytes


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("optimizer", [None, "adafactor"])
def test_the_smaller_model_of_the_paper(tf_graph, optimizer):
    program = models.language_model(**{**PAPER, "d_ff": 8192, "heads": 8}, optimizer=optimizer)
    layout = mtf.auto_mtf.layout(
        program.graph, "rows:2,cols:4", program.outputs, objective="time", hardware="tpu_v2"
    )
    split = {d for d, _ in layout._pairs}
    assert {"batch", "d_ff", "heads"} <= split and not split & {"length", "memory_length"}


@pytest.mark.slow
def test_does_not_grow_with_layers(tf_graph):
    found = []
    for layers in (2, 8):
        with tf.Graph().as_default():
            program = models.language_model(**{**TINY, "layers": layers})
        estimator = StepEstimator(program.graph, "m:4,n:2", program.outputs)
        solver = estimator.program()
        solver.next_best()
        rows = [len(table.rows) for table in estimator._tables.tables]
        found.append((len(estimator.times), rows, solver.sizes))
    assert found[0][1:] == found[1][1:]
    assert found[1][0] <= found[0][0] + 12  # layers at the ends add up gradients otherwise


@pytest.mark.slow
def test_objectives(tf_graph):
    program = models.language_model(**TINY)
    graph, outputs = program.graph, program.outputs
    fast = mtf.auto_mtf.layout(graph, "m:2,n:2", outputs, objective="time", hardware=SLOW)
    assert fast._pairs == set(StepEstimator(graph, "m:2,n:2", outputs, SLOW).solve().layout.items())
    layout, shape = mtf.auto_mtf.layout_and_mesh_shape(
        graph, 8, outputs, 3, objective="time", hardware=SLOW
    )
    times = [
        StepEstimator(graph, mesh, outputs, SLOW).solve().seconds.total
        for mesh in ["mesh_0:8", "mesh_0:4,mesh_1:2", "mesh_0:2,mesh_1:2,mesh_2:2"]
    ]
    assert StepEstimator(graph, shape, outputs, SLOW).estimate(layout).seconds.total == min(times)
    with pytest.raises(ValueError, match="objective='speed' is none of 'memory', 'time'"):
        mtf.auto_mtf.layout(graph, "m:2", outputs, objective="speed")
    with pytest.raises(
        ValueError, match="memory_limit_bytes=0 must be a number of bytes, more than 0"
    ):
        mtf.auto_mtf.layout(graph, "m:2", outputs, memory_limit_bytes=0)
    with pytest.raises(ValueError, match="unknown hardware 'tpu_v9': it is one of tpu_v2, tpu_v3"):
        mtf.auto_mtf.layout(graph, "m:2", outputs, hardware="tpu_v9")


def test_limits_that_nothing_meets(tf_graph):
    program = models.language_model(**TINY)
    for objective in ["time", "memory"]:
        with pytest.raises(MemoryLimitError, match=r"no layout fits in 1,000 B.* too many") as e:
            mtf.auto_mtf.layout(
                program.graph, "m:2", program.outputs, objective=objective, memory_limit_bytes=1000
            )
        assert e.value.missing_bytes > 0
    with pytest.raises(MemoryLimitError) as e:
        mtf.auto_mtf.layout_and_mesh_shape(
            program.graph, 8, program.outputs, objective="time", memory_limit_bytes=1000
        )
    text = str(e.value)
    assert "B activations; less with a smaller batch, mtf.recompute_grad" in text
    assert "B weights; less with more processors" in text


def test_estimates_of_what_cannot_be(tf_graph):
    program = models.language_model(**TINY)
    estimator = StepEstimator(program.graph, "m:2,n:3", program.outputs)
    assert estimator.estimate("batch:m,unknown:n,d_ff:rows").layout == {"batch": "m"}
    with pytest.raises(ValueError, match="splits 'batch' over both 'm' and 'n'"):
        estimator.estimate("batch:m;batch:n")
    with pytest.raises(
        ValueError, match="mesh dimension n=3 does not divide all sizes of dimension 'd_ff'"
    ):
        estimator.estimate({"d_ff": "n"})
    with pytest.raises(ValueError, match="malformed layout"):
        estimator.estimate("batch")


def test_profiles(tmp_path):
    for name, profile in hardware.PROFILES.items():
        assert hardware.hardware_profile(name) is profile and profile.source
        path = str(tmp_path / f"{name}.json")
        profile.save(path)
        assert hardware.hardware_profile(path) == profile
    assert hardware.hardware_profile().name == "tpu_v3"
    assert hardware.PROFILES["a100"].product_flops("bfloat16") == pytest.approx(0.6 * 312e12)
    assert hardware.PROFILES["a100"].product_flops("int32") == pytest.approx(0.6 * 156e12)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"bad\.json is no hardware profile: KeyError"):
        hardware.hardware_profile(str(tmp_path / "bad.json"))
    links = '{"link": null, "node_link": null, "axis_links": null}'
    for i, content in enumerate([b"flops: 1", b"", b"\xff\xfe", b"[1]", links.encode()]):
        path = tmp_path / f"bad{i}.json"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"json is no hardware profile: .*measure writes one"):
            hardware.hardware_profile(str(path))
    with pytest.raises(ValueError, match="flops lacks float32"):
        SLOW.replace(flops={"bfloat16": 1.0})
    with pytest.raises(ValueError, match="must be more than 0"):
        SLOW.replace(memory_bandwidth=0.0)
    with pytest.raises(ValueError, match='kind is "ring" or "switch"'):
        Link(1.0, 0.0, "mesh")


def test_fourier_transforms_are_split_in_pencils(tf_graph):
    """One mesh dimension may split x before a transform and ky after it."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    space = mtf.convert_to_shape("x:16,y:16,z:16").dims
    frequencies = mtf.convert_to_shape("kx:16,ky:16,kz:16").dims
    x = mtf.zeros(mesh, space, tf.complex64)
    waves = mtf.signal.fft3d(x, space, frequencies)
    y = mtf.signal.ifft3d(waves * 2.0, frequencies, space)
    machine = SLOW.replace(link=Link(1e9, 1e-6))
    estimator = StepEstimator(mesh.graph, "rows:2,cols:2", [y], machine)
    best = estimator.solve()
    assert best.seconds.total == pytest.approx(
        min(estimator.estimate(rules).seconds.total for rules in all_layouts(estimator))
    )
    assert len({"x", "y", "z"} & set(best.layout)) == len(best.layout) / 2 == 2
    impl = CostModel(estimator.mesh_shape, machine).impl(best.layout)
    kinds = [
        c.kind for _, cost in walk(mesh.graph.operations, impl).costs for c in cost.collectives
    ]
    assert kinds == ["alltoall"] * 4


def test_what_nothing_needs_takes_no_time_and_memory(tf_graph):
    """Operations that neither outputs nor effects need are never run."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.ones(mesh, "batch:8,i:8")
    y = mtf.layers.dense(x, [mtf.Dimension("h", 8)], x.shape.dims[1:], name="a")
    before = StepEstimator(graph, "all:2", [y]).estimate("batch:all")
    mtf.gradients([mtf.reduce_sum(y)], [v.value for v in graph.trainable_variables])
    assert StepEstimator(graph, "all:2", [y]).estimate("batch:all") == before
    # Without outputs, any of them may be fetched.
    every = StepEstimator(graph, "all:2").estimate("batch:all")
    assert every.seconds.total > before.seconds.total and every.peak_bytes > before.peak_bytes
    # An assignment runs, and what it needs does, in a loop too.
    [variable, *_] = graph.trainable_variables
    _, total = mtf.while_loop(
        lambda i, a: mtf.less(i, 3), lambda i, a: [i + 1, a + variable.value],
        [mtf.constant(mesh, 0, [], tf.int32), mtf.zeros_like(variable.value)],
    )  # fmt: skip
    assert StepEstimator(graph, "all:2", [y]).estimate("batch:all") == before
    mtf.assign(variable, total)
    assigned = StepEstimator(graph, "all:2", [y]).estimate("")
    assert assigned.seconds.total > before.seconds.total


def test_slices_on_cores():
    """Fewer slices than cores leave cores idle, unless each operation has all of them."""
    known = Hardware("two", {"float32": 2e9}, 1e30, 1e9, Link(1e30, 0.0), one_memory=True, cores=2,
                     sharing_seconds=0.25)  # fmt: skip
    mesh = mtf.convert_to_shape("rows:2,cols:2")
    one, all_cores = (
        hardware.CostModel(mesh, known, shares_out=shares_out) for shares_out in (False, True)
    )
    with tf.Graph().as_default():
        x = mtf.ones(mtf.Mesh(mtf.Graph(), "mesh"), "a:2,b:2")
    seconds = {}
    for layout in ({}, {"a": "rows"}, {"a": "rows", "b": "cols"}):
        # Work for two cores of a second.
        parts = 2 ** len(layout)
        cost = Cost(4 * 2e9 // parts, 0)
        seconds[parts] = [m.seconds(cost, "float32", [x], m.impl(layout)) for m in (one, all_cores)]
    assert [s.compute for s in seconds[1]] == [2.0, 1.25]
    assert [s.compute for s in seconds[2]] == [1.0, 1.0]
    assert [s.compute for s in seconds[4]] == [1.0, 1.0]


def test_constants_take_no_time(tf_graph):
    """TensorFlow computes them before the first step, but not what is too large to be kept."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    d = mtf.Dimension("d", 64)
    one = mtf.exp(mtf.range(mesh, d, tf.float32) * 2.0)
    drawn = mtf.exp(mtf.random_uniform(mesh, [d]))
    given = mtf.exp(mtf.import_tf_tensor(mesh, tf.placeholder(tf.float32, [64]), [d]))

    def seconds(layout, limit, machine):
        known = machine.replace(folded_bytes=limit)
        estimators = (StepEstimator(mesh.graph, "a:2", [y], known) for y in (one, drawn, given))
        return [estimator.estimate(layout).seconds.compute for estimator in estimators]

    for layout, size, machine in [("", 256, SLOW), ("", 256, SHARED), ("d:a", 128, SHARED)]:
        every = seconds(layout, 0, machine)
        assert all(every) and seconds(layout, size, machine) == every
        assert seconds(layout, size + 1, machine) == [0.0, *every[1:]]
    # The part of a processor of a program that all run, which has its number only in a step.
    assert seconds("d:a", 1024, SLOW) == seconds("d:a", 0, SLOW)
    assert hardware.local_machine(4, one_memory=True).folded_bytes == 10 * 2**20
    assert KNOWN.folded_bytes == 0  # XLA computes them within what reads them


@pytest.mark.parametrize("size, share", [(1024, 0.0), (2**15, 0.5)])
def test_constants_that_processors_read_of_each_other(tf_graph, size, share):
    """What is made of large ones is computed in each step, but by the processor that has them."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    d, e = mtf.Dimension("d", size), mtf.Dimension("e", 4)
    y = mtf.range(mesh, d, tf.float32) * mtf.range(mesh, e, tf.float32)

    def seconds(output, limit, layout="e:a"):
        machine = SHARED.replace(folded_bytes=limit)
        estimator = StepEstimator(mesh.graph, "a:2", [output], machine)
        return estimator.estimate(layout).seconds.compute

    z = mtf.exp(y)  # of equal slices, but not made before the first step where `y` is not
    (range_d, range_e), kept = y.operation.inputs, 2**30
    computed = [seconds(x, 0) for x in (y, z)]
    parts = computed[0] - seconds(range_d, 0) - seconds(range_e, 0), computed[1] - computed[0]
    assert seconds(y, kept) == pytest.approx(share * parts[0])
    assert seconds(z, kept) == pytest.approx(share * sum(parts))
    assert seconds(z, kept, "d:a") == seconds(z, kept, "") == 0.0


def test_what_is_gathered_in_one_memory_is_made_once(tf_graph):
    """For all processors that have it, and not for each slice that it is made of."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.random_uniform(mesh, "a:16,b:16")
    op = mtf.replace_dimensions(x, x.shape[1], mtf.Dimension("c", 16)).operation
    known = SHARED.replace(link=Link(1e30, 1.0))  # a second for each slice that is made
    model = CostModel(mtf.convert_to_shape("rows:2,cols:4"), known)
    for layout, copies in ({"a": "rows", "b": "cols"}, 2), ({"b": "cols"}, 1), ({"b": "rows"}, 1):
        assert model.operation(op, model.impl(layout)).communication == pytest.approx(copies)
    soft = mtf.softmax(x, x.shape[1]).operation
    # Two sums, of the largest and of all, each of four slices for either half of the rows.
    whole = model.operation(soft, model.impl({"a": "rows", "b": "cols"})).communication
    assert whole == pytest.approx(2 * 2 * 4)


def test_transforms_in_one_memory(tf_graph):
    """The axes that split the input and the output of one are not split at a time."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.cast(mtf.random_uniform(mesh, "x:16,y:16,z:16"), tf.complex64)
    dims = mtf.convert_to_shape("kx:16,ky:16,kz:16").dims
    op = mtf.signal.fft3d(x, x.shape.dims, dims).operation
    model = CostModel(mtf.convert_to_shape("rows:2,cols:2"), SHARED)
    seconds = {
        layout: model.operation(op, model.impl(dict(pair.split(":") for pair in layout.split(";"))))
        for layout in ("x:rows;ky:rows", "x:rows;ky:cols", "x:rows;kx:cols")
    }
    one, two, same = seconds.values()
    assert two.compute < 1.5 * one.compute and same.compute < 1.5 * one.compute


KNOWN = hardware.local_machine(4, one_memory=False, compiled=True)


def test_copies_of_what_is_assigned_are_in_memory():
    """As on XLA's CPU devices: of weights that both passes read, and split as these are."""
    with tf.Graph().as_default():
        program = models.language_model(**TINY, optimizer="sgd")
    estimator = StepEstimator(program.graph, "rows:2,cols:2", program.outputs, KNOWN)
    for layout, parts in (("", 1), ("d_ff:cols;heads:cols;vocab:cols;d_model:rows", 4)):
        held = estimator.peak_by_kind(layout)
        assert 0 < held["copies"] < held["weights"]
        largest = max(v.size for v in program.graph.trainable_variables)
        assert largest * 4 // parts in {h.bytes for h in estimator.peak_contents(layout)}
    without = StepEstimator(program.graph, "rows:2,cols:2", program.outputs, SLOW)
    assert "copies" not in without.peak_by_kind("")
    with pytest.raises(MemoryLimitError, match=r"copies; less with more processors"):
        estimator.solve(1000)


def chain(mesh):
    """A product, three functions, and another product; with gradients."""
    x = mtf.random_uniform(mesh, "batch:64,features:256")
    for number in range(2):
        new = mtf.Dimension(f"hidden_{number}", 256)
        x = mtf.layers.dense(x, [new], x.shape[-1:], use_bias=False, name=f"dense_{number}")
        x = mtf.relu(mtf.square(x) * 0.5)
    return mtf.reduce_mean(x)


def blocks(mesh):
    """Two convolutions of images in blocks."""
    x = mtf.random_uniform(mesh, "batch:4,nx:4,ny:4,x:8,y:8,channels:4")
    for number in range(2):
        out = mtf.Dimension(f"out_{number}", 8)
        across, down = x.shape[1:3]
        x = mtf.relu(
            mtf.layers.conv2d_with_blocks(
                x, out, h_blocks_dim=across, w_blocks_dim=down, name=f"conv_{number}"
            )
        )
    return mtf.reduce_mean(mtf.square(x))


def built(make):
    """Returns a function that builds a training step of what returns a loss."""

    def build():
        graph = mtf.Graph()
        loss = make(mtf.Mesh(graph, "mesh"))
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.value for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
        return models.Program(graph, loss.mesh, [loss], updates)

    return build


def language_model(**sizes):
    sizes = {
        "batch": 8,
        "length": 32,
        "vocab": 256,
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 256,
        **sizes,
    }
    return models.language_model(**{**TINY, **sizes}, optimizer="sgd")


def long_model():
    """A model half of whose memory would be that of attention, if XLA kept it in several forms."""
    return language_model(batch=2, length=256)


def test_elementwise_results_are_not_in_memory():
    """XLA computes them within what reads them, from what they are made of."""
    with tf.Graph().as_default():
        program = built(chain)()
    fused, apart = (
        StepEstimator(program.graph, "rows:2,cols:2", program.outputs, known).memory
        for known in (KNOWN, SLOW)
    )

    def in_memory(memory):
        times = range(len(memory.at))
        return {h.name.split(":")[0] for t in times for h in memory.contents(t, {})}

    # What the second product reads is, and not what it is made of.
    functions = {"square", "scalar_mul", "relu", "square_1", "scalar_mul_1", "relu_1"}
    assert in_memory(fused) & functions == {"relu"}
    assert in_memory(apart) >= functions


@pytest.mark.parametrize("zero", [None, 1, 3])
def test_compiled_memory_is_a_constraint(zero):
    """The layout that the search finds within a limit is within it, also of what is in parts."""
    with tf.Graph().as_default():
        program = models.language_model(**TINY)
    mesh = mtf.convert_to_shape("rows:2,cols:2")
    stored = given_stored_layout(mesh, None, zero, zero and "rows")
    estimator = StepEstimator(program.graph, mesh, program.outputs, KNOWN, stored)
    limit = 0.7 * estimator.estimate("").peak_bytes
    found = estimator.solve(limit)
    assert estimator.least()[1] <= found.peak_bytes <= limit
    held = estimator.peak_contents(found.layout)
    assert sum(h.bytes for h in held) == found.peak_bytes
    assert any(h.kind == "copies" for h in held)


def test_compiled_memory_of_a_loop():
    with tf.Graph().as_default():
        graph, outputs = loop_program(gradients=True)
    estimator = StepEstimator(graph, "rows:2,cols:2", outputs, KNOWN)
    by_operation = StepEstimator(graph, "rows:2,cols:2", outputs, SLOW)
    tape = "loop tape"
    assert estimator.peak_by_kind("")[tape] == by_operation.peak_by_kind("")[tape] > 0


@pytest.mark.slow_but(8)
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("build, layout", [
    (built(chain), ""),
    (built(chain), "batch:rows,hidden_0:cols"),
    (built(blocks), ""),
    (built(blocks), "batch:rows"),
    (built(blocks), "nx:cols"),
    (built(blocks), "ny:rows,batch:cols"),
    (language_model, ""),
    (language_model, "batch:rows,d_ff:cols,heads:cols,vocab:cols"),
    (long_model, "batch:rows,length:cols"),
])  # fmt: skip
def test_memory_of_compiled_steps(build, layout):
    """The peak is that of XLA's analysis of the program that it compiles for each CPU device."""
    mesh = "rows:2,cols:2"
    with tf.Graph().as_default():
        program = build()
    estimator = StepEstimator(program.graph, mesh, program.outputs, KNOWN)
    predicted = estimator.estimate(layout.replace(",", ";")).peak_bytes

    @mtf.pjrt.function(mesh_shape=mesh, layout=layout)
    def step():
        program = build()
        lowering = mtf.Lowering(program.graph, {program.mesh: mtf.pjrt.mesh_impl()})
        updates = [lowering.lowered_operation(update) for update in program.updates]
        with tf.control_dependencies(updates):
            return [tf.identity(lowering.export_to_tf_tensor(y)) for y in program.outputs]

    found = step.lower().memory()
    used = (
        found.argument_size_in_bytes + found.temp_size_in_bytes
        + found.output_size_in_bytes - found.alias_size_in_bytes
    )  # fmt: skip
    # Which buffers share memory, another version of XLA may decide in another way.
    assert 0.8 < predicted / used < 1.2, (predicted, used)


def test_messages_of_processes_wait_for_cores(monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    links = [
        hardware.local_machine(count, False, processes=count, machines=machines).link
        for count, machines in ((2, 1), (4, 1), (4, 2))
    ]
    assert links[0] == links[2] == hardware._BETWEEN_PROCESSES
    assert links[1].latency == 2 * links[0].latency
    assert links[1].bandwidth == links[0].bandwidth / 2


def test_names_within_functions_are_no_candidates():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    w = mtf.get_variable(mesh, "w", "_own:4,rows:8")  # a name that a variable shows to its user
    sums = mtf.cumsum(w, "rows")
    moved = mtf.dynamic_shift(sums, mtf.constant(mesh, 1, dtype=tf.int32), "rows", wrap=True)
    estimator = StepEstimator(graph, "m:2", [moved])
    assert {d for d, _ in estimator.space.pairs} == {"_own", "rows"}
    # It may still be written.
    assert estimator.estimate("tmp_dim_cumsum:m").seconds.total > 0
