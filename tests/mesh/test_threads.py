"""Several threads: each builds programs in a tf graph of its own, or all run one session."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh.residual_network import network, new_session, train

import mesh_tensorflow as mtf
from mesh_tensorflow import _watching, placement_mesh_impl
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow._mesh.replicate import _first_key
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.utils import counted_steps, steps_done

THREADS = 4
COUNT = mtf.Dimension("count", 4)


@pytest.fixture
def all_at_once():
    """Runs a function in several threads; returns the results, by the thread's number."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def run(function):
        with ThreadPoolExecutor(THREADS) as pool:
            return [f.result(300) for f in [pool.submit(function, i) for i in range(THREADS)]]

    yield run
    sys.setswitchinterval(interval)


def met(impl):
    """A maker of `impl` that waits until all threads are within their programs."""
    barrier = threading.Barrier(THREADS, timeout=30)

    def make():
        barrier.wait()
        return impl()

    return make


@pytest.mark.slow
def test_replicated_programs(all_at_once):
    make = met(lambda: SimdMeshImpl("x:2", "batch:x"))

    def build_and_train(number):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            return train(replicate(lambda: network(make), devices=["/cpu:0", "/cpu:1"]))[0]

    results = all_at_once(build_and_train)
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        alone = train(network(lambda: PlacementMeshImpl("x:1", "", [""])))[0]
    for losses in results:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)


@pytest.mark.slow
def test_loops_and_devices(all_at_once):
    """Constants that are shared within a loop, or on a device, are of the thread's own graph."""
    make = met(lambda: PlacementMeshImpl("x:2", "count:x", ["/cpu:0", "/cpu:1"]))

    def build_and_run(number):
        with tf.Graph().as_default(), new_session() as session:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            x = mtf.import_tf_tensor(mesh, tf.range(4.0) + number, [COUNT])
            for _ in range(8):
                [x] = mtf.while_loop(
                    lambda x: mtf.less(mtf.reduce_sum(x), 1000.0),
                    lambda x: [
                        x * 2.0 + mtf.cast(mtf.mtf_range(mesh, COUNT, tf.int32), tf.float32)
                    ],
                    [x],
                )
                x *= 0.5
            lowering = mtf.Lowering(graph, {mesh: make()})
            return session.run(lowering.export_to_tf_tensor(x))

    def expected(number):
        x = np.arange(4.0) + number
        for _ in range(8):
            while x.sum() < 1000:
                x = x * 2 + np.arange(4)
            x *= 0.5
        return x

    for number, result in enumerate(all_at_once(build_and_run)):
        np.testing.assert_allclose(result, expected(number), rtol=1e-5)


ROWS, COLS, WIDE = mtf.Dimension("rows", 4), mtf.Dimension("cols", 6), mtf.Dimension("wide", 8)
WAYS = ["placement", "collectives"]


def build(way, x, weight, updates, at_lowering=lambda: None):
    """A layer on x:2,y:2 whose results need both mesh dimensions; `weight` is its initial value."""
    cpus = [f"/cpu:{i}" for i in range(4)]

    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        rows = mtf.import_tf_tensor(mesh, x, [ROWS, COLS])
        initial = tf.constant_initializer(float(weight))
        w = mtf.get_variable(mesh, "w", [COLS, WIDE], initializer=initial)
        sums = mtf.einsum([mtf.exp(rows), w], [ROWS, WIDE])
        shifted = mtf.shift(sums, 1, ROWS, wrap=True)
        total = mtf.reduce_sum(shifted) - mtf.reduce_max(sums)
        [sums] = mtf.while_loop(
            lambda s: mtf.less(mtf.reduce_max(s), 1e5), lambda s: [s * 2.0], [sums]
        )
        update = mtf.assign_add(w, mtf.ones(mesh, [COLS, WIDE])) if updates else None
        at_lowering()
        if way == "placement":
            impl = PlacementMeshImpl("x:2,y:2", "rows:x,wide:y", cpus, merge="none")
        else:
            impl = SimdMeshImpl("x:2,y:2", "rows:x,wide:y")
        lowering = mtf.Lowering(graph, {mesh: impl})
        results = [lowering.export_to_tf_tensor(sums), lowering.export_to_tf_tensor(total)]
        return [*results, *([lowering.lowered_operation(update)] if updates else [])]

    if way == "placement":
        return program()
    return replicate(program, devices=cpus)


def expected_of(x, weight):
    sums = np.exp(x) @ np.full([6, 8], weight)
    total = sums.sum() - sums.max()
    while sums.max() < 1e5:
        sums = sums * 2
    return [sums, total]


def assert_expected(found, x, weight):
    for value, expected in zip(found, expected_of(x, weight)):
        np.testing.assert_allclose(value, expected, rtol=1e-4)


def limited_session():
    """A session with four CPUs that raises if collectives of two steps wait for each other."""
    return tf.Session(
        config=tf.ConfigProto(device_count={"CPU": 4}, operation_timeout_in_ms=120000)
    )


def rows_of(number):
    return np.random.RandomState(number).rand(4, 6).astype(np.float32)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("way", WAYS)
def test_graphs_of_threads_are_apart(way, all_at_once):
    """Each thread has another value, other data and other updates of the variable "w"."""
    barrier = threading.Barrier(THREADS, timeout=60)

    def build_and_run(number):
        with tf.Graph().as_default() as graph, limited_session() as session:
            results = build(way, tf.constant(rows_of(number)), number + 1, True, barrier.wait)
            session.run(tf.global_variables_initializer())
            found = [session.run(results) for _ in range(3 + number)]
            graphs = {made.graph for made in [*results, *tf.global_variables()]}
            return found, [v.op.name for v in tf.global_variables()], graphs == {graph}

    for number, (found, names, one_graph) in enumerate(all_at_once(build_and_run)):
        assert names == ["w"] and one_graph
        for step, results in enumerate(found):
            assert_expected(results, rows_of(number), number + 1 + step)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("way", WAYS)
def test_threads_run_one_session(way, all_at_once):
    """Steps that run at once do not take each other's values."""
    barrier = threading.Barrier(THREADS, timeout=60)
    with tf.Graph().as_default(), limited_session() as session:
        x = tf.placeholder(tf.float32, [4, 6])
        results = build(way, x, 2, False)
        session.run(tf.global_variables_initializer())

        def run(number):
            barrier.wait()
            return [session.run(results, {x: rows_of(30 * number + i)}) for i in range(30)]

        for number, found in enumerate(all_at_once(run)):
            for i, values in enumerate(found):
                assert_expected(values, rows_of(30 * number + i), 2)


def test_steps_are_the_thread_s_own(all_at_once):
    barrier = threading.Barrier(THREADS, timeout=60)

    def steps(number):
        with tf.Graph().as_default(), tf.Session() as session:
            step = tf.constant(number)
            with counted_steps(step), keys_by_step(step):
                barrier.wait()
                mesh = mtf.Mesh(mtf.Graph(), "mesh")
                noise = mtf.random_uniform(mesh, [COUNT], seed=5)
                lowering = mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
                found = session.run([steps_done(), lowering.export_to_tf_tensor(noise)])
                barrier.wait()
            return int(found[0]), found[1].tolist()

    results = all_at_once(steps)
    assert [step for step, _ in results] == list(range(THREADS))
    assert len({tuple(noise) for _, noise in results}) == THREADS


def test_groups_of_collectives_have_numbers_of_their_own(all_at_once):
    """Two groups under one number would wait for each other."""
    barrier = threading.Barrier(THREADS, timeout=60)

    def take(number):
        barrier.wait()
        mine = [
            placement_mesh_impl.group_key([f"/cpu:{i}", f"/thread:{number}"]) for i in range(200)
        ]
        return mine, [_first_key(["/cpu:77"], alone=True) for _ in range(200)]

    groups, programs = zip(*all_at_once(take))
    assert len(set().union(*groups)) == len(set().union(*programs)) == 200 * THREADS


def test_programs_are_listed_while_others_are_lowered(all_at_once):
    """As by an error in one thread, which is looked up in the names of all Lowerings."""
    kept = [_watching.NodeNames() for _ in range(2000)]

    def work(number):
        tables = []
        for _ in range(100):
            if number % 2:
                tables.append(_watching.NodeNames())
            else:
                assert isinstance(_watching.living_names(), list)
        return tables

    made = [table for tables in all_at_once(work) for table in tables]
    assert set(map(id, made + kept)) <= set(map(id, _watching.living_names()))
