"""Programs that are built in several threads at once, each in a tf graph of its own."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from test_simd import network, new_session, train

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.placement import collectives
from mesh_tensorflow._mesh.simd.replicate import _first_key
from mesh_tensorflow._mesh.slices.random_values import keys_by_step
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


@pytest.mark.parametrize("share", [False, True])
def test_replicated_programs(share, all_at_once):
    make = met(lambda: SimdMeshImpl("x:2", "batch:x"))

    def build_and_train(number):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            return train(
                replicate(lambda: network(make), devices=["/cpu:0", "/cpu:1"], share_memory=share)
            )[0]

    results = all_at_once(build_and_train)
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        alone = train(network(lambda: PlacementMeshImpl("x:1", "", [""])))[0]
    for losses in results:
        np.testing.assert_allclose(losses, alone, rtol=1e-5)


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
        mine = [collectives.group_key([f"/cpu:{i}", f"/thread:{number}"]) for i in range(200)]
        return mine, [_first_key(["/cpu:77"]) for _ in range(200)]

    groups, programs = zip(*all_at_once(take))
    assert len(set().union(*groups)) == len(set().union(*programs)) == 200 * THREADS
