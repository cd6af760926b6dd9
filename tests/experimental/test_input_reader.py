"""Readers: each processor gets its slices of the batches that a whole data set has."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.paths import WORKERS

import mesh_tensorflow as mtf
from mesh_tensorflow.experimental import input_reader
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

BATCH, EXAMPLES = 4, 18
SHAPES = ["batch:4,h:6,w:4", "batch:4,one:1"]
DATA = np.random.RandomState(0).rand(EXAMPLES, 6, 4).astype(np.float32)
NUMBERS = np.arange(EXAMPLES, dtype=np.int32)[:, None]
LAYOUTS = ["", "batch:rows", "batch:rows,w:cols", "h:rows,w:cols", "h:cols,batch:rows"]


def creator():
    return tf.data.Dataset.from_tensor_slices((DATA, NUMBERS))


def batch(step):
    examples = slice(step * BATCH, (step + 1) * BATCH)
    return [DATA[examples], NUMBERS[examples]]


def own(mesh_impl, step, pnum):
    """Returns a processor's slices of a batch."""
    return [
        x[
            tuple(
                slice(b, b + n)
                for b, n in zip(mesh_impl.slice_begin(shape, pnum), mesh_impl.slice_shape(shape))
            )
        ]
        for x, shape in zip(batch(step), map(mtf.convert_to_shape, SHAPES))
    ]


# -- placement


@pytest.mark.parametrize("layout", LAYOUTS)
def test_placement(layout, tf_graph):
    mesh_impl = PlacementMeshImpl("rows:2,cols:2", layout, ["cpu:0"] * 4)
    reader = input_reader.PlacementMeshImplInputReader(mesh_impl, creator, SHAPES_OF)
    seen = []
    slices = reader.gpu_placement(lambda *inputs: seen.extend(inputs) or inputs)
    assert [len(x) for x in seen] == [4, 4]
    with tf.Session() as session:
        for _ in range(2):
            reader.initialize(session)
            for step in range(4):
                found = session.run(slices)
                for pnum in range(4):
                    for x, y in zip(own(mesh_impl, step, pnum), found):
                        np.testing.assert_array_equal(y[pnum], x)
            with pytest.raises(tf.errors.OutOfRangeError):  # two examples are left over
                session.run(slices)


SHAPES_OF = [mtf.convert_to_shape(shape) for shape in SHAPES]


@pytest.mark.parametrize(
    "shapes, text",
    [
        (
            ["batch:4,h:6,w:5", "batch:4,one:1"],
            r"batches of \[\[4, 6, 4\], \[4, 1\]\], but mtf_input_shapes",
        ),
        (["batch:4,h:6,w:4"], "the data set has batches of"),
        (
            ["batch:4,h:6,w:4", "b:4,one:1"],
            "begins with the dimension of the batch, the same for all",
        ),
        ([], "begins with the dimension of the batch"),
    ],
)
def test_wrong_shapes(shapes, text, tf_graph):
    mesh_impl = PlacementMeshImpl("rows:2,cols:2", "", ["cpu:0"] * 4)
    with pytest.raises(ValueError, match=text):
        input_reader.PlacementMeshImplInputReader(
            mesh_impl, creator, [mtf.convert_to_shape(s) for s in shapes]
        )


# -- one program on each of four logical CPUs


@pytest.mark.parametrize(
    "layout, l2p",
    [*[(layout, None) for layout in LAYOUTS[1:]], ("batch:rows,w:cols", [2, 0, 3, 1])],
)
def test_simd(layout, l2p, tf_graph):
    readers = []

    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        mesh_impl = SimdMeshImpl("rows:2,cols:2", layout, logical_to_physical=l2p)
        places = input_reader.ProcessDevices(mesh_impl)
        assert places.ordered_ordinals == (l2p or [0, 1, 2, 3])
        assert places.ordered_tpus == mesh_impl.devices
        readers.append(input_reader.SimdMeshImplInputReader(mesh_impl, creator, SHAPES_OF))
        infeed = readers[-1].infeed_queue
        assert (infeed.number_of_tuple_elements, infeed.number_of_shards) == (2, 4)
        slices = infeed.generate_dequeue_op()
        assert [x.shape for x in slices] == infeed.tuple_shapes
        assert [x.shape.as_list() for x in slices] == [mesh_impl.slice_shape(s) for s in SHAPES_OF]
        xs = [
            mtf.import_laid_out_tensor(mesh, mesh_impl.LaidOutTensor([x]), shape)
            for x, shape in zip(slices, SHAPES_OF)
        ]
        lowering = mtf.Lowering(graph, {mesh: mesh_impl})
        return [lowering.export_to_tf_tensor(x) for x in xs]

    whole = replicate(program, devices=[f"/cpu:{i}" for i in range(4)])
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        readers[-1].start_infeed_thread(session).join(10)
        for step in range(4):
            for found, expected in zip(session.run(whole), batch(step)):
                np.testing.assert_array_equal(found, expected)
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(whole)


# -- one program on each processor of several processes


@pytest.mark.slow
@pytest.mark.parametrize("count, layout", [(2, "batch:rows,w:cols"), (4, "batch:cols")])
def test_processes_read_for_their_own_processors(count, layout, tmp_path):
    processes.launch(count, WORKERS / "reader_worker.py", layout, 4 // count, tmp_path)
    for index in range(count):
        np.testing.assert_array_equal(
            np.load(tmp_path / f"{index}.npy"), np.arange(32).reshape(2, 4, 4)
        )


# -- TPUs: the graphs that feed them


def assignment(hosts=1):
    """Returns an assignment of the 8 cores of 2 x 2 chips, on one host or two."""
    cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
    topology = tf.tpu.experimental.Topology(
        mesh_shape=[2, 2, 1, 2], device_coordinates=cores.reshape(hosts, -1, 4)
    )
    return tf.tpu.experimental.DeviceAssignment(topology, cores[:8, None])


def tpu_mesh(hosts, l2p=None, layout="batch:rows,w:cols"):
    return SimdMeshImpl(
        "rows:4,cols:2", layout, device_assignment=assignment(hosts), logical_to_physical=l2p
    )


# What the classic says.
ORDINALS = {None: [0, 1, 2, 3] * 2, (0, 1, 4, 5, 2, 3, 6, 7): [0, 1, 0, 1, 2, 3, 2, 3]}
HOSTS = {None: [0] * 4 + [1] * 4, (0, 1, 4, 5, 2, 3, 6, 7): [0, 0, 1, 1, 0, 0, 1, 1]}


@pytest.mark.parametrize("l2p", ORDINALS)
def test_process_devices(l2p, tf_graph):
    found = input_reader.ProcessDevices(tpu_mesh(2, l2p))
    assert found.ordered_ordinals == ORDINALS[l2p]
    assert found.ordered_host_ids == HOSTS[l2p]
    assert found.ordered_tpus == [
        f"/task:{host}/device:TPU:{core}" for host, core in zip(HOSTS[l2p], ORDINALS[l2p])
    ]
    assert found.ordered_hosts == [f"/task:{host}/device:CPU:0" for host in HOSTS[l2p]]
    assert found.host_id_to_its_pnums == {
        host: [pnum for pnum in range(8) if HOSTS[l2p][pnum] == host] for host in (0, 1)
    }
    assert (found.num_cores, found.num_hosts, found.num_cores_per_host) == (8, 2, 4)


def test_hosts_have_names(tf_graph):
    assert input_reader._host_id_to_tf_device(1, True) == "/job:tpu_worker/task:1/device:CPU:0"
    assert input_reader._host_id_to_tf_device(1, False) == "/task:1/device:CPU:0"


def enqueued(graph):
    """Returns (device, ordinal, inputs) of what is sent to each core."""
    return [
        (op.device, op.get_attr("device_ordinal"), list(op.inputs))
        for op in graph.get_operations()
        if op.type == "InfeedEnqueueTuple"
    ]


def values_without_devices(graph, tensors, initializers, steps):
    """Runs a graph that is for several hosts in this process."""
    definition = graph.as_graph_def()
    kept = [node for node in definition.node if node.op != "InfeedEnqueueTuple"]  # TPUs only
    del definition.node[:]
    definition.node.extend(kept)
    for node in definition.node:
        node.device = ""
    with tf.Graph().as_default() as here, tf.Session() as session:
        tf.import_graph_def(definition, name="")
        session.run([here.get_operation_by_name(op.name) for op in initializers])
        names = tf.nest.map_structure(lambda t: t.name, tensors)
        return [session.run(names) for _ in range(steps)]


@pytest.mark.parametrize("is_eval", [False, True])
@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("l2p", ORDINALS)
def test_tpus_are_sent_their_slices(hosts, l2p, is_eval, tf_graph):
    mesh_impl = tpu_mesh(hosts, l2p)
    reader = input_reader.SimdMeshImplInputReader(
        mesh_impl, creator, SHAPES_OF, external_worker=True, is_eval_mode=is_eval
    )
    sent = enqueued(tf_graph)
    places = input_reader.ProcessDevices(mesh_impl)
    assert [device for device, *_ in sent] == places.ordered_hosts
    assert [ordinal for _, ordinal, _ in sent] == places.ordered_ordinals
    starts = [op for op in tf_graph.get_operations() if op.type == "MakeIterator"]
    # One host reads whole batches, two read each a part of the four that the batch is split into.
    assert len(starts) == (1 if hosts == 1 or is_eval else 4)
    assert all(op.device.startswith("/job:tpu_worker/task:") for op in starts)
    readers = {op.device for op in starts}
    assert len(readers) == (1 if hosts == 1 or is_eval else 2)
    assert reader.infeed_queue.tuple_types == [tf.float32, tf.int32]
    found = values_without_devices(tf_graph, [inputs for *_, inputs in sent], starts, 4)
    for step, slices in enumerate(found):
        for pnum in range(8):
            for x, y in zip(own(mesh_impl, step, pnum), slices[pnum]):
                np.testing.assert_array_equal(y, x)


def test_program_of_a_tpu_takes_what_is_sent(tf_graph):
    reader = input_reader.SimdMeshImplInputReader(tpu_mesh(1), creator, SHAPES_OF)
    given = []
    tf.tpu.replicate(
        lambda *inputs: given.append(inputs) or tf.reduce_sum(inputs[0]),
        [[]] * 8,
        infeed_queue=reader.infeed_queue,
        device_assignment=assignment(),
    )
    [taken] = [op for op in tf_graph.get_operations() if op.type == "InfeedDequeueTuple"]
    assert "_tpu_replicate" in taken.node_def.attr
    assert [x.shape.as_list() for x in given[0]] == [[1, 6, 2], [1, 1]]
    with pytest.raises(ValueError, match="for the 8 processors of its mesh, but the program has 4"):
        reader.infeed_queue.set_number_of_shards(4)


class Session:
    """Counts what is run, and ends after some steps."""

    def __init__(self, steps):
        self.left, self.started, self.sent = steps, 0, 0

    def run(self, operations):
        if all(op.type == "MakeIterator" for op in operations):
            self.started += 1
            return
        assert [op.type for op in operations] == ["InfeedEnqueueTuple"] * 8
        if not self.left:
            raise tf.errors.OutOfRangeError(None, None, "the end")
        self.left, self.sent = self.left - 1, self.sent + 1


@pytest.mark.parametrize("number_steps, expected", [(3, 3), (-1, 5), (7, 5)])
def test_thread_that_sends(number_steps, expected, tf_graph):
    reader = input_reader.SimdMeshImplInputReader(tpu_mesh(2), creator, SHAPES_OF)
    session = Session(5)
    thread = reader.start_infeed_thread(session, number_steps, initial_wait_sec=0.0)
    thread.join(10)
    assert not thread.is_alive() and (session.started, session.sent) == (1, expected)


def test_slices_of_a_part_of_the_batch(tf_graph):
    mesh_impl = tpu_mesh(1)
    slicer = input_reader.SubBatchSlicer(
        lambda: creator().batch(1, drop_remainder=True),
        0,
        [[2, 3], [2]],
        mesh_impl,
        SHAPES_OF,
        False,
        False,
    )
    slices = list(slicer.get_slices())
    assert [(pnum, number) for _, pnum, number in slices] == [(2, 0), (3, 0), (2, 1)]
    with tf.Session() as session:
        session.run(slicer.initializer)
        left, right, number = session.run([x for x, *_ in slices])
    np.testing.assert_array_equal(np.concatenate([left, right], -1), DATA[:1])
    assert number.tolist() == [[0]]
