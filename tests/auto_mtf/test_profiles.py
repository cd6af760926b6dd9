"""Layouts by the times of a program's operations on this machine."""

import itertools
import json

import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh import devices
from mesh_tensorflow.auto_mtf import _units, hardware, measure, models, profiles, step_time
from mesh_tensorflow.auto_mtf.explanation import Explanation
from mesh_tensorflow.auto_mtf.step_time import StepEstimator

SHAPE = mtf.convert_to_shape("rows:2,cols:2")
CPUS = [f"cpu:{i}" for i in range(4)]
SIZES = {
    "batch": 4, "length": 8, "vocab": 16, "d_model": 16, "layers": 2, "heads": 2, "d_kv": 8,
    "d_ff": 32, "optimizer": "sgd",
}  # fmt: skip


def program(**sizes):
    with tf.Graph().as_default():
        return step_time.ProgramParts.of(models.language_model(**{**SIZES, **sizes}))


def dense(dims="batch:64,i:64", outputs="h:64", optimizer=None):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        x = mtf.ones(mtf.Mesh(graph, "mesh"), dims)
        y = mtf.layers.dense(x, list(mtf.convert_to_shape(outputs)), x.shape.dims[1:], name="a")
        loss = mtf.reduce_sum(mtf.square(y))
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.value for v in variables])
        if optimizer is not None:
            optimizer.apply_grads(gradients, variables)
    return step_time.ProgramParts.of((graph, [loss, *gradients]))


def estimator(parts, path, seconds=60.0, simd=False, devices=CPUS):
    profile = profiles.Profile(seconds, cache=str(path), show=False)
    return profiles.estimator_on(profiles.Processors(SHAPE, devices, simd), parts, profile)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("simd", [False, True])
def test_all_operations_are_timed_once(simd, tmp_path):
    path = tmp_path / "profiles.json"
    first = estimator(dense(), path, simd=simd)
    [times] = json.loads(path.read_text()).values()
    # One more says that the program was timed.
    assert f"{len(times) - 1} of {len(times) - 1} operations timed" in str(first.costs)
    best = first.solve()
    assert best.seconds.total > 0 and best.layout in [e.layout for e in first.best(3)]
    # In another program of the same operations, and another run, they are known.
    again = estimator(dense(), path, simd=simd)
    assert [e.seconds for e in again.best(3)] == [e.seconds for e in first.best(3)]
    assert json.loads(path.read_text()) == {next(iter(json.loads(path.read_text()))): times}


@pytest.mark.slow
def test_layers_that_repeat_are_timed_once(tmp_path):
    two, four = (estimator(program(layers=n), "", seconds=1e-3) for n in (2, 4))
    wanted = [str(e.costs).split(" operations")[0].split()[-1] for e in (two, four)]
    assert wanted[0] == wanted[1]


@pytest.mark.slow
def test_what_is_not_timed_is_scaled_by_what_is():
    rough = profiles.estimator_on(profiles.Processors(SHAPE, CPUS), program(), None)
    short = estimator(program(), "", seconds=1e-3)
    assert str(short.costs).startswith("1 of ")
    # All but a few operations by one factor, so that the ranking is that of the cost model.
    ratios = {
        layout: short.estimate(layout).seconds.total / rough.estimate(layout).seconds.total
        for layout in ("", "batch:rows", "batch:rows;d_ff:cols")
    }
    assert max(ratios.values()) < 2 * min(ratios.values())
    assert abs(ratios[""] - 1) > 1e-3


def test_what_is_not_timed_is_like_what_was_of_the_same_size():
    """By the operations of the same class that the cost model takes to be about as long."""
    parts = program()
    costs = profiles.estimator_on(
        profiles.Processors(SHAPE, CPUS), parts, profiles.Profile(1e-9, cache="", show=False)
    ).costs
    costs._pairs = {"A": [(1.0, 9.0)] + [(10.0, 20.0)] * 5, "": [(1.0, 0.5)]}
    like = profiles._Timed("A", 12.0, 1.0, "", "", False, (), lambda lowering: [])
    assert costs._correction(like) == 2.0
    assert costs._correction(like._replace(predicted=0.5)) == (9.0 + 20 * 4) / (1.0 + 10 * 4)
    assert costs._correction(like._replace(kind="B")) == 0.5


def test_few_parts_have_the_threads_of_tensorflow(monkeypatch):
    """Layouts that cut into fewer parts than there are cores are estimated apart, as they run."""
    monkeypatch.setattr("mesh_tensorflow._mesh.devices.cores", lambda: 4)
    monkeypatch.setattr(profiles, "cores", lambda: 4)
    machine = profiles.Processors(SHAPE, CPUS)
    assert machine.few_parts == [frozenset(["rows"]), frozenset(["cols"])]
    assert profiles.Processors(SHAPE, CPUS[:2] * 2).few_parts == []
    gpus = [f"gpu:{i}" for i in range(4)]
    assert profiles.Processors(SHAPE, gpus).few_parts == []
    parts, known = program(), hardware.local_machine(4, one_memory=True).replace(cores=4)
    both = profiles.estimator_on(machine, parts, None, known)
    one, shared = (
        StepEstimator(
            parts.graph, SHAPE, parts.outputs, known,
            costs=hardware.CostModel(SHAPE, known, shares_out=shares_out),
        )
        for shares_out in (False, True)
    )  # fmt: skip
    for layout, like in (
        ("", shared), ("batch:rows", shared), ("d_ff:cols;vocab:cols", shared),
        ("batch:rows;d_ff:cols", one),
    ):  # fmt: skip
        assert both.estimate(layout) == like.estimate(layout)
    # In the order of these times, and each once.
    found = list(itertools.islice(both.fastest(), 40))
    times = [e.seconds.total for e in found]
    # The search does not tell times apart that differ by a millionth.
    assert times == pytest.approx(sorted(times), rel=1e-5) and len({e.text for e in found}) == 40
    assert both.solve().seconds == found[0].seconds
    assert both.estimate(found[20].layout) == found[20]
    assert both.faster_than(times[0]) is None
    assert both.faster_than(2 * times[0]).seconds == found[0].seconds
    with pytest.raises(step_time.MemoryLimitError, match="no layout fits in 10 B"):
        both.solve(10)
    # An explanation compares layouts of both kinds.
    explained = Explanation(both, both.estimate(""), [both.estimate("batch:rows;d_ff:cols")], None)
    assert explained.chosen.seconds == both.estimate("").seconds
    assert "batch:rows;d_ff:cols" in str(explained)


def test_the_threads_of_sessions():
    machine = profiles.Processors(SHAPE, CPUS)
    one = devices.one_thread_each(range(4), SHAPE, mtf.convert_to_layout_rules("batch:rows"))
    with tf.Graph().as_default() as made:
        for layout, threads in (("", 0), ("batch:rows", int(one))):
            with machine.session(made, layout) as session:
                assert session._config.intra_op_parallelism_threads == threads
                assert session._config.device_count["CPU"] == 4


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("simd", [False, True])
def test_steps_are_measured_with_the_threads_of_their_layouts(simd, monkeypatch):
    opened = []
    session_of = profiles.Processors.session
    monkeypatch.setattr(
        profiles.Processors, "session",
        lambda self, made, layout, **kw: opened.append(layout) or session_of(self, made, layout),
    )  # fmt: skip
    layouts = ["", "batch:rows;d_ff:cols"]
    times = measure.step_seconds(
        lambda: models.language_model(**SIZES), SHAPE, layouts, 1, 1, "simd" if simd else "shared"
    )
    assert opened == layouts and min(times) > 0


def timed_product(parts, **changed):
    """Returns the _Timed of the product of `dense`."""
    [op] = [op for op in parts.graph.operations if op.name == "a/einsum"]
    timed = profiles._Timed(
        "Einsum", 1e-3 / 5, 1.0, "batch:rows;h:cols", "rows:rows;cols:cols", False,
        tuple(op.inputs), lambda lowering: profiles._lower(op, lowering),
    )  # fmt: skip
    return timed._replace(**changed)


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("cores", [1, 8])
def test_what_is_timed_is_computed_as_often_as_it_says(cores, simd, monkeypatch):
    """Side by side, repetitions are equal operations, which TensorFlow would compute once."""
    monkeypatch.setattr(profiles, "cores", lambda: cores)
    parts, machine = dense(), profiles.Processors(SHAPE, CPUS, simd)
    timed = timed_product(parts)
    assert timed.repeats == 5
    with tf.Graph().as_default() as made:
        fetch = profiles._fetch(parts.graph, timed, machine, timed.repeats)
        options, found = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE), tf.RunMetadata()
        with machine.session(made, timed.program, optimized=False) as session:
            session.run(fetch, options=options, run_metadata=found)
    by_device = {d.device: [n.node_name for n in d.node_stats] for d in found.step_stats.dev_stats}
    # Nobody waits for the inputs of another.
    made_on = [d for d, names in by_device.items() if any("Fill" in name for name in names)]
    assert len(made_on) == 4, by_device
    run = [name for names in by_device.values() for name in names]
    products = {name for name in run if name.split("/")[-1].startswith(("MatMul", "Einsum"))}
    assert len(products) == 5 * 4, run


def test_a_step_that_does_not_end_is_an_error(tf_graph):
    def never(lowering):
        values = tf.queue.FIFOQueue(1, tf.float32, shapes=[[]])
        return [mtf.LaidOutTensor([values.dequeue()] * 4)]

    parts, machine = dense(), profiles.Processors(SHAPE, CPUS)
    timed = timed_product(parts, run=never)
    message = (
        r"time operations: a step of Einsum of Shape\[batch=64, i=64\], Shape\[i=64, h=64\] in the "
        r"layout 'batch:rows;h:cols' did not end within 0\.5 s\. Leave out the times of operations "
        r"\(profile=False\), or give more seconds"
    )
    with pytest.raises(TimeoutError, match=message):
        profiles._times_of(parts.graph, [timed], machine, lambda: True, 0.5)


def test_steps_that_are_timed_take_turns(monkeypatch):
    """What slows the machine down for a while slows not all runs of one step down."""
    now, ran = [0.0], []
    monkeypatch.setattr(profiles.time, "perf_counter", lambda: now[0])

    def step(name, seconds):
        def run():
            ran.append(name)
            busy = 10 * seconds if 4 <= len(ran) <= 9 else 0.0
            now[0] += seconds + busy

        return run

    seconds = {"a": 1e-3, "b": 2e-3, "c": 40.0}
    turns = profiles._Turns({name: step(name, took) for name, took in seconds.items()})
    while not turns.done:
        turns.take(3)
    assert turns.least() == pytest.approx(seconds)
    # Forth and back; what takes long is run twice.
    assert "".join(ran) == "abc" + "cba" + "abba" * 3


def test_rounds_are_spread_over_the_time_that_others_are_built(monkeypatch):
    """So that load of a second slows down no operation in all of its rounds."""
    monkeypatch.setattr(profiles, "_IN_ONE_GRAPH", 1)
    happened = []
    take, build = profiles._Turns.take, profiles._fetch_if_possible

    def taken(self, rounds):
        happened.append(self)
        take(self, rounds)

    def built(*args):
        happened.append(None)
        return build(*args)

    monkeypatch.setattr(profiles._Turns, "take", taken)
    monkeypatch.setattr(profiles, "_fetch_if_possible", built)
    found = estimator(dense(), "")
    number = happened.count(None)
    assert str(found.costs).startswith(f"{number} of {number} operations timed")
    first = happened[1]
    places = [i for i, one in enumerate(happened) if one is first]
    builds = [happened[: place + 1].count(None) for place in places]
    assert builds == [1, 2, 3, 4]


def test_what_is_built_is_within_the_seconds(monkeypatch):
    """Building a split convolution takes longer than timing it."""
    built, build = [], profiles._fetch_if_possible
    monkeypatch.setattr(
        profiles, "_fetch_if_possible", lambda *args: built.append(args) or build(*args)
    )
    found = estimator(program(), "", 1e-9)
    assert len(built) == 1 and str(found.costs).startswith("1 of ")


def two_layers():
    """Returns the graph of a training step, and the loss."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        h = mtf.ones(mtf.Mesh(graph, "mesh"), "batch:64,i:64")
        for name in ("first", "second"):
            out = [mtf.Dimension(name, 64)]
            h = mtf.relu(mtf.layers.dense(h, out, h.shape.dims[1:], use_bias=False, name=name))
        loss = mtf.reduce_sum(mtf.square(h))
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.value for v in variables])
        mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, variables)
    return graph, loss


@pytest.mark.parametrize(("layout", "part"), [("batch:rows", 1 / 3), ("first:rows", 1.0)])
def test_sums_for_updates_are_sent_beside_each_other(layout, part):
    """Of the loss and two gradients, over the batch; a sum of activations is waited for."""
    graph, loss = two_layers()
    seconds = []
    for busy in (1.0, 0.0):
        link = hardware.Link(1e30, 1e-3, busy=busy)
        known = hardware.PROFILES["tpu_v3"].replace(link=link)
        found = step_time.StepEstimator(graph, SHAPE, [loss], known).estimate(layout)
        seconds.append(found.seconds.communication)
    assert seconds[1] == pytest.approx(part * seconds[0]) and seconds[0] > 0
    with pytest.raises(ValueError, match="busy is a part of the latency, from 0 to 1"):
        hardware.Link(1e9, 1e-3, busy=2.0)


@pytest.mark.parametrize("mesh", ["one:1", "one:1,cols:4"])
def test_one_processor_splits_nothing(mesh):
    """Programs that are one are no choice, and not tried one after the other."""
    parts = dense()
    found = step_time.StepEstimator(parts.graph, mesh, parts.outputs, joint=True)
    texts = [e.text for e in itertools.islice(found.fastest(), 9)]
    assert "" in texts and not any("one" in text for text in texts)
    assert found.estimate("batch:one;h:one+cols") == found.estimate("h:cols")


def test_gradients_of_weights_are_computed_beside_others(monkeypatch):
    """Of one slice, on two cores: two products of three take the time of a step."""
    graph, loss = two_layers()
    goes_on = _units.read_by_gradients(graph.operations)
    beside = _units.computed_beside(graph.operations, goes_on)
    # That of the first layer has no other beside it: nothing asks for the gradient of the input.
    assert [op.name for op in beside] == ["second/einsum/gradients/einsum_1"]
    [op] = beside
    known = hardware.local_machine(4, one_memory=True).replace(cores=4)
    model = hardware.CostModel(SHAPE, known)
    for layout, part in (
        ({}, 0.0),
        ({"batch": "rows"}, 0.0),
        ({"batch": "rows", "first": "cols"}, 1.0),
    ):
        assert model.beside(op, model.impl(layout)) == part
    three = hardware.CostModel(SHAPE, known.replace(cores=3))
    assert three.beside(op, three.impl({"batch": "rows"})) == pytest.approx(1 / 3)
    # Where each operation has the threads of all cores, and on processors without a common memory.
    shared = hardware.CostModel(SHAPE, known, shares_out=True)
    apart = hardware.CostModel(SHAPE, hardware.PROFILES["tpu_v3"])
    assert shared.beside(op, shared.impl({})) == apart.beside(op, apart.impl({})) == 1.0

    # What is estimated of the program, too.
    def seconds():
        return StepEstimator(graph, SHAPE, [loss], known).estimate("").seconds.total

    estimated = seconds()
    monkeypatch.setattr(hardware.CostModel, "beside", lambda self, op, impl: 1.0)
    assert seconds() - estimated == pytest.approx(model.operation(op, model.impl({})).total)


def test_an_explanation_says_what_was_timed(tmp_path):
    parts = dense(optimizer=mtf.optimize.SgdOptimizer(0.1))
    whole = estimator(parts, tmp_path / "profiles.json")
    some = estimator(parts, "", seconds=1e-9)
    for found, least in ((whole, 0.8), (some, 0.0)):
        chosen = found.estimate("batch:rows")
        text = Explanation(found, chosen, [], None).sections()["layers"].splitlines()
        assert text[0].split()[-1] == "timed"
        shares = [int(line.split()[-1][:-1]) / 100 for line in text if line.endswith("%")]
        assert all(0 <= share <= 1 for share in shares)
        assert max(shares) >= least
    # Of assignments, none is timed.
    part = whole.times.by_layer(chosen.layout, whole.costs.only_timed())
    every = whole.times.by_layer(chosen.layout)
    assert part.keys() == every.keys()
    assert all(part[name].total <= every[name].total * (1 + 1e-9) for name in every)
    assert sum(s.total for s in part.values()) < sum(s.total for s in every.values())


@pytest.mark.parametrize("simd, tasks", [(True, [0] * 4), (False, range(4)), (False, [0] * 4)])
def test_without_splits_and_effects_one_processor_computes(simd, tasks):
    """Of those that have a memory of their own: TensorFlow leaves out what nobody reads."""
    devices = [f"/job:worker/task:{t}/device:CPU:{i}" for i, t in enumerate(tasks)]
    machine = profiles.Processors(SHAPE, CPUS if simd else devices, simd)
    known = hardware.local_machine(4, one_memory=machine.one_memory).replace(sharing_seconds=1.0)

    def seconds(parts):
        return profiles.estimator_on(machine, parts, None, known).estimate("").seconds.compute

    only = dense(), dense(optimizer=mtf.optimize.SgdOptimizer(0.1))
    read, updated = map(seconds, only)
    # Updates themselves take next to nothing.
    assert read < (updated / 3 if simd or len(set(tasks)) > 1 else updated)
    assert read > updated / 8


def test_merged_processors_are_one():
    """On one device nothing is split, whatever the layout says."""
    one = profiles.Processors(SHAPE, ["cpu:0"] * 4)
    assert one.executed.size == 1 and one.one_memory
    merged = profiles.estimator_on(one, dense(), None)
    seconds = {merged.estimate(layout).seconds for layout in ("", "batch:rows;h:cols", "i:rows")}
    assert len(seconds) == 1
    assert all(time.communication == 0 for time in seconds)
    four = profiles.Processors(SHAPE, CPUS)
    assert four.executed == SHAPE and four.slices("batch:rows;h:cols") == 4
    assert profiles.Processors(SHAPE, CPUS, simd=True).slices("") == 4
    # Each process computes its own, whatever the others have.
    tasks = [f"/job:worker/task:{task}/device:CPU:0" for task in range(4)]
    assert profiles.Processors(SHAPE, tasks).slices("") == 4


def test_what_cannot_run_alone_keeps_the_time_of_the_cost_model(tmp_path):
    with tf.Graph().as_default():
        graph = mtf.Graph()
        x = mtf.random_uniform(mtf.Mesh(graph, "mesh"), "batch:8,i:8")
        outside = tf.constant(2.0)
        # A function that reads a tensor of the user's own tf graph.
        y = mtf.slicewise(lambda t: t * outside, [x], x.shape, x.dtype, list(x.shape))
        parts = step_time.ProgramParts.of((graph, [mtf.reduce_sum(mtf.square(y))]))
    timed = estimator(parts, tmp_path / "profiles.json")
    assert "cannot run alone" in str(timed.costs)
    assert timed.solve().seconds.total > 0


@pytest.mark.slow
def test_by_the_functions_of_auto_mtf(tmp_path):
    parts = dense()
    asked = mtf.auto_mtf.Profile(20, cache=str(tmp_path / "p.json"), devices=CPUS, show=False)
    where = (parts.graph, "rows:2,cols:2", parts.outputs)
    layout = mtf.auto_mtf.layout(*where, objective="time", profile=asked)
    explained = mtf.auto_mtf.explain(*where, profile=asked)
    assert dict(layout.pairs) == explained.chosen.layout
    assert "operations timed in" in str(explained) and "logical CPUs" in str(explained)
    layout, stored = mtf.auto_mtf.layout_and_stored_layout(*where, profile=asked)
    assert stored is None and dict(layout.pairs) == explained.chosen.layout


def test_mistakes():
    parts = dense()
    with pytest.raises(ValueError, match="'memory' has no use for a profile, which is of times"):
        mtf.auto_mtf.layout(parts.graph, "all:2", parts.outputs, profile=True)
    with pytest.raises(ValueError, match="seconds must be more than 0"):
        mtf.auto_mtf.Profile(seconds=0)
